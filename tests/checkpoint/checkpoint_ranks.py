"""What the processes of tests of checkpoints run; light to import, as each of them does it anew."""

import os
import random
import resource
import warnings
from pathlib import Path

import torch
from checkpoint.plans import Trained, differences, empty, make_plan, make_tables

from rowwise import CheckpointError
from rowwise.checkpoint import write as writing
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import write
from rowwise.train.saved import CheckpointFolder
from rowwise.train.snapshot import collect, restore

ROWS, DIM = 3000, 8


def save_and_read(comm, folder, seed):
    """Save by one plan, and read by another: what is different."""
    warnings.simplefilter("error")
    chance = random.Random(seed)
    trained = Trained.make(make_tables(chance), seed=seed)
    model, optimizers = trained.by(make_plan(chance, trained.tables, len(comm.ranks)), comm)
    write(folder, *collect(model, optimizers, comm), comm)
    again, others = empty(trained.tables, make_plan(chance, trained.tables, len(comm.ranks)), comm)
    restore(Checkpoint.open(folder), again, others, comm)
    return differences(again.embeddings, trained.model.embeddings)


def state_at(step):
    """All of a table, and a tensor that each rank has."""
    return torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM) + step, torch.full((700, 4), float(step))


def save_for_ever(comm, folder, background):
    """One checkpoint after the other; rank 0 notes what is surely there."""
    writing.SIZES = writing.FileSizes(4000, 8000, 8000)  # many files
    saved = CheckpointFolder(folder / "ckpt", comm, background=background)
    each = ROWS // len(comm.ranks)
    rows = comm.rank * each, (comm.rank + 1) * each
    for step in range(1, 10_000):
        whole, shared = state_at(step)
        mine = LocalShard(name="t", tensor=whole[slice(*rows)], shape=(ROWS, DIM), rows=rows)
        saved.save(step, [mine, LocalShard.whole("s", shared)], {"step": step})
        if not background or step > 1:
            note(folder / "done", step - int(background))
        if step == 2:
            note(folder / f"pid-{comm.rank}", os.getpid())
        saved.prune(2, None)


def note(path: Path, number: int) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(str(number))
    part.replace(path)


def fill_the_disk(comm, folder):
    """One rank may write only little; what each says of it, and whether all can go on."""
    part = LocalShard(
        name="t", tensor=torch.ones(1000, 8), shape=(3000, 8), rows=(comm.rank * 1000, comm.rank * 1000 + 1000)
    )
    saved = CheckpointFolder(folder / "ckpt", comm)
    saved.save(1, [part], {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    said = ""
    try:
        saved.save(2, [part], {})
    except CheckpointError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    there = sorted(path.name for path in (folder / "ckpt").iterdir())
    saved.save(3, [part], {})
    return said, there, saved.steps()

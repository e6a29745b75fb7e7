"""Checkpoints that several ranks have written, for the tests of what is done with them."""

import random

import torch
from checkpoint.plans import Trained, make_plan, make_tables

from rowwise import Adam, Lamb, Plan, Table
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import CheckpointManifest
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import write
from rowwise.parallel.comm import run_threads
from rowwise.planning.planner import column_wise, replicated, row_wise
from rowwise.train.snapshot import collect

TABLES = (
    Table(name="user", rows=60, dim=8, optimizer=Adam()),
    Table(name="item", rows=40, dim=12, row_type="fp16"),
    Table(name="word", rows=30, dim=32, row_type="int8", column_group=16, optimizer=Lamb()),
    Table(name="few", rows=5, dim=4, row_type="bf16"),
)
SPREAD = Plan(
    world=3,
    tiles=(
        *row_wise(TABLES[0], range(3)),
        *column_wise(TABLES[1], range(3)),
        *column_wise(TABLES[2], [1, 2]),
        *replicated(TABLES[3], range(3)),
    ),
)


def write_by(folder, trained: Trained, plan: Plan, **data) -> Checkpoint:
    """As the ranks of a plan write it."""

    def rank(comm):
        parts, more = collect(*trained.by(plan, comm), comm)
        write(folder, parts, {"step": 7, "samples": 700, **data, **more}, comm)

    run_threads(plan.world, rank)
    return Checkpoint.open(folder)


def saved(folder, steps=3, **data) -> Checkpoint:
    """Four tables of four row types on three ranks."""
    torch.manual_seed(1)
    return write_by(folder, Trained.make(TABLES, steps), SPREAD, **data)


def drawn(seed: int, world: int, **shape: int) -> tuple[random.Random, Trained, Plan]:
    """Tables and a plan by chance."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    trained = Trained.make(make_tables(chance, **shape), seed=seed)
    return chance, trained, make_plan(chance, trained.tables, world)


def wholes(folder, tensors, data=None, **how) -> CheckpointManifest:
    """What one rank writes."""
    return write(folder, [LocalShard.whole(name, tensor) for name, tensor in tensors.items()], data or {}, **how)


def flip(folder, file, place=-1):
    """Change one bit of a file."""
    content = bytearray((folder / file).read_bytes())
    content[place] ^= 4
    (folder / file).write_bytes(content)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)

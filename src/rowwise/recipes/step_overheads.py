"""Measures what a training step takes beside its tables, layers and transfers, for a profile of `rowwise calibrate`.

Batches of synthetic rows are made, by a rank that is alone and by one of two: apart from what it reads for both, each
encodes its own samples. Other data may take a rank more time, or less.

A run of a small model on little data is compared with its simulation by the profile: what is left of each stage is the
program's own work, such as headers, metrics and the calls of layers. It is about the same for each model and batch.
Tables are not part of it, as the profile's networks have measured sets of few samples.

Known limits: lines of the log are part of it, one for 20 steps as in the library's recipes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time

from msgspec import structs

from rowwise.base.errors import PeerError
from rowwise.base.quantity import round_digits
from rowwise.ingest.batch_shard import BatchShard
from rowwise.ingest.service.local import cores
from rowwise.planning.perf.hardware import Hardware, MakingTimes, StageOverhead
from rowwise.recipes.compose import resolve
from rowwise.recipes.find import load
from rowwise.recipes.resolved import ResolvedRecipe, make_batcher
from rowwise.recipes.simulated import columns_of
from rowwise.recipes.simulated_run import check_run

STEPS, LINE = 100, 20
MEASURED = ("data", "route", "exchange", "forward", "backward", "return", "reduce", "status", "other")
SMALL = {"model.bottom": "[16]", "model.top": "[16]", "data.test_rows": 1000, "train.epochs": 1, "log.every": LINE}
SAMPLES = 64  # of each rank
LIMIT_s = 300.0
ROWS = 1 << 16  # of batches that are made to measure that
BATCH, TIMES = 4096, 5  # other work makes a measurement longer


def with_overheads(hardware: Hardware, world: int) -> Hardware:
    """The profile with the overheads of a step on so many ranks of this machine."""
    bare = structs.replace(hardware, overheads=())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = folder / "machine.json"
        profile.write_text(bare.to_json())
        batch = SAMPLES * world
        changes = SMALL | {"train.batch": batch, "data.rows": STEPS * batch}
        words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        train = ["train", "dlrm-synthetic", *words, "--nproc", str(world), "--runs", str(folder / "runs")]
        command = [sys.executable, "-m", "rowwise", *train, "--hardware", str(profile)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=LIMIT_s)
        except subprocess.TimeoutExpired:
            raise PeerError(f"a run that measures steps has not ended after {LIMIT_s:g} s") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise PeerError(f"a run that measures steps has failed: {last}")
        (stages,) = (folder / "runs").rglob("stages.csv")
        checked = check_run(stages.parent)
    batches = measure_batches()
    left = {stage.stage: stage.measured_s - stage.predicted_s for stage in checked.stages if stage.stage in MEASURED}
    return structs.replace(
        hardware,
        batches=batches,
        overheads=tuple(StageOverhead(stage, round_digits(s)) for stage, s in left.items() if s > 0),
    )


def measure_batches() -> MakingTimes:
    """The time that this process takes to make batches, on ranks of a host whose cores all compute."""
    changes = {"train.batch": BATCH, "train.ahead": 0, "data.rows": ROWS, "data.test_rows": 1000}
    resolved = resolve(load("dlrm-synthetic", [f"{key}={value}" for key, value in changes.items()]))
    taken = [(_making_s(resolved, 1), _making_s(resolved, 2)) for _ in range(TIMES)]
    alone_s, half_s = map(min, zip(*taken, strict=True))
    encode_s = min(max(2 * (alone_s - half_s), 0.0), alone_s)
    return MakingTimes(
        cores=cores(),
        read_s=round_digits(alone_s - encode_s),
        encode_s=round_digits(encode_s),
    )


def _making_s(resolved: ResolvedRecipe, world: int) -> float:
    """Seconds of the processor for a column of a sample of all ranks, on one of them."""
    batcher = make_batcher(resolved, resolved.rows.train, shard=BatchShard(rank=0, world=world))
    begin_s = process_time()
    for _ in batcher:
        pass
    return (process_time() - begin_s) / (ROWS * columns_of(resolved))

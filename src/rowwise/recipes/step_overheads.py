"""Measures the overheads of a training step besides tables, layers and transfers, for a profile of `rowwise calibrate`.

The time to make a batch of synthetic rows is measured for a single rank, and for one of two ranks: each reads all rows
but encodes its own samples, so the difference is half of the encoding. Other data may take more time, or less.

A run of a small model on little data is compared with its simulation by the profile: the difference in each stage is
the program's own work, such as headers, metrics and calls of layers. It hardly depends on the model and the batch.
Tables are left out, as the profile has measured small batches of them.

Known limit: the overheads include the log, one line per 20 steps as in the library's recipes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time

from msgspec import structs

from rowwise.base.errors import PeerError
from rowwise.base.processor import usable_processors
from rowwise.base.quantity import round_digits
from rowwise.ingest.batch_shard import BatchShard
from rowwise.planning.perf.hardware import Hardware, MakingTimes, StageOverhead
from rowwise.recipes.compose import resolve
from rowwise.recipes.find import load
from rowwise.recipes.resolved import ResolvedRecipe, make_batcher
from rowwise.recipes.simulated import columns_of
from rowwise.recipes.simulated_run import check_run

STEPS, LINE = 100, 20
MEASURED = ("data", "route", "exchange", "forward", "backward", "return", "reduce", "status", "other")
SMALL = {"model.bottom": "[16]", "model.top": "[16]", "data.test_rows": 1000, "train.epochs": 1, "log.every": LINE}
SAMPLES = 64  # per rank
LIMIT_s = 300.0
ROWS = 1 << 16  # rows of the batches that are timed
BATCH, TIMES = 4096, 5  # the minimum counts, as other work slows a measurement down


def with_overheads(hardware: Hardware, world: int) -> Hardware:
    """The profile with the overheads of a step on `world` ranks of this machine."""
    bare = structs.replace(hardware, overheads=())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = folder / "machine.json"
        profile.write_text(bare.to_json())
        batch = SAMPLES * world
        changes = SMALL | {"train.batch": batch, "data.rows": STEPS * batch}
        settings = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        train = ["train", "dlrm-synthetic", *settings, "--nproc", str(world), "--runs", str(folder / "runs")]
        command = [sys.executable, "-m", "rowwise", *train, "--hardware", str(profile)]
        try:
            process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=LIMIT_s)
        except subprocess.TimeoutExpired:
            raise PeerError(f"the run that measures steps exceeded {LIMIT_s:g} s") from None
        if process.returncode:
            message = (process.stderr.strip().splitlines() or ["no message"])[-1]
            raise PeerError(f"the run that measures steps failed: {message}")
        (stages,) = (folder / "runs").rglob("stages.csv")
        checked = check_run(stages.parent)
    batches = measure_batches()
    overhead_s = {
        stage.stage: stage.measured_s - stage.predicted_s for stage in checked.stages if stage.stage in MEASURED
    }
    return structs.replace(
        hardware,
        batches=batches,
        overheads=tuple(StageOverhead(stage, round_digits(s)) for stage, s in overhead_s.items() if s > 0),
    )


def measure_batches() -> MakingTimes:
    """Time of making batches on a rank of a host whose cores all compute."""
    changes = {"train.batch": BATCH, "train.ahead": 0, "data.rows": ROWS, "data.test_rows": 1000}
    resolved = resolve(load("dlrm-synthetic", [f"{key}={value}" for key, value in changes.items()]))
    seconds = [(_batch_s(resolved, 1), _batch_s(resolved, 2)) for _ in range(TIMES)]
    alone_s, half_s = map(min, zip(*seconds, strict=True))
    encode_s = min(max(2 * (alone_s - half_s), 0.0), alone_s)
    return MakingTimes(
        cores=usable_processors(),
        read_s=round_digits(alone_s - encode_s),
        encode_s=round_digits(encode_s),
    )


def _batch_s(resolved: ResolvedRecipe, world: int) -> float:
    """CPU seconds of a rank per column and global sample."""
    batcher = make_batcher(resolved, resolved.rows.train, shard=BatchShard(rank=0, world=world))
    begin_s = process_time()
    for _ in batcher:
        pass
    return (process_time() - begin_s) / (ROWS * columns_of(resolved))

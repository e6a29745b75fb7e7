"""Measures what a training step takes beside its tables, layers and transfers, for a profile of `rowwise calibrate`.

A run of a small model on little data is compared with its simulation by the profile: what is left of each stage is the
program's own work, such as headers, metrics and the calls of layers. It is about the same for each model and batch.
Tables are not part of it, as the profile's networks have measured sets of few samples.

Known limits: lines of the log are part of it, one for 20 steps as in the library's recipes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from msgspec import structs

from rowwise.errors import PeerError
from rowwise.perf.hardware import Hardware, StageOverhead
from rowwise.recipes.simulated_run import check_run

STEPS, LINE = 100, 20
MEASURED = ("data", "route", "exchange", "forward", "backward", "return", "reduce", "status", "other")
SMALL = {"model.bottom": "[16]", "model.top": "[16]", "data.test_rows": 1000, "train.epochs": 1, "log.every": LINE}
SAMPLES = 64  # of each rank
LIMIT_s = 300.0


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
    left = {stage.stage: stage.measured_s - stage.predicted_s for stage in checked.stages if stage.stage in MEASURED}
    return structs.replace(
        hardware,
        overheads=tuple(StageOverhead(stage, float(f"{s:.4g}")) for stage, s in left.items() if s > 0),
    )

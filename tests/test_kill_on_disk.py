"""A run with tables on disk that is killed again and again ends with the bits of one that was not."""

import time

import pytest
import torch
from launching import rowwise, started, wait_for

from rowwise.checkpoint.read import Checkpoint

SETTINGS = {
    "data.rows": 60_000, "data.test_rows": 2_000, "train.batch": 1024, "save.every": 10, "save.keep": 2,
    "tables.all.dim": 128,
}  # fmt: skip
TRAIN = ("train", "dlrm-synthetic", "--memory", "20MB", *(f"--set={key}={x}" for key, x in SETTINGS.items()))
RANKS = ("--nproc", "2")


def tensors(run):
    checkpoint = Checkpoint.open(max((run / "ckpt").glob("step-*[0-9]")))
    return {name: checkpoint.load(name) for name in checkpoint.names() if not name.startswith("recorder/")}


@pytest.mark.slow
# Seconds after a checkpoint: in the next save, write-back or compaction; with three steps in flight, in a look-ahead.
@pytest.mark.parametrize(
    ("wait_s", "depth", "ranks", "pin"),
    [
        (0.0, 2, (), "null"),
        (0.05, 3, (), "20000"),
        (0.3, 1, (), "null"),
        (0.1, 3, RANKS, "null"),
        (0.1, 2, RANKS, "9000"),
    ],
)
def test_killed_runs_end_with_the_same_bits(tmp_path, wait_s, depth, ranks, pin):
    train = (*TRAIN, *ranks, f"--set=train.pipeline_depth={depth}", f"--set=pin={pin}")
    whole, killed = (tmp_path / name / "runs/dlrm-synthetic/1" for name in ("whole", "killed"))
    for run in (whole, killed):
        run.parents[2].mkdir()
    assert not rowwise(whole.parents[2], *train).returncode

    def saved():
        return len(list((killed / "ckpt").glob("step-*[0-9]"))), sorted((killed / "ckpt").glob("step-*[0-9]"))[-1:]

    command, before = train, (0, [])
    for _ in range(3):
        with started(killed.parents[2], *command) as process:
            wait_for(lambda old=before, process=process: saved() != old or process.poll() is not None, 120)
            time.sleep(wait_s)
            process.kill()
        before, command = saved(), ("resume", str(killed), *ranks)
        assert not list((killed / "disk").glob("*"))
    done = rowwise(killed.parents[2], *command)
    assert not done.returncode or "has finished" in done.stderr
    ours, theirs = tensors(killed), tensors(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

"""Under torchrun: one of the workers is killed, and the run goes on by itself from its last checkpoint."""

import os
import signal

import pytest
from launching import ELASTIC, PYTHON, ranks_of, rowwise, started, wait_for_step, write_recipe
from test_launch import RUN, result, same, tensors

from rowwise.train.saved import CheckpointFolder

pytestmark = [pytest.mark.dist, pytest.mark.slow]
STEPS = {"train": {**ELASTIC, "epochs": 1000, "steps": 60}, "log": {"every": 2}, "save": {"every": 5, "keep": 9}}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")


def under_torchrun(folder, *args, restarts=2):
    return started(
        folder, "--max-restarts", str(restarts), "--no-python", *PYTHON, "-m", "rowwise", *args, program=TORCHRUN
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = write_recipe(tmp_path_factory.mktemp("undisturbed"), **STEPS)
    done = rowwise(folder, "train", "small.yaml", "--nproc", "3")
    assert done.returncode == 0, done.stderr
    return folder / RUN


@pytest.mark.parametrize("verb", ["train", "resume"])
def test_a_worker_that_is_killed_is_no_end(undisturbed, tmp_path, verb):
    write_recipe(tmp_path, **STEPS)
    run, args = tmp_path / RUN, ("train", "small.yaml")
    if verb == "resume":
        assert rowwise(tmp_path, "train", "small.yaml", "--set", "train.steps=12").returncode == 0
        # Not twice: the attempt after a kill goes on from where that one was.
        args = ("resume", RUN, "--from", "step-000000010", "--set", "train.steps=60")
    with under_torchrun(tmp_path, *args) as process:
        pids = ranks_of(run)
        wait_for_step(run, 24)
        os.kill(pids[1], signal.SIGKILL)
        first = CheckpointFolder(run / "ckpt").steps()[-1]
        again = ranks_of(run, after=1)
        assert not set(again) & set(pids)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == ""
    log = (run / "log.txt").read_text()
    begun = [int(line.split()[-2]) for line in log.splitlines() if " training from step " in line]
    assert begun[-1] >= min(first, 20)
    assert begun[-1] % 5 == 0
    assert not (tmp_path / "runs/small/2").exists()
    assert result(run)["test"] == result(undisturbed)["test"]
    assert same(tensors(run), tensors(undisturbed))


def test_the_guilty_worker_says_why(tmp_path):
    write_recipe(tmp_path, **STEPS, init_from="nowhere")
    with under_torchrun(tmp_path, "train", "small.yaml", restarts=0) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1  # torchrun's
    assert f"rowwise: rank 0: {tmp_path}/nowhere is not a checkpoint" in err


def test_ranks_are_not_made_twice(tmp_path):
    """torchrun itself takes --nproc for one of its own options, wherever it stands."""
    write_recipe(tmp_path, **STEPS)
    torchruns = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = rowwise(tmp_path, "train", "small.yaml", "--nproc", "2", environment=torchruns)
    assert (done.returncode, done.stdout) == (2, "")
    out = "leave out --nproc, or start rowwise without torchrun"
    assert done.stderr == f"rowwise: --nproc 2 under torchrun, which has started 3 ranks; {out}\n"


def test_torchrun_passes_a_wish_to_stop_on(tmp_path):
    write_recipe(tmp_path, **STEPS | {"train": {**ELASTIC, "epochs": 5000}})
    with under_torchrun(tmp_path, "train", "small.yaml") as process:
        wait_for_step(tmp_path / RUN, 8)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert result(tmp_path / RUN)["status"] == "stopped", err
    assert CheckpointFolder(tmp_path / RUN / "ckpt").steps()[-1] == result(tmp_path / RUN)["steps"]

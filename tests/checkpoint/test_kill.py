"""A rank that is killed, or whose disk is full, takes along no checkpoint that was there, and leaves no half of one."""

import os
import random
import signal
import threading
import time

import pytest
import torch
from checkpoint import checkpoint_ranks
from checkpoint.checkpoint_ranks import state_at

from rowwise.base.errors import PeerError
from rowwise.checkpoint.write import PART
from rowwise.parallel.comm.spawn import run_processes
from rowwise.train.saved import CheckpointFolder

WORLD = 3


def kill_once(folder, chance, background):
    """All ranks save for ever; after a while one is killed. What is left, and whether a write was cut short."""

    def kill():
        victim, end = folder / f"pid-{chance.randrange(WORLD)}", time.monotonic() + 60
        while not victim.exists():
            if time.monotonic() > end:
                return
            time.sleep(0.01)
        time.sleep(chance.random() * 0.2)
        os.kill(int(victim.read_text()), signal.SIGKILL)

    folder.mkdir()
    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(PeerError, match=r"was killed by SIGKILL"):
        run_processes(WORLD, checkpoint_ranks.save_for_ever, folder, background, timeout_s=60)
    killer.join()
    saved, done = CheckpointFolder(folder / "ckpt"), int((folder / "done").read_text())
    steps = saved.steps()
    assert steps
    assert done <= steps[-1] <= done + 2, (done, steps)
    for step in steps:
        found = saved.open(f"step-{step}")
        found.verify()
        assert found.manifest.data == {"step": step}
        for name, want in zip(("t", "s"), state_at(step), strict=True):
            assert torch.equal(found.load(name), want)
    cut = any(path.name.endswith(PART) for path in saved.folder.iterdir())
    saved.clean()
    assert saved.steps() == steps
    assert len(list(saved.folder.iterdir())) == len(steps)
    return cut


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1500)
def test_killed_at_many_moments(tmp_path):
    chance = random.Random(0)
    cut = [kill_once(tmp_path / str(k), chance, background=k % 2 == 1) for k in range(24)]
    assert sum(cut) >= 4, "few kills found a checkpoint half written: make them larger"


@pytest.mark.dist
def test_killed_once(tmp_path):
    kill_once(tmp_path / "one", random.Random(1), background=False)


@pytest.mark.dist
def test_a_disk_that_is_full_on_one_rank_is_one_error_on_all(tmp_path):
    want = (
        f"{tmp_path / 'ckpt' / 'step-000000002'} was not saved: rank 1: 00001-00000.safetensors: File too large: "
        f"expected 32,000 bytes of free space; earlier checkpoints are unchanged"
    )
    found = run_processes(3, checkpoint_ranks.fill_the_disk, tmp_path, timeout_s=60)
    assert found == [(want, ["step-000000001"], [1, 3])] * 3

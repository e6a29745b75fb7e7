"""Runs with a mirror, and copies of it, killed at fifty random moments, at a store that fails and is killed."""

import multiprocessing
import random
import shutil
import signal
import time

import pytest
from base.storage.stores import FAULTS, connect, s3_server
from launching import wait_for
from mirrored_work import COPIES, MIRROR, PRELOADED, SAVE, SETTINGS, STEPS, copy, train
from small import lines, same, saved, trained

from rowwise.base.storage.folder import StorageFolder
from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.named import checkpoints_of, step_in
from rowwise.checkpoint.read import Checkpoint

KILLS = 50
LONGEST_s = {train: 0.4, copy: 0.1}  # from the begin of work to a kill


def complete_ones(server, place, known):
    """What is taken for a checkpoint; each is read whole once, and its bytes are those of its checksums."""
    folder = StorageFolder(connect(server.endpoint), place)
    found = checkpoints_of(folder) if folder.relative_names() else ()
    for one in found:
        if (manifest := one.storage.stat(one.inside(NAME))) not in known:
            Checkpoint.open(one).verify()
            known.add(manifest)
    return {step_in(one) for one in found}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1200)
def test_killed_at_fifty_moments_while_a_store_fails(tmp_path):
    """Increments, mirrors, fetches and copies: no half checkpoint is taken for whole, and the end has the same bits."""
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    whole = trained(tmp_path, **SETTINGS, save=SAVE)[0].folder.path
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    kills, known, cut, ends, machine = {train: 0, copy: 0}, set(), 0, 0, 0
    with s3_server(tmp_path / "s3", **FAULTS, seed=seed) as server:
        while sum(kills.values()) < KILLS or not ends:
            there = complete_ones(server, MIRROR, known)
            work, folder = draw.choice((train, copy) if there else (train,)), tmp_path / f"machine-{machine}"
            begun = context.Event()
            process = context.Process(target=work, args=(tmp_path, str(folder), server.endpoint, begun))
            process.start()
            try:
                assert wait_for(lambda p=process, b=begun: b.is_set() or not p.is_alive(), 120)
                if sum(kills.values()) < KILLS:
                    process.join(draw.uniform(0, LONGEST_s[work]))
                    if draw.random() < 0.25:  # the store is gone for a moment, in which the process may be killed
                        server.kill()
                        time.sleep(draw.uniform(0, 0.1))
                        process.kill() if draw.random() < 0.5 else None
                        server.start()
                        process.join(draw.uniform(0, LONGEST_s[work]))
                    process.kill()
                process.join(300)
            finally:
                process.kill()
            assert process.exitcode in (0, -signal.SIGKILL), (tmp_path / "said.txt").read_text()
            kills[work] += process.exitcode != 0
            complete_ones(server, COPIES, known)
            if work is copy:
                continue
            cut += any(folder.glob("runs/small/*/ckpt/*.part"))
            if process.exitcode == 0:
                (run,) = folder.glob("runs/small/*")
                assert same(saved(run), saved(whole))
                assert lines(run) == lines(whole)
                assert STEPS in complete_ones(server, MIRROR, known)
                ends += 1
                shutil.rmtree(tmp_path / "s3/bucket")
                (tmp_path / "s3/bucket").mkdir()
            if process.exitcode == 0 or (there and draw.random() < 0.3):  # the machine is lost, with its disk
                shutil.rmtree(folder, ignore_errors=True)
                machine += 1
    print(f"kills {kills[train]} and {kills[copy]}, {cut} of them in a checkpoint of the folder; {ends} runs ended")
    assert all(kills.values())

"""A checkpoint that is written behind a run's back holds what the run had when it was asked for."""

import threading

import pytest
import torch

from rowwise import CheckpointError
from rowwise.checkpoint import write as writing
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.read import Checkpoint
from rowwise.parallel.comm.thread import run_threads
from rowwise.train.saved import CheckpointFolder


def rows_of(comm, tensor):
    """A tensor that is cut by rows, the same number on each rank."""
    world, each = len(comm.ranks), len(tensor)
    shape = (world * each, *tensor.shape[1:])
    return LocalShard(name="t", tensor=tensor, shape=shape, rows=(comm.rank * each, (comm.rank + 1) * each))


def test_what_is_saved_is_what_was_there(tmp_path):
    """Tensors and data that change right after `add` change in no checkpoint; a rank may have several tiles."""
    whole, first_rows = torch.zeros(7), torch.arange(3000.0).expand(4, 3000).T

    def run(comm):
        saved = CheckpointFolder(tmp_path / "ckpt", comm, background=True)
        begin = 1000 * comm.rank
        mine = first_rows[begin : begin + 1000].clone()
        for step in range(1, 5):
            data = {"list": [step]}
            mine += 1
            tiles = [
                LocalShard(name="t", tensor=rows, shape=(3000, 4), rows=(at, at + 500))
                for at, rows in zip((begin, begin + 500), mine.split(500), strict=True)
            ]
            saved.save(step, [*tiles, LocalShard.whole("w", torch.full((7,), float(step)))], data)
            saved.prune(2, None)
            mine += 100
            data["list"][0] = -1
            mine -= 100
        saved.wait()

    run_threads(3, run)
    saved = CheckpointFolder(tmp_path / "ckpt")
    assert saved.steps() == [3, 4]
    for step in saved.steps():
        found = saved.open(f"step-{step}")
        found.verify()
        assert torch.equal(found.load("t"), first_rows + step)
        assert torch.equal(found.load("w"), whole + step)
        assert found.manifest.data == {"list": [step]}
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["step-000000003", "step-000000004"]


def test_the_step_goes_on_while_it_is_written(tmp_path, monkeypatch):
    """And the next checkpoint waits for it."""
    held, sync = threading.Event(), writing.write_file
    monkeypatch.setattr(writing, "write_file", lambda *given: (held.wait(60), sync(*given))[1])
    saved = CheckpointFolder(tmp_path / "ckpt", background=True)
    saved.save(1, [LocalShard.whole("t", torch.ones(3))], {})
    assert saved.steps() == []
    timer = threading.Timer(0.3, held.set)
    timer.start()
    saved.save(2, [LocalShard.whole("t", torch.ones(3))], {})
    assert held.is_set()
    saved.wait()
    saved.wait()
    assert saved.steps() == [1, 2]


@pytest.mark.parametrize("heard", ["wait", "add", "cut"])
def test_trouble_of_one_rank_is_met_by_all(tmp_path, monkeypatch, heard):
    sync = writing.write_file

    def full(path, *tensors):
        if path.name.startswith("00001"):
            raise OSError(28, "No space left on device")
        return sync(path, *tensors)

    def run(comm):
        saved = CheckpointFolder(tmp_path / "ckpt", comm, background=True)
        part = rows_of(comm, torch.ones(3, 2))
        saved.save(1, [part], {})
        saved.wait()
        monkeypatch.setattr(writing, "write_file", full)
        saved.save(2, [part], {})
        saved.prune(1, None)
        want = r"step-000000002 was not saved: rank 1: 00001-00000\.safetensors: No space left on device: .*; earlier"
        with pytest.raises(CheckpointError, match=want):
            {"wait": saved.wait, "add": lambda: saved.save(3, [part], {}), "cut": lambda: saved.remove_after(0)}[
                heard
            ]()
        comm.all_gather(torch.zeros(1), [1, 1], "barrier").wait()
        monkeypatch.setattr(writing, "write_file", sync)
        comm.all_gather(torch.zeros(1), [1, 1], "barrier").wait()
        assert saved.steps() == [1]
        saved.save(4, [part], {})
        saved.wait()
        return saved.steps()

    assert run_threads(2, run) == [[1, 4], [1, 4]]
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["step-000000001", "step-000000004"]
    Checkpoint.open(tmp_path / "ckpt" / "step-000000004").verify()

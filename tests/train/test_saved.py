"""Which checkpoints there are, which is taken, and which may go."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowwise import CheckpointError
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import NAME
from rowwise.train.saved import CheckpointFolder


def three(value):
    return [LocalShard.whole("t", torch.full((3,), float(value)))]


def data(step, best=None):
    return {"progress": {"step": step, "best": None if best is None else {"step": best}}}


def add(saved, *steps, best=None):
    for step in steps:
        saved.save(step, three(float(step)), data(step, best))


def test_by_name(tmp_path):
    saved = CheckpointFolder(tmp_path / "ckpt")
    add(saved, 3, 20, 1000, best=20)
    assert saved.steps() == [3, 20, 1000]
    wanted = {"last": 1000, "best": 20, "step-3": 3, "step-000000020": 20, "step-1000": 1000}
    assert {which: int(saved.open(which).load("t")[0]) for which in wanted} == wanted
    add(saved, 2000)
    assert saved.open("best").manifest.data["progress"]["step"] == 2000  # nothing to choose by
    for which in ("step-4", "failed", "newest", "step-", "step-3.part"):
        with pytest.raises(CheckpointError, match=f"has no checkpoint '{which}': expected one of last, best, step-00"):
            saved.open(which)
    saved.save_failed(three(0), {})
    with pytest.raises(CheckpointError, match=r"step-000002000, failed$"):
        saved.open("step-4")


@pytest.mark.parametrize("which", ["last", "best", "step-1", "failed"])
def test_where_nothing_was_saved(tmp_path, which):
    with pytest.raises(CheckpointError, match="ckpt has no checkpoint"):
        CheckpointFolder(tmp_path / "ckpt").open(which)


def test_a_failed_state_is_replaced_and_is_no_step(tmp_path):
    saved = CheckpointFolder(tmp_path / "ckpt")
    for value in (1.0, 2.0):
        saved.save_failed(three(value), {})
    assert float(saved.open("failed").load("t")[0]) == 2.0
    assert not saved.steps()
    add(saved, 1)
    saved.prune(1, None)
    saved.remove_after(0)
    assert not saved.steps()
    assert float(saved.open("failed").load("t")[0]) == 2.0


@settings(max_examples=15)
@given(st.sets(st.integers(0, 50), max_size=8), st.integers(1, 4), st.none() | st.integers(0, 7), st.integers(0, 50))
def test_the_newest_and_the_best_stay(tmp_path_factory, steps, keep, best, cut):
    saved = CheckpointFolder(tmp_path_factory.mktemp("ckpt"))
    steps = sorted(steps)
    add(saved, *steps)
    best = steps[best] if best is not None and best < len(steps) else None
    saved.prune(keep, best)
    kept = sorted({*steps[-keep:]} | ({best} if best is not None else set()))
    assert saved.steps() == kept
    saved.remove_after(cut)
    assert saved.steps() == [step for step in kept if step <= cut]
    assert len(list(saved.folder.iterdir())) == len(saved.steps())


def test_of_what_is_there_only_the_data_is_written_again(tmp_path):
    """A run that ends with a step that was saved already has nothing new but that it has ended."""
    saved = CheckpointFolder(tmp_path / "ckpt")
    add(saved, 1)
    saved.save(1, three(0), {"progress": "ended"})
    assert int(saved.open().load("t")[0]) == 1
    assert saved.open().manifest.data == {"progress": "ended"}


def test_halves_are_no_checkpoints(tmp_path):
    saved = CheckpointFolder(tmp_path / "ckpt")
    add(saved, 1, 2, 3)
    saved.save_failed(three(0), {})
    (saved.path(3) / NAME).unlink()  # on its way out
    (saved.folder / "step-000000004.part").mkdir()  # on its way in, with all of its files
    (saved.folder / "step-000000004.part" / NAME).write_bytes((saved.path(2) / NAME).read_bytes())
    (saved.folder / "failed.part").mkdir()
    (saved.folder / "notes").mkdir()  # somebody's own
    (saved.folder / "notes" / NAME).touch()
    assert saved.steps() == [1, 2]
    assert int(saved.open().load("t")[0]) == 2
    with pytest.raises(CheckpointError, match="has no checkpoint 'step-3'"):
        saved.open("step-3")
    saved.clean()
    names = sorted(path.name for path in saved.folder.iterdir())
    assert names == ["failed", "notes", "step-000000001", "step-000000002"]
    (saved.folder / "failed" / NAME).unlink()
    saved.clean()
    assert not (saved.folder / "failed").exists()


def test_a_half_deleted_one_makes_room_for_a_new_one(tmp_path):
    saved = CheckpointFolder(tmp_path / "ckpt")
    add(saved, 1)
    (saved.path(1) / NAME).unlink()
    saved.save(1, three(5), {})
    assert int(saved.open().load("t")[0]) == 5


def test_cleaning_where_nothing_is(tmp_path):
    CheckpointFolder(tmp_path / "ckpt").clean()
    assert not (tmp_path / "ckpt").exists()

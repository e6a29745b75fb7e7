"""Increments and rounded checkpoints are checkpoints to every tool."""

import pytest
from checkpoint.made import flip
from checkpoint.plans import contents
from checkpoint.test_delta import always_increment, make_run, save_both

from rowwise import Topology
from rowwise.checkpoint.check import verify
from rowwise.checkpoint.diff import diff
from rowwise.checkpoint.export import export_parquet
from rowwise.checkpoint.listing import list_checkpoints
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.rewrite import retype_tables, rewrite
from rowwise.planning.planner import simple_plan
from rowwise.train import saved as saving


@pytest.fixture(params=[32, 8, 4])
def both(request, tmp_path, monkeypatch):
    """Four steps of a run: full checkpoints, and increments that are equal to them."""
    monkeypatch.setattr(saving, "is_full_due", always_increment)
    _, run = make_run(request.param)
    save_both(run, tmp_path, request.param)
    return tmp_path / "full", tmp_path / "less", request.param


@pytest.mark.few(1)
def test_an_increment_is_listed_as_one(both):
    full, less, bits = both
    rounded = "" if bits == 32 else f", tables in {bits} bits"
    assert [one.how for one in list_checkpoints(full)] == [f"full{rounded}"] * 4
    found = list_checkpoints(less)
    want = [*(f"increment {k} on a full one{rounded}" for k in (3, 2, 1)), f"full{rounded}"]
    assert [one.how for one in found] == want
    assert [one.ranks for one in found] == [4] * 4
    assert all(one.written_bytes < one.size_bytes for one in found[:3])


@pytest.mark.slow
def test_written_anew_an_increment_is_a_full_one(both, tmp_path):
    full, less, _ = both
    last, same = Checkpoint.open(less / "step-000000003"), Checkpoint.open(full / "step-000000003")
    assert not diff(last, same).tensors
    tables = retype_tables(last, None, {})
    plan = simple_plan(list(tables.values()), Topology(devices=2))
    rewrite(last, tmp_path / "anew", plan, tables, state=True, tell=None)
    anew = Checkpoint.open(tmp_path / "anew")
    assert anew.find_damage() == []
    assert not diff(anew, same).tensors
    assert contents(anew).keys() == contents(same).keys()
    assert not any(piece.ids or piece.bits for entry in anew.manifest.tensors.values() for piece in entry.chunks)
    assert [path.name for path in export_parquet(last, tmp_path / "out")]


@pytest.mark.slow
def test_damage_that_increments_share_is_found_in_all_of_them(both):
    _, less, _ = both
    first = Checkpoint.open(less / "step-000000000")
    piece = first.entry("model/embeddings.t0").chunks[0]  # on which rows that changed are laid
    flip(first.folder, piece.file, first.header(piece.file).ranges[piece.key].begin)
    found = verify(less)
    assert [bool(one.damage) for one in found.checked] == [True] * 4
    last = Checkpoint.open(less / "step-000000003")
    flip(last.folder, next(file for file in last.manifest.files if file not in first.manifest.files))
    assert len(verify(less).checked[0].damage) > len(found.checked[0].damage)

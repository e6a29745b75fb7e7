"""Caches of tables on disk are counted in training, over all ranks, and what validation and checkpoints read is not."""

import io
import re
from time import monotonic

import pytest
import torch
from ranked import Ranked, train
from rich.console import Console
from trainings import fast, read_csv

from rowwise import Embeddings, Table
from rowwise.cli.console import LiveLine
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.plan import Plan, Tile
from rowwise.parallel.shard import shard
from rowwise.tables.store.row_store import CacheCounters, SlotIds, StoreUse, sum_up
from rowwise.train.cache_counts import CacheCounts, disk_cells
from rowwise.train.run_folder import HEADERS
from rowwise.train.settings import Log, Saving


def world_of(tmp_path, **more):
    how = fast(train={"epochs": 2}, log=Log(every=3), save=Saving(every=4, keep=9), evaluate={"every": 2})
    return Ranked(how, tmp_path, dropout=0.0, **more)


def totals(folder, table):
    lines = [row for row in read_csv(folder / "caches.csv") if row["table"] == table]
    return {name: sum(int(row[name]) for row in lines) for name in ("hits", "misses", "new_rows", "evictions")}


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_lines_have_what_training_looked_up(tmp_path, ranks):
    train(world_of(tmp_path, on_disk=("user",)), ranks)
    rows, steps = read_csv(tmp_path / "caches.csv"), read_csv(tmp_path / "steps.csv")
    assert tuple(rows[0]) == HEADERS["caches.csv"]
    assert [row["step"] for row in rows] == [row["step"] for row in steps]
    assert {row["table"] for row in rows} == {"user"}
    found = totals(tmp_path, "user")
    assert found["hits"] + found["misses"] == int(steps[-1]["samples"])  # of one id each
    assert found["misses"] <= 12
    assert found["evictions"] == 0
    assert all(int(row["memory_bytes"]) > 0 for row in rows)
    assert all(row["disk_bytes"] != "" and row["reads"] == row["read_bytes"] == "0" for row in steps)
    assert all(float(row[name]) == 0 for row in steps for name in ("disk_wait_s", "disk_busy_s"))


@pytest.mark.slow
def test_validation_and_checkpoints_change_no_count(tmp_path):
    with_pauses, without = world_of(tmp_path / "a", on_disk=("user",)), world_of(tmp_path / "b", on_disk=("user",))
    without.valid = False
    train(with_pauses, 1)
    train(without, 1)
    a, b = totals(tmp_path / "a", "user"), totals(tmp_path / "b", "user")
    assert a["hits"] + a["misses"] == b["hits"] + b["misses"]


def test_a_run_in_memory_has_no_counts(tmp_path):
    trainer = train(world_of(tmp_path), 1)[0]
    assert not (tmp_path / "caches.csv").exists()
    assert trainer._recorder.hit_rate is None
    assert all(row["reads"] == row["disk_bytes"] == "" for row in read_csv(tmp_path / "steps.csv"))


@pytest.mark.few(1)
@pytest.mark.parametrize("on_disk", [(), ("user",)])
def test_the_live_line_has_the_hit_rate_of_tables_on_disk(tmp_path, on_disk):
    world, shown = world_of(tmp_path, on_disk=on_disk), []
    world.on(solo(), world.net(), tell=shown.append).run()
    text = LiveLine(Console(file=io.StringIO()))._text(shown[-1], monotonic() + 1)
    assert bool(re.search(r", cache \d+%, data wait", text)) == bool(on_disk)


@pytest.mark.slow
def test_a_run_that_is_resumed_cuts_lines_and_counts_anew(tmp_path):
    world = world_of(tmp_path, on_disk=("user", "words"))
    train(world, 1)
    whole = read_csv(tmp_path / "caches.csv")
    resumed = train(world, 1, which="step-000000004")[0]
    rows = read_csv(tmp_path / "caches.csv")
    assert [(row["step"], row["table"]) for row in rows] == [(row["step"], row["table"]) for row in whole]
    assert 0.0 < resumed._recorder.hit_rate <= 1.0


def test_counts_of_a_pause_are_left_out_and_a_take_inside_ends_before_it(tmp_path):
    table = Table(name="a", rows=100, dim=4)
    model = torch.nn.ModuleDict({"a": Embeddings([table], device="meta")})
    tile = Tile(table="a", rank=0, rows=(0, 100), cols=(0, 4), tier="disk", cache_rows=32)
    module = shard(model, Plan(world=1, tiles=(tile,)), solo(), disk=tmp_path)["a"]
    counts, disk = CacheCounts([module]), module.arenas[0].store

    def look_up(number):
        ids = SlotIds(torch.arange(number), torch.tensor([0, number]), [0])
        with disk.pin(ids, changes=False, counts=True):
            pass

    look_up(5)
    with counts.paused():
        look_up(20)
        assert counts.take().tables["a"].misses == 5
    look_up(22)
    taken = counts.take().tables["a"]
    assert (taken.hits, taken.misses) == (20, 2)
    assert counts.take().hit_rate == 0.0


def test_sums_of_ranks():
    a, b = CacheCounters(hits=1, misses=3, memory_bytes=7), CacheCounters(misses=8)
    one = StoreUse(
        tables={"a": CacheCounters(hits=3, misses=1, memory_bytes=10)},
        reads=1, read_bytes=4096, written_bytes=9, disk_bytes=5, read_wait_s=0.5, busy_s=3.0, ranks=1,
    )  # fmt: skip
    two = StoreUse(tables={"a": a, "b": b}, reads=2, read_wait_s=0.25, write_wait_s=0.25, busy_s=1.0, ranks=1)
    both = sum_up([one, two, StoreUse()])
    assert both.tables["a"] == CacheCounters(hits=4, misses=4, memory_bytes=17)
    assert (both.reads, both.disk_bytes, both.hit_rate) == (3, 5, 0.25)
    counts = {"reads": 3, "read_bytes": 4096, "written_bytes": 9, "disk_bytes": 5}
    assert disk_cells(both) == {**counts, "disk_wait_s": 0.5, "disk_busy_s": 2.0}  # seconds: of a rank
    assert disk_cells(StoreUse()) == {}

"""Tables larger than the memory of a run are planned on disk, with as many rows cached as there is room for."""

import re
from collections import Counter
from dataclasses import replace
from itertools import islice

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from pyarrow import parquet as pq
from small import recipe, write_rows

from rowwise import Adam, DataError, Plan, RowWiseAdagrad, SpecError, Table, Topology
from rowwise.base.errors import RowwiseError, TableMemoryError
from rowwise.checkpoint.read import Checkpoint
from rowwise.parallel.plan import Tile
from rowwise.recipes.compose import make_model, resolve
from rowwise.recipes.pinned_rows import ExactCounts, count_rows
from rowwise.recipes.placement import describe_disk_tables, fill_caches, has_disk_tables
from rowwise.recipes.recipe import Data, Recipe
from rowwise.recipes.resolved import make_batcher
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.sharding import choose_plan, tables_of
from rowwise.recipes.table_memory import TableMemory, raise_if_short, single_rank_plan
from rowwise.recipes.trained import evaluate
from rowwise.tables.store.sizes import cache_bytes, disk_bytes
from rowwise.train.settings import Training

MB = 10**6


@pytest.fixture
def large(tmp_path):
    """The small recipe with tables of 14.4 MB, and its model."""
    write_rows(tmp_path / "rows.parquet")
    small = recipe(tmp_path)
    tables = tuple(structs.replace(t, rows=4000 * t.rows) for t in small.tables.list)
    made = structs.replace(small, tables=structs.replace(small.tables, list=tables))
    return made, make_model(resolve(made), on_meta=True)


def memory_of(model, topology, limit, **more):
    tables = tables_of(model)
    given = {"free_H": (limit,) * topology.hosts, "disk_free_H": (10**9,) * topology.hosts, "limited": True}
    return TableMemory(tables=tables, plan=single_rank_plan(tables, topology.world), topology=topology, **given | more)


@pytest.mark.parametrize("topology", [Topology(), Topology(devices=2), Topology(hosts=2, devices=2)])
@pytest.mark.parametrize("background", [False, True])
def test_tables_that_do_not_fit_are_on_disk_and_caches_fill_the_memory(large, topology, background):
    made, model = large
    limit = 6 * MB if background else 4 * MB
    memory = memory_of(model, topology, limit, background=background)
    plan = choose_plan(made, model, topology, memory)
    plan.validate(tables_of(model))
    assert has_disk_tables(plan)
    placed = replace(memory, plan=plan)
    for host in range(topology.hosts):
        assert placed.needed_bytes(host) <= limit
        assert placed.needed_bytes(host) >= 0.45 * limit or topology.hosts > 1
    if topology.world == 1 and not background:
        assert placed.needed_bytes(0) > 0.97 * limit


def test_with_room_nothing_is_on_disk(large):
    made, model = large
    for topology in (Topology(), Topology(devices=2)):
        assert not has_disk_tables(choose_plan(made, model, topology, memory_of(model, topology, 20 * MB)))


def test_what_is_too_small_says_so_in_numbers(large):
    made, model = large
    one = Topology()
    cause = (
        r"with rows on disk, the index of all rows and the rows of 128 samples take 2\.6 MB: expected a larger --memory"
    )
    with pytest.raises(TableMemoryError, match=rf"memory is 1\.0 MB; {cause} \(2\.6 MB\); or "):
        choose_plan(made, model, one, memory_of(model, one, MB))
    free = r"1\.0 MB are free; with rows on disk"
    with pytest.raises(TableMemoryError, match=free):
        choose_plan(made, model, one, memory_of(model, one, MB, limited=False))
    disk = (
        r"on disk need up to 21\.0 MB, and 5\.0 MB are free on the disk: expected another disk by --set disk=FOLDER; or"
    )
    with pytest.raises(TableMemoryError, match=disk):
        choose_plan(made, model, one, memory_of(model, one, 4 * MB, disk_free_H=(5 * MB,)))


def test_caches_of_a_given_plan_that_are_too_large_are_named(large):
    _, model = large
    tables = tables_of(model)
    tiles = (structs.replace(t, tier="disk", cache_rows=t.rows[1]) for t in single_rank_plan(tables).tiles)
    memory = replace(memory_of(model, Topology(), 4 * MB), plan=Plan(world=1, tiles=tuple(tiles)))
    with pytest.raises(TableMemoryError, match=r"caches and indices.*"):
        raise_if_short(memory)


def test_the_line_of_a_run_has_the_numbers_of_its_plan(large):
    made, model = large
    plan = choose_plan(made, model, Topology(), memory_of(model, Topology(), 4 * MB))
    line = describe_disk_tables(plan, tables_of(model))
    cached = sum(tile.cache_rows for tile in plan.tiles)
    assert line.startswith(f"user, item, seen on disk, in up to 42.0 MB: {cached:,} of 400,000 rows cached in 4.0 MB")
    hit = int(re.search(r"(\d+)% of lookups hit", line)[1])
    assert hit == pytest.approx(100 * cached / 400_000, abs=3)
    assert not describe_disk_tables(single_rank_plan(tables_of(model)), tables_of(model))


@given(
    rows=st.lists(st.integers(1, 10**7), min_size=1, max_size=4),
    cached=st.floats(0, 0.5),
    room=st.floats(0.01, 2),
    optimizer=st.sampled_from((Adam(), RowWiseAdagrad())),
)
def test_caches_grow_to_the_room_and_not_beyond(rows, cached, room, optimizer):
    tables = [Table(name=f"t{i}", rows=r, dim=12, optimizer=optimizer) for i, r in enumerate(rows)]
    tiles = [
        Tile(table=t.name, rank=0, rows=(0, t.rows), cols=(0, 12), tier="disk", cache_rows=int(cached * t.rows))
        for t in tables
    ]
    plan = Plan(world=1, tiles=tuple(tiles))

    def taken(one):
        return sum(cache_bytes(t, one.tiles_of(t.name)[0].cache_rows) for t in tables)

    limit = int(room * sum(cache_bytes(t, t.rows) for t in tables))
    filled = fill_caches(plan, tables, limit)
    filled.validate(tables)
    assert filled == plan or taken(filled) <= limit
    if taken(plan) < 0.9 * limit and limit < taken(plan) * 5 and min(rows) > 10**5 and cached > 0.1:
        assert all(t.cache_rows == t.rows[1] for t in filled.tiles) or taken(filled) > 0.9 * limit


def test_memory_is_a_size_above_nothing_and_on_a_cpu():
    data = Data(dataset="synthetic")
    assert Recipe(data=data, memory="4GB").memory_bytes == 4 * 10**9
    assert Recipe(data=data, memory=1000).memory_bytes == 1000
    with pytest.raises(SpecError, match="size such as 40GB"):
        Recipe(data=data, memory="lots")
    with pytest.raises(SpecError, match="0, such as 4GB"):
        Recipe(data=data, memory=0)


def test_disk_bytes_are_of_pieces(large):
    _, model = large
    tables = tables_of(model)
    plan = Plan(world=1, tiles=tuple(structs.replace(t, tier="disk") for t in single_rank_plan(tables).tiles))
    memory = replace(memory_of(model, Topology(), MB), plan=plan)
    assert memory.disk_bytes(0) == sum(map(disk_bytes, tables))
    assert (memory.rows_bytes(0), memory.state_bytes(0)) == (0, 0)
    assert memory.cache_bytes(0) == memory.needed_bytes(0) == sum(cache_bytes(table, 0) for table in tables)


def saved(run):
    """The tensors of the newest checkpoint; rows on disk that never changed are in no file."""
    checkpoint = Checkpoint.open(max((run / "ckpt").glob("step-*[0-9]")))
    return {name: checkpoint.load(name) for name in checkpoint.names()}


def test_a_run_with_tables_on_disk_ends_as_one_in_memory(large, tmp_path):
    made, _ = large
    ends = []
    for number, memory in enumerate((None, 6 * MB)):
        run = TrainingRun.start(structs.replace(made, memory=memory), tmp_path / "runs")
        assert has_disk_tables(run.plan) == bool(number)
        assert run.go().status == "finished"
        ends.append(saved(run.folder.path))
    scores = [evaluate(path).tasks for path in sorted((tmp_path / "runs/small").iterdir())]
    assert scores[0] == scores[1]
    resident, on_disk = ends
    assert resident.keys() == on_disk.keys()
    assert all(torch.equal(resident[key], on_disk[key]) for key in resident)


def test_a_run_warns_of_memory_that_is_not_there(large, tmp_path):
    made, _ = large
    run = TrainingRun.start(structs.replace(made, memory="900TB"), tmp_path / "runs")
    assert not has_disk_tables(run.plan)
    log = (run.folder.path / "warnings.txt").read_text()
    assert "memory=900.0 TB: " in log
    assert "are free, which limits the tables" in log


@pytest.mark.slow
@pytest.mark.parametrize("pin", [None, 500])
def test_a_resumed_run_with_tables_on_disk_ends_as_one_that_was_not_stopped(large, tmp_path, pin):
    made, _ = large
    made = structs.replace(made, memory=4 * MB, pin=pin)
    whole = TrainingRun.start(made, tmp_path / "runs")
    whole.go()
    once = structs.replace(made, train=structs.replace(made.train, epochs=1))
    path = (part := TrainingRun.start(once, tmp_path / "runs")).folder.path
    part.go()
    TrainingRun.resume(path, (f"train.epochs={made.train.epochs}",)).go()
    expected, found = saved(whole.folder.path), saved(path)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_a_run_that_cannot_start_leaves_no_folder(large, tmp_path):
    made, _ = large
    for changes in ({"memory": MB}, {"memory": 6 * MB, "init_from": "nope"}):
        with pytest.raises((TableMemoryError, OSError, RowwiseError)):
            TrainingRun.start(structs.replace(made, **changes), tmp_path / "runs")
        assert not any((tmp_path / "runs").rglob("recipe.yaml"))
        assert not any(path.name.isdecimal() for path in (tmp_path / "runs").rglob("*"))


@pytest.mark.slow
def test_a_run_with_pinned_rows_ends_as_one_in_memory(large, tmp_path):
    made, _ = large
    resident = TrainingRun.start(made, tmp_path / "runs")
    resident.go()
    pinned = TrainingRun.start(structs.replace(made, memory=4 * MB, pin=1000), tmp_path / "runs")
    assert sum(tile.pinned_rows for tile in pinned.plan.tiles) > 40
    pinned.go()
    expected, found = (saved(run.folder.path) for run in (resident, pinned))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_rows_are_counted_exactly_and_the_hottest_come_first(large):
    made, model = large
    resolved = resolve(made)
    counted = count_rows(resolved, model, 300)  # three batches of 128
    ids = []
    for batch in islice(make_batcher(resolved, resolved.rows.train), 3):
        ids += batch.sparse.ids_of("item").tolist()
    expected = sorted(Counter(ids).items(), key=lambda pair: (-pair[1], pair[0]))
    assert counted.hot_rows["item"].tolist() == [row for row, count in expected if count > 1]
    assert counted.workloads[1].access.pooling == len(ids) / 384
    assert [workload.table.name for workload in counted.workloads] == ["user", "item", "seen"]


def test_bad_rows_that_a_run_leaves_out_are_not_counted(large, tmp_path):
    made, model = large
    rows = pq.read_table(tmp_path / "rows.parquet")
    labels = rows["label"].to_numpy().copy()
    labels[3] = 7
    place = rows.schema.get_field_index("label")
    pq.write_table(rows.set_column(place, "label", pa.array(labels)), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="row 3"):
        count_rows(resolve(made), model, 10_000)
    made = structs.replace(made, data=structs.replace(made.data, on_bad_rows="quarantine"))
    assert count_rows(resolve(made), model, 10_000).workloads[0].access.pooling > 0


def test_counts_do_not_depend_on_how_ids_arrive():
    rows_N = torch.randint(0, 5000, (3 << 19,), generator=torch.Generator().manual_seed(0))
    counts = ExactCounts()
    for part in rows_N.split(100_000):
        counts.add(part)
    counts.merge()
    rows_U, counts_U = rows_N.unique(return_counts=True)
    assert torch.equal(counts.rows_U, rows_U)
    assert torch.equal(counts.counts_U, counts_U)
    assert counts.total == len(rows_N)


def test_what_cannot_be_pinned_is_refused():
    data = Data(dataset="synthetic")
    with pytest.raises(SpecError, match="pin=0: expected at least 1 training row"):
        Recipe(data=data, pin=0)
    with pytest.raises(SpecError, match=r"pin=10 with train.device=cuda"):
        Recipe(data=data, pin=10, train=Training(device="cuda"))

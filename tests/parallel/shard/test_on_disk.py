"""Tables on disk have the bits of tables in memory: lookups, rows and optimizer state, on any number of ranks."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from parallel.shard.equal import SEED, Job, look_up, make_sharded, make_steps, rows_apart, train
from parallel.shard.layout_cases import CASES

from rowwise import Embeddings, Plan, Pooling, RowwiseError, SpecError, StateError, Table, Topology
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.thread import run_threads
from rowwise.planning.planner.layouts import row_wise, table_wise
from rowwise.tables.row_optimizers import OPTIMIZERS
from rowwise.tables.spec import TRAINED_TYPES, Constant, Normal, RowType

ROWS = 1500  # more than a cache of one set and its overflow hold
LAYOUTS = ("table-wise", "row-wise", "interleaved rows", "uneven rows")


def on_disk(tiles, cache_rows, pinned_rows=0):
    cached = [min(cache_rows, tile.rows[1] - tile.rows[0]) for tile in tiles]
    pinned = [min(pinned_rows, max(0, n - 32)) for n in cached]
    changes = zip(tiles, cached, pinned, strict=True)
    return tuple(structs.replace(t, tier="disk", cache_rows=n, pinned_rows=p) for t, n, p in changes)


def one_table(**settings):
    return (Table(name="a", **({"rows": ROWS, "dim": 8} | settings)),)


def train_on_disk(tmp_path, tables, tiles, world, steps, **settings):
    job = Job(tables=tables, plan=Plan(world=world, tiles=tiles), steps=steps, disk=tmp_path, **settings)
    whole = job.whole()
    if world == 1:
        return whole.differences(solo())
    return [text for found in run_threads(world, whole.differences, 60) for text in found]


def test_layouts_are_known():
    assert set(LAYOUTS) <= set(CASES), list(CASES)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("row_type", TRAINED_TYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.few(12)
def test_every_optimizer_and_row_type(tmp_path, optimizer, row_type, world):
    tables = one_table(row_type=row_type, optimizer=OPTIMIZERS[optimizer]())
    tiles = on_disk(row_wise(tables[0], range(world)), 32)
    steps = make_steps(tables, [(150,) * world] * 4)
    assert not train_on_disk(tmp_path, tables, tiles, world, steps)


@given(
    layout=st.sampled_from(LAYOUTS),
    world=st.sampled_from([1, 2, 4]),
    cached=st.integers(0, 200),
    pooling=st.sampled_from(Pooling),
    dim=st.sampled_from([1, 4, 12, 1100]),
    init=st.sampled_from([None, Normal(std=0.1), Constant(value=0.5)]),
    elastic=st.booleans(),
    pinned=st.sampled_from([0, 1, 64]),
    seed=st.integers(0, 99),
)
def test_any_layout_with_tables_in_memory_beside(
    tmp_path_factory, layout, world, cached, pooling, dim, init, elastic, pinned, seed
):
    more = {} if init is None else {"init": init}
    tables = (
        Table(name="a", rows=ROWS, dim=dim, pooling=pooling, features=("x", "y"), **more),
        Table(name="b", rows=30, dim=4),
        Table(name="c", rows=ROWS, dim=4, row_type=RowType.INT8),
    )
    topology = Topology(hosts=1, devices=world)
    tiles = (
        *on_disk(CASES[layout](tables[0], topology), cached, pinned),
        *table_wise(tables[1], 0),
        *on_disk(table_wise(tables[2], world - 1), cached),
    )
    steps = make_steps(tables, [(48,) * world] * 3, seed)
    folder = tmp_path_factory.mktemp("disk")
    hot_rows = {"a": torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))[:900]}
    assert not train_on_disk(folder, tables, tiles, world, steps, elastic=elastic, hot_rows=hot_rows)


def test_pinned_rows_that_cannot_be_are_refused(tmp_path):
    tables = one_table()
    plan = Plan(world=1, tiles=on_disk(table_wise(tables[0], 0), 64, 32))
    with pytest.raises(SpecError, match="hot rows of table 'a' are not known: expected `pin` in the recipe"):
        make_sharded(tables, plan, solo(), disk=tmp_path)
    for rows in ([3, ROWS], [-1], [5, 5]):
        with pytest.raises(SpecError, match=r"hot_rows of table 'a'.*distinct rows from 0 to 1,499"):
            make_sharded(tables, plan, solo(), disk=tmp_path, hot_rows={"a": torch.tensor(rows)})
    for changes in ({"pinned_rows": 65}, {"pinned_rows": -1}, {"tier": "device", "cache_rows": 0}):
        wrong = Plan(world=1, tiles=tuple(structs.replace(tile, **changes) for tile in plan.tiles))
        with pytest.raises(SpecError, match=r"pinned_rows=.*0 to its cache_rows"):
            wrong.validate(tables)
    full = Plan(world=1, tiles=tuple(structs.replace(tile, pinned_rows=33) for tile in plan.tiles))
    with pytest.raises(SpecError, match="pinned_rows=33: expected at most cache_rows - 32"):
        make_sharded(tables, full, solo(), disk=tmp_path, hot_rows={"a": torch.arange(5)})
    host = Plan(world=1, tiles=tuple(structs.replace(tile, tier="host") for tile in plan.tiles))
    with pytest.raises(SpecError, match="pins rows of the tier 'host'"):
        make_sharded(tables, host, solo(), hot_rows={"a": torch.arange(5)})


def test_a_state_dict_is_refused_and_a_copy_too(tmp_path):
    tables = one_table()
    sharded = make_sharded(tables, Plan(world=1, tiles=on_disk(table_wise(tables[0], 0), 64)), solo(), disk=tmp_path)
    with pytest.raises(StateError, match="not in a tensor"):
        sharded.state_dict()
    with pytest.raises(StateError, match="copied or pickled"):
        copy.deepcopy(sharded.arenas[0])
    assert not list(rows_apart(sharded, Embeddings(tables, seed=3)))


def test_column_cuts_and_missing_folders_are_refused(tmp_path):
    tables = one_table()
    halves = tuple(structs.replace(t, cols=cols) for t in table_wise(tables[0], 0) for cols in ((0, 4), (4, 8)))
    with pytest.raises(SpecError, match="tile has the same"):
        make_sharded(tables, Plan(world=1, tiles=on_disk(halves, 9)), solo(), disk=tmp_path)
    with pytest.raises(SpecError, match="folder for rows"):
        make_sharded(tables, Plan(world=1, tiles=on_disk(table_wise(tables[0], 0), 9)), solo())


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_that_is_larger_than_the_cache_is_looked_up_in_halves_and_not_trained(tmp_path, world):
    tables = (
        Table(name="a", rows=5000, dim=8, features=("a", "other")),
        Table(name="b", rows=5000, dim=4, pooling=Pooling.SEQUENCE, features=("b", "more")),
    )
    tiles = tuple(tile for table in tables for tile in on_disk(row_wise(table, range(world)), 32))
    (step,) = make_steps(tables, [(1500,) * world])
    expected = look_up(Embeddings(tables, seed=SEED), step)

    def rank(comm):
        sharded, part = make_sharded(tables, Plan(world=world, tiles=tiles), comm, disk=tmp_path), step.of(comm.rank)
        with pytest.raises(RowwiseError, match="more rows of table"):
            sharded(part.batch)
        with torch.no_grad():  # rows of the failed call are not in their slots
            found, wanted = look_up(sharded, part), step.cut(expected, comm.rank)
        return all(torch.allclose(found[name], wanted[name]) for name in found)

    assert all(run_threads(world, rank, 60))


def test_an_id_outside_its_table_is_named_and_changes_nothing(tmp_path):
    tables = one_table()
    plan = Plan(world=1, tiles=on_disk(table_wise(tables[0], 0), 32))
    sharded = make_sharded(tables, plan, solo(), disk=tmp_path)
    step = make_steps(tables, [(20,)])[0]
    wrong = step.batch.values_N.clone()
    wrong[3] = ROWS
    with pytest.raises(Exception, match=f"table 'a': feature 'a'.*id {ROWS} is not in 0..{ROWS - 1}"):
        sharded(replace(step.batch, values_N=wrong))
    list(train(sharded, [step]))
    whole = Embeddings(tables, seed=3)
    list(train(whole, [step]))
    assert not list(rows_apart(sharded, whole))

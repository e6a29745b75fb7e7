"""The simple plan: always valid, the same for the same tables, small ones everywhere, the rest in balance."""

import math
import random
import time
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import Adam, Plan, Pooling, RowType, RowWiseAdagrad, Sgd, SpecError, Table, Tile, Topology
from rowwise.parallel.plan import tiles_by_table
from rowwise.planning.planner.heuristic import simple_plan
from rowwise.planning.planner.layouts import table_wise

STATE_floats = {Sgd: lambda dim: 0, RowWiseAdagrad: lambda dim: 1, Adam: lambda dim: 2 * dim}
topologies = st.builds(Topology, hosts=st.integers(1, 4), devices=st.integers(1, 8))


@st.composite
def table_lists(draw) -> list[Table]:
    return [
        Table(
            name=f"t{i}",
            rows=draw(st.integers(1, 10) | st.integers(1, 10**7)),
            dim=draw(st.integers(1, 128)),
            features=tuple(f"f{i}.{j}" for j in range(draw(st.integers(0, 3)))),
            optimizer=draw(st.sampled_from([Sgd(), RowWiseAdagrad(), Adam()])),
            row_type=draw(st.sampled_from(RowType)),
            pooling=draw(st.sampled_from(Pooling)),
        )
        for i in range(draw(st.integers(1, 12)))
    ]


def stored_bytes(table: Table) -> int:
    return table.rows * (table.row_bytes + 4 * STATE_floats[type(table.optimizer)](table.dim))


def shares(plan: Plan, tables: list[Table], ids: dict[str, float]) -> tuple[list[list[float]], float]:
    """Of tables that are not copied: each rank's part of all bytes, and of all that are read; the largest of a tile."""
    placed = tiles_by_table(plan)
    dealt = [table for table in tables if plan.world == 1 or not copied(placed[table.name], table)]
    ranks, tiles = [], []
    for size in (stored_bytes, lambda table: ids[table.name] * table.row_bytes):
        total, on = sum(map(size, dealt)), defaultdict(float)
        for table in dealt if total else ():
            for tile in placed[table.name]:
                part = size(table) / total * (tile.rows[1] - tile.rows[0]) / table.rows
                on[tile.rank] += part
                tiles.append(part)
        ranks.append([on[rank] for rank in range(plan.world)])
    return ranks, max(tiles, default=0.0)


def copied(tiles: Sequence[Tile], table: Table) -> bool:
    """Whether each of several tiles is the whole table."""
    return len(tiles) > 1 and all(tile.rows == (0, table.rows) for tile in tiles)


@given(table_lists(), topologies, st.integers(1, 10**5), st.integers(0, 1 << 22), st.randoms(use_true_random=False))
def test_plans_are_valid_in_balance_and_depend_on_the_tables_alone(tables, topology, batch, limit, rng):
    ids = {table.name: rng.choice([0.0, 1.0, 2.5, 40.0]) for table in tables}
    plan = simple_plan(tables, topology, batch=batch, ids=ids, replicate_bytes=limit)
    plan.validate(tables)
    shuffled = rng.sample(tables, len(tables))
    assert simple_plan(shuffled, topology, batch=batch, ids=ids, replicate_bytes=limit) == plan
    ranks, largest = shares(plan, tables, ids)
    for loads in ranks:
        assert max(loads) <= 2 / plan.world + largest + 1e-9


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), topologies)
def test_where_size_is_traffic_no_rank_has_more_than_its_part_and_one_piece(rows, topology):
    tables = [Table(name=f"t{i}", rows=n, dim=16) for i, n in enumerate(rows)]
    ids = {f"t{i}": n / 1000 for i, n in enumerate(rows)}
    plan = simple_plan(tables, topology, ids=ids, replicate_bytes=0)
    ranks, largest = shares(plan, tables, ids)
    for loads in ranks:
        assert max(loads) <= 1 / plan.world + largest + 1e-9


@given(table_lists(), topologies)
def test_copies_are_small_and_move_fewer_bytes_than_an_exchange(tables, topology):
    plan = simple_plan(tables, topology, batch=512)
    for table in tables:
        ids = len(table.feature_names)  # as many vectors: a bag of a feature, or its one id
        exchanged = 512 * (8 * ids + 2 * 4 * ids * table.dim)
        reduced = 2 * 4 * table.rows * table.dim
        small = stored_bytes(table) <= 1 << 20 and reduced <= exchanged
        assert copied(plan.tiles_of(table.name), table) == (small and topology.world > 1)


@pytest.mark.parametrize(("pooling", "copies"), [(Pooling.SUM, False), (Pooling.SEQUENCE, True)])
def test_ids_of_a_sequence_travel_one_by_one(pooling, copies):
    table = Table(name="t", rows=1000, dim=16, pooling=pooling)
    plan = simple_plan([table], Topology(devices=2), batch=100, ids={"t": 20.0})
    assert copied(plan.tiles, table) == copies


@given(table_lists())
def test_one_rank_has_every_table_whole(tables):
    plan = simple_plan(tables, Topology())
    assert set(plan.tiles) == {tile for table in tables for tile in table_wise(table, 0)}


def test_only_what_is_more_than_a_rank_should_have_is_cut():
    tables = [Table(name=f"t{i}", rows=1000, dim=16) for i in range(8)]
    plan = simple_plan(tables, Topology(devices=8), replicate_bytes=0)
    assert [(tile.table, tile.rank) for tile in plan.tiles] == [(f"t{i}", i) for i in range(8)]  # ties by name
    large = Table(name="large", rows=10**6, dim=16)
    plan = simple_plan([*tables, large], Topology(devices=4), replicate_bytes=0)
    assert {tile.rank for tile in plan.tiles_of("large")} == {0, 1, 2, 3}
    assert all(len(plan.tiles_of(table.name)) == 1 for table in tables)
    plan = simple_plan(tables, Topology(devices=8), replicate_bytes=0, ids={"t3": 100.0})
    assert len(plan.tiles_of("t3")) == 8  # small, but most of what is read


def test_two_large_tables_with_little_traffic_are_not_put_together():
    large = [Table(name=f"large{i}", rows=10**6, dim=64) for i in range(2)]
    busy = [Table(name=f"busy{i}", rows=10**4, dim=64) for i in range(2)]
    ids = {"large0": 1.0, "large1": 1.0, "busy0": 50.0, "busy1": 50.0}
    plan = simple_plan([*large, *busy], Topology(devices=2), ids=ids)
    (sizes, traffic), _ = shares(plan, [*large, *busy], ids)
    assert max(sizes) < 0.6
    assert max(traffic) < 0.6


@pytest.mark.slow
def test_hundreds_of_tables_on_a_hundred_ranks_take_less_than_a_second():
    rng = random.Random(5)
    tables = [Table(name=f"t{i}", rows=int(10 ** rng.uniform(2, 7.5)), dim=rng.choice([16, 64])) for i in range(856)]
    ids = {table.name: math.exp(rng.gauss(1.5, 1.2)) for table in tables}
    began = time.process_time()
    plan = simple_plan(tables, Topology(hosts=16, devices=8), ids=ids)
    plan.validate(tables)
    assert time.process_time() - began < 1
    ranks, _ = shares(plan, tables, ids)
    assert all(max(loads) < 1.5 / 128 for loads in ranks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ids": {"u": 1.0}}, "ids of table 'u': no such table"),
        ({"ids": {"t": -1.0}}, "ids of table 't': -1.0: expected a finite number"),
        ({"ids": {"t": math.nan}}, "ids of table 't': nan: expected a finite number"),
        ({"batch": 0}, "simple_plan with batch=0, replicate_bytes=1048576: expected at least one sample"),
        ({"replicate_bytes": -1}, "replicate_bytes=-1: .* a size of at least 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(SpecError, match=message):
        simple_plan([Table(name="t", rows=10, dim=4)], Topology(), **settings)


def test_tables_are_checked():
    with pytest.raises(SpecError, match="no tables"):
        simple_plan([], Topology())
    with pytest.raises(SpecError, match="table 't' is named"):
        simple_plan([Table(name="t", rows=10, dim=4)] * 2, Topology())

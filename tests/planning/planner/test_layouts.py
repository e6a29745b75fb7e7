"""Layouts: each covers any table exactly and evenly, on any topology; so do the odd cases that sharding is held to."""

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel.shard.layout_cases import CASES

from rowwise import Plan, RowType, Table, Tile, Topology
from rowwise.parallel.plan import column_block
from rowwise.planning import planner
from rowwise.planning.perf.hardware import Machine, hardware_named
from rowwise.planning.planner.infer_layout import infer_kind
from rowwise.planning.planner.kinds import candidate_kinds, tiles_of
from rowwise.planning.planner.layouts import LAYOUTS as RECORDS
from rowwise.planning.planner.layouts import NAMES, column_wise, grid, replicated, row_wise, table_row_wise, table_wise

# On all ranks or hosts of a topology, or on the last of them.
LAYOUTS: dict[str, Callable[[Table, Topology], tuple[Tile, ...]]] = {
    "table_wise": lambda table, topology: table_wise(table, topology.world - 1),
    "row_wise": lambda table, topology: row_wise(table, range(topology.world)),
    "column_wise": lambda table, topology: column_wise(table, range(topology.world)),
    "table_row_wise": lambda table, topology: table_row_wise(table, topology, topology.hosts - 1),
    "grid": lambda table, topology: grid(table, topology, range(topology.hosts)),
    "replicated": lambda table, topology: replicated(table, range(topology.world)),
}

kinds = st.tuples(st.sampled_from(RowType), st.none()) | st.tuples(st.just(RowType.INT8), st.sampled_from([16, 32, 48]))
topologies = st.builds(Topology, hosts=st.integers(1, 5), devices=st.integers(1, 5))


@st.composite
def made_tables(draw, min_rows: int = 1, multiple: int = 1) -> Table:
    row_type, group = draw(kinds)
    rows, dim = draw(st.integers(min_rows, 1000)), multiple * draw(st.integers(1, 256 // multiple))
    return Table(name="t", rows=rows, dim=dim, row_type=row_type, column_group=group)


def lengths(ranges: set[tuple[int, int]]) -> list[int]:
    return [end - begin for begin, end in ranges]


@pytest.mark.parametrize("layout", LAYOUTS)
@given(table=made_tables(), topology=topologies)
def test_every_layout_is_a_valid_plan_that_json_gives_back(layout, table, topology):
    plan = Plan(world=topology.world, tiles=LAYOUTS[layout](table, topology))
    plan.validate([table])
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("layout", LAYOUTS)
@given(table=made_tables(), topology=topologies)
def test_cuts_are_even(layout, table, topology):
    tiles = LAYOUTS[layout](table, topology)
    rows, cols = lengths({tile.rows for tile in tiles}), lengths({tile.cols for tile in tiles})
    assert max(rows) - min(rows) <= 1
    assert max(cols) - min(cols) <= column_block(table)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(table=made_tables())
def test_with_one_rank_every_layout_is_table_wise(layout, table):
    assert LAYOUTS[layout](table, Topology()) == table_wise(table, 0)


@given(made_tables(), st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True))
def test_as_many_ranks_are_used_as_there_are_rows_or_blocks(table, ranks):
    blocks = -(-table.dim // column_block(table))
    assert [tile.rank for tile in row_wise(table, ranks)] == ranks[: table.rows]
    assert [tile.rank for tile in column_wise(table, ranks)] == ranks[:blocks]
    assert [tile.rank for tile in replicated(table, ranks)] == ranks


@given(made_tables(min_rows=5), topologies)
def test_a_grid_has_columns_across_hosts_and_rows_across_devices(table, topology):
    tiles = grid(table, topology, range(topology.hosts))
    by_host = {}
    for tile in tiles:
        by_host.setdefault(topology.host_of(tile.rank), []).append(tile)
    assert len(by_host) == min(topology.hosts, -(-table.dim // column_block(table)))
    for on_host in by_host.values():
        assert len({tile.cols for tile in on_host}) == 1
        assert len({tile.rank for tile in on_host}) == len(on_host) == topology.devices
    assert len({tile.cols for tile in tiles}) == len(by_host)


def test_host_layouts_use_the_devices_of_one_host():
    table, topology = Table(name="t", rows=100, dim=64), Topology(hosts=3, devices=4)
    tiles = table_row_wise(table, topology, 1)
    assert [tile.rank for tile in tiles] == [4, 5, 6, 7]
    assert len({tile.rows for tile in tiles}) == 4


@pytest.mark.parametrize("layout", RECORDS, ids=lambda layout: layout.name)
def test_a_layout_goes_to_other_processes(layout):
    assert pickle.loads(pickle.dumps(layout)) is layout


def test_every_public_layout_is_planned():
    machine = Machine(Topology(hosts=2, devices=2), hardware_named("cpu"))
    planned = {kind.layout.name for kind in candidate_kinds(machine, 8, ("device",))}
    assert planned == set(NAMES) == set(LAYOUTS)
    assert set(NAMES) <= set(planner.__all__)


@given(table=made_tables(min_rows=25), topology=topologies, data=st.data())
def test_tiles_are_recognised_as_what_made_them(table, topology, data):
    """A layout that differs from others makes tiles that differ; its units are those that it was given."""
    machine = Machine(topology, hardware_named("cpu"))
    kind = data.draw(
        st.sampled_from(candidate_kinds(machine, -(-table.dim // column_block(table)), ("device", "host")))
    )
    units = data.draw(st.lists(st.sampled_from(kind.layout.units(topology)), min_size=kind.parts, max_size=kind.parts))
    tiles = tiles_of(kind, table, units, topology)
    assert infer_kind(table, tiles, topology, [kind]) == (kind, tuple(units))


def test_a_table_that_cannot_be_cut_stays_whole():
    assert column_wise(Table(name="t", rows=9, dim=4), [2, 1]) == table_wise(Table(name="t", rows=9, dim=4), 2)
    assert row_wise(Table(name="t", rows=1, dim=64), [2, 1]) == table_wise(Table(name="t", rows=1, dim=64), 2)


TOPOLOGIES = [
    *(Topology(devices=world) for world in (1, 2, 3, 4, 8)),
    Topology(hosts=2, devices=2),
    Topology(hosts=2, devices=4),
    Topology(hosts=4, devices=1),
    Topology(hosts=3, devices=2),
]


@pytest.mark.parametrize("case", CASES)
@given(made_tables(min_rows=8, multiple=4))
def test_every_case_that_sharding_is_held_to_is_a_valid_plan(case, table):
    for topology in TOPOLOGIES:
        Plan(world=topology.world, tiles=CASES[case](table, topology)).validate([table])


def test_cases_are_what_they_are_called():
    table, topology = Table(name="t", rows=20, dim=12), Topology(hosts=2, devices=2)
    tiles = {name: case(table, topology) for name, case in CASES.items()}
    assert len({frozenset(placed) for placed in tiles.values()}) == len(tiles)
    assert [tile.rank for tile in tiles["two row tiles on a rank"]] == [3, 3]
    assert {tile.rank for tile in tiles["table-row-wise"]} == {2, 3}
    assert len(tiles["pinwheel"]) == 5
    assert not any(tile.rows == (0, 20) or tile.cols == (0, 12) for tile in tiles["pinwheel"])
    assert [tile.rank for tile in tiles["interleaved rows"]] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_the_decision_shows_the_code_that_there_is():
    root = Path(__file__).parents[3]
    decision = (root / "docs/decisions/0009-plans-are-tiles.md").read_text()
    layouts, cases = "src/rowwise/planning/planner/layouts.py", "tests/parallel/shard/layout_cases.py"
    code = [(root / file).read_text() for file in (layouts, layouts, cases)]
    shown = re.findall(r"```python\n(.*?)```", decision, re.S)
    assert len(shown) == len(code)
    assert all(block in source for block, source in zip(shown, code, strict=True))


def test_layouts_and_simple_plans_need_no_torch():
    code = """
import sys
from rowwise import Table, Topology
from rowwise.planning.planner.layouts import grid
from rowwise.planning.planner.heuristic import simple_plan
table, topology = Table(name="t", rows=10, dim=8), Topology(hosts=2, devices=2)
grid(table, topology, [0, 1])
simple_plan([table], topology).validate([table])
print([name for name in ("torch", "numpy") if name in sys.modules])
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")

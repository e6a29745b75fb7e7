"""Plans have managed tables in whole buckets of rows, each on one rank and in memory."""

import pytest
from planning.planner.asked import question

from rowwise import Managed, SpecError, Table, Topology
from rowwise.planning.perf.access import Access
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.layouts import NAMES, row_wise
from rowwise.planning.planner.pipeline import make_plan

POLICY = Managed()


def request(tables, layouts):
    rules, access = Constraints(layouts={"*": layouts}), [Access(pooling=20.0)] * len(tables)
    return question(tables, Topology(devices=3), 1e9, access=access, constraints=rules, machine="cpu", buffers=True)


def make_table(managed=POLICY):
    return Table(name="t", rows=10_000, dim=64, managed=managed)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 200])
def test_rows_are_cut_between_buckets(ranks):
    table = make_table()
    assert table.rows == 10_112  # 128 buckets of 79 rows
    tiles = row_wise(table, range(ranks))
    assert len(tiles) == min(ranks, table.buckets)
    assert all(row % table.row_multiple == 0 for tile in tiles for row in tile.rows)
    assert tiles[-1].rows[1] == table.rows


def test_a_search_cuts_no_columns_and_replicates_nothing():
    for layouts in (NAMES, ("row_wise",), ("table_wise", "replicated")):
        plan = make_plan(request([make_table()], layouts), seconds=0.05, prove=False).plan
        plan.validate([make_table()])
    for layout in ("column_wise", "replicated"):
        with pytest.raises(SpecError, match=r"'t' \(10112 x 64\)"):
            make_plan(request([make_table()], (layout,)), seconds=0.05, prove=False)
        make_plan(request([make_table(None)], (layout,)), seconds=0.05, prove=False)

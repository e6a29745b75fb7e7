"""Plans: every layout is a set of tiles that covers each table exactly; anything else is refused by name."""

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import Plan, SpecError, Table, Tile

USERS = Table(name="users", rows=100, dim=16)
ITEMS = Table(name="items", rows=37, dim=10)


def tile(table: Table, rank: int, rows: tuple[int, int] | None = None, cols: tuple[int, int] | None = None) -> Tile:
    return Tile(table=table.name, rank=rank, rows=rows or (0, table.rows), cols=cols or (0, table.dim))


def grid(table: Table, row_cuts: list[int], col_cuts: list[int], ranks: list[list[int]]) -> tuple[Tile, ...]:
    """A tile between each two cuts, on each of its ranks."""
    rows, cols = [0, *row_cuts, table.rows], [0, *col_cuts, table.dim]
    rectangles = [(r, c) for r in pairwise(rows) for c in pairwise(cols)]
    return tuple(tile(table, rank, r, c) for (r, c), on in zip(rectangles, ranks, strict=True) for rank in on)


LAYOUTS = {
    "table-wise": (tile(USERS, 3),),
    "row-wise": grid(USERS, [25, 50, 75], [], [[0], [1], [2], [3]]),
    "uneven rows": grid(USERS, [1, 99], [], [[2], [0], [0]]),
    "column-wise": grid(USERS, [], [4, 12], [[0], [1], [2]]),
    "grid": grid(USERS, [30, 60], [8], [[0], [1], [2], [3], [0], [1]]),
    "replicated": grid(USERS, [], [], [[0, 1, 2, 3]]),
    "replicated row-wise": grid(USERS, [50], [], [[0, 2], [1, 3]]),
    "not a grid": (*grid(USERS, [60], [8], [[0], [], [1], []]), tile(USERS, 2, (0, 100), (8, 16))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_valid(layout):
    Plan(world=4, tiles=LAYOUTS[layout]).validate([USERS])
    Plan(world=4, tiles=(tile(ITEMS, 1), *reversed(LAYOUTS[layout]))).validate([USERS, ITEMS])


BAD = {
    "no tile": ((), "table 'users' .100 x 16.: 1600 cells are on no rank"),
    "hole in rows": (grid(USERS, [25, 50], [], [[0], [], [1]]), "table 'users' .100 x 16.: 400 cells are on no rank"),
    "hole in columns": (grid(USERS, [], [4, 8], [[0], [], [1]]), "table 'users' .* 400 cells are on no rank"),
    "rows overlap": (
        (tile(USERS, 0, (0, 60)), tile(USERS, 1, (40, 100))),
        "table 'users': two tiles overlap in rows 40:60",
    ),
    "columns overlap": (
        (tile(USERS, 0, None, (0, 12)), tile(USERS, 1, None, (8, 16))),
        r"table 'users': two tiles overlap in rows 0:100, columns \(0, 12\) and \(8, 16\)",
    ),
    "overlap makes up for a hole": (
        (tile(USERS, 0, (0, 60)), tile(USERS, 1, (40, 80)), tile(USERS, 2, (80, 100))),
        "table 'users': two tiles overlap in rows 40:60",
    ),
    "tile inside a tile": (
        (tile(USERS, 0), tile(USERS, 1, (40, 60), (4, 8))),
        "table 'users': two tiles overlap in rows 40:60",
    ),
    "rank too large": ((tile(USERS, 4),), r"tile users\[0:100, 0:16\] on rank 4: the plan has ranks 0 to 3"),
    "rank negative": ((tile(USERS, -1),), "tile users.* on rank -1: the plan has ranks 0 to 3"),
    "rows past the end": ((tile(USERS, 0, (0, 101)),), "tile users.*: outside table 'users', which is 100 x 16"),
    "columns past the end": ((tile(USERS, 0, None, (0, 20)),), "tile users.*: outside table 'users'"),
    "rows before the start": ((tile(USERS, 0, (-1, 100)),), "tile users.*: outside table 'users'"),
    "no rows": ((tile(USERS, 0), tile(USERS, 1, (5, 5))), "tile users.*: outside table 'users'"),
    "rows backwards": ((tile(USERS, 0, (100, 0)),), "tile users.*: outside table 'users'"),
    "column cut inside a block": (
        grid(USERS, [], [6], [[0], [1]]),
        r"tile users\[0:100, 0:6\] on rank 0: cuts columns at 6; cut at a multiple of 4",
    ),
    "no such table": ((tile(USERS, 0), tile(ITEMS, 0)), "tile items.* no such table; the tables are users"),
    "partly replicated": (
        grid(USERS, [50], [], [[0, 1], [2]]),
        "table 'users': some tiles are copied and others are not",
    ),
    "twice on a rank": (
        (tile(USERS, 1), tile(USERS, 1)),
        r"table 'users': tile users\[0:100, 0:16\] on rank 1 is listed 2 times",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_plans_name_the_table(case):
    tiles, message = BAD[case]
    with pytest.raises(SpecError, match=message):
        Plan(world=4, tiles=tiles).validate([USERS])


def test_the_last_columns_need_not_be_a_whole_block():
    Plan(world=2, tiles=grid(ITEMS, [], [4, 8], [[0], [1], [0]])).validate([ITEMS])


def test_each_table_is_checked():
    with pytest.raises(SpecError, match=r"table 'items' .37 x 10.: 370 cells are on no rank"):
        Plan(world=4, tiles=(tile(USERS, 0),)).validate([USERS, ITEMS])


@st.composite
def cut_tables(draw) -> tuple[tuple[Table, ...], Plan]:
    """Tables cut at random and dealt to random ranks, every cut of a table on as many."""
    world = draw(st.integers(1, 6))
    tables, tiles = [], []
    for index in range(draw(st.integers(1, 3))):
        table = Table(name=f"t{index}", rows=draw(st.integers(1, 200)), dim=draw(st.integers(1, 40)))
        rows = draw(st.sets(st.integers(1, table.rows - 1), max_size=4)) if table.rows > 1 else ()
        cols = draw(st.sets(st.sampled_from(range(4, table.dim, 4)), max_size=4)) if table.dim > 4 else ()
        copies = draw(st.integers(1, world))
        ranks = st.lists(st.integers(0, world - 1), min_size=copies, max_size=copies, unique=True)
        on = [draw(ranks) for _ in range((len(rows) + 1) * (len(cols) + 1))]
        tables.append(table)
        tiles += grid(table, sorted(rows), sorted(cols), on)
    return tuple(tables), Plan(world=world, tiles=tuple(draw(st.permutations(tiles))))


@given(cut_tables())
def test_any_cut_is_valid(cut):
    tables, plan = cut
    plan.validate(tables)


@given(cut_tables(), st.data())
def test_any_cut_with_a_tile_doubled_is_refused(cut, data):
    tables, plan = cut
    again = data.draw(st.sampled_from(plan.tiles))
    with pytest.raises(SpecError, match=f"table '{again.table}'"):
        Plan(world=plan.world, tiles=(*plan.tiles, again)).validate(tables)


@given(cut_tables(), st.data())
def test_any_cut_with_a_rectangle_gone_is_refused(cut, data):
    tables, plan = cut
    gone = data.draw(st.sampled_from(plan.tiles))
    left = tuple(t for t in plan.tiles if (t.table, t.rows, t.cols) != (gone.table, gone.rows, gone.cols))
    with pytest.raises(SpecError, match=f"table '{gone.table}' .* cells are on no rank"):
        Plan(world=plan.world, tiles=left).validate(tables)


@given(cut_tables(), st.data())
def test_any_cut_with_a_tile_grown_is_refused(cut, data):
    tables, plan = cut
    index = data.draw(st.integers(0, len(plan.tiles) - 1))
    old = plan.tiles[index]
    grown = msgspec.structs.replace(old, rows=(old.rows[0], old.rows[1] + 1))
    with pytest.raises(SpecError, match=f"{old.table}"):
        Plan(world=plan.world, tiles=(*plan.tiles[:index], grown, *plan.tiles[index + 1 :])).validate(tables)


@given(cut_tables())
def test_json_round_trip(cut):
    _, plan = cut
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text.encode()) == plan
    assert Plan.from_json(text).to_json() == text


def test_json_can_be_written_by_hand():
    text = '{"world": 2, "tiles": [{"table": "users", "rank": 1, "rows": [0, 100], "cols": [0, 16]}]}'
    assert Plan.from_json(text) == Plan(world=2, tiles=(tile(USERS, 1),))


ONE = {"table": "users", "rank": 1, "rows": [0, 100], "cols": [0, 16]}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"world": 2, "tiles": [], "ranks": 2}, "unknown field `ranks`"),
        ({"world": 2, "tiles": [ONE | {"tier": "disk"}]}, r"unknown field `tier` - at `\$.tiles\[0\]`"),
        ({"world": "2", "tiles": []}, r"Expected `int`, got `str` - at `\$.world`"),
        ({"world": 2, "tiles": [ONE | {"rank": 0.5}]}, r"Expected `int`, got `float` - at `\$.tiles\[0\].rank`"),
        ({"world": 2, "tiles": [ONE | {"rows": [0, 1, 2]}]}, r"of length 2 - at `\$.tiles\[0\].rows`"),
        ({"world": 2}, "missing required field `tiles`"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_reading_is_strict(plan, message):
    with pytest.raises(SpecError, match=f"not a plan: .*{message}"):
        Plan.from_json(json.dumps(plan))


@pytest.mark.parametrize("text", ["", "{", "not json", b"\xff", '{"world": 2, "tiles": []} and more'])
def test_what_is_not_json_is_refused(text):
    with pytest.raises(SpecError, match="not a plan: "):
        Plan.from_json(text)


def test_diff_names_what_moved():
    here = Plan(world=2, tiles=(*grid(USERS, [50], [], [[0], [1]]), tile(ITEMS, 0)))
    there = Plan(world=4, tiles=(*grid(USERS, [50], [], [[0], [3]]), tile(ITEMS, 0)))
    moved = ["- users[50:100, 0:16] on rank 1", "+ users[50:100, 0:16] on rank 3"]
    assert here.diff(there) == ["- 2 ranks", "+ 4 ranks", *moved]


@given(cut_tables(), cut_tables())
def test_diff_is_empty_for_the_same_tiles_and_mirrors(one, two):
    (_, here), (_, there) = one, two
    assert here.diff(Plan(world=here.world, tiles=here.tiles[::-1])) == []
    mirrored = [("+" if line[0] == "-" else "-") + line[1:] for line in there.diff(here)]
    assert sorted(here.diff(there)) == sorted(mirrored)
    mine, theirs = ({str(t) for t in plan.tiles} for plan in (here, there))
    lines = {line for line in here.diff(there) if "[" in line}
    assert lines == {f"- {t}" for t in mine - theirs} | {f"+ {t}" for t in theirs - mine}


@pytest.mark.parametrize(("group", "cut", "fits"), [(None, 16, False), (16, 16, True), (16, 8, False), (32, 32, True)])
def test_int8_columns_that_share_a_scale_stay_together(group, cut, fits):
    table = Table(name="bytes", rows=10, dim=64, row_type="int8", column_group=group)
    plan = Plan(world=2, tiles=grid(table, [], [cut], [[0], [1]]))
    if fits:
        plan.validate([table])
    else:
        want = rf"cuts columns at {cut}; cut at a multiple of {group or 64}, as int8 columns share a scale"
        with pytest.raises(SpecError, match=want):
            plan.validate([table])

"""Plans: every layout is a set of tiles that covers each table exactly; anything else is refused by name."""

import json
import re
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import Adagrad, Plan, SpecError, Table, Tile

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
    "two tiles on a rank": grid(USERS, [50], [], [[1], [1]]),
    "not a grid": (*grid(USERS, [60], [8], [[0], [], [1], []]), tile(USERS, 2, (0, 100), (8, 16))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_valid(layout):
    Plan(world=4, tiles=LAYOUTS[layout]).validate([USERS])
    Plan(world=4, tiles=(tile(ITEMS, 1), *reversed(LAYOUTS[layout]))).validate([USERS, ITEMS])


COVER = "expected each cell on exactly one rank, or the table replicated, once on every rank"
BAD = {
    "no tile": ((), "a plan without tiles: expected tiles for each of the tables, which are users"),
    "hole in rows": (
        grid(USERS, [25, 50], [], [[0], [], [1]]),
        f"table 'users' (100 x 16): rows 25:50 x columns 0:16 are on no rank: {COVER}",
    ),
    "hole in columns": (
        grid(USERS, [], [4, 8], [[0], [], [1]]),
        "table 'users' (100 x 16): rows 0:100 x columns 4:8 are on no rank",
    ),
    "hole at the end": (
        grid(USERS, [30, 60], [8], [[0], [1], [2], [3], [0], []]),
        "table 'users' (100 x 16): rows 60:100 x columns 8:16 are on no rank",
    ),
    "hole beside cuts": (  # those of other columns do not end it
        (tile(USERS, 0, (0, 20)), *grid(USERS, [20, 50, 80], [4], [[], [], [], [1], [], [1], [0], [1]])),
        "table 'users' (100 x 16): rows 20:80 x columns 0:4 are on no rank",
    ),
    "two holes": (
        grid(USERS, [25, 50, 75], [], [[0], [], [1], []]),
        "table 'users' (100 x 16): rows 25:50 x columns 0:16 are on no rank",
    ),
    "rows overlap": (
        (tile(USERS, 0, (0, 60)), tile(USERS, 1, (40, 100))),
        "table 'users' (100 x 16): rows 40:60 x columns 0:16 are in both users[0:60, 0:16] on rank 0 and "
        f"users[40:100, 0:16] on rank 1: {COVER}",
    ),
    "columns overlap": (
        (tile(USERS, 0, None, (0, 12)), tile(USERS, 1, None, (8, 16))),
        "rows 0:100 x columns 8:12 are in both users[0:100, 0:12] on rank 0 and users[0:100, 8:16] on rank 1",
    ),
    "overlap makes up for a hole": (
        (tile(USERS, 0, (0, 60)), tile(USERS, 1, (40, 80)), tile(USERS, 2, (80, 100))),
        "table 'users' (100 x 16): rows 40:60 x columns 0:16 are in both",
    ),
    "tile inside a tile": (
        (tile(USERS, 0), tile(USERS, 1, (40, 60), (4, 8))),
        "rows 40:60 x columns 4:8 are in both users[0:100, 0:16] on rank 0 and users[40:60, 4:8] on rank 1",
    ),
    "overlap on one rank": (
        (tile(USERS, 2, (0, 60)), tile(USERS, 2, (40, 100))),
        "rows 40:60 x columns 0:16 are in both users[0:60, 0:16] on rank 2 and users[40:100, 0:16] on rank 2",
    ),
    "rank too large": ((tile(USERS, 4),), "tile users[0:100, 0:16] on rank 4: the plan has ranks 0 to 3"),
    "rank negative": ((tile(USERS, -1),), "tile users[0:100, 0:16] on rank -1: the plan has ranks 0 to 3"),
    "rows past the end": (
        (tile(USERS, 0, (0, 101)),),
        "tile users[0:101, 0:16] on rank 0: expected a rectangle inside table 'users' (100 x 16)",
    ),
    "columns past the end": (
        (tile(USERS, 0, None, (0, 20)),),
        "on rank 0: expected a rectangle inside table 'users' (100 x 16)",
    ),
    "rows before the start": (
        (tile(USERS, 0, (-1, 100)),),
        "on rank 0: expected a rectangle inside table 'users' (100 x 16)",
    ),
    "no rows": (
        (tile(USERS, 0), tile(USERS, 1, (5, 5))),
        "tile users[5:5, 0:16] on rank 1: expected a rectangle inside table 'users'",
    ),
    "rows backwards": (
        (tile(USERS, 0, (100, 0)),),
        "tile users[100:0, 0:16] on rank 0: expected a rectangle inside table 'users'",
    ),
    "column cut inside a block": (
        grid(USERS, [], [6], [[0], [1]]),
        "tile users[0:100, 0:6] on rank 0: cuts columns at 6: expected a cut at a multiple of 4",
    ),
    "no such table": ((tile(USERS, 0), tile(ITEMS, 0)), "on rank 0: no such table; the tables are users"),
    "copies of pieces": (
        grid(USERS, [50], [], [[0, 2], [1, 3]]),
        "table 'users' (100 x 16): rows 0:50 x columns 0:16 are in both users[0:50, 0:16] on rank 0 and "
        f"users[0:50, 0:16] on rank 2: {COVER}",
    ),
    "a copy of one piece": (
        grid(USERS, [50], [], [[0, 1], [2]]),
        "rows 0:50 x columns 0:16 are in both users[0:50, 0:16] on rank 0 and users[0:50, 0:16] on rank 1",
    ),
    "copies on some ranks": (
        grid(USERS, [], [], [[3, 0]]),
        f"table 'users' (100 x 16) is replicated on ranks 0, 3, not on 1, 2: {COVER}",
    ),
    "copies and a piece": (
        (*grid(USERS, [], [], [[0, 1, 2, 3]]), tile(USERS, 0, (0, 50))),
        "table 'users' (100 x 16): rows 0:50 x columns 0:16 are in both users[0:50, 0:16] on rank 0 and users[0:100",
    ),
    "twice on a rank": (
        (tile(USERS, 1), tile(USERS, 1)),
        "table 'users': tile users[0:100, 0:16] on rank 1 is listed 2 times",
    ),
    "copies, one twice": (
        grid(USERS, [], [], [[0, 1, 2, 3, 3]]),
        "table 'users': tile users[0:100, 0:16] on rank 3 is listed 2 times",
    ),
}


def test_a_plan_prints_as_a_table_of_its_tiles():
    host = Tile(table="items", rank=0, rows=(0, 37), cols=(0, 10), tier="host")
    plan = Plan(world=4, tiles=(*grid(USERS, [50], [], [[10], [2]]), host))
    assert str(plan).splitlines() == [
        "4 ranks, 3 tiles",
        "table  rank  rows    columns  memory",
        "items  0     0:37    0:10     host",
        "users  2     50:100  0:16     device",
        "users  10    0:50    0:16     device",
    ]
    many = str(Plan(world=50, tiles=grid(USERS, [], [], [list(range(50))]))).splitlines()
    assert len(many) == 43
    assert many[-1] == "... 10 more"


@pytest.mark.parametrize("case", BAD)
def test_bad_plans_name_the_table(case):
    tiles, message = BAD[case]
    with pytest.raises(SpecError, match=re.escape(message)):
        Plan(world=4, tiles=tiles).validate([USERS])


@pytest.mark.parametrize("world", [0, -1])
def test_a_plan_is_for_at_least_one_rank(world):
    with pytest.raises(SpecError, match=f"a plan for {world} ranks: expected at least 1"):
        Plan(world=world, tiles=(tile(USERS, 0),)).validate([USERS])


def test_messages_list_a_few_names_of_many():
    tables = [Table(name=f"t{i}", rows=1, dim=4) for i in range(856)]
    want = "which are t0, t1, t2, t3, t4, t5, t6, t7 and 848 more"
    with pytest.raises(SpecError, match=want):
        Plan(world=1, tiles=()).validate(tables)
    with pytest.raises(SpecError, match="8, 9 and 118"):
        Plan(world=128, tiles=grid(USERS, [], [], [[0, 1]])).validate([USERS])


def test_the_last_columns_need_not_be_a_whole_block():
    Plan(world=2, tiles=grid(ITEMS, [], [4, 8], [[0], [1], [0]])).validate([ITEMS])


def test_each_table_is_checked():
    with pytest.raises(SpecError, match=r"'items' .37 x 10."):
        Plan(world=4, tiles=(tile(USERS, 0),)).validate([USERS, ITEMS])


@st.composite
def cut_tables(draw, copies: bool = True) -> tuple[tuple[Table, ...], Plan]:
    """Tables cut at random and dealt to random ranks; or whole on all ranks."""
    world = draw(st.integers(1, 6))
    tables, tiles = [], []
    for index in range(draw(st.integers(1, 3))):
        table = Table(name=f"t{index}", rows=draw(st.integers(1, 200)), dim=draw(st.integers(1, 40)))
        rows = draw(st.sets(st.integers(1, table.rows - 1), max_size=4)) if table.rows > 1 else ()
        cols = draw(st.sets(st.sampled_from(range(4, table.dim, 4)), max_size=4)) if table.dim > 4 else ()
        tables.append(table)
        if copies and draw(st.booleans()):
            tiles += grid(table, [], [], [list(range(world))])
        else:
            on = [[draw(st.integers(0, world - 1))] for _ in range((len(rows) + 1) * (len(cols) + 1))]
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


@given(cut_tables(copies=False), st.data())
def test_any_cut_with_a_tile_gone_names_its_place(cut, data):
    tables, plan = cut
    gone = data.draw(st.sampled_from(plan.tiles))
    left = tuple(tile for tile in plan.tiles if tile is not gone)
    hole = f"rows {gone.rows[0]}:{gone.rows[1]} x columns {gone.cols[0]}:{gone.cols[1]} are on no rank"
    want = f"table '{gone.table}' .*: {hole}" if left else f"a plan without tiles: .* {gone.table}"
    with pytest.raises(SpecError, match=want):
        Plan(world=plan.world, tiles=left).validate(tables)


@given(cut_tables(copies=False), st.data())
def test_the_hole_that_is_named_is_empty_and_the_first(cut, data):
    tables, plan = cut
    left = data.draw(st.lists(st.sampled_from(plan.tiles), unique=True, min_size=1))
    try:
        Plan(world=plan.world, tiles=tuple(left)).validate(tables)
    except SpecError as error:
        found = re.match(r"table '(\w+)' .*: rows (\d+):(\d+) x columns (\d+):(\d+) are on no rank", str(error))
        top, bottom, first, last = map(int, found.groups()[1:])
        table = next(table for table in tables if table.name == found[1])
        here = [tile for tile in left if tile.table == table.name]
        held = {(row, col) for tile in here for row in range(*tile.rows) for col in range(*tile.cols)}
        empty = {(row, col) for row in range(table.rows) for col in range(table.dim)} - held
        assert {(row, col) for row in range(top, bottom) for col in range(first, last)} <= empty
        assert min(empty) == (top, first)
    else:
        assert len(left) == len(plan.tiles)


@given(cut_tables(), st.data())
def test_any_cut_with_a_tile_grown_is_refused(cut, data):
    tables, plan = cut
    index = data.draw(st.integers(0, len(plan.tiles) - 1))
    old = plan.tiles[index]
    grown = msgspec.structs.replace(old, rows=(old.rows[0], old.rows[1] + 1))
    with pytest.raises(SpecError, match=f"{old.table}"):
        Plan(world=plan.world, tiles=(*plan.tiles[:index], grown, *plan.tiles[index + 1 :])).validate(tables)


@given(cut_tables(), st.lists(st.sampled_from("abc"), unique=True))
def test_json_round_trip(cut, names):
    plan = msgspec.structs.replace(cut[1], approximate=tuple(names))
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
        ({"world": 2, "tiles": [ONE | {"colour": "red"}]}, r"unknown field `colour` - at `\$.tiles\[0\]`"),
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
        want = rf"cuts columns at {cut}: expected a cut at a multiple of {group or 64}, as int8 columns share a scale"
        with pytest.raises(SpecError, match=want):
            plan.validate([table])


@given(cut_tables())
def test_tiles_are_found_by_table_and_by_rank(cut):
    tables, plan = cut
    assert sorted(tile for table in tables for tile in plan.tiles_of(table.name)) == sorted(plan.tiles)
    assert sorted(tile for rank in range(plan.world) for tile in plan.tiles_on(rank)) == sorted(plan.tiles)
    assert all(tile.table == table.name for table in tables for tile in plan.tiles_of(table.name))
    assert all(tile.rank == rank for rank in range(plan.world) for tile in plan.tiles_on(rank))
    assert plan.tiles_of("none such") == plan.tiles_on(plan.world) == ()


COLUMNS = grid(USERS, [], [8], [[0], [1]])
SMOOTH = Table(name="smooth", rows=100, dim=16, optimizer=Adagrad())
CLIPPED = Table(name="clipped", rows=100, dim=16, optimizer=Adagrad(clip=1.0))


def test_row_statistics_may_be_approximate_where_columns_are_cut():
    Plan(world=2, tiles=COLUMNS, approximate=("users",)).validate([USERS])
    Plan(world=2, tiles=grid(CLIPPED, [9], [8], [[0], [1], [1], [0]]), approximate=("clipped",)).validate([CLIPPED])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["item"], "approximate table 'item': no such table; the tables are users, items, smooth"),
        (["users", "users"], "approximate table 'users' is listed 2 times: expected each table once"),
        (["items"], "approximate table 'items': no tile cuts its columns, so it is exact as it is; take it off"),
        (["smooth"], "approximate table 'smooth': Adagrad without clip updates each column by itself, so it is exact"),
    ],
)
def test_a_table_that_would_not_be_approximate_is_refused_by_name(names, message):
    tiles = (*COLUMNS, *grid(ITEMS, [9], [], [[0], [1]]), *grid(SMOOTH, [], [8], [[0], [1]]))
    with pytest.raises(SpecError, match=message):
        Plan(world=2, tiles=tiles, approximate=tuple(names)).validate([USERS, ITEMS, SMOOTH])


def test_diff_names_what_is_approximate():
    one, two = (Plan(world=2, tiles=COLUMNS, approximate=names) for names in (("a", "b"), ("c", "b")))
    assert one.diff(two) == ["- approximate a", "+ approximate c"]

"""`Plan`: places tables on ranks as tiles; a tile is a rectangle of one table on one rank.

Every layout (table-, row-, column-wise, grid, replicated) is a choice of tiles, so a plan can be read, compared, edited
by hand and executed unchanged. Each cell of a table is on exactly one rank, or the table is replicated on all.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from rowwise.base.errors import SpecError
from rowwise.base.value import MAX_RANKS, check_max, parse_json
from rowwise.tables.row_optimizers import needs_full_rows
from rowwise.tables.spec import Table, Value, Wire

COLUMN_BLOCK = 4  # row statistics are summed over blocks of four columns, so tiles are cut between blocks
COVER = "each cell on exactly one rank, or the table replicated, once on every rank"
NAMES = 8  # names listed in a message
SHOWN_TILES = 40  # lines of `str(plan)`


Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")


class Tile(Value, frozen=True, order=True, omit_defaults=True):
    """Rows [rows[0], rows[1]) and columns [cols[0], cols[1]) of a table, on one rank."""

    table: str
    rank: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    tier: Tier = "device"  # memory tier of the tile's rows
    cache_rows: int = 0  # rows that the tier above may cache
    pinned_rows: int = 0  # of those, slots for the hottest rows, which never leave them

    def __str__(self) -> str:
        pinned = f", {self.pinned_rows} of them pinned" if self.pinned_rows else ""
        tier = "" if self.tier == "device" else f" ({self.tier}, {self.cache_rows} rows cached{pinned})"
        return f"{self.table}[{_range(self.rows)}, {_range(self.cols)}] on rank {self.rank}{tier}"


class Forecast(Value, frozen=True, kw_only=True):
    """A planner's forecast of a plan, and its cost model; the runtime does not read it."""

    model: str  # name of the cost model
    batch: int  # samples per step, of all ranks
    wire: Wire = Wire()  # wire types of vectors; the dense part is not in the forecast
    step_s: float  # all tables: operators on the slowest rank plus links on the slowest rank
    pipelined_s: float | None = None  # step_s while the next ids are prefetched; None if the model has no stages
    measured_s: float | None = None  # measured time of a step of all tables
    bound_s: float | None = None  # lower bound of step_s for any plan, by the same model
    bound: str = ""  # how the bound was computed
    operators_s: tuple[float, ...] = ()  # time of all operators, by rank
    links_s: tuple[float, ...] = ()
    # By stage of a step, as runs measure them, then by rank.
    stages_s: Mapping[str, tuple[float, ...]] = msgspec.field(default_factory=dict)
    memory_bytes: tuple[tuple[int, ...], ...] = ()  # by rank, then by tier
    limits_bytes: tuple[int, ...] = ()  # by tier

    @property
    def expected_s(self) -> float:
        """Expected time of a step: the sum of the slowest rank's stages; without stages, `step_s`."""
        ranks_s = [sum(stages) for stages in zip(*self.stages_s.values(), strict=True)]
        return max(ranks_s, default=self.step_s)

    @property
    def gap(self) -> float | None:
        """(step_s - bound_s) / bound_s."""
        return self.step_s / self.bound_s - 1 if self.bound_s else None


class Plan(Value, frozen=True, omit_defaults=True):
    """The tiles of a model's tables on `world` ranks."""

    world: int
    tiles: tuple[Tile, ...]
    # Tables whose optimizer sums over each column piece instead of full rows: faster, as ranks exchange no sums, but
    # not equal to one device.
    approximate: tuple[str, ...] = ()
    forecast: Forecast | None = None

    def __str__(self) -> str:
        """A table of the tiles, one line each, of the first `SHOWN_TILES`."""
        tiles, more = sorted(self.tiles), len(self.tiles) - SHOWN_TILES
        rows = [("table", "rank", "rows", "columns", "memory")]
        rows += [(t.table, str(t.rank), _range(t.rows), _range(t.cols), t.tier) for t in tiles[:SHOWN_TILES]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(x.ljust(width) for x, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        title = f"{self.world} ranks, {len(tiles)} tile{'s' * (len(tiles) != 1)}"
        title += f"; approximate: {', '.join(self.approximate)}" if self.approximate else ""
        return "\n".join([title, *lines, *[f"... {more} more"] * (more > 0)])

    def to_json(self) -> str:
        """The plan as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """Read a plan; an unknown key or a wrong type raises an error with its place."""
        return parse_json(text, cls, "a plan")

    def tiles_of(self, table: str) -> tuple[Tile, ...]:
        return tuple(tile for tile in self.tiles if tile.table == table)

    def tiles_on(self, rank: int) -> tuple[Tile, ...]:
        return tuple(tile for tile in self.tiles if tile.rank == rank)

    def validate(self, tables: Sequence[Table]) -> None:
        """Raise unless each table is covered exactly once, or is replicated on every rank, and all ranks exist."""
        known = {t.name: t for t in tables}
        if self.world < 1:
            raise SpecError(f"a plan for {self.world} ranks", "at least 1")
        check_max("a plan for ", self, world=MAX_RANKS)
        if known and not self.tiles:
            raise SpecError("a plan without tiles", f"tiles for each of the tables, which are {_shorten(known)}")
        tiles: dict[str, list[Tile]] = {name: [] for name in known}
        for tile in self.tiles:
            if tile.table not in known:
                raise SpecError(f"tile {tile}: no such table; the tables are {_shorten(known)}")
            if not 0 <= tile.rank < self.world:
                raise SpecError(f"tile {tile}: the plan has ranks 0 to {self.world - 1}")
            tiles[tile.table].append(tile)
        for table in tables:
            _check_cover(table, tiles[table.name], self.world)
        _check_approximate(self, known)

    def diff(self, other: "Plan") -> list[str]:
        """One line for each tile that differs: '-' in this plan only, '+' in the other only."""
        # Counters, as a plan edited by hand may list a tile twice.
        tiles, other_tiles = Counter(self.tiles), Counter(other.tiles)
        removed = [f"- {tile}" for tile in sorted((tiles - other_tiles).elements())]
        added = [f"+ {tile}" for tile in sorted((other_tiles - tiles).elements())]
        world = [] if self.world == other.world else [f"- {self.world} ranks", f"+ {other.world} ranks"]
        before, after = set(self.approximate), set(other.approximate)
        exact = [f"- approximate {name}" for name in sorted(before - after)]
        return world + removed + added + exact + [f"+ approximate {name}" for name in sorted(after - before)]


def tiles_by_table(plan: Plan) -> dict[str, list[Tile]]:
    """Grouped once, as a scan of all tiles for each of thousands of tables would be quadratic."""
    tiles: dict[str, list[Tile]] = defaultdict(list)
    for tile in plan.tiles:
        tiles[tile.table].append(tile)
    return tiles


def column_block(table: Table) -> int:
    """The multiple of columns at which tiles may be cut."""
    if table.row_type.facts.scaled:
        return table.column_group or table.dim
    return COLUMN_BLOCK


def _check_cover(table: Table, tiles: list[Tile], world: int) -> None:
    for tile, times in Counter(tiles).items():
        _check_tile(table, tile)
        if times > 1:
            raise SpecError(f"table {table.name!r}: tile {tile} is listed {times} times")
    ranks = {tile.rank for tile in tiles}
    if len(tiles) > 1 and all((tile.rows, tile.cols) == ((0, table.rows), (0, table.dim)) for tile in tiles):
        if len(ranks) < world:
            where = f"{_shorten(sorted(ranks))}, not on {_shorten(sorted(set(range(world)) - ranks))}"
            raise SpecError(f"{_name_and_shape(table)} is replicated on ranks {where}", COVER)
        if table.managed is not None:
            raise SpecError(f"{_name_and_shape(table)} is managed, and replicated", "each row on one rank")
        return
    _check_overlaps(table, tiles)
    # Inside the table and without overlap, equal areas mean an exact cover.
    if sum((t.rows[1] - t.rows[0]) * (t.cols[1] - t.cols[0]) for t in tiles) != table.rows * table.dim:
        raise SpecError(f"{_name_and_shape(table)}: {_describe_first_hole(table, tiles)} are on no rank", COVER)


def _check_tile(table: Table, tile: Tile) -> None:
    if not (0 <= tile.rows[0] < tile.rows[1] <= table.rows and 0 <= tile.cols[0] < tile.cols[1] <= table.dim):
        raise SpecError(f"tile {tile}", f"a rectangle inside {_name_and_shape(table)}")
    if not 0 <= tile.cache_rows <= (0 if tile.tier == "device" else tile.rows[1] - tile.rows[0]):
        raise SpecError(
            f"tile {tile}: cache_rows={tile.cache_rows}",
            "at most the rows of the tile, and 0 on the device, which is the top",
        )
    if not 0 <= tile.pinned_rows <= tile.cache_rows:
        raise SpecError(f"tile {tile}: pinned_rows={tile.pinned_rows}", "0 to its cache_rows")
    _check_buckets(table, tile)
    # The table's right edge may be inside a block; every other cut is between two blocks.
    block = column_block(table)
    for cut in tile.cols:
        if cut % block and cut != table.dim:
            expected = f"a cut at a multiple of {block}"
            if table.row_type.facts.scaled:
                expected += f", as {table.row_type} columns share a scale (Table.column_group sets how many)"
            raise SpecError(f"tile {tile}: cuts columns at {cut}", expected)


def _check_buckets(table: Table, tile: Tile) -> None:
    """Raise for a tile of a managed table that is not whole buckets in memory, with their ids."""
    if table.managed is None:
        return
    lead = f"tile {tile}: table {table.name!r} is managed"
    if tile.cols != (0, table.dim):
        raise SpecError(lead, f"tiles of all {table.dim} columns, as an id's row is made and dropped at once")
    if any(row % table.row_multiple for row in tile.rows):
        raise SpecError(lead, f"rows cut at multiples of {table.row_multiple}, between two buckets of ids")
    if tile.tier == "disk":
        raise SpecError(lead, "tier 'device', as its rows stay in memory")


def _check_overlaps(table: Table, tiles: list[Tile]) -> None:
    ordered = sorted(tiles, key=lambda tile: (tile.rows, tile.cols, tile.rank))
    for index, tile in enumerate(ordered):
        for other in ordered[index + 1 :]:
            # Sorted by first row: no later tile can reach back into these rows.
            if other.rows[0] >= tile.rows[1]:
                break
            left, right = max(tile.cols[0], other.cols[0]), min(tile.cols[1], other.cols[1])
            if left < right:
                overlap = _describe_rectangle((other.rows[0], min(tile.rows[1], other.rows[1])), (left, right))
                raise SpecError(f"{_name_and_shape(table)}: {overlap} are in both {tile} and {other}", COVER)


def _describe_first_hole(table: Table, tiles: list[Tile]) -> str:
    """Describe the first rectangle that no tile covers; the tiles do not overlap and leave one."""
    # It begins at row 0 or at the last row of a tile, and ends at the next tile below.
    for top in sorted({0, *(tile.rows[1] for tile in tiles)}):
        left = 0
        for begin, end in [*sorted(t.cols for t in tiles if t.rows[0] <= top < t.rows[1]), (table.dim, table.dim)]:
            if left < begin:
                below = [t.rows[0] for t in tiles if top < t.rows[0] and t.cols[0] < begin and left < t.cols[1]]
                return _describe_rectangle((top, min(below, default=table.rows)), (left, begin))
            left = end
    raise AssertionError(f"no hole in {_name_and_shape(table)}")


def _check_approximate(plan: Plan, known: Mapping[str, Table]) -> None:
    for name, times in Counter(plan.approximate).items():
        lead = f"approximate table {name!r}"
        if name not in known:
            raise SpecError(f"{lead}: no such table; the tables are {_shorten(known)}")
        if times > 1:
            raise SpecError(f"{lead} is listed {times} times", "each table once")
        table = known[name]
        if all(tile.cols == (0, table.dim) for tile in plan.tiles_of(name)):
            raise SpecError(f"{lead}: no tile cuts its columns, so it is exact as it is; take it off the list")
        if not needs_full_rows(table.optimizer):
            kind = type(table.optimizer).__name__
            reason = f"{kind} without clip updates each column by itself, so it is exact as it is"
            raise SpecError(f"{lead}: {reason}; take it off the list")


def _name_and_shape(table: Table) -> str:
    return f"table {table.name!r} ({table.rows} x {table.dim})"


def _describe_rectangle(rows: tuple[int, int], cols: tuple[int, int]) -> str:
    return f"rows {_range(rows)} x columns {_range(cols)}"


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}:{bounds[1]}"


def _shorten(names: Iterable[object]) -> str:
    """The first `NAMES` names, and the number of the others."""
    texts = [str(name) for name in names]
    suffix = f" and {len(texts) - NAMES} more" if len(texts) > NAMES else ""
    return ", ".join(texts[:NAMES]) + suffix

"""Where tables live: a plan is a tuple of tiles, each a rectangle of one table on one rank.

Every layout (table-, row-, column-wise, grid, replicated) is only a way of choosing tiles, so a plan can be read,
compared, edited by hand and executed unchanged. Making plans and executing them are other modules. Known limits:
copies of parts. Each cell of a table is on exactly one rank, or the whole table is once on every rank.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from rowwise.errors import SpecError
from rowwise.row_optimizers import couples_columns
from rowwise.spec import Table, Value, Wire
from rowwise.textfile import decode_json
from rowwise.value import MOST_RANKS, check_most

COLUMN_BLOCK = 4  # row statistics are summed over blocks of four columns, so cuts fall between blocks
COVER = "want each cell on exactly one rank, or the whole table once on every rank"
NAMES = 8  # as many are listed in a message


Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")


class Tile(Value, frozen=True, order=True, omit_defaults=True):
    """Rows [rows[0], rows[1]) and columns [cols[0], cols[1]) of a table, on one rank."""

    table: str
    rank: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    tier: Tier = "device"  # of the rank's memory, in which all these rows live
    cache_rows: int = 0  # of them that may have a copy in the tier above

    def __str__(self) -> str:
        lives = "" if self.tier == "device" else f" ({self.tier}, {self.cache_rows} rows cached)"
        where = f"{self.rows[0]}:{self.rows[1]}, {self.cols[0]}:{self.cols[1]}"
        return f"{self.table}[{where}] on rank {self.rank}{lives}"


class Forecast(Value, frozen=True, kw_only=True):
    """The predicted step of a plan, and the model behind it; the runtime does not read it."""

    model: str  # of costs
    batch: int  # samples of a step, of all ranks together
    wire: Wire = Wire()  # how vectors travel; the dense part is not in the forecast
    step_s: float  # of all tables: operators of the busiest rank, and links of the busiest rank
    measured_s: float | None = None  # what a step of all tables took where it was measured, before any run
    bound_s: float | None = None  # no plan takes less, by the same model
    bound: str = ""  # how that is known
    operators_s: tuple[float, ...] = ()  # of each rank
    links_s: tuple[float, ...] = ()
    stages_s: Mapping[str, tuple[float, ...]] = msgspec.field(
        default_factory=dict
    )  # by stage of a step, as runs time them: of each rank
    memory_bytes: tuple[tuple[int, ...], ...] = ()  # of each rank: by tier
    limits_bytes: tuple[int, ...] = ()  # by tier

    @property
    def expected_s(self) -> float:
        """What a step should take: the slowest rank's stages in a row; where they are not known, `step_s`."""
        ranks_s = [sum(stages) for stages in zip(*self.stages_s.values(), strict=True)]
        return max(ranks_s, default=self.step_s)

    @property
    def gap(self) -> float | None:
        """How much more than the bound it takes, as a share of the bound."""
        return self.step_s / self.bound_s - 1 if self.bound_s else None


class Plan(Value, frozen=True, omit_defaults=True):
    """The tiles of all tables for `world` ranks."""

    world: int
    tiles: tuple[Tile, ...]
    # Tables whose row-wise optimizer state is kept for each column piece separately: faster, as pieces need not
    # agree on a row's statistics, but not what one device computes.
    approximate: tuple[str, ...] = ()
    forecast: Forecast | None = None

    def to_json(self) -> str:
        """The plan as text; `from_json` reads it back equal."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """Read a plan strictly: an unknown key or a wrong type is an error that names its place."""
        try:
            # Strict because the types are: a misspelt key would otherwise be a silent default.
            return decode_json(text, cls)
        except msgspec.DecodeError as error:
            raise SpecError(f"not a plan: {error}") from None

    def tiles_of(self, table: str) -> tuple[Tile, ...]:
        """The tiles of a table."""
        return tuple(tile for tile in self.tiles if tile.table == table)

    def tiles_on(self, rank: int) -> tuple[Tile, ...]:
        """The tiles of a rank."""
        return tuple(tile for tile in self.tiles if tile.rank == rank)

    def validate(self, tables: Sequence[Table]) -> None:
        """Raise unless each table is covered exactly, or is whole on every rank, and every rank exists."""
        known = {t.name: t for t in tables}
        if self.world < 1:
            raise SpecError(f"a plan for {self.world} ranks: want at least 1")
        check_most("a plan for ", self, world=MOST_RANKS)
        if known and not self.tiles:
            raise SpecError(f"a plan without tiles: want some for each of the tables, which are {_listed(known)}")
        tiles: dict[str, list[Tile]] = {name: [] for name in known}
        for tile in self.tiles:
            if tile.table not in known:
                raise SpecError(f"tile {tile}: no such table; the tables are {_listed(known)}")
            if not 0 <= tile.rank < self.world:
                raise SpecError(f"tile {tile}: the plan has ranks 0 to {self.world - 1}")
            tiles[tile.table].append(tile)
        for table in tables:
            _check_cover(table, tiles[table.name], self.world)
        _check_approximate(self, known)

    def diff(self, other: "Plan") -> list[str]:
        """One line for each tile that only one of the plans has: '-' here, '+' there."""
        # Counted, not set-wise: a plan edited by hand may list a tile twice, and that is a difference.
        mine, theirs = Counter(self.tiles), Counter(other.tiles)
        gone = [f"- {tile}" for tile in sorted((mine - theirs).elements())]
        new = [f"+ {tile}" for tile in sorted((theirs - mine).elements())]
        world = [] if self.world == other.world else [f"- {self.world} ranks", f"+ {other.world} ranks"]
        here, there = set(self.approximate), set(other.approximate)
        exact = [f"- approximate {name}" for name in sorted(here - there)]
        return world + gone + new + exact + [f"+ approximate {name}" for name in sorted(there - here)]


def column_block(table: Table) -> int:
    """How many neighbouring columns stay together."""
    if table.row_type.facts.scaled:
        return table.column_group or table.dim
    return COLUMN_BLOCK


def _check_cover(table: Table, tiles: list[Tile], world: int) -> None:
    for tile, times in Counter(tiles).items():
        _check_tile(table, tile)
        if times > 1:
            raise SpecError(f"table {table.name!r}: tile {tile} is listed {times} times")
    held = {tile.rank for tile in tiles}
    if len(tiles) > 1 and all((tile.rows, tile.cols) == ((0, table.rows), (0, table.dim)) for tile in tiles):
        if len(held) < world:
            missing = _listed(rank for rank in range(world) if rank not in held)
            raise SpecError(f"{_sized(table)} is whole on ranks {_listed(sorted(held))}, not on {missing}: {COVER}")
        return
    _check_overlaps(table, tiles)
    # Inside the table and without overlap, equal areas mean an exact cover.
    if sum((t.rows[1] - t.rows[0]) * (t.cols[1] - t.cols[0]) for t in tiles) != table.rows * table.dim:
        raise SpecError(f"{_sized(table)}: {_first_hole(table, tiles)} are on no rank; {COVER}")


def _check_tile(table: Table, tile: Tile) -> None:
    if not (0 <= tile.rows[0] < tile.rows[1] <= table.rows and 0 <= tile.cols[0] < tile.cols[1] <= table.dim):
        raise SpecError(f"tile {tile}: outside {_sized(table)}")
    if not 0 <= tile.cache_rows <= (0 if tile.tier == "device" else tile.rows[1] - tile.rows[0]):
        want = "want at most its rows, and none on the device, which is the top"
        raise SpecError(f"tile {tile}: cache_rows={tile.cache_rows}: {want}")
    # The right edge of the table may fall inside a block; every other cut has to be between two.
    block = column_block(table)
    for cut in tile.cols:
        if cut % block and cut != table.dim:
            want = f"cut at a multiple of {block}"
            if table.row_type.facts.scaled:
                want += f", as {table.row_type} columns share a scale (Table.column_group sets how many)"
            raise SpecError(f"tile {tile}: cuts columns at {cut}; {want}")


def _check_overlaps(table: Table, tiles: list[Tile]) -> None:
    ordered = sorted(tiles, key=lambda tile: (tile.rows, tile.cols, tile.rank))
    for index, tile in enumerate(ordered):
        for other in ordered[index + 1 :]:
            # Sorted by first row: no later tile can reach back into these rows.
            if other.rows[0] >= tile.rows[1]:
                break
            left, right = max(tile.cols[0], other.cols[0]), min(tile.cols[1], other.cols[1])
            if left < right:
                both = _range((other.rows[0], min(tile.rows[1], other.rows[1])), (left, right))
                raise SpecError(f"{_sized(table)}: {both} are in both {tile} and {other}; {COVER}")


def _first_hole(table: Table, tiles: list[Tile]) -> str:
    """The first rows and columns that no tile has; there are some, and no two tiles overlap."""
    # A hole begins at the first row or where a tile ends, and goes on to the next tile below it.
    for top in sorted({0, *(tile.rows[1] for tile in tiles)}):
        left = 0
        for begin, end in [*sorted(t.cols for t in tiles if t.rows[0] <= top < t.rows[1]), (table.dim, table.dim)]:
            if left < begin:
                below = [t.rows[0] for t in tiles if top < t.rows[0] and t.cols[0] < begin and left < t.cols[1]]
                return _range((top, min(below, default=table.rows)), (left, begin))
            left = end
    raise AssertionError(f"no hole in {_sized(table)}")


def _check_approximate(plan: Plan, known: Mapping[str, Table]) -> None:
    for name, times in Counter(plan.approximate).items():
        at = f"approximate table {name!r}"
        if name not in known:
            raise SpecError(f"{at}: no such table; the tables are {_listed(known)}")
        if times > 1:
            raise SpecError(f"{at} is listed {times} times: want it once")
        table = known[name]
        if all(tile.cols == (0, table.dim) for tile in plan.tiles_of(name)):
            raise SpecError(f"{at}: no tile cuts its columns, so it is exact as it is; take it off the list")
        if not couples_columns(table.optimizer):
            kind = type(table.optimizer).__name__
            what = f"{kind} without clip updates each column by itself, so it is exact as it is"
            raise SpecError(f"{at}: {what}; take it off the list")


def _sized(table: Table) -> str:
    return f"table {table.name!r} ({table.rows} x {table.dim})"


def _range(rows: tuple[int, int], cols: tuple[int, int]) -> str:
    return f"rows {rows[0]}:{rows[1]} x columns {cols[0]}:{cols[1]}"


def _listed(names: Iterable[object]) -> str:
    """The first of them, and how many more there are."""
    words = [str(name) for name in names]
    more = f" and {len(words) - NAMES} more" if len(words) > NAMES else ""
    return ", ".join(words[:NAMES]) + more

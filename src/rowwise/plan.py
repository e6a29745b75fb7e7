"""Where tables live: a plan is a tuple of tiles, each a rectangle of one table on one rank.

Every layout (table-, row-, column-wise, grid, replicated) is only a way of choosing tiles, so a plan can be
read, compared, edited by hand and executed unchanged. Making plans and executing them are other modules.
Gives up: a table is either cut once (every cell on exactly one rank) or copied whole cuts to several ranks;
a mixture of the two inside one table is refused.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from rowwise.errors import SpecError
from rowwise.spec import RowType, Table, Value

COLUMN_BLOCK = 4  # row statistics are summed over blocks of four columns, so cuts fall between blocks


class Tile(Value, frozen=True, order=True):
    """Rows [rows[0], rows[1]) and columns [cols[0], cols[1]) of a table, on one rank."""

    table: str
    rank: int
    rows: tuple[int, int]
    cols: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.table}[{self.rows[0]}:{self.rows[1]}, {self.cols[0]}:{self.cols[1]}] on rank {self.rank}"


class Plan(Value, frozen=True):
    """All tiles of a model for `world` ranks."""

    world: int
    tiles: tuple[Tile, ...]

    def to_json(self) -> str:
        """The plan as text; `from_json` reads it back equal."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """Read a plan strictly: an unknown key or a wrong type is an error that names its place."""
        try:
            # Strict because the types are: a misspelt key would otherwise be a silent default.
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise SpecError(f"not a plan: {error}") from None

    def validate(self, tables: Sequence[Table]) -> None:
        """Raise unless the tiles cover every table exactly and every rank exists."""
        known = {t.name: t for t in tables}
        tiles: dict[str, list[Tile]] = {name: [] for name in known}
        for tile in self.tiles:
            if tile.table not in known:
                raise SpecError(f"tile {tile}: no such table; the tables are {', '.join(known)}")
            if not 0 <= tile.rank < self.world:
                raise SpecError(f"tile {tile}: the plan has ranks 0 to {self.world - 1}")
            tiles[tile.table].append(tile)
        for table in tables:
            _check_cover(table, tiles[table.name])

    def diff(self, other: "Plan") -> list[str]:
        """One line for each tile that only one of the plans has: '-' here, '+' there."""
        # Counted, not set-wise: a plan edited by hand may list a tile twice, and that is a difference.
        mine, theirs = Counter(self.tiles), Counter(other.tiles)
        gone = [f"- {tile}" for tile in sorted((mine - theirs).elements())]
        new = [f"+ {tile}" for tile in sorted((theirs - mine).elements())]
        world = [] if self.world == other.world else [f"- {self.world} ranks", f"+ {other.world} ranks"]
        return world + gone + new


def _check_cover(table: Table, tiles: list[Tile]) -> None:
    for tile in tiles:
        _check_tile(table, tile)
    # A copied (data-parallel) table lists each rectangle once for each rank that holds it.
    copies = Counter((tile.rows, tile.cols) for tile in tiles)
    if len(set(copies.values())) > 1:
        raise SpecError(f"table {table.name!r}: some tiles are copied and others are not; copy all of them or none")
    _check_ranks(table, tiles)
    rectangles = sorted(copies)
    for index, (rows, cols) in enumerate(rectangles):
        for other_rows, other_cols in rectangles[index + 1 :]:
            # Sorted by first row: no later rectangle can reach back into these rows.
            if other_rows[0] >= rows[1]:
                break
            if other_cols[0] < cols[1] and cols[0] < other_cols[1]:
                overlap = f"rows {other_rows[0]}:{min(rows[1], other_rows[1])}"
                columns = f"columns {cols} and {other_cols}"
                raise SpecError(f"table {table.name!r}: two tiles overlap in {overlap}, {columns}")
    # Inside the table and without overlap, equal areas mean an exact cover.
    covered = sum((rows[1] - rows[0]) * (cols[1] - cols[0]) for rows, cols in rectangles)
    if covered != table.rows * table.dim:
        missing = table.rows * table.dim - covered
        raise SpecError(f"table {table.name!r} ({table.rows} x {table.dim}): {missing} cells are on no rank")


def _check_ranks(table: Table, tiles: list[Tile]) -> None:
    for tile, times in Counter(tiles).items():
        if times > 1:
            raise SpecError(f"table {table.name!r}: tile {tile} is listed {times} times")


def _check_tile(table: Table, tile: Tile) -> None:
    if not (0 <= tile.rows[0] < tile.rows[1] <= table.rows and 0 <= tile.cols[0] < tile.cols[1] <= table.dim):
        raise SpecError(f"tile {tile}: outside table {table.name!r}, which is {table.rows} x {table.dim}")
    # The right edge of the table may fall inside a block; every other cut has to be between two.
    block = _column_block(table)
    for cut in tile.cols:
        if cut % block and cut != table.dim:
            want = f"cut at a multiple of {block}"
            if table.row_type is RowType.INT8:
                want += ", as int8 columns share a scale (Table.column_group sets how many)"
            raise SpecError(f"tile {tile}: cuts columns at {cut}; {want}")


def _column_block(table: Table) -> int:
    """How many neighbouring columns stay together."""
    if table.row_type is RowType.INT8:
        return table.column_group or table.dim
    return COLUMN_BLOCK

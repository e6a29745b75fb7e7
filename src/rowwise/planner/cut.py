"""The layout that a table's tiles are of, read back from the tiles.

Its own file because a plan does not say it (a plan is tiles, whoever made them), while re-planning has to know it.
Gives up: tiles that no layout of ours makes; they have none.
"""

from collections.abc import Iterable, Iterator, Sequence

from rowwise.plan import Tile
from rowwise.planner.kinds import Kind, tiles_of
from rowwise.spec import Table, Topology

Units = tuple[int, ...]


def cut_of(
    table: Table, tiles: Sequence[Tile], topology: Topology, kinds: Iterable[Kind] = ()
) -> tuple[Kind, Units] | None:
    """The kind and the units that make just these tiles, in any order; if it is one of `kinds`, that one."""
    known, wanted = list(kinds), sorted(tiles)
    spans = {tile.cols for tile in tiles}
    first = wanted[0]
    for layout, units in _guesses(wanted, topology):
        parts = len(spans) if layout in ("column_wise", "grid") else 1
        same = [kind for kind in known if (kind.layout, kind.parts, kind.tier) == (layout, parts, first.tier)]
        made = Kind(layout, parts, first.tier, first.cache_rows / (first.rows[1] - first.rows[0]))
        for kind in (*same, made):
            if sorted(tiles_of(kind, table, units, topology)) == wanted:
                return kind, units
    return None


def _guesses(tiles: Sequence[Tile], topology: Topology) -> Iterator[tuple[str, Units]]:
    """Layouts and units that tiles may be of; a wrong guess makes other tiles."""
    everywhere = topology.world + topology.hosts
    by_cols = sorted(tiles, key=lambda tile: (tile.cols, tile.rows))
    firsts = [tile for tile in by_cols if tile.rows[0] == 0]
    if len(tiles) == len(firsts):  # rows are whole
        if len(tiles) > 1 and by_cols[0].cols == by_cols[-1].cols:
            yield "replicated", (everywhere,)
        else:
            yield "column_wise" if len(tiles) > 1 else "table_wise", tuple(tile.rank for tile in by_cols)
        return
    hosts = tuple(topology.world + topology.host_of(tile.rank) for tile in firsts)
    if topology.hosts > 1:
        yield "table_row_wise" if len(hosts) == 1 else "grid", hosts
    yield "row_wise", (everywhere,)

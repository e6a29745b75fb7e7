"""The ways to place a table that are tried: a layout, into how many pieces, and where its rows live.

A kind says what is cut; units say where it goes (a rank, a host, or all ranks, by the kind's span). Known limits: cuts
of rows and columns that are not even.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from rowwise.perf.hardware import Machine
from rowwise.plan import TIERS, Tier, Tile
from rowwise.planner.layouts import LAYOUTS, Layout, UnitSpan
from rowwise.spec import Table, Topology

EACH_UP_TO = 8  # every number of pieces up to this, and then powers of two
CACHED = (0.0, 0.001, 0.004, 0.015, 0.05, 0.15, 0.35, 0.7)  # shares of rows that the tier above may hold


class PlacementKind(NamedTuple):
    """A layout, a number of pieces, a tier and a cached share."""

    layout: Layout
    parts: int = 1  # pieces that go to units by themselves
    tier: Tier = "device"
    cached: float = 0.0

    @property
    def span(self) -> UnitSpan:
        return self.layout.span

    @property
    def column_parts(self) -> int:
        """Into how many pieces columns are cut."""
        return self.parts if self.layout.pieces == "columns" else 1

    def row_parts(self, topology: Topology) -> int:
        """Into how many pieces rows are cut."""
        pieces = self.parts if self.layout.pieces == "rows" else 1
        return pieces * (self.layout.unit_ranks(topology) if self.layout.spreads_rows else 1)

    def __str__(self) -> str:
        words = self.layout.words
        if self.parts > 1:
            words += f", {self.layout.pieces} in {self.parts}"
        if self.tier != "device":
            words += f", rows on the {self.tier}"
            words += f" ({self.cached:.1%} cached on the {self.above})" if self.cached else ""
        return words

    @property
    def above(self) -> Tier:
        """The tier that may hold copies of rows."""
        return TIERS[max(TIERS.index(self.tier) - 1, 0)]

    @property
    def tiers(self) -> frozenset[Tier]:
        """Those that have rows, or copies of them."""
        return frozenset({self.tier, self.above} if self.cached else {self.tier})


def kinds_for(machine: Machine, widest: int, tiers: Sequence[Tier]) -> list[PlacementKind]:
    """All kinds for a machine, from the least split to the most; `widest` is the most column blocks of a table."""
    topology = machine.topology
    found = [
        PlacementKind(layout, parts)
        for layout in LAYOUTS
        if layout.differs_on(topology)
        for parts in _parts(layout, topology, widest)
    ]
    resident = [kind for kind in found if kind.parts in kind.layout.tiered]
    for tier in tiers:
        if tier != "device":
            found += [kind._replace(tier=tier, cached=share) for kind in resident for share in CACHED]
    return found


def _parts(layout: Layout, topology: Topology, widest: int) -> Iterator[int]:
    """Numbers of pieces that are tried: every one up to some, and then powers of two."""
    if layout.pieces is None:
        yield 1
        return
    units = len(layout.units(topology))
    most = min(widest, units) if layout.pieces == "columns" else units
    yield from range(2, min(most, EACH_UP_TO) + 1)
    yield from (2**k for k in range(4, 11) if 2**k <= most)


def tiles_of(kind: PlacementKind, table: Table, units: Sequence[int], topology: Topology) -> tuple[Tile, ...]:
    """A table's tiles; units are numbered ranks first, then hosts."""
    first = kind.layout.units(topology).start
    tiles = kind.layout.tiles(table, topology, [unit - first for unit in units])
    if kind.tier == "device":
        return tiles
    return tuple(_lowered(tile, kind) for tile in tiles)


def _lowered(tile: Tile, kind: PlacementKind) -> Tile:
    cached = math.ceil(kind.cached * (tile.rows[1] - tile.rows[0]))
    return structs.replace(tile, tier=kind.tier, cache_rows=cached)

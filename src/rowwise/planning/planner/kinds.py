"""Placement kinds that the search tries: a layout, a number of pieces, and a tier of memory.

A kind defines how a table is cut, units (ranks, hosts, or all ranks, by its `unit_kind`) where the pieces go. Not
supported: uneven cuts.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from rowwise.parallel.plan import Tier, Tile
from rowwise.planning.perf.hardware import Machine
from rowwise.planning.planner.layouts import LAYOUTS, Layout, UnitKind
from rowwise.tables.spec import Table, Topology

EACH_UP_TO = 8  # all numbers of pieces up to this are tried, then powers of two
CACHED = (0.0, 0.001, 0.004, 0.015, 0.05, 0.15, 0.35, 0.7)  # candidate shares of rows cached in the tier above


class PlacementKind(NamedTuple):
    """A layout, its number of pieces, and the tier of its rows."""

    layout: Layout
    parts: int = 1  # pieces, each of which goes to a unit
    tier: Tier = "device"
    cached: float = 0.0  # share of the rows cached in a tier above
    cache_tier: Tier = "device"  # the tier of the cache

    @property
    def unit_kind(self) -> UnitKind:
        return self.layout.unit_kind

    @property
    def column_parts(self) -> int:
        return self.parts if self.layout.pieces == "columns" else 1

    def row_parts(self, topology: Topology) -> int:
        pieces = self.parts if self.layout.pieces == "rows" else 1
        return pieces * (self.layout.unit_ranks(topology) if self.layout.spreads_rows else 1)

    def __str__(self) -> str:
        words = self.layout.words
        if self.parts > 1:
            words += f", {self.layout.pieces} in {self.parts}"
        if self.tier != "device":
            words += f", rows on the {self.tier}"
            words += f" ({self.cached:.1%} cached on the {self.cache_tier})" if self.cached else ""
        return words

    @property
    def tiers(self) -> frozenset[Tier]:
        """Tiers that hold rows, or copies of them."""
        return frozenset({self.tier, self.cache_tier})


def candidate_kinds(
    machine: Machine, widest: int, tiers: Sequence[Tier], cached: Sequence[float] = CACHED
) -> list[PlacementKind]:
    """All kinds for a machine, from the least cut to the most; `widest` is the column blocks of the widest table.

    `tiers` are those of rows, from the device down; each caches rows of the next, in these shares.
    """
    topology = machine.topology
    kinds = [
        PlacementKind(layout, parts)
        for layout in LAYOUTS
        if layout.differs_on(topology)
        for parts in _piece_counts(layout, topology, widest)
    ]
    # Rows below the device are many. Where ranks cut them finer, ids are sent too often; hosts still do.
    resident = [k for k in kinds if k.layout.tiered and (k.parts <= EACH_UP_TO or k.unit_kind != "rank")]
    for above, tier in itertools.pairwise(tiers):
        kinds += [k._replace(tier=tier, cached=share, cache_tier=above) for k in resident for share in cached]
    return kinds


def _piece_counts(layout: Layout, topology: Topology, widest: int) -> Iterator[int]:
    """Numbers of pieces that are tried: all up to `EACH_UP_TO`, then powers of two."""
    if layout.pieces is None:
        yield 1
        return
    units = len(layout.units(topology))
    max_parts = min(widest, units) if layout.pieces == "columns" else units
    yield from range(2, min(max_parts, EACH_UP_TO) + 1)
    yield from (2**k for k in range(4, 11) if 2**k <= max_parts)


def tiles_of(kind: PlacementKind, table: Table, units: Sequence[int], topology: Topology) -> tuple[Tile, ...]:
    first = kind.layout.units(topology).start
    tiles = kind.layout.tiles(table, topology, [unit - first for unit in units])
    if kind.tier == "device":
        return tiles
    cached = [math.ceil(kind.cached * (tile.rows[1] - tile.rows[0])) for tile in tiles]
    return tuple(structs.replace(t, tier=kind.tier, cache_rows=n) for t, n in zip(tiles, cached, strict=True))

"""The ways to place a table that are tried: a layout, into how many pieces, and where its rows live.

Its own file because options, plans and explanations all speak of them. A kind says what is cut; units say where it
goes (a rank, a host, or all ranks, by the kind's span). Gives up: cuts of rows and columns that are not even.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec import structs

from rowwise.perf.hardware import Machine
from rowwise.plan import Tier, Tile
from rowwise.planner import layouts
from rowwise.spec import Table, Topology

Span = Literal["rank", "host", "all"]
SPANS: tuple[Span, ...] = ("rank", "host", "all")
LAYOUTS = ("table_wise", "column_wise", "row_wise", "table_row_wise", "grid", "replicated")
EACH_UP_TO = 8  # every number of pieces up to this, and then powers of two
CACHED = (0.0, 0.001, 0.004, 0.015, 0.05, 0.15, 0.35, 0.7)  # shares of rows that the tier above may hold
TIERED = {"table_wise": (1,), "column_wise": (2, 4), "row_wise": (1,), "table_row_wise": (1,)}


class Kind(NamedTuple):
    """One way to place a table."""

    layout: str
    parts: int = 1  # pieces that go to units by themselves
    tier: Tier = "device"
    cached: float = 0.0

    @property
    def span(self) -> Span:
        """What a piece goes to."""
        if self.layout in ("row_wise", "replicated"):
            return "all"
        return "host" if self.layout in ("table_row_wise", "grid") else "rank"

    def row_parts(self, topology: Topology) -> int:
        """Into how many pieces rows are cut inside a unit."""
        if self.layout == "row_wise":
            return topology.world
        return topology.devices if self.span == "host" else 1

    def __str__(self) -> str:
        words = self.layout.replace("_", "-")
        if self.parts > 1:
            words += f", columns in {self.parts}"
        if self.tier != "device":
            above = "device" if self.tier == "host" else "host"
            words += f", rows on the {self.tier}"
            words += f" ({self.cached:.1%} cached on the {above})" if self.cached else ""
        return words


def kinds_for(machine: Machine, widest: int, tiers: Sequence[Tier]) -> list[Kind]:
    """All kinds for a machine, from the least split to the most; `widest` is the most column blocks of a table."""
    topology = machine.topology
    found = [Kind("table_wise")]
    if topology.world > 1:
        found += [Kind("column_wise", n) for n in _pieces(min(widest, topology.world))]
        if topology.hosts > 1 and topology.devices > 1:
            found.append(Kind("table_row_wise"))
            found += [Kind("grid", n) for n in _pieces(min(widest, topology.hosts))]
        found += [Kind("row_wise"), Kind("replicated")]
    resident = [kind for kind in found if kind.parts in TIERED.get(kind.layout, ())]
    for tier in tiers:
        if tier != "device":
            found += [kind._replace(tier=tier, cached=share) for kind in resident for share in CACHED]
    return found


def _pieces(most: int) -> list[int]:
    small = range(2, min(most, EACH_UP_TO) + 1)
    return [*small, *(2**k for k in range(4, 11) if 2**k <= most)]


def tiles_of(kind: Kind, table: Table, units: Sequence[int], topology: Topology) -> tuple[Tile, ...]:
    """A table's tiles; units are numbered ranks first, then hosts."""
    match kind.layout:
        case "table_wise" | "column_wise":
            tiles = layouts.column_wise(table, units)
        case "table_row_wise" | "grid":
            tiles = layouts.grid(table, topology, [unit - topology.world for unit in units])
        case "row_wise":
            tiles = layouts.row_wise(table, range(topology.world))
        case _:
            tiles = layouts.replicated(table, range(topology.world))
    if kind.tier == "device":
        return tiles
    return tuple(_lowered(tile, kind) for tile in tiles)


def _lowered(tile: Tile, kind: Kind) -> Tile:
    cached = math.ceil(kind.cached * (tile.rows[1] - tile.rows[0]))
    return structs.replace(tile, tier=kind.tier, cache_rows=cached)

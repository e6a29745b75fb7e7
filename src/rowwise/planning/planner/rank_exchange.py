"""Seconds that each rank of a plan spends on exchanges, by the exchange networks of a measured profile.

The search's cost adds the longest computation of any rank to the longest transfer. NeuroShard's estimate is finer:
each rank's own lookup, exchange (which starts when the slowest rank has looked up), return and update in a row, and
then the slowest rank. It is no sum over pieces, so the search cannot use it. Forecasts use it.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from rowwise.parallel.plan import Plan, tiles_by_table
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.exchange import Amounts, Exchanges, NarrowWires, WireCost
from rowwise.planning.perf.hardware import FLOAT_bytes, Hardware
from rowwise.planning.perf.wires import link_shares
from rowwise.planning.planner.problem import PlanRequest
from rowwise.tables.spec import LINKS, Link, Table, Topology, WireType


class ExchangeSeconds(NamedTuple):
    """Seconds of each rank for ids, vectors and gradients, without the wait for ranks that look up longer."""

    ids_W: Floats
    vectors_W: Floats
    gradients_W: Floats

    @property
    def total_W(self) -> Floats:
        return self.ids_W + self.vectors_W + self.gradients_W


def split_exchange(plan: Plan, request: PlanRequest, exchange_W: Floats) -> ExchangeSeconds:
    """The seconds of an exchange in proportion to the bytes of ids, vectors and gradients."""
    dim_W, ids_W = exchange_amounts(plan, request, float)
    ids_bytes_W = ids_W * request.machine.hardware.id_bytes
    vectors_bytes_W = dim_W * request.batch * FLOAT_bytes
    ids_s_W = exchange_W * ids_bytes_W / np.maximum(ids_bytes_W + 2 * vectors_bytes_W, 1.0)
    return ExchangeSeconds(ids_s_W, (exchange_W - ids_s_W) / 2, (exchange_W - ids_s_W) / 2)


def exchanges_s(exchanges: Exchanges, plan: Plan, request: PlanRequest, lookup_W: Floats) -> ExchangeSeconds:
    topology, wire = request.machine.topology, request.model.wire
    floats = _WireColumns(topology, dict.fromkeys(LINKS, WireType.FP32))
    forward = _WireColumns(topology, {link: wire.codecs(link).forward for link in LINKS})
    backward = _WireColumns(topology, {link: wire.codecs(link).backward for link in LINKS})
    dim_W, ids_W = exchange_amounts(plan, request, floats)
    amounts = Amounts(dim_W, ids_W, request.batch, np.zeros(plan.world))
    outward, returning = amounts._replace(skew_W=lookup_W - lookup_W.min()), amounts
    # Each rank encodes or decodes the vectors that it looks up for all, and those that its samples get from all.
    coded_W = (dim_W + dim_W.mean()) / 2 * request.batch
    if exchanges.narrow is not None:
        bags_W, _ = exchange_amounts(plan, request, lambda _: 1.0)
        vectors_W = (bags_W + bags_W.mean()) / 2 * request.batch
        coding = [columns.added_s(exchanges.narrow, vectors_W, coded_W) for columns in (forward, backward)]
    else:
        outward = outward._replace(dim_W=exchange_amounts(plan, request, forward)[0])
        returning = returning._replace(dim_W=exchange_amounts(plan, request, backward)[0])
        coding = [coded_W * columns.coding_s(request.machine.hardware) for columns in (forward, backward)]
    vectors_W = exchanges.forward.transfer_s(outward) + coding[0]
    # The fitted price of a narrow wire may be negative (saved bytes); far from the fit it must not exceed the rest.
    both_W = np.maximum(vectors_W + exchanges.backward.transfer_s(returning) + coding[1], 0.0)
    vectors_W = np.clip(vectors_W, 0.0, both_W)
    return ExchangeSeconds(exchanges.route.transfer_s(amounts), vectors_W, both_W - vectors_W)


class _WireColumns(NamedTuple):
    """Widths of vectors on the wires of one direction, in floats."""

    topology: Topology
    types: Mapping[Link, WireType]

    @property
    def shares(self) -> dict[Link, float]:
        return link_shares("all_to_all", self.topology)

    def __call__(self, width: int) -> float:
        """Width on the wire of a vector of `width` columns, as the mean over the other ranks."""
        size = sum(share * self.types[link].vector_bytes(width) for link, share in self.shares.items())
        return size / sum(self.shares.values()) / FLOAT_bytes

    def coding_s(self, hardware: Hardware) -> float:
        """Seconds to encode and decode a float, as the mean over all ranks."""
        return sum(share * hardware.coding_s(self.types[link]) for link, share in self.shares.items())

    def added_s(self, narrow: NarrowWires, vectors_W: Floats, floats_W: Floats) -> Floats:
        """Seconds of coding for each rank, minus those of the bytes saved."""
        world, added_W = self.topology.world, np.zeros(self.topology.world)
        for link, share in self.shares.items():
            facts = self.types[link].facts
            if share and not facts.exact:
                cost: WireCost = getattr(narrow, facts.coded_as)
                added_W += cost.seconds(share * world, share * vectors_W, share * floats_W)
        return added_W


def exchange_amounts(plan: Plan, request: PlanRequest, columns: Callable[[int], float]) -> tuple[Floats, Floats]:
    """Columns that each rank looks up per sample, and ids that it gets in a step; replicated tables have none."""
    known = {w.table.name: w for w in request.workloads}
    dim_W, ids_W = np.zeros(plan.world), np.zeros(plan.world)
    for name, parts in tiles_by_table(plan).items():
        table, access = known[name].table, known[name].access
        if len(parts) > 1 and all(_is_whole(table, tile.rows, tile.cols) for tile in parts):
            continue
        for tile in parts:
            dim_W[tile.rank] += known[name].vectors * columns(tile.cols[1] - tile.cols[0])
            ids_W[tile.rank] += access.pooling * request.batch * (tile.rows[1] - tile.rows[0]) / table.rows
    return dim_W, ids_W


def _is_whole(table: Table, rows: tuple[int, int], cols: tuple[int, int]) -> bool:
    return rows == (0, table.rows) and cols == (0, table.dim)

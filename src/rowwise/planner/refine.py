"""A step of a plan rank by rank, with the networks for exchanges: who waits for whom.

The search's cost adds the most that any rank computes to the most that any rank sends. NeuroShard's estimate is finer:
each rank's own lookup, exchange (for which it waits until the slowest has looked up), return and update in a row, and
then the slowest of these. It is no sum of pieces, so the search cannot use it; forecasts do, and the best few plans
are ordered by it.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rowwise.perf.access import Floats
from rowwise.perf.exchange import Amounts, Exchanges, NarrowWires
from rowwise.perf.hardware import FLOAT_bytes, Hardware
from rowwise.perf.wires import bytes_of, link_shares
from rowwise.plan import Plan
from rowwise.planner.problem import PlanRequest
from rowwise.spec import Pooling, Table, Topology, WireType


def exchanges_s(exchanges: Exchanges, plan: Plan, question: PlanRequest, lookup_W: Floats) -> Floats:
    """Seconds of each rank for all that travels, without the wait for ranks that look up longer."""
    topology, wire = question.machine.topology, question.model.wire
    floats = _WireColumns(topology, WireType.FP32, WireType.FP32)
    forward = _WireColumns(topology, wire.host.forward, wire.network.forward)
    backward = _WireColumns(topology, wire.host.backward, wire.network.backward)
    dim_W, ids_W = amounts_of(plan, question, floats)
    together = Amounts(dim_W, ids_W, question.batch, np.zeros(plan.world))
    there, back = together._replace(skew_W=lookup_W - lookup_W.min()), together
    # Each rank codes what it makes, and its samples' part of what all make.
    coded_W = (dim_W + dim_W.mean()) / 2 * question.batch
    if exchanges.narrow is not None:
        bags_W, _ = amounts_of(plan, question, lambda _: 1.0)
        vectors_W = (bags_W + bags_W.mean()) / 2 * question.batch
        coding_W = sum(columns.added_s(exchanges.narrow, vectors_W, coded_W) for columns in (forward, backward))
    else:
        there = there._replace(dim_W=amounts_of(plan, question, forward)[0])
        back = back._replace(dim_W=amounts_of(plan, question, backward)[0])
        coding_W = coded_W * sum(columns.coding_s(question.machine.hardware) for columns in (forward, backward))
    return (
        exchanges.route.own_s(together)
        # Saved bytes never save all that an exchange takes, however far prices are stretched.
        + np.maximum(exchanges.forward.own_s(there) + exchanges.backward.own_s(back) + coding_W, 0.0)
    )


class _WireColumns(NamedTuple):
    """Widths of vectors on the wires of one direction, counted in floats."""

    topology: Topology
    host: WireType
    network: WireType

    def __call__(self, width: int) -> float:
        """Of so many columns, as the mean over the other ranks."""
        near, far = self.topology.devices - 1, self.topology.world - self.topology.devices
        size = near * bytes_of(self.host, width) + far * bytes_of(self.network, width)
        return size / (near + far) / FLOAT_bytes

    def coding_s(self, hardware: Hardware) -> float:
        shares = link_shares("all_to_all", self.topology)
        return shares["host"] * hardware.coding_s(self.host) + shares["network"] * hardware.coding_s(self.network)

    def added_s(self, narrow: NarrowWires, vectors_W: Floats, floats_W: Floats) -> Floats:
        """What coding takes each rank, less what the bytes saved would have."""
        near, far = self.topology.devices - 1, self.topology.world - self.topology.devices
        shares, found_W = link_shares("all_to_all", self.topology), np.zeros(self.topology.world)
        for kind, peers, share in ((self.host, near, shares["host"]), (self.network, far, shares["network"])):
            if kind is not WireType.FP32:
                found_W += getattr(narrow, kind).seconds(peers, share * vectors_W, share * floats_W)
        return found_W


def amounts_of(plan: Plan, question: PlanRequest, columns: Callable[[int], float]) -> tuple[Floats, Floats]:
    """Columns that each rank makes for all samples, and ids that it gets for that; copies make nothing that travels."""
    known = {w.table.name: w for w in question.workloads}
    tiles = defaultdict(list)
    for tile in plan.tiles:
        tiles[tile.table].append(tile)
    dim_W, ids_W = np.zeros(plan.world), np.zeros(plan.world)
    for name, parts in tiles.items():
        table, access = known[name].table, known[name].access
        if len(parts) > 1 and all(_is_whole(table, tile.rows, tile.cols) for tile in parts):
            continue
        bags = access.pooling if table.pooling is Pooling.SEQUENCE else len(table.feature_names)
        for tile in parts:
            dim_W[tile.rank] += bags * columns(tile.cols[1] - tile.cols[0])
            ids_W[tile.rank] += access.pooling * question.batch * (tile.rows[1] - tile.rows[0]) / table.rows
    return dim_W, ids_W


def _is_whole(table: Table, rows: tuple[int, int], cols: tuple[int, int]) -> bool:
    return rows == (0, table.rows) and cols == (0, table.dim)

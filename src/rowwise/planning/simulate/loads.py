"""The tables' part of a step on a machine: by a plan, or as if tables could be shared evenly between ranks.

Even loads are those of whole tables over the number of ranks: the planner's bound for tables that need no cuts. Where
device memory is too small, a share of each table is in the tier below it, as large as it has to be.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rowwise.parallel.plan import TIERS, Plan
from rowwise.planning.perf.access import Curves, Floats, Workload
from rowwise.planning.perf.learned import LearnedModel
from rowwise.planning.perf.roofline import Roofline
from rowwise.planning.perf.wires import link_shares
from rowwise.planning.planner.kinds import CACHED, PlacementKind
from rowwise.planning.planner.layouts import TABLE_WISE
from rowwise.planning.planner.options import TableArrays, price_pieces
from rowwise.planning.planner.problem import Pieces, PlacementProblem, PlanRequest
from rowwise.planning.planner.rank_exchange import ExchangeSeconds, exchanges_s
from rowwise.planning.simulate.links import Links, Seconds, add_seconds
from rowwise.planning.simulate.step import VECTORS, Simplification, TableSeconds, sum_transfers
from rowwise.planning.simulate.traffic import (
    Flow,
    HEADER_bytes,
    PlanTraffic,
    WORD_bytes,
    block_bytes,
    outer_flow,
)
from rowwise.tables.spec import LINKS, Link, Topology, Wire

Model = LearnedModel | Roofline


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TableLoads:
    """Seconds of the tables of a step, and bytes of each tier on the rank that has most of it."""

    seconds: TableSeconds
    memory_bytes: tuple[int, ...]


class MissingMemory(NamedTuple):
    """Bytes of a rank in each tier that evenly shared tables would take, and the limits."""

    need_bytes: tuple[int, ...]
    limit_bytes: tuple[int, ...]

    @property
    def lacking_bytes(self) -> int:
        """Missing bytes of the tier that lacks most, at least 1."""
        return max(1, *(need - limit for need, limit in zip(self.need_bytes, self.limit_bytes, strict=True)))


def planned_loads(problem: PlacementProblem, sums: Pieces, plan: Plan, links: Links, *, elastic: bool) -> TableLoads:
    """Loads of a plan; `sums` are the loads of its ranks."""
    request = problem.request
    model = _model_of(request)
    compute = _compute_seconds(model, sums.load_NK)
    measured = request.machine.hardware.exchanges
    if measured is not None and isinstance(model, LearnedModel) and plan.world > 1 and links.topology.hosts == 1:
        transfers = _measured_transfers(exchanges_s(measured, plan, request, compute["lookup_W"]))
    else:
        traffic = PlanTraffic.of_plan(
            request.workloads, plan, links.topology, request.batch, model.wire, elastic=elastic
        )  # fmt: skip
        transfers = with_coding(sum_transfers(traffic.flows(), links), request, links)
    memory = tuple(int(size) for size in sums.bytes_NM.max(0))
    return TableLoads(seconds=TableSeconds(**compute, transfers=transfers), memory_bytes=memory)


def simplified_tables(
    tables: TableSeconds, workloads: Sequence[Workload], batch: int, links: Links, simplified: frozenset[Simplification]
) -> TableSeconds:
    """The tables' part as arXiv 2310.02784 counts it: of all that tables do, the bytes of the rows that are looked up.

    ids      no ids travel
    rows     a lookup, and an update, take the rows' bytes at the rate of the memory
    vectors  an exchange sends the rows' bytes over the number of ranks, twice, instead of pooled vectors
    """
    topology = links.topology
    looked_bytes = sum(w.access.pooling * w.table.row_bytes for w in workloads) * batch / topology.world
    transfers = dict(tables.transfers)
    if "ids" in simplified:
        transfers = {stage: seconds for stage, seconds in transfers.items() if not stage.startswith("route.")}
    if "vectors" in simplified and topology.world > 1:
        sent = links.send(2 * looked_bytes / topology.world, inside=topology.hosts == 1)
        inside = ("exchange.inside", "return.inside")
        transfers = {stage: seconds for stage, seconds in transfers.items() if stage not in inside}
        transfers |= dict.fromkeys(VECTORS, sent)
    if "rows" in simplified:
        rows_W = np.full(1, looked_bytes / links.machine.hardware.device_Bps)
        tables = replace(tables, lookup_W=rows_W, update_W=rows_W)
    return replace(tables, transfers=transfers)


@dataclass(frozen=True, slots=True, eq=False)
class EvenPieces:
    """A rank's even share of all tables: with rows on the device, and with each kind of placement below it."""

    on_device: Pieces
    below: tuple[Pieces, ...]

    @classmethod
    def of(cls, request: PlanRequest) -> "EvenPieces":
        """Kinds below the device are priced only if its memory is too small for the tables."""
        on_device = _even_pieces(request, PlacementKind(TABLE_WISE))
        fits = not (on_device.bytes_NM[0] > np.array(request.limits_bytes)).any()
        kinds = tuple(_lower_kinds(request)) if not fits else ()
        return cls(on_device, tuple(_even_pieces(request, kind) for kind in kinds))


def even_loads(request: PlanRequest, links: Links, pieces: EvenPieces | None = None) -> TableLoads | MissingMemory:
    """Loads with every table's work shared evenly; `pieces` that are known are not priced again."""
    pieces = pieces or EvenPieces.of(request)
    limits, on_device = np.array(request.limits_bytes, dtype=float), pieces.on_device
    best: tuple[float, dict[str, Floats], Floats] | None = None
    for lower in (on_device, *pieces.below):
        share = _share_below(on_device.bytes_NM[0], lower.bytes_NM[0], limits)
        if share is None:
            continue
        load_1K = on_device.load_NK * (1 - share) + lower.load_NK * share
        compute = _compute_seconds(_model_of(request), load_1K)
        seconds = float(sum(x.sum() for x in compute.values()))
        if best is None or seconds < best[0]:
            best = seconds, compute, on_device.bytes_NM[0] * (1 - share) + lower.bytes_NM[0] * share
    if best is None:
        candidates = (on_device, *pieces.below)
        least = min(candidates, key=lambda candidate: float(np.maximum(candidate.bytes_NM[0] - limits, 0).sum()))
        return MissingMemory(tuple(int(size) for size in least.bytes_NM[0]), request.limits_bytes)
    wire = _model_of(request).wire
    transfers = sum_transfers(even_flows(request.workloads, request.batch, wire, links.topology), links)
    seconds = TableSeconds(**best[1], transfers=with_coding(transfers, request, links))
    return TableLoads(seconds=seconds, memory_bytes=tuple(int(size) for size in best[2]))


def even_flows(workloads: Sequence[Workload], batch: int, wire: Wire, topology: Topology) -> list[Flow]:
    """The collectives of tables that ranks share evenly."""
    if topology.world == 1:
        return []
    ones_W, samples = np.ones(topology.world), batch / topology.world
    bags = sum(len(w.table.feature_names) for w in workloads)
    words = (bags + sum(w.access.pooling for w in workloads)) * samples / topology.world
    blocks = {
        backward: {link: _even_block(workloads, wire, link, backward, topology.world) * ones_W for link in LINKS}
        for backward in (False, True)
    }
    return [
        outer_flow(topology, ("route.counts", "counts", "all_to_all"), ones_W, HEADER_bytes * ones_W),
        outer_flow(topology, ("route.ids", "ids", "all_to_all"), ones_W, WORD_bytes * words * ones_W),
        outer_flow(topology, ("exchange.send", "pooled", "all_to_all"), blocks[False], samples * ones_W),
        outer_flow(topology, ("return.send", "gradients", "all_to_all"), samples * ones_W, blocks[True]),
    ]


def _even_block(workloads: Sequence[Workload], wire: Wire, link: Link, backward: bool, world: int) -> float:
    """Bytes of a rank's vectors of a sample."""
    kind = wire.vectors(link, backward=backward)
    return sum(w.vectors * block_bytes(kind, [w.table.dim]) for w in workloads) / world


def with_coding(transfers: dict[str, Seconds], request: PlanRequest, links: Links) -> dict[str, Seconds]:
    """The transfers with the seconds to encode and decode vectors, as a mean over ranks."""
    wire, hardware, topology = _model_of(request).wire, request.machine.hardware, links.topology
    floats = sum(w.vectors * w.table.dim for w in request.workloads) * request.batch / topology.world
    for stage, direction in (("exchange.send", "forward"), ("return.send", "backward")):
        if stage in transfers:
            shares = link_shares("all_to_all", topology).items()
            coding_s = sum(share * hardware.coding_s(getattr(wire.codecs(link), direction)) for link, share in shares)
            if coding_s:
                transfers[stage] = add_seconds(transfers[stage], {"device": coding_s * floats})
    return transfers


def _measured_transfers(exchange: ExchangeSeconds) -> dict[str, Seconds]:
    """Exchanges of a measured host, whose networks include packing and latency."""
    parts = {"route.ids": exchange.ids_W, "exchange.send": exchange.vectors_W, "return.send": exchange.gradients_W}
    return {stage: {"links in hosts": float(seconds_W.max())} for stage, seconds_W in parts.items()}


def _compute_seconds(model: Model, load_NK: Floats) -> dict[str, Floats]:
    """Lookups and updates, and apart from them the rows of lower tiers."""
    above_NK = load_NK.copy()
    above_NK[:, model.lower_tiers] = 0.0
    by_stage = {stage.name: stage.seconds(model.phi, above_NK) for stage in model.stages}
    fetched, stored = model.lower_tiers
    return {
        "lookup_W": by_stage["lookup"],
        "update_W": by_stage["update"],
        "fetch_W": load_NK[:, fetched],
        "store_W": load_NK[:, stored],
    }


def _even_pieces(request: PlanRequest, kind: PlacementKind) -> Pieces:
    """A rank's even share of all tables."""
    index_T = np.arange(len(request.workloads))
    curves = Curves.of(request.workloads, request.batch)
    pieces, world = (
        price_pieces(request, TableArrays.of(request), curves, kind, index_T),
        request.machine.topology.world,
    )
    return Pieces(
        load_NK=pieces.load_NK.sum(0, keepdims=True) / world,
        link_N=pieces.link_N.sum(0, keepdims=True) / world,
        bytes_NM=pieces.bytes_NM.sum(0, keepdims=True) / world,
    )


def _lower_kinds(request: PlanRequest) -> list[PlacementKind]:
    """Tables below device memory, with shares of their rows cached above."""
    held = [tier for tier, limit in zip(TIERS, request.limits_bytes, strict=True) if limit]
    pairs = itertools.pairwise(held)
    return [PlacementKind(TABLE_WISE, 1, tier, share, above) for above, tier in pairs for share in CACHED]


def _share_below(device_M: Floats, below_M: Floats, limits: Floats) -> float | None:
    """The least share of the tables that has to be below the device for all to fit; None if they never do."""
    low, high = 0.0, 1.0
    for device, below, limit in zip(device_M, below_M, limits, strict=True):
        # device * (1 - x) + below * x <= limit
        if below < device:
            low = max(low, (device - limit) / (device - below))
        elif below > device:
            high = min(high, (limit - device) / (below - device))
        elif device > limit:
            return None
    return low if low <= high else None


def _model_of(request: PlanRequest) -> Model:
    assert isinstance(request.model, LearnedModel | Roofline), "models without stages are refused before"
    return request.model

"""Traffic of tables in a step: its collectives, with the bytes of each rank by link.

They follow from the routes by which `shard` sends, so they are the bytes that a rehearsal counts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from rowwise.parallel.plan import Plan
from rowwise.parallel.shard.routes import ExchangePath, RankPiece, Routes, make_routes
from rowwise.planning.perf.access import Curves, Floats, Workload
from rowwise.tables.spec import LINKS, Link, Pooling, Table, Topology, Wire, WireType

FLOAT_bytes, ID_bytes, WORD_bytes = 4, 8, 4
HEADER_bytes = 24  # to each rank before its ids, and in a gather of sizes
FLAGS_bytes = 2
WIDE_ROWS = 1 << 31  # ids of larger tables take two words
SHARED_SCALE = 16  # vectors whose widths have a multiple of it in common share scales of that width
Members = Literal["all", "host", "peers"]  # of a collective: all ranks, those of a host, those of a device number
ByLink = Mapping[Link, Floats]
Range = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Flow:
    """A collective: bytes that each rank sends and receives, by link."""

    stage: str  # of the step
    purpose: str
    collective: str
    sent: ByLink
    received: ByLink


class BatchCounts(NamedTuple):
    """Ids of a step by destination."""

    samples: float  # of each rank
    sent_ids: Callable[[str, Range], float]  # of a rank, by feature and range of rows; repeats may be sent once
    own_ids: Callable[[str], float]  # of a rank, by feature
    distinct: Callable[[Table, Range], float]  # rows of a range that the samples of all ranks look up


def expected_counts(workloads: Sequence[Workload], batch: int, world: int) -> BatchCounts:
    """Counts by access statistics; ids fall on ranges of rows by their size, as in the planner's costs."""
    known = {feature: w for w in workloads for feature in w.table.feature_names}
    unique = dict(zip((w.table.name for w in workloads), Curves.of(workloads, batch).unique_T.tolist(), strict=True))

    def own_ids(feature: str) -> float:
        workload = known[feature]
        return workload.access.pooling / len(workload.table.feature_names) * batch / world

    def sent_ids(feature: str, rows: Range) -> float:
        return own_ids(feature) * (rows[1] - rows[0]) / known[feature].table.rows

    def distinct(table: Table, rows: Range) -> float:
        return unique[table.name] * (rows[1] - rows[0]) / table.rows

    return BatchCounts(batch / world, sent_ids, own_ids, distinct)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTraffic:
    """The collectives of the tables of a plan."""

    routes: Routes
    counts: BatchCounts
    wire: Wire

    @classmethod
    def of_plan(
        cls, workloads: Sequence[Workload], plan: Plan, topology: Topology, batch: int, wire: Wire, *, elastic: bool
    ) -> "PlanTraffic":
        """The traffic of a step of `batch` samples of all ranks."""
        routes = make_routes([w.table for w in workloads], plan, topology, elastic=elastic)
        return cls(routes=routes, counts=expected_counts(workloads, batch, plan.world), wire=wire)

    def flows(self) -> list[Flow]:
        """All collectives of a step; none on one rank."""
        if self.routes.world == 1:
            return []
        parts = (self._ids(), self._pooled(), self._in_hosts(), self._per_id(), self._flags(), self._replicated())
        return [*(flow for part in parts for flow in part), *self._row_sums()]

    def _ids(self) -> Iterator[Flow]:
        """Headers, then to each rank the sizes of bags, ids and weights of its slices."""
        tables, cuts = self.routes.tables, self.routes.cuts
        words_W = np.zeros(self.routes.world)
        for rank, slices in enumerate(self.routes.slices_W):
            wide = any(tables[s.table].rows >= WIDE_ROWS for s in slices)
            weighted = any(tables[s.table].pooling is Pooling.WEIGHTED for s in slices)
            for s in slices:
                first, last = cuts[s.feature][s.range : s.range + 2]
                words_W[rank] += self.counts.samples
                words_W[rank] += self.counts.sent_ids(s.feature, (first, last)) * (1 + wide + weighted)
        ones_W = np.ones(self.routes.world)
        yield outer_flow(self._topology, ("route.counts", "counts", "all_to_all"), ones_W, HEADER_bytes * ones_W)
        yield outer_flow(self._topology, ("route.ids", "ids", "all_to_all"), ones_W, WORD_bytes * words_W)

    def _pooled(self) -> Iterator[Flow]:
        if any(self.routes.pooled_pieces(rank, ExchangePath.ALL_TO_ALL) for rank in range(self.routes.world)):
            samples_W = np.full(self.routes.world, self.counts.samples)
            blocks = self._blocks(ExchangePath.ALL_TO_ALL, backward=False)
            yield outer_flow(self._topology, ("exchange.send", "pooled", "all_to_all"), blocks, samples_W)
            yield self._gradients(ExchangePath.ALL_TO_ALL)

    def _gradients(self, path: ExchangePath) -> Flow:
        samples_W = np.full(self.routes.world, self.counts.samples)
        names = ("return.send", "gradients", "all_to_all")
        return outer_flow(self._topology, names, samples_W, self._blocks(path, backward=True))

    def _blocks(self, path: ExchangePath, *, backward: bool) -> ByLink:
        """Bytes of each rank's vectors of a sample, by link."""
        widths_W = [[p.width for p, _ in self.routes.pooled_pieces(w, path)] for w in range(self.routes.world)]
        return self._block_bytes(widths_W, backward=backward)

    def _block_bytes(self, widths_W: Sequence[Sequence[int]], *, backward: bool) -> ByLink:
        return {
            link: np.array([block_bytes(self.wire.vectors(link, backward=backward), widths) for widths in widths_W])
            for link in LINKS
        }

    def _in_hosts(self) -> Iterator[Flow]:
        """Sums inside a host, then a vector to each host; gradients the other way round."""
        routes, topology = self.routes, self._topology
        path = ExchangePath.HIERARCHICAL
        if not any(group.path is path for groups in routes.groups_W for group in groups):
            return
        widths_H = [[piece.width for piece, _ in routes.host_pieces(host)] for host in range(topology.hosts)]
        widths_W = [widths for widths in widths_H for _ in range(topology.devices)]
        samples_W = np.full(routes.world, self.counts.samples)
        for backward, stage, purpose in ((False, "exchange", "pooled"), (True, "return", "gradients")):
            blocks = self._block_bytes(widths_W, backward=backward)
            exact = self.wire.vectors("host", backward=backward).facts.exact
            summed = ("all_gather" if backward else "reduce_scatter") if exact else "all_to_all"
            all_hosts_W = samples_W * topology.hosts
            inside = outer_flow(self._topology, (f"{stage}.inside", purpose, summed), blocks, all_hosts_W, "host")
            ends = (samples_W, blocks) if backward else (blocks, samples_W)
            across = outer_flow(self._topology, (f"{stage}.send", purpose, "all_to_all"), *ends, "peers")
            yield from (across, inside) if backward else (inside, across)

    def _per_id(self) -> Iterator[Flow]:
        """A vector for each id: of sequences both ways, of bags that the rank of the samples pools forward only."""
        ones_W = np.ones(self.routes.world)
        for path in (ExchangePath.ALL_TO_ALL, ExchangePath.PER_ID):
            if not any(self.routes.per_id_pieces(rank, path) for rank in range(self.routes.world)):
                continue
            rows = {
                backward: {
                    link: np.array([self._row_bytes(w, path, link, backward) for w in range(self.routes.world)])
                    for link in LINKS
                }
                for backward in (False, True)
            }
            yield outer_flow(self._topology, ("exchange.send", "rows", "all_to_all"), rows[False], ones_W)
            if path is ExchangePath.PER_ID:
                yield self._gradients(path)
            else:
                yield outer_flow(self._topology, ("return.send", "gradients", "all_to_all"), ones_W, rows[True])

    def _row_bytes(self, rank: int, path: ExchangePath, link: Link, backward: bool) -> float:
        kind, total = self.wire.vectors(link, backward=backward), 0.0
        for piece in self.routes.per_id_pieces(rank, path):
            number = self.routes.slices_W[rank][piece.slice].range
            first, last = self.routes.cuts[piece.feature][number : number + 2]
            total += self.counts.sent_ids(piece.feature, (first, last)) * kind.vector_bytes(piece.width)
        return total

    def _flags(self) -> Iterator[Flow]:
        """Flags of the kinds of outputs that losses depend on, if tables have both."""
        if len({table.pooling is Pooling.SEQUENCE for table in self.routes.tables}) == 2:
            ones_W = np.ones(self.routes.world)
            yield outer_flow(self._topology, ("return.send", "status", "all_gather"), FLAGS_bytes * ones_W, ones_W)

    def _replicated(self) -> Iterator[Flow]:
        """Replicated tables: an all-gather of what each rank staged, or an all-reduce of their gradients."""
        routes, counts, ones_W = self.routes, self.counts, np.ones(self.routes.world)
        for sequences in (False, True):
            tables = [t for t in routes.replicated if (t.pooling is Pooling.SEQUENCE) == sequences]
            features = [(t, feature) for t in tables for feature in t.feature_names]
            if not tables:
                continue
            floats = sum(table.dim for table, _ in features)
            numbers = sum(table.rows * (table.dim + 1) for table in tables)
            if not routes.elastic and counts.samples * routes.world * floats >= 2 * numbers:
                yield self._ring("update.sums", "copies", FLOAT_bytes * numbers)
                continue
            ids = [counts.own_ids(feature) for _, feature in features]
            words = len(features) * counts.samples + sum(ids)
            grads = counts.samples * floats
            if sequences:
                grads = sum(count * table.dim for count, (table, _) in zip(ids, features, strict=True))
            weights = sum(ids) * any(table.pooling is Pooling.WEIGHTED for table in tables)
            gathers = {"counts": HEADER_bytes, "ids": ID_bytes * words + FLOAT_bytes * weights}
            for purpose, size_bytes in (gathers | {"copies": FLOAT_bytes * grads}).items():
                yield outer_flow(self._topology, ("update.sums", purpose, "all_gather"), size_bytes * ones_W, ones_W)

    def _ring(self, stage: str, purpose: str, size_bytes: float) -> Flow:
        """An all-reduce, in which each rank sends to the next."""
        world, topology = self.routes.world, self._topology
        sent, received = _no_bytes(world), _no_bytes(world)
        for rank in range(world):
            after = (rank + 1) % world
            link = topology.link(rank, after)
            sent[link][rank] = received[link][after] = 2 * (world - 1) / world * size_bytes
        return Flow(stage=stage, purpose=purpose, collective="all_reduce", sent=sent, received=received)

    def _row_sums(self) -> Iterator[Flow]:
        """Sums over the columns of a rank, to the ranks with other columns of the same rows."""
        routes = self.routes
        pieces = [
            (rank, piece)
            for rank, groups in enumerate(routes.groups_W)
            for group in groups
            if group.needs_full_rows
            for piece in group.pieces
        ]
        optimizers = {rank_piece.table: routes.tables[rank_piece.table].optimizer for _, rank_piece in pieces}
        clipped = {table: 1 for table, optimizer in optimizers.items() if optimizer.clip is not None}
        summed = {table: optimizer.sums_columns for table, optimizer in optimizers.items() if optimizer.sums_columns}
        for terms in (clipped, summed):
            if terms:
                yield self._between_columns([pair for pair in pieces if pair[1].table in terms], terms)

    def _between_columns(self, pieces: Sequence[tuple[int, RankPiece]], terms: Mapping[int, int]) -> Flow:
        topology, owners = self._topology, self.routes.column_owners
        sent, received = _no_bytes(topology.world), _no_bytes(topology.world)
        for rank, piece in pieces:
            table, tile = self.routes.tables[piece.table], piece.tile
            nodes = count_nodes(*tile.cols)
            size = FLOAT_bytes * self.counts.distinct(table, tile.rows) * terms[piece.table] * nodes
            for peer in {owner.rank for owner in owners[piece.table, tile.rows]} - {rank}:
                link = topology.link(rank, peer)
                sent[link][rank] += size
                received[link][peer] += size
        return Flow(stage="update.sums", purpose="row sums", collective="all_to_all", sent=sent, received=received)

    @property
    def _topology(self) -> Topology:
        return self.routes.topology


def _no_bytes(world: int) -> dict[Link, Floats]:
    return {link: np.zeros(world) for link in LINKS}


def outer_flow(
    topology: Topology, names: tuple[str, str, str], left: ByLink | Floats, right: ByLink | Floats,
    members: Members = "all",
) -> Flow:  # fmt: skip
    """Rank r sends rank w the product of `left[r]` and `right[w]`, which depend on the link between the two."""
    lefts, rights = ({link: x if isinstance(x, np.ndarray) else x[link] for link in LINKS} for x in (left, right))
    stage, purpose, collective = names
    return Flow(
        stage=stage,
        purpose=purpose,
        collective=collective,
        sent={link: lefts[link] * _sum_reached(topology, rights[link], link, members) for link in LINKS},
        received={link: rights[link] * _sum_reached(topology, lefts[link], link, members) for link in LINKS},
    )


def _sum_reached(topology: Topology, value_W: Floats, link: Link, members: Members) -> Floats:
    """For each rank, the sum over the members that it reaches by a link."""
    value_HD = value_W.reshape(topology.hosts, topology.devices)
    # Sums over the members of each rank's host, then of its group; nested differences give each class of links.
    host_HD = value_HD if members == "peers" else np.broadcast_to(value_HD.sum(1, keepdims=True), value_HD.shape)
    if link == "host":
        return np.zeros(topology.world) if members == "peers" else (host_HD - value_HD).reshape(-1)
    if members == "host":
        return np.zeros(topology.world)
    sizes_G = np.array(topology.groups or (topology.hosts,))
    begins_G = np.concatenate([[0], np.cumsum(sizes_G)[:-1]])
    group_HD = np.repeat(np.add.reduceat(host_HD, begins_G, axis=0), sizes_G, axis=0)
    near_HD = group_HD - host_HD if link == "network" else host_HD.sum(0) - group_HD
    return near_HD.reshape(-1)


def block_bytes(kind: WireType, widths: Sequence[int]) -> float:
    """Bytes of a sample's vectors that lie side by side."""
    common = math.gcd(*widths) if widths else 0
    if common and common % SHARED_SCALE == 0:
        return sum(widths) // common * kind.vector_bytes(common)
    return sum(map(kind.vector_bytes, widths))


def count_nodes(first: int, last: int) -> int:
    """Number of sums that a range of columns sends: one for each of its largest aligned runs of 2**k columns."""
    count = 0
    while first < last:
        size = 1 << (last - first).bit_length() - 1
        first += min(size, first & -first) if first else size
        count += 1
    return count

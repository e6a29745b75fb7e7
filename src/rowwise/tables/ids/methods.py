"""Compression methods by name: each makes an id map from a table, a budget of bytes and a history of its ids.

This module decides; `rules` and `arrays` write the map. The budget covers stored rows, the map, and the projections of
narrow rows. It leaves out optimizer state, which is not served.

[Note: Learned maps] The idea is that of "Learning to Collide" (Ghaemmaghami et al. 2022), whose algorithm is not
public: ids that behave alike share a row. The probe, a small model, learns a low-dimensional vector for each id from
history. Weighted k-means clusters the vectors, with the count of an id as its weight, so that centroids are close to
frequent ids. Each cluster is a row.

    learned            at most FEW_CLUSTERS clusters, even if the budget allows more
    learned_many       as many clusters as the budget allows
    learned_head_tail  a row for each of the most frequent ids, as many as fit, and FEW_CLUSTERS clusters of the others
    learned_balanced   like `learned`, but a row has at most BALANCE times its fair part of all accesses
    learned_own        FEW_CLUSTERS clusters, to which as many ids as the budget allows add a narrow row of their own

More clusters were worse, not better, on all measured data: a probe learns only a few bits about an id. Beyond them the
folds disagree about the cluster of an id, and samples of other ids train its row.

An id with fewer than MIN_COUNT samples is in no cluster, as a single sample is not worth the bits of its entry. Such
ids share one row with ids that were never seen. If the history has vectors without each fold, the map has a map for
each fold over the same clusters.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.tables.ids.arrays import add_maps, entry_map, make_folds, ranked_map
from rowwise.tables.ids.cluster import Clusters, cluster
from rowwise.tables.ids.idmap import IdMap, WORD_bytes
from rowwise.tables.ids.nearest import nearest
from rowwise.tables.ids.rules import double_hash_map, hash_map, quotient_remainder_map
from rowwise.tables.ids.words import bits_for, set_words
from rowwise.tables.spec import Table, row_bytes

MIN_COUNT = 2  # occurrences of an id that is clustered
FEW_CLUSTERS = 64
ALPHA = 0.3  # the dim of an id grows with this power of its count
BALANCE = 4.0  # largest number of accesses of a row in `learned_balanced`, over the mean
ROUNDS = 60  # bisection steps
Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedVectors:
    """The probe's vectors of ids, learned without the samples of each fold. See [Note: Folds]."""

    features: tuple[str, ...]  # their ids choose the fold of a sample
    seed: int
    vectors: tuple[Floats, ...]  # [ids, dim] for each fold


@dataclass(frozen=True, slots=True, kw_only=True)
class IdHistory:
    """Counts and vectors of a table's ids, taken from past samples."""

    counts_N: Ids  # occurrences of each id
    vectors_ND: Floats | None = None  # the probe's vector of each id
    folded: FoldedVectors | None = None  # None if the map is not trained on the samples that it was learned from


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The arguments of a method."""

    table: Table
    budget_bytes: int
    history: IdHistory
    seed: int

    @property
    def ids(self) -> int:
        return self.table.rows

    @property
    def rows(self) -> int:
        """The number of rows that fit the budget beside an empty map."""
        return self.budget_bytes // self.table.row_bytes

    @property
    def by_count_N(self) -> Ids:
        """All ids, the most frequent first."""
        return np.argsort(-self.history.counts_N, kind="stable")


def make_map(method: str, table: Table, budget_bytes: int, history: IdHistory, *, seed: int = 0) -> IdMap | None:
    """A method's map, within `budget_bytes` for map and rows; None if the method needs more."""
    if method not in METHODS:
        raise SpecError(f"no compression method {method!r}", f"one of {', '.join(METHODS)}")
    if len(history.counts_N) != table.rows:
        raise SpecError(f"table {table.name!r}: counts of {len(history.counts_N)} ids", f"{table.rows}, one for each")
    full_bytes = table_bytes(table, None)
    if budget_bytes >= full_bytes:
        raise SpecError(
            f"table {table.name!r}: a budget of {budget_bytes:,} bytes",
            f"less than its {full_bytes:,} bytes without a map",
        )
    id_map = METHODS[method](_Request(table=table, budget_bytes=budget_bytes, history=history, seed=seed))
    if id_map is None or table_bytes(table, id_map) > budget_bytes:
        return None
    return replace(id_map, about=id_map.about | {"method": method, "seed": seed})


def table_bytes(table: Table, id_map: IdMap | None) -> int:
    """Bytes of a table's rows, with a map also those of the map and the projections."""
    if id_map is None:
        return table.rows * table.row_bytes
    total = id_map.map_bytes
    for part in id_map.shape.parts:
        total += _part_bytes(table, part.rows, table.dim if part.dim is None else part.dim)
    return total


def _part_bytes(table: Table, rows: int, dim: int) -> int:
    """Bytes of the rows of a part; narrow rows have one group of columns, and a projection."""
    if dim >= table.dim:
        return rows * table.row_bytes
    return rows * row_bytes(table.row_type, dim) + 4 * table.dim * dim


def _hash(request: _Request, make: Callable[[int, int, int], IdMap] = hash_map) -> IdMap | None:
    return make(request.ids, request.rows, request.seed) if request.rows else None


def _quotient_remainder(request: _Request, combine: Literal["sum", "product"] = "sum") -> IdMap | None:
    try:
        return quotient_remainder_map(request.ids, request.rows, request.seed, combine)
    except SpecError:  # too few rows for all pairs
        return None


def _frequency(request: _Request) -> IdMap | None:
    """Half of the rows belong to the most frequent ids, one each; all other ids are hashed to the other half."""

    def size(head: int) -> int:
        return 2 * head * request.table.row_bytes + WORD_bytes * set_words(head, request.ids)

    head = _bisect(size, min(request.rows, request.ids) // 2, request.budget_bytes)
    return ranked_map(request.ids, [np.sort(request.by_count_N[:head])], head, seed=request.seed) if head else None


def _mixed_dims(request: _Request, budget_bytes: int | None = None) -> IdMap | None:
    """A row of its own for each id that was seen, wider for more frequent ids; ids too rare for dim 1 have none.

    The dim of an id is scale * count ** ALPHA, rounded to the table's dim or one of its halves. The scale is the
    largest that fits the budget.
    """
    budget_bytes = request.budget_bytes if budget_bytes is None else budget_bytes
    counts_N, dims = request.history.counts_N, _halve(request.table.dim)
    seen_C = request.by_count_N[: int((counts_N > 0).sum())]
    power_C = counts_N[seen_C].astype(np.float64) ** ALPHA

    # Dims fall with the counts, so the ids of each dim are a range of `seen_C`; a choice is the ends of these ranges.
    def ends_at(scale: float) -> list[int]:
        """The ends at a scale, where the bounds between dims are halfway by ratio."""
        return [int(np.searchsorted(-power_C, -(dim / 2**0.5) / scale, "right")) for dim in dims]

    def size(ends: list[int]) -> int:
        total, begin = 0, 0
        for dim, end in zip(dims, ends, strict=True):
            count, begin = end - begin, end
            if count:
                total += _part_bytes(request.table, count, dim) + WORD_bytes * set_words(count, request.ids)
        return total

    low, high = 0.0, 2.0 * request.table.dim
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if size(ends_at(middle)) <= budget_bytes else (low, middle)
    ends, too_large = ends_at(low) if low else [0] * len(dims), ends_at(high)
    # `low` and `high` are adjacent floats now, but many ids of equal count change their dim between them. Spend the
    # rest of the budget by widening some of those ids, beginning with the widest dim.
    for index in range(len(dims)):
        move = partial(_move_end, ends, index)
        ends = move(_bisect(lambda end, move=move: size(move(end)), too_large[index], budget_bytes, ends[index]))
    if not ends[-1]:
        return None
    begins = [0, *ends[:-1]]
    sets = [(np.sort(seen_C[a:b]), dim) for a, b, dim in zip(begins, ends, dims, strict=True) if b > a]
    set_dims = [None if dim >= request.table.dim else dim for _, dim in sets]
    return ranked_map(request.ids, [set_C for set_C, _ in sets], 0, dims=set_dims, seed=request.seed)


def _move_end(ends: list[int], index: int, end: int) -> list[int]:
    """The ends with one moved; later ends do not precede it."""
    return [*ends[:index], end, *(max(end, later) for later in ends[index + 1 :])]


def _halve(dim: int) -> list[int]:
    """The dim and its repeated halves down to 1, widest first."""
    dims = [dim]
    while dims[-1] > 1:
        dims.append((dims[-1] + 1) // 2)
    return dims


def _learned_own(request: _Request) -> IdMap | None:
    """Clusters of full width for at most half of the budget, and narrow rows for the rest of it."""
    shared = _learned(request, FEW_CLUSTERS, budget_bytes=request.budget_bytes // 2)
    if shared is None:
        return None
    own = _mixed_dims(request, request.budget_bytes - table_bytes(request.table, shared))
    return shared if own is None else add_maps(shared, own)


def _learned(
    request: _Request,
    max_clusters: int | None = None,
    *,
    budget_bytes: int | None = None,
    head_tail: bool = False,
    balance: float | None = None,
) -> IdMap | None:
    """A row for each cluster of ids; with `head_tail` first a row for each of the most frequent ids.

    Args:
        request: the arguments of the method.
        max_clusters: limit of clusters; by default the number of ids.
        budget_bytes: by default that of the request.
        head_tail: use the rows that the budget allows beyond `max_clusters` for the most frequent ids.
        balance: the largest number of accesses of a cluster, over the mean.
    """
    counts_N, vectors_ND = request.history.counts_N, request.history.vectors_ND
    max_clusters = request.ids if max_clusters is None else max_clusters
    if vectors_ND is None or len(vectors_ND) != request.ids:
        got = "none" if vectors_ND is None else str(len(vectors_ND))
        raise SpecError(
            f"table {request.table.name!r}: vectors of ids: got {got}", f"{request.ids}, one for each id, from a probe"
        )
    often_C = request.by_count_N[: int((counts_N >= MIN_COUNT).sum())]
    budget_bytes = request.budget_bytes if budget_bytes is None else budget_bytes
    count, rows = _fit_entries(request, budget_bytes, len(often_C), len(often_C) if head_tail else max_clusters)
    if not rows:
        return None
    head = max(0, rows - max_clusters) if head_tail else 0
    tail_C = np.sort(often_C[head:count])
    clusters = _cluster_ids(request, tail_C, rows - head, balance) if len(tail_C) and rows > head else None
    used_rows = head if clusters is None else head + len(clusters.centroids_KD)

    def make_entries(fold_vectors: Floats | None) -> IdMap:
        rows_N = np.full(request.ids, -1, np.int64)
        rows_N[often_C[:head]] = np.arange(head)
        if clusters is not None:
            no_fold = fold_vectors is None
            label_C = clusters.label_N if no_fold else nearest(fold_vectors[tail_C], clusters.centroids_KD)
            rows_N[tail_C] = head + label_C
        return entry_map(request.ids, rows_N, used_rows, unseen_rows=1, seed=request.seed)

    id_map, folded = make_entries(None), request.history.folded
    if folded is None:
        return id_map
    return make_folds(id_map, [make_entries(vectors) for vectors in folded.vectors], folded.features, folded.seed)


def _cluster_ids(request: _Request, ids_C: Ids, clusters: int, balance: float | None) -> Clusters:
    """Clusters of ids by their vectors, weighted by their counts."""
    vectors_ND = request.history.vectors_ND
    assert vectors_ND is not None
    weights_C = request.history.counts_N[ids_C].astype(np.float64)
    cap = None if balance is None else balance * weights_C.sum() / clusters
    return cluster(np.ascontiguousarray(vectors_ND[ids_C]), weights_C, clusters, seed=request.seed, cap=cap)


def _fit_entries(request: _Request, budget_bytes: int, max_ids: int, max_rows: int) -> tuple[int, int]:
    """The number of ids with an entry, most frequent first, and of rows that they share.

    Entries and rows compete for the budget. Rows get at least half of it, unless `max_rows` need less; entries get the
    rest, and rows what entries leave.
    """
    row_size = request.table.row_bytes
    min_rows = min(max_rows, budget_bytes // (2 * row_size))

    def size(count: int, rows: int) -> int:
        return (rows + 1) * row_size + WORD_bytes * set_words(count, request.ids, bits_for(rows))

    count = _bisect(lambda count: size(count, min(count, min_rows)), max_ids, budget_bytes)
    limit = min(count, max_rows, budget_bytes // row_size)
    return count, _bisect(lambda rows: size(count, rows), limit, budget_bytes) if count and min_rows else 0


def _bisect(size: Callable[[int], int], limit: int, budget: int, low: int = 0) -> int:
    """The largest number from `low` to `limit` whose size is within the budget; sizes grow with the number."""
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(middle) <= budget else (low, middle - 1)
    return low


METHODS: dict[str, Callable[[_Request], IdMap | None]] = {
    "hash": _hash,
    "double_hash": partial(_hash, make=double_hash_map),
    "quotient_remainder": _quotient_remainder,
    "quotient_product": partial(_quotient_remainder, combine="product"),
    "frequency": _frequency,
    "mixed": _mixed_dims,
    "learned": partial(_learned, max_clusters=FEW_CLUSTERS),
    "learned_many": _learned,
    "learned_head_tail": partial(_learned, max_clusters=FEW_CLUSTERS, head_tail=True),
    "learned_balanced": partial(_learned, max_clusters=FEW_CLUSTERS, balance=BALANCE),
    "learned_own": _learned_own,
}

"""Every way to put the ids of a table into a number of bytes, by its name: from a budget and a history to an id map.

The decisions are here, apart from `rules` and `placed`, which write down what was decided. All bytes count: rows as
they are stored, the map, and what projects narrow rows. Optimizer state is left out, as rows alone are served; it goes
with the rows.

[Note: Learned maps] Follows the idea of "Learning to Collide" (Ghaemmaghami et al. 2022), whose algorithm is not
public: ids share a row if they behave alike, by how often they come and by a low-dimensional vector that a small model
(the probe) has learned for them from history. Vectors are clustered by weighted k-means, the weight of an id being its
count, so that frequent ids pull rows to themselves; each cluster is a row.

    learned            at most FEW clusters, whatever the budget allows
    learned_many       as many clusters as the budget allows
    learned_head_tail  rows of their own for the most frequent ids, as many as fit, and FEW clusters of the others
    learned_balanced   as `learned`, where no row has more than a few times its share of all accesses
    learned_own        FEW clusters, and beside them a narrow row of its own for as many ids as the budget allows

More clusters than that were worse, not better, on all data that was measured: what a probe knows of an id is worth a
few bits, and beyond them folds disagree about an id, whose row is then trained by samples of others.

An id that came fewer than FEWEST times is in no cluster: what one sample says of it is not worth its bits. Such ids,
and those never seen, share one row that learns what a rare id is like. With a `FoldedVectors` history the map is one
for each fold, over the same clusters.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import SpecError
from rowwise.hashing.cluster import Clusters, cluster
from rowwise.hashing.idmap import IdMap, WORD_bytes
from rowwise.hashing.nearest import nearest
from rowwise.hashing.placed import add_maps, entry_map, make_folds, ranked_map
from rowwise.hashing.rules import double_hashed, hashed, quotient_remainder
from rowwise.hashing.words import bits_for, set_words
from rowwise.spec import Table, row_bytes

FEWEST = 2  # times that an id has to come to be put beside others that behave alike
FEW = 64  # clusters
ALPHA = 0.3  # the dim of an id grows with this power of its count
FULL = 4.0  # times its share of all accesses that a row of `learned_balanced` may have
ROUNDS = 60  # of bisection
Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedVectors:
    """The probe's vectors of ids, learned without the samples of each fold. See [Note: Folds]."""

    features: tuple[str, ...]  # whose ids say in which fold a sample is
    seed: int
    vectors: tuple[Floats, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdHistory:
    """Counts and vectors of a table's ids, taken from past rows."""

    counts_N: Ids  # how often each came
    vectors_ND: Floats | None = None  # what a probe has learned for each
    folded: FoldedVectors | None = None  # None: the rows that a map is used for are not those that it was learned of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """The arguments of a method."""

    table: Table
    budget_bytes: int
    history: IdHistory
    seed: int

    @property
    def ids(self) -> int:
        return self.table.rows

    def row_bytes(self, dim: int | None = None) -> int:
        """Bytes of a row of this dim; narrow rows have one group of columns."""
        table = self.table
        whole = dim is None or dim >= table.dim
        return table.row_bytes if whole else row_bytes(table.row_type, dim or 0)

    @property
    def rows(self) -> int:
        """That fit where nothing else is stored."""
        return self.budget_bytes // self.row_bytes()

    @property
    def order_N(self) -> Ids:
        return np.argsort(-self.history.counts_N, kind="stable")


def make_map(method: str, table: Table, budget_bytes: int, history: IdHistory, *, seed: int = 0) -> IdMap | None:
    """The map of a method that takes at most so many bytes with its rows; None: it cannot be that small."""
    if method not in METHODS:
        raise SpecError(f"no way {method!r} to compress a table; there are {', '.join(METHODS)}")
    if len(history.counts_N) != table.rows:
        raise SpecError(f"table {table.name!r}: counts of {len(history.counts_N)} ids: want {table.rows}, one for each")
    if budget_bytes >= table_bytes(table, None):
        raise SpecError(f"table {table.name!r}: {budget_bytes} bytes: want fewer than it takes without a map")
    made = METHODS[method](_Ask(table=table, budget_bytes=budget_bytes, history=history, seed=seed))
    if made is None or table_bytes(table, made) > budget_bytes:
        return None
    return replace(made, about=made.about | {"method": method, "seed": seed})


def table_bytes(table: Table, id_map: IdMap | None) -> int:
    """Bytes of a table: its rows, and its map with all sections."""
    if id_map is None:
        return table.rows * table.row_bytes
    total = id_map.map_bytes
    for part in id_map.shape.parts:
        dim = table.dim if part.dim is None else min(part.dim, table.dim)
        narrow = dim < table.dim
        total += part.rows * (row_bytes(table.row_type, dim) if narrow else table.row_bytes)
        total += 4 * table.dim * dim if narrow else 0
    return total


def _hash(ask: _Ask) -> IdMap | None:
    return hashed(ask.ids, ask.rows, ask.seed) if ask.rows else None


def _double_hash(ask: _Ask) -> IdMap | None:
    return double_hashed(ask.ids, ask.rows, ask.seed) if ask.rows else None


def _quotient_remainder(ask: _Ask) -> IdMap | None:
    return _pairs(ask, "sum")


def _quotient_product(ask: _Ask) -> IdMap | None:
    return _pairs(ask, "product")


def _pairs(ask: _Ask, combine: Literal["sum", "product"]) -> IdMap | None:
    try:
        return quotient_remainder(ask.ids, ask.rows, ask.seed, combine)
    except SpecError:  # too few rows for all pairs
        return None


def _frequency(ask: _Ask) -> IdMap | None:
    """Half of the rows are those of the most frequent ids, the others are hashed to the rest."""

    def size(head: int) -> int:
        return 2 * head * ask.row_bytes() + WORD_bytes * set_words(head, ask.ids)

    head = _most(size, min(ask.budget_bytes // ask.row_bytes(), ask.ids) // 2, ask.budget_bytes)
    return ranked_map(ask.ids, [np.sort(ask.order_N[:head])], head, seed=ask.seed) if head else None


def _make_mixed_dims(ask: _Ask) -> IdMap | None:
    return _own_rows(ask, ask.budget_bytes)


def _own_rows(ask: _Ask, budget_bytes: int) -> IdMap | None:
    """A row of its own for each id that was seen, as wide as its count says, or none where it would be too narrow."""
    counts_N, dims = ask.history.counts_N, _dims(ask.table.dim)
    order_N = ask.order_N[: int((counts_N > 0).sum())]
    power_N = counts_N[order_N].astype(np.float64) ** ALPHA

    def ends(scale: float) -> list[int]:
        """The number of ids with at least each dim; a dim begins halfway (by ratio) to the next narrower one."""
        return [int(np.searchsorted(-power_N, -(dim / 2**0.5) / scale, "right")) for dim in dims]

    def size(found: list[int]) -> int:
        total, before = 0, 0
        for dim, end in zip(dims, found, strict=True):
            count, before = end - before, end
            narrow = 4 * ask.table.dim * dim if dim < ask.table.dim and count else 0
            total += count * ask.row_bytes(dim) + narrow + WORD_bytes * set_words(count, ask.ids)
        return total

    low, high = 0.0, 2.0 * ask.table.dim
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if size(ends(middle)) <= budget_bytes else (low, middle)
    chosen, wider = ends(low) if low else [0] * len(dims), ends(high)
    for place in range(len(dims)):  # ids that come as often are as wide, but for some of those that did not all fit
        moved = partial(_with_end, chosen, place)
        chosen = moved(_most(lambda end, moved=moved: size(moved(end)), wider[place], budget_bytes, chosen[place]))
    if not chosen[-1]:
        return None
    begins = [0, *chosen[:-1]]
    blocks = [(np.sort(order_N[a:b]), dim) for a, b, dim in zip(begins, chosen, dims, strict=True) if b > a]
    widths = [None if dim >= ask.table.dim else dim for _, dim in blocks]
    return ranked_map(ask.ids, [block for block, _ in blocks], 0, dims=widths, seed=ask.seed)


def _with_end(ends: list[int], place: int, end: int) -> list[int]:
    return [*ends[:place], end, *(max(end, later) for later in ends[place + 1 :])]


def _dims(dim: int) -> list[int]:
    """The table's and its halves, widest first."""
    found = [dim]
    while found[-1] > 1:
        found.append((found[-1] + 1) // 2)
    return found


def _make_learned(ask: _Ask) -> IdMap | None:
    return _clusters(ask, ask.budget_bytes, FEW)


def _learned_many(ask: _Ask) -> IdMap | None:
    return _clusters(ask, ask.budget_bytes, ask.ids)


def _learned_head_tail(ask: _Ask) -> IdMap | None:
    return _clusters(ask, ask.budget_bytes, FEW, own=True)


def _make_learned_balanced(ask: _Ask) -> IdMap | None:
    return _clusters(ask, ask.budget_bytes, FEW, full=FULL)


def _learned_own(ask: _Ask) -> IdMap | None:
    """Clusters of full width, at most half of the budget, and narrow rows with what is left."""
    shared = _clusters(ask, ask.budget_bytes // 2, FEW)
    if shared is None:
        return None
    own = _own_rows(ask, ask.budget_bytes - table_bytes(ask.table, shared))
    return shared if own is None else add_maps(shared, own)


def _clusters(ask: _Ask, budget_bytes: int, most: int, *, own: bool = False, full: float | None = None) -> IdMap | None:
    """Rows for the ids that came often enough: one for each cluster; or, `own`, for each that fits beside clusters."""
    counts_N, vectors_ND = ask.history.counts_N, ask.history.vectors_ND
    if vectors_ND is None or len(vectors_ND) != ask.ids:
        got = "none" if vectors_ND is None else str(len(vectors_ND))
        raise SpecError(
            f"table {ask.table.name!r}: vectors of ids: got {got}: want {ask.ids}, one for each, of a probe"
        )
    seen_C = ask.order_N[: int((counts_N >= FEWEST).sum())]
    count, rows = _fitting(ask, budget_bytes, len(seen_C), len(seen_C) if own else most)
    if not rows:
        return None
    head = max(0, rows - most) if own else 0
    tail_C = np.sort(seen_C[head:count])
    found = _tail(ask, tail_C, rows - head, full) if len(tail_C) and rows > head else None
    made = head if found is None else head + len(found.centroids_KD)

    def written(vectors: Floats | None) -> IdMap:
        rows_N = np.full(ask.ids, -1, np.int64)
        rows_N[seen_C[:head]] = np.arange(head)
        if found is not None:
            near_C = found.label_N if vectors is None else nearest(vectors[tail_C], found.centroids_KD)
            rows_N[tail_C] = head + near_C
        return entry_map(ask.ids, rows_N, made, unseen_rows=1, seed=ask.seed)

    folded = ask.history.folded
    if folded is None:
        return written(None)
    return make_folds(written(None), [written(vectors) for vectors in folded.vectors], folded.features, folded.seed)


def _tail(ask: _Ask, tail_C: Ids, clusters: int, full: float | None) -> Clusters:
    """Clusters of rare ids by their statistics."""
    vectors_ND = ask.history.vectors_ND
    assert vectors_ND is not None
    weights_C = ask.history.counts_N[tail_C].astype(np.float64)
    cap = None if full is None else full * weights_C.sum() / clusters
    return cluster(np.ascontiguousarray(vectors_ND[tail_C]), weights_C, clusters, seed=ask.seed, cap=cap)


def _fitting(ask: _Ask, budget_bytes: int, seen: int, most: int) -> tuple[int, int]:
    """How many ids have an entry, the most frequent first, and how many rows they share.

    As many ids as fit beside the rows, which have half of the budget at least if they are worth it.
    """
    one_bytes = ask.row_bytes()
    kept = min(most, budget_bytes // (2 * one_bytes))

    def size(count: int, rows: int) -> int:
        return (rows + 1) * one_bytes + WORD_bytes * set_words(count, ask.ids, bits_for(rows))

    count = _most(lambda count: size(count, min(count, kept)), seen, budget_bytes)
    limit = min(count, most, budget_bytes // one_bytes)
    return count, _most(lambda rows: size(count, rows), limit, budget_bytes) if count and kept else 0


def _most(size: Callable[[int], int], limit: int, budget: int, least: int = 0) -> int:
    """The largest number up to the limit whose size is within the budget, as that of `least` is; sizes grow with it."""
    low, high = least, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(middle) <= budget else (low, middle - 1)
    return low


METHODS: dict[str, Callable[[_Ask], IdMap | None]] = {
    "hash": _hash,
    "double_hash": _double_hash,
    "quotient_remainder": _quotient_remainder,
    "quotient_product": _quotient_product,
    "frequency": _frequency,
    "mixed": _make_mixed_dims,
    "learned": _make_learned,
    "learned_many": _learned_many,
    "learned_head_tail": _learned_head_tail,
    "learned_balanced": _make_learned_balanced,
    "learned_own": _learned_own,
}

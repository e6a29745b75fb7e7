"""Weighted k-means for learned id maps: ids whose vectors are close to each other share a row.

What is decided here is which cells there are and how many clusters each gets; what is inside of a cell is
`_cpp/cell.h`'s. It gives up the best clustering for one in minutes: see [Note: Cells].

[Note: Cells] Up to `ClusterEffort.plain` pairs of a point and a cluster are one cell, clustered as a whole, and so are
128 clusters. Else the points are cut into cells, by the nearest of a few centroids that a sample gives, and each is
clustered alone, or cut again. With sqrt(rounds * clusters) cells, finding the cell of a point and a cluster in it cost
the same; there are fewer, as fewer borders mean less error. Clusters go where they are worth most: each cell draws
about twice the seeds that it may need, notes by how much each lessens the error, and the most useful seeds of all
cells are counted. How many it may need is in proportion to (weight * variance) ** (D / (D + 2)), which makes errors
least where points are dense (Zador 1982). Points at the border of a cell cannot join a cluster across it; what that
costs is in the tests.

Sizes: N points, D dims, C cells, K clusters.
"""

import heapq
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import SpecError
from rowwise.hashing import native
from rowwise.hashing.native import CELL, Cells, ClusterBuffers, ClusterSettings, Doubles, Floats, Ints, Labels, Points
from rowwise.value import Value

MOST_DIMS = 64
MOST_POINTS = (1 << 31) - 1
MOST_WEIGHT = 1e300  # so that errors are finite, too
SAMPLE = 32  # points for each cell, of which its centroid is made
TRIED = 1 << 24  # points times clusters, over all tries
ENOUGH = 1000  # clusters in a cell: more of them lessen the error hardly, but take longer
FEW = 128  # clusters that are never cut apart
CUTTING = 0.3  # of the time, about
TWICE = 2  # times the clusters there are to be: as many are tried out to find where they are worth most
STEPS = 32  # that progress is told in, while cells are clustered
Tell = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Clusters:
    """The cluster of each point, and the centre and weight of each cluster. None is empty."""

    label_N: Labels
    centroids_KD: Floats
    weight_K: Doubles  # sums of the weights of their points


class ClusterEffort(Value, frozen=True):
    """Limits of the clustering's work. Threads change only its time; 0: one for each core."""

    rounds: int = 8
    tries: int = 8  # of which the best is kept, where points and clusters are few
    plain: int = 1 << 26  # points times clusters that are not cut into cells
    threads: int = 0


def cluster(
    vectors_ND: Floats,
    weights_N: NDArray[np.float32 | np.float64],
    clusters: int,
    *,
    seed: int = 0,
    cap: float | None = None,
    tell: Tell | None = None,
) -> Clusters:
    """At most this many clusters of points, so that the weighted squares of distances from their centroids are few.

    If there are no more different vectors than clusters, each is a cluster; equal vectors share one. Else there may be
    fewer clusters than asked for, where points are too close to each other to tell them apart. A centroid is the
    weighted mean of its points. Points without a weight go to the nearest one of their cell. The same input and seed
    give the same bits, for any number of threads and on every processor.

    Args:
        vectors_ND: finite, of at most 64 dims.
        weights_N: at least 0; if all are 0, all points count the same.
        clusters: at least 1.
        seed: of what is drawn: seeds of clusters, and samples.
        cap: what a cluster may weigh. Only one whose one point with a weight is heavier weighs more; equal vectors may
            then be apart. Points that find no room go to the nearest cluster of their cell that has some, lightest and
            farthest first, and if there is none to any one. An error if that fails, which cannot be where the points
            are one cell, and clusters are as many as points above the cap and two for each cap that the others weigh.
        tell: called with the share of the work that is done, now and then.
    """
    return cluster_with(ClusterEffort(), vectors_ND, weights_N, clusters, (seed, cap), tell)


def cluster_with(
    effort: ClusterEffort,
    vectors_ND: Floats,
    weights_N: NDArray[np.float32 | np.float64],
    clusters: int,
    seed_cap: tuple[int, float | None] = (0, None),
    tell: Tell | None = None,
) -> Clusters:
    """`cluster`, with an explicit amount of work."""
    seed, cap = seed_cap[0], math.inf if seed_cap[1] is None else seed_cap[1]
    vectors_ND, weights_N = _check_points(vectors_ND, weights_N)
    if type(clusters) is not int or clusters < 1:
        raise SpecError(f"clusters={clusters!r}: want a whole number of at least 1")
    if not cap > 0:
        raise SpecError(f"cap={cap!r}: want more than 0, or None")
    if not len(vectors_ND):
        return Clusters(np.empty(0, np.int32), np.empty((0, vectors_ND.shape[1]), np.float32), np.empty(0))
    work = _Work(vectors_ND, weights_N, effort, seed, cap)
    tell = tell or _tell_nobody
    found = work.clustered(*work.cut(min(clusters, len(vectors_ND)), tell), tell)
    found = _assign_points(found, vectors_ND, weights_N, clusters, cap)
    tell(1.0)
    return found


@final
class _Work:
    """The points, and the order that cells are ranges of."""

    def __init__(self, vectors_ND: Floats, weights_N: Doubles, effort: ClusterEffort, seed: int, cap: float) -> None:
        largest = max(float(vectors_ND.max()), -float(vectors_ND.min()))
        self.scale: float = math.ldexp(1.0, -math.frexp(largest)[1])
        self.vectors_ND, self.weights_N, self.effort = vectors_ND, weights_N, effort
        self.points = Points(vectors_ND, weights_N, np.arange(len(vectors_ND), dtype=np.int32), self.scale)
        self.how = ClusterSettings(seed, effort.rounds, cap, effort.threads or os.cpu_count() or 1)

    def cut(self, clusters: int, tell: Tell) -> tuple[Cells, Ints]:
        """Cells that are small enough, and how many different vectors each has."""
        cells = np.array([(0, len(self.vectors_ND), clusters, 0)], CELL)
        distinct_C = np.full(1, len(self.vectors_ND))  # until it is cut, which tells
        if len(self.vectors_ND) * clusters <= self.effort.plain or clusters <= FEW:
            distinct_C = native.survey_cells(self.points, cells, self.how)["distinct"]
        whole = set[int]()  # begins of cells that cannot be cut
        while True:
            size_C = cells["end"] - cells["begin"]
            large = np.flatnonzero((size_C * cells["clusters"] > self.effort.plain) & (cells["clusters"] > FEW))
            large = [int(c) for c in large if int(cells["begin"][c]) not in whole]
            if not large:
                cells["base"] = np.cumsum(cells["clusters"]) - cells["clusters"]
                return cells, distinct_C
            made, counts = [np.delete(cells, large)], [np.delete(distinct_C, large)]
            for done, c in enumerate(large):
                parts, part_counts = self.parts(cells[c : c + 1])
                if len(parts) == 1:
                    whole.add(int(cells["begin"][c]))
                made.append(parts)
                counts.append(part_counts)
                if len(cells) == 1:  # later ones, of cells that are still too large, are few
                    tell(CUTTING * (done + 1) / len(large))
            cells, distinct_C = np.concatenate(made), np.concatenate(counts)
            by_begin = np.argsort(cells["begin"])
            cells, distinct_C = cells[by_begin], distinct_C[by_begin]

    def parts(self, cell: Cells) -> tuple[Cells, Ints]:
        """One cell cut into many, and how many different vectors each has."""
        begin, end, clusters = (int(cell[name][0]) for name in ("begin", "end", "clusters"))
        needed = 2 * math.isqrt((end - begin) * clusters // self.effort.plain)  # so that cells need not be cut again
        wanted = max(2, min(math.isqrt(self.effort.rounds * clusters), max(clusters // ENOUGH, needed)))
        ends = self.sort(begin, end, self.coarse(self.points.order_M[begin:end], wanted))
        if len(ends) == 1:  # nearly all are equal
            ends = self.sort(begin, end, self.coarse(native.distinct_points(self.points, begin, end), wanted))
        cells = np.zeros(len(ends), CELL)
        cells["begin"] = begin + np.concatenate([[0], ends[:-1]])
        cells["end"] = begin + ends
        survey_C = native.survey_cells(self.points, cells, self.how)
        cells["clusters"] = self.shares(cells, survey_C, clusters)
        return cells, survey_C["distinct"]

    def sort(self, begin: int, end: int, centroids_CD: Floats) -> Ints:
        """Puts the points of a range in the order of their nearest centroids; where those of each end that has some."""
        ends_C = native.sort_by_nearest(self.points, begin, end, centroids_CD, self.how.threads)
        return ends_C[np.diff(ends_C, prepend=0) > 0]

    def coarse(self, order_M: Labels, wanted: int) -> Floats:
        """Scaled centroids of a sample, where weight is and where points are."""
        sample_M = native.sample_points(order_M, SAMPLE * wanted, self.how.seed)
        even = float(self.weights_N.mean()) or 1.0
        cell = np.array([(0, len(sample_M), wanted, 0)], CELL)
        places = ClusterBuffers(np.zeros((wanted, self.points.dims), np.float32), np.zeros(wanted), 1)
        points = Points(self.vectors_ND, self.weights_N, sample_M, self.scale, even)
        native.cluster_cells(points, cell, np.full(1, wanted + 1), self.how._replace(cap=math.inf), places)
        return (places.centroids_KD[: places.used_C[0]] * self.scale).astype(np.float32)

    def shares(self, cells: Cells, survey_C: Cells, clusters: int) -> Ints:
        dims, one_C = self.points.dims, np.ones(len(cells), np.int64)
        amount_C = survey_C["spread"] ** (dims / (dims + 2))
        guess = cells.copy()
        guess["clusters"] = shares(amount_C, one_C, survey_C["distinct"], TWICE * clusters)
        if (guess["clusters"] * (cells["end"] - cells["begin"])).max() <= 16 * self.effort.plain:  # else it takes long
            amount_C = self.worth(guess, clusters)
        if self.how.cap == math.inf:
            return shares(amount_C, one_C, survey_C["distinct"], clusters)
        size_C = cells["end"] - cells["begin"]
        light_C = np.maximum(survey_C["weight"] - survey_C["heavy_weight"], 0)
        least_C = survey_C["heavy"] + np.minimum(np.ceil(2 * light_C / self.how.cap), size_C).astype(np.int64)
        return shares(amount_C, np.clip(least_C, 1, size_C), size_C, clusters)

    def worth(self, cells: Cells, clusters: int) -> Doubles:
        """The number of the most useful clusters in each cell, estimated from seeds that are tried out."""
        cells["base"] = np.cumsum(cells["clusters"]) - cells["clusters"]
        drop_K = native.error_drops(self.points, cells, self.how)
        drop_K[cells["base"]] = math.inf  # the first of each cell
        least = np.partition(drop_K, -clusters)[-clusters] if clusters < len(drop_K) else 0.0
        return np.add.reduceat((drop_K >= least) & (drop_K > 0), cells["base"]).astype(np.float64)

    def clustered(self, cells: Cells, distinct_C: Ints, tell: Tell) -> Clusters:
        points, total = self.points, int(cells["clusters"].sum())
        places = ClusterBuffers(np.zeros((total, points.dims), np.float32), np.zeros(total), len(cells))
        label_N = np.empty(len(self.vectors_ND), np.int32)
        tries = max(1, min(self.effort.tries, TRIED // (len(label_N) * total)))
        begun = CUTTING if len(cells) > 1 else 0.0
        for some, done in _batches(cells):
            part = ClusterBuffers(places.centroids_KD, places.weight_K, len(some))
            native.cluster_cells(points, cells[some], distinct_C[some], self.how._replace(tries=tries), part, label_N)
            places.used_C[some] = part.used_C
            tell(begun + (1 - begun) * done)
        return _without_gaps(cells, places, label_N)


def shares(amount_C: Doubles, least_C: Ints, most_C: Ints, total: int) -> Ints:
    """Whole numbers in proportion to the amounts, from `least` to `most`, whose sum is at most `total`.

    Less than that only if nothing with an amount can have more. Too much in `least`: it is what is shared places.
    """
    if most_C.sum() <= total:
        return most_C.astype(np.int64)
    if least_C.sum() > total:
        amount_C, least_C = least_C.astype(np.float64), np.ones(len(least_C), np.int64)
    amount_C = amount_C / (amount_C.max() or 1)
    low, high = 0.0, 2.0 * max(total, int(most_C.max())) / max(float(amount_C[amount_C > 0].min(initial=1)), 1e-300)
    for _ in range(200):  # until nothing lies between them
        middle = math.sqrt(low) * math.sqrt(high) if low else high / 2**20
        over = np.clip(np.floor(np.minimum(middle * amount_C, most_C)), least_C, most_C).sum() > total
        low, high = (low, middle) if over else (middle, high)
    exact_C = np.minimum(low * amount_C, most_C)
    share_C = np.clip(np.floor(exact_C), least_C, most_C).astype(np.int64)
    may_C = np.flatnonzero((share_C < most_C) & (amount_C > 0))
    first_C = may_C[np.argsort(share_C[may_C] - exact_C[may_C], kind="stable")]
    share_C[first_C[: total - int(share_C.sum())]] += 1
    return share_C


def _batches(cells: Cells) -> Iterator[tuple[Ints, float]]:
    """Cells that are clustered together, the largest first, and the share of the work that is done with them."""
    cost_C = (cells["end"] - cells["begin"]) * (cells["clusters"] + 8.0)
    largest_first = np.argsort(-cost_C, kind="stable")
    done_C = np.cumsum(cost_C[largest_first])
    ends = np.unique(np.searchsorted(done_C, done_C[-1] * np.arange(1, STEPS) / STEPS, "right"))
    begin = 0
    for end in [*ends.tolist(), len(cells)]:
        if begin < end:
            yield largest_first[begin:end], float(done_C[end - 1] / done_C[-1])
        begin = end


def _without_gaps(cells: Cells, places: ClusterBuffers, label_N: Labels) -> Clusters:
    place_K = np.arange(len(places.weight_K)) - np.repeat(cells["base"], cells["clusters"])
    there_K = place_K < np.repeat(places.used_C, cells["clusters"])
    number_K1 = np.full(len(there_K) + 1, -1, np.int32)  # the last for the label -1
    number_K1[:-1] = np.cumsum(there_K) - 1
    if there_K.all():
        return Clusters(label_N, places.centroids_KD, places.weight_K)
    return Clusters(number_K1[label_N], places.centroids_KD[there_K], places.weight_K[there_K])


def _assign_points(found: Clusters, vectors_ND: Floats, weights_N: Doubles, clusters: int, cap: float) -> Clusters:
    """Points that had no room in their cell go wherever there is some: the heaviest first, where it is emptiest."""
    left = np.flatnonzero(found.label_N < 0)
    if not len(left):
        return found
    left = left[np.argsort(-weights_N[left], kind="stable")]
    centroids = list(found.centroids_KD)
    loads = [(float(load), k) for k, load in enumerate(found.weight_K)]
    heapq.heapify(loads)
    for i in left:
        w = float(weights_N[i])
        if len(centroids) < clusters:
            load, k = 0.0, len(centroids)
            centroids.append(vectors_ND[i])
        else:
            load, k = heapq.heappop(loads)
        if load and load + w > cap:
            raise SpecError(
                f"cap={cap:g}: {clusters} clusters do not hold points that weigh {weights_N.sum():g} together, as they "
                "lie: want more clusters or a higher cap; twice the mean weight of a cluster is mostly enough"
            )
        centroids[k] = np.float32((centroids[k] * load + vectors_ND[i].astype(np.float64) * w) / (load + w))
        heapq.heappush(loads, (load + w, k))
        found.label_N[i] = k
    weight_K = np.array([load for load, _ in sorted(loads, key=lambda entry: entry[1])])
    return Clusters(found.label_N, np.array(centroids, np.float32), weight_K)


def _check_points(vectors_ND: Floats, weights_N: NDArray[Any]) -> tuple[Floats, Doubles]:
    if vectors_ND.ndim != 2 or vectors_ND.dtype != np.float32 or not 1 <= vectors_ND.shape[1] <= MOST_DIMS:
        raise SpecError(f"vectors are {_kind(vectors_ND)}: want float32[N, D], of 1 to {MOST_DIMS} dims")
    if len(vectors_ND) > MOST_POINTS:
        raise SpecError(f"{len(vectors_ND)} vectors: want at most {MOST_POINTS}")
    if weights_N.shape != vectors_ND.shape[:1] or weights_N.dtype not in (np.float32, np.float64):
        raise SpecError(f"weights are {_kind(weights_N)}: want float32 or float64, one for each of {len(vectors_ND)}")
    vectors_ND = np.ascontiguousarray(vectors_ND)
    weights_N = np.ascontiguousarray(weights_N, np.float64)
    if len(vectors_ND):
        if not (np.isfinite(vectors_ND.min()) and np.isfinite(vectors_ND.max())):
            row = int(np.argmin(np.isfinite(vectors_ND).all(1)))
            raise SpecError(f"vector {row} is {vectors_ND[row]}: want finite numbers")
        if not (weights_N.min() >= 0 and weights_N.sum() < MOST_WEIGHT):
            row = int(np.argmin((weights_N >= 0) & np.isfinite(weights_N)))
            raise SpecError(f"weight {row} is {weights_N[row]}: want finite numbers of at least 0, of no vast sum")
    return vectors_ND, weights_N


def _kind(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _tell_nobody(_done: float) -> None:
    pass

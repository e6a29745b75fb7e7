"""Weighted k-means for learned id maps: ids whose vectors are close to each other share a row.

This module chooses cells of points and the number of clusters of each cell; `_cpp/cell.h` clusters inside a cell.

[Note: Cells] k-means over all points compares each point with each cluster, which takes hours for millions of ids. So
large problems are cut into cells, which are clustered separately: minutes, at a slightly larger error.
- A problem of at most `ClusterEffort.plain` pairs of a point and a cluster, or of 128 clusters, is one cell.
- Larger ones are cut by the nearest of a few centroids of a sample; cells that are still too large are cut again. With
  sqrt(rounds * clusters) cells, finding a point's cell and its cluster in the cell take equally long. Fewer cells are
  used, because points at a border cannot join a cluster across it, which adds error (the tests measure it).
- Each cell gets clusters by the error that they save. A first guess is proportional to (weight * variance) **
  (D / (D + 2)), which minimises the error of dense points (Zador 1982). Each cell draws seeds for twice its guess and
  records how much each seed lowers the error; its clusters are those of its seeds that are among the best of all cells.

Axes: N points, D dims, C cells, K clusters.
"""

import heapq
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.base.value import Value
from rowwise.tables.ids import native
from rowwise.tables.ids.native import (
    CELL,
    Cells,
    ClusterBuffers,
    ClusterSettings,
    Doubles,
    Floats,
    Ints,
    Labels,
    Points,
)

MAX_DIMS = 64
MAX_POINTS = (1 << 31) - 1
MAX_WEIGHT = 1e300  # so that errors are finite, too
SAMPLE = 32  # sampled points for each centroid of a cell
MAX_TRY_PAIRS = 1 << 24  # points times clusters, summed over tries
CELL_CLUSTERS = 1000  # clusters of a cell; larger cells take longer and hardly lower the error
WHOLE_CLUSTERS = 128  # a problem of at most this many clusters is one cell
SEEDS_PER_CLUSTER = 2  # seeds drawn to find where clusters lower the error most
STEPS = 32  # kernel calls for all cells; Ctrl-C is handled between them


@dataclass(frozen=True, slots=True)
class Clusters:
    """The cluster of each point, and the centroid and weight of each cluster. No cluster is empty."""

    label_N: Labels
    centroids_KD: Floats
    weight_K: Doubles  # the total weight of each cluster's points


class ClusterEffort(Value, frozen=True):
    """Limits of the work of clustering."""

    rounds: int = 8  # of Lloyd's algorithm
    tries: int = 8  # restarts with other seeds, of which the best is kept; small problems only
    plain: int = 1 << 26  # largest points times clusters of one cell
    threads: int = 0  # 0: one per core; the result does not depend on it


def cluster(
    vectors_ND: Floats,
    weights_N: NDArray[np.float32 | np.float64],
    clusters: int,
    *,
    seed: int = 0,
    cap: float | None = None,
    effort: ClusterEffort | None = None,
) -> Clusters:
    """At most `clusters` clusters with a small weighted sum of squared distances to their centroids.

    If there are no more distinct vectors than clusters, each distinct vector is a cluster. Otherwise there may be fewer
    clusters than `clusters`, where points are too close for float32. A centroid is the weighted mean of its points.
    Points of weight 0 join the nearest cluster of their cell. The same input and seed give the same bits, for any
    number of threads and on every processor.

    Args:
        vectors_ND: finite, of at most 64 dims.
        weights_N: at least 0; if all are 0, all points count the same.
        clusters: at least 1.
        seed: of the random choice of first centroids and samples.
        cap: the largest weight of a cluster. Only a single point that is heavier may exceed it. Equal vectors may be in
            several clusters. A point whose nearest cluster is full joins the nearest one of its cell with room, the
            lightest points last; if its cell has none, it joins another cell's. Raises if there is none at all. That
            cannot happen in one cell with a cluster for each point above the cap, and two for each cap of the others'
            total weight.
        effort: limits of the work; None: the defaults.
    """
    cap = math.inf if cap is None else cap
    vectors_ND, weights_N = _check_points(vectors_ND, weights_N)
    if type(clusters) is not int or clusters < 1:
        raise SpecError(f"clusters={clusters!r}", "a whole number of at least 1")
    if not cap > 0:
        raise SpecError(f"cap={cap!r}", "more than 0, or None")
    if not len(vectors_ND):
        return Clusters(np.empty(0, np.int32), np.empty((0, vectors_ND.shape[1]), np.float32), np.empty(0))
    work = _Clustering(vectors_ND, weights_N, effort or ClusterEffort(), seed, cap)
    cells, distinct_C = work.cut_cells(min(clusters, len(vectors_ND)))
    result = work.cluster_cells(cells, distinct_C)
    return _assign_points(result, vectors_ND, weights_N, clusters, cap)


@final
class _Clustering:
    """The points of one clustering, in an order in which cells are ranges."""

    def __init__(self, vectors_ND: Floats, weights_N: Doubles, effort: ClusterEffort, seed: int, cap: float) -> None:
        largest = max(float(vectors_ND.max()), -float(vectors_ND.min()))
        self.scale: float = math.ldexp(1.0, -math.frexp(largest)[1])
        self.vectors_ND, self.weights_N, self.effort = vectors_ND, weights_N, effort
        self.points = Points(vectors_ND, weights_N, np.arange(len(vectors_ND), dtype=np.int32), self.scale)
        self.settings = ClusterSettings(seed, effort.rounds, cap, effort.threads or os.cpu_count() or 1)

    def cut_cells(self, clusters: int) -> tuple[Cells, Ints]:
        """Cells that are small enough to cluster, and the number of distinct vectors in each."""
        cells = np.array([(0, len(self.vectors_ND), clusters, 0)], CELL)
        distinct_C = np.full(1, len(self.vectors_ND))  # an upper bound: cutting counts them
        if len(self.vectors_ND) * clusters <= self.effort.plain or clusters <= WHOLE_CLUSTERS:
            distinct_C = native.survey_cells(self.points, cells, self.settings)["distinct"]
        uncuttable = set[int]()  # begins of cells
        while True:
            size_C = cells["end"] - cells["begin"]
            is_large_C = (size_C * cells["clusters"] > self.effort.plain) & (cells["clusters"] > WHOLE_CLUSTERS)
            large = [int(c) for c in np.flatnonzero(is_large_C) if int(cells["begin"][c]) not in uncuttable]
            if not large:
                cells["base"] = np.cumsum(cells["clusters"]) - cells["clusters"]
                return cells, distinct_C
            all_cells, counts = [np.delete(cells, large)], [np.delete(distinct_C, large)]
            for c in large:
                smaller_cells, smaller_counts = self._cut_cell(cells[c : c + 1])
                if len(smaller_cells) == 1:
                    uncuttable.add(int(cells["begin"][c]))
                all_cells.append(smaller_cells)
                counts.append(smaller_counts)
            cells, distinct_C = np.concatenate(all_cells), np.concatenate(counts)
            by_begin = np.argsort(cells["begin"])
            cells, distinct_C = cells[by_begin], distinct_C[by_begin]

    def _cut_cell(self, cell: Cells) -> tuple[Cells, Ints]:
        """Cut a cell; returns the new cells and the number of distinct vectors in each."""
        begin, end, clusters = (int(cell[name][0]) for name in ("begin", "end", "clusters"))
        # Each of n cells has about 1/n of the points and of the clusters, so 1/n**2 of the pairs; factor 2 as a margin.
        min_count = 2 * math.isqrt((end - begin) * clusters // self.effort.plain)
        count = max(2, min(math.isqrt(self.effort.rounds * clusters), max(clusters // CELL_CLUSTERS, min_count)))
        ends = self._sort_points(begin, end, self._coarse_centroids(self.points.order_M[begin:end], count))
        if len(ends) == 1:  # nearly all vectors are equal, and the sample had equal ones only
            distinct_M = native.distinct_points(self.points, begin, end)
            ends = self._sort_points(begin, end, self._coarse_centroids(distinct_M, count))
        cells = np.zeros(len(ends), CELL)
        cells["begin"] = begin + np.concatenate([[0], ends[:-1]])
        cells["end"] = begin + ends
        survey_C = native.survey_cells(self.points, cells, self.settings)
        cells["clusters"] = self._divide_clusters(cells, survey_C, clusters)
        return cells, survey_C["distinct"]

    def _sort_points(self, begin: int, end: int, centroids_CD: Floats) -> Ints:
        """Sort a range by the nearest centroid; returns the end of each nonempty centroid's range."""
        ends_C = native.sort_by_nearest(self.points, begin, end, centroids_CD, self.settings.threads)
        return ends_C[np.diff(ends_C, prepend=0) > 0]

    def _coarse_centroids(self, order_M: Labels, count: int) -> Floats:
        """Scaled centroids of a sample of points."""
        sample_M = native.sample_points(order_M, SAMPLE * count, self.settings.seed)
        # The mean weight is added to each weight: cells follow both weight and number of points.
        even = float(self.weights_N.mean()) or 1.0
        cell = np.array([(0, len(sample_M), count, 0)], CELL)
        buffers = ClusterBuffers(np.zeros((count, self.points.dims), np.float32), np.zeros(count), 1)
        points = Points(self.vectors_ND, self.weights_N, sample_M, self.scale, even)
        native.cluster_cells(points, cell, np.full(1, count + 1), self.settings._replace(cap=math.inf), buffers)
        return (buffers.centroids_KD[: buffers.used_C[0]] * self.scale).astype(np.float32)

    def _divide_clusters(self, cells: Cells, survey_C: Cells, clusters: int) -> Ints:
        """The number of clusters of each cell; `clusters` in all."""
        dims, ones_C = self.points.dims, np.ones(len(cells), np.int64)
        weight_C = survey_C["spread"] ** (dims / (dims + 2))
        guess = cells.copy()
        guess["clusters"] = apportion(weight_C, ones_C, survey_C["distinct"], SEEDS_PER_CLUSTER * clusters)
        if (guess["clusters"] * (cells["end"] - cells["begin"])).max() <= 16 * self.effort.plain:  # else too slow
            weight_C = self._count_useful_clusters(guess, clusters)
        if self.settings.cap == math.inf:
            return apportion(weight_C, ones_C, survey_C["distinct"], clusters)
        # Points are assigned by falling weight, so a cluster without room for one holds more than half the cap: two
        # clusters for each cap of weight are always enough.
        size_C = cells["end"] - cells["begin"]
        light_C = np.maximum(survey_C["weight"] - survey_C["heavy_weight"], 0)
        min_C = survey_C["heavy"] + np.minimum(np.ceil(2 * light_C / self.settings.cap), size_C).astype(np.int64)
        return apportion(weight_C, np.clip(min_C, 1, size_C), size_C, clusters)

    def _count_useful_clusters(self, cells: Cells, clusters: int) -> Doubles:
        """For each cell, the number of its seeds among the `clusters` seeds that lower the error most."""
        cells["base"] = np.cumsum(cells["clusters"]) - cells["clusters"]
        drop_K = native.error_drops(self.points, cells, self.settings)
        drop_K[cells["base"]] = math.inf  # each cell needs at least one cluster
        threshold = np.partition(drop_K, -clusters)[-clusters] if clusters < len(drop_K) else 0.0
        return np.add.reduceat((drop_K >= threshold) & (drop_K > 0), cells["base"]).astype(np.float64)

    def cluster_cells(self, cells: Cells, distinct_C: Ints) -> Clusters:
        points, total = self.points, int(cells["clusters"].sum())
        buffers = ClusterBuffers(np.zeros((total, points.dims), np.float32), np.zeros(total), len(cells))
        label_N = np.empty(len(self.vectors_ND), np.int32)
        tries = max(1, min(self.effort.tries, MAX_TRY_PAIRS // (len(label_N) * total)))
        settings = self.settings._replace(tries=tries)
        for batch in _batches(cells):
            output = ClusterBuffers(buffers.centroids_KD, buffers.weight_K, len(batch), label_N)
            native.cluster_cells(points, cells[batch], distinct_C[batch], settings, output)
            buffers.used_C[batch] = output.used_C
        return _drop_unused(cells, buffers, label_N)


def apportion(weight_C: Doubles, min_C: Ints, max_C: Ints, total: int) -> Ints:
    """Divide `total` in proportion to weights into whole numbers from `min_C` to `max_C`.

    The sum is below `total` only if each number with a weight is at its maximum. If the sum of `min_C` is above
    `total`, it is divided in proportion to `min_C`.
    """
    if max_C.sum() <= total:
        return max_C.astype(np.int64)
    if min_C.sum() > total:
        weight_C, min_C = min_C.astype(np.float64), np.ones(len(min_C), np.int64)
    weight_C = weight_C / (weight_C.max() or 1)
    # Bisect the factor on the weights, by ratio as factors span many magnitudes; then round the largest fractions up.
    low, high = 0.0, 2.0 * max(total, int(max_C.max())) / max(float(weight_C[weight_C > 0].min(initial=1)), 1e-300)
    for _ in range(200):  # enough for adjacent floats
        middle = math.sqrt(low) * math.sqrt(high) if low else high / 2**20
        over = np.clip(np.floor(np.minimum(middle * weight_C, max_C)), min_C, max_C).sum() > total
        low, high = (low, middle) if over else (middle, high)
    exact_C = np.minimum(low * weight_C, max_C)
    count_C = np.clip(np.floor(exact_C), min_C, max_C).astype(np.int64)
    raisable_M = np.flatnonzero((count_C < max_C) & (weight_C > 0))
    by_fraction_M = raisable_M[np.argsort(count_C[raisable_M] - exact_C[raisable_M], kind="stable")]
    count_C[by_fraction_M[: total - int(count_C.sum())]] += 1
    return count_C


def _batches(cells: Cells) -> Iterator[Ints]:
    """Batches of cells of about equal cost, the largest cells first."""
    cost_C = (cells["end"] - cells["begin"]) * (cells["clusters"] + 8.0)
    largest_first = np.argsort(-cost_C, kind="stable")
    done_C = np.cumsum(cost_C[largest_first])
    ends = np.unique(np.searchsorted(done_C, done_C[-1] * np.arange(1, STEPS) / STEPS, "right"))
    begin = 0
    for end in [*ends.tolist(), len(cells)]:
        if begin < end:
            yield largest_first[begin:end]
        begin = end


def _drop_unused(cells: Cells, buffers: ClusterBuffers, label_N: Labels) -> Clusters:
    """The clusters that cells have used, numbered without gaps."""
    index_K = np.arange(len(buffers.weight_K)) - np.repeat(cells["base"], cells["clusters"])  # in the cluster's cell
    used_K = index_K < np.repeat(buffers.used_C, cells["clusters"])
    new_label = np.append(np.cumsum(used_K, dtype=np.int32) - 1, np.int32(-1))  # label -1 indexes the last entry
    if used_K.all():
        return Clusters(label_N, buffers.centroids_KD, buffers.weight_K)
    return Clusters(new_label[label_N], buffers.centroids_KD[used_K], buffers.weight_K[used_K])


def _assign_points(result: Clusters, vectors_ND: Floats, weights_N: Doubles, clusters: int, cap: float) -> Clusters:
    """Assign points for which no cluster of their cell had room: the heaviest first, each to the lightest cluster."""
    unassigned = np.flatnonzero(result.label_N < 0)
    if not len(unassigned):
        return result
    unassigned = unassigned[np.argsort(-weights_N[unassigned], kind="stable")]
    centroids = list(result.centroids_KD)
    loads = [(float(load), k) for k, load in enumerate(result.weight_K)]
    heapq.heapify(loads)
    for i in unassigned:
        w = float(weights_N[i])
        if len(centroids) < clusters:
            load, k = 0.0, len(centroids)
            centroids.append(vectors_ND[i])
        else:
            load, k = heapq.heappop(loads)
        if load and load + w > cap:
            raise SpecError(
                f"cap={cap:g}: {clusters} clusters do not hold points that weigh {weights_N.sum():g} together",
                "more clusters or a higher cap",
                hint="twice the mean weight of a cluster is mostly enough",
            )
        centroids[k] = np.float32((centroids[k] * load + vectors_ND[i].astype(np.float64) * w) / (load + w))
        heapq.heappush(loads, (load + w, k))
        result.label_N[i] = k
    weight_K = np.array([load for load, _ in sorted(loads, key=lambda entry: entry[1])])
    return Clusters(result.label_N, np.array(centroids, np.float32), weight_K)


def _check_points(vectors_ND: Floats, weights_N: NDArray[Any]) -> tuple[Floats, Doubles]:
    if vectors_ND.ndim != 2 or vectors_ND.dtype != np.float32 or not 1 <= vectors_ND.shape[1] <= MAX_DIMS:
        raise SpecError(f"vectors are {_describe(vectors_ND)}", f"float32[N, D], of 1 to {MAX_DIMS} dims")
    if len(vectors_ND) > MAX_POINTS:
        raise SpecError(f"{len(vectors_ND)} vectors", f"at most {MAX_POINTS}")
    if weights_N.shape != vectors_ND.shape[:1] or weights_N.dtype not in (np.float32, np.float64):
        got = _describe(weights_N)
        raise SpecError(f"weights are {got}", f"float32 or float64, one for each of {len(vectors_ND)}")
    vectors_ND = np.ascontiguousarray(vectors_ND)
    weights_N = np.ascontiguousarray(weights_N, np.float64)
    if len(vectors_ND):
        if not (np.isfinite(vectors_ND.min()) and np.isfinite(vectors_ND.max())):
            row = int(np.argmin(np.isfinite(vectors_ND).all(1)))
            raise SpecError(f"vector {row} is {vectors_ND[row]}", "finite numbers")
        if not (weights_N.min() >= 0 and weights_N.sum() < MAX_WEIGHT):
            row = int(np.argmin((weights_N >= 0) & np.isfinite(weights_N)))
            raise SpecError(
                f"weight {row} is {weights_N[row]}",
                f"finite numbers of at least 0 that sum to less than {MAX_WEIGHT:g}",
            )
    return vectors_ND, weights_N


def _describe(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"

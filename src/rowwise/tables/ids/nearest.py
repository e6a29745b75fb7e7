"""Finds the nearest of many centroids for each vector.

Above `MAX_PAIRS` the centroids are clustered into cells, and a vector is compared only to the centroids of its nearest
cell. That may miss the nearest centroid, so the search is repeated with other cells, `SEARCHES` times in all.
"""

import math
import os

import numpy as np
from numpy.typing import NDArray

from rowwise.tables.ids import native
from rowwise.tables.ids.cluster import cluster
from rowwise.tables.ids.native import Floats, Labels, Points

MAX_PAIRS = 1 << 34  # most pairs of a vector and a centroid that are all compared
SEARCHES = 3


def nearest(vectors_ND: Floats, centroids_KD: Floats) -> Labels:
    """The index of the nearest centroid of each vector; approximate above `MAX_PAIRS`."""
    if len(vectors_ND) * len(centroids_KD) <= MAX_PAIRS:
        return _compare_all(vectors_ND, centroids_KD)
    best_N = _search_cells(vectors_ND, centroids_KD, 0)
    for seed in range(1, SEARCHES):
        label_N = _search_cells(vectors_ND, centroids_KD, seed)
        best_distance_N, distance_N = (((vectors_ND - centroids_KD[x]) ** 2).sum(1) for x in (best_N, label_N))
        best_N = np.where(distance_N < best_distance_N, label_N, best_N)
    return best_N


def _search_cells(vectors_ND: Floats, centroids_KD: Floats, seed: int) -> Labels:
    """The nearest centroid in the nearest of sqrt(K) cells, the number that makes both comparisons equally long."""
    cells = cluster(centroids_KD, np.ones(len(centroids_KD)), math.isqrt(len(centroids_KD)), seed=seed)
    cell_N = _compare_all(vectors_ND, cells.centroids_KD)
    label_N = np.empty(len(vectors_ND), np.int32)
    count = len(cells.centroids_KD)
    for in_cell_K, in_cell_N in zip(_group(cells.label_N, count), _group(cell_N, count), strict=True):
        if len(in_cell_N):
            label_N[in_cell_N] = in_cell_K[_compare_all(vectors_ND[in_cell_N], centroids_KD[in_cell_K])]
    return label_N


def _group(label_N: Labels, count: int) -> list[NDArray[np.int64]]:
    """The indices of each label."""
    sorted_N = np.argsort(label_N, kind="stable")
    return np.split(sorted_N, np.cumsum(np.bincount(label_N, minlength=count))[:-1])


def _compare_all(vectors_ND: Floats, centroids_KD: Floats) -> Labels:
    vectors_ND = np.ascontiguousarray(vectors_ND, np.float32)
    largest = float(max(np.abs(vectors_ND).max(initial=0), np.abs(centroids_KD).max(initial=0)))
    scale = math.ldexp(1.0, -math.frexp(largest)[1])  # squares of scaled distances neither overflow nor vanish
    points = Points(vectors_ND, np.ones(len(vectors_ND)), np.arange(len(vectors_ND), dtype=np.int32), scale)
    scaled_KD = np.ascontiguousarray(centroids_KD * scale, np.float32)
    return native.nearest_of(points, scaled_KD, os.cpu_count() or 1)

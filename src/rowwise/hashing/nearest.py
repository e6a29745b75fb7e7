"""Finds the nearest of many centroids for each vector.

Many centroids are cut into cells, and a vector is compared to those of the cell whose centre is nearest only, in three
ways to cut; it misses a nearer one now and then.
"""

import math
import os

import numpy as np
from numpy.typing import NDArray

from rowwise.hashing import native
from rowwise.hashing.cluster import cluster
from rowwise.hashing.native import Floats, Labels, Points

MOST = 1 << 34  # pairs of a vector and a centroid that are all compared
CUTS = 3  # into cells, each another one: the nearest that any of them finds


def nearest(vectors_ND: Floats, centroids_KD: Floats, most: int = MOST) -> Labels:
    """The number of the nearest centroid of each vector, or where there are very many of one about as near."""
    if len(vectors_ND) * len(centroids_KD) <= most:
        return _compare_all(vectors_ND, centroids_KD)
    best_N = _search_cells(vectors_ND, centroids_KD, 0)
    for seed in range(1, CUTS):
        label_N = _search_cells(vectors_ND, centroids_KD, seed)
        far_N, near_N = (((vectors_ND - centroids_KD[at]) ** 2).sum(1) for at in (best_N, label_N))
        best_N = np.where(near_N < far_N, label_N, best_N)
    return best_N


def _search_cells(vectors_ND: Floats, centroids_KD: Floats, seed: int) -> Labels:
    """The nearest of those in the nearest of about as many cells as each has centroids."""
    cells = cluster(centroids_KD, np.ones(len(centroids_KD)), math.isqrt(len(centroids_KD)), seed=seed)
    cell_N = _compare_all(vectors_ND, cells.centroids_KD)
    label_N = np.empty(len(vectors_ND), np.int32)
    of_cells, points = _runs(cells.label_N, len(cells.centroids_KD)), _runs(cell_N, len(cells.centroids_KD))
    for some_K, some_N in zip(of_cells, points, strict=True):
        if len(some_N):
            label_N[some_N] = some_K[_compare_all(vectors_ND[some_N], centroids_KD[some_K])]
    return label_N


def _runs(number_N: Labels, count: int) -> list[NDArray[np.int64]]:
    order_N = np.argsort(number_N, kind="stable")
    return np.split(order_N, np.cumsum(np.bincount(number_N, minlength=count))[:-1])


def _compare_all(vectors_ND: Floats, centroids_KD: Floats) -> Labels:
    vectors_ND = np.ascontiguousarray(vectors_ND, np.float32)
    largest = float(max(np.abs(vectors_ND).max(initial=0), np.abs(centroids_KD).max(initial=0)))
    scale = math.ldexp(1.0, -math.frexp(largest)[1])
    points = Points(vectors_ND, np.ones(len(vectors_ND)), np.arange(len(vectors_ND), dtype=np.int32), scale)
    scaled_KD = np.ascontiguousarray(centroids_KD * scale, np.float32)
    return native.nearest_of(points, scaled_KD, os.cpu_count() or 1)

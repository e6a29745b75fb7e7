"""The C++ kernels of clustering: nearest centroids, k-means of a cell, and cutting points into cells.

Arrays are not checked here; `cluster` has checked them. Axes: N points, M points of a range, D dims, C cells, K
clusters.
"""

from ctypes import Structure, c_char_p, c_double, c_int64, c_uint64
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from rowwise.base.library import CLibrary, Float32s, Float64s, Int32s, Int64s, NativeStruct, NeedsMemory, Numbers

CELL = np.dtype([("begin", "i8"), ("end", "i8"), ("clusters", "i8"), ("base", "i8")])
SURVEY = np.dtype([("weight", "f8"), ("spread", "f8"), ("heavy_weight", "f8"), ("heavy", "i8"), ("distinct", "i8")])
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Labels = NDArray[np.int32]
Cells = NDArray[np.void]  # records of type CELL: ranges of points, and their numbers of clusters


class _NativeSettings(Structure):
    _fields_ = [("seed", c_uint64), ("rounds", c_int64), ("tries", c_int64), ("cap", c_double)]


class ClusterSettings(NamedTuple):
    """The settings of k-means, the same for all cells."""

    seed: int
    rounds: int
    cap: float
    threads: int
    tries: int = 1


@final
class Points(NativeStruct):
    """Points in an order in which cells are ranges. The arrays are not copied.

    Args:
        vectors_ND: the vectors of all points.
        weights_N: the weights of all points.
        order_M: indices of the points to cluster; cells are ranges of it.
        scale: a power of two that makes the largest coordinate about 1.
        even: added to each weight.
    """

    _fields_ = (
        ("x", Float32s), ("w", Float64s), ("dims", c_int64), ("scale", c_double), ("even", c_double),
        ("order", Int32s),
    )  # fmt: skip

    def __init__(
        self, vectors_ND: Floats, weights_N: Doubles, order_M: Labels, scale: float, even: float = 0.0
    ) -> None:
        dims = vectors_ND.shape[1]
        super().__init__(x=vectors_ND, w=weights_N, dims=dims, scale=scale, even=even, order=order_M)
        self.order_M = order_M


@final
class ClusterBuffers(NativeStruct):
    """Output of `cluster_cells`: arrays of all clusters and labels, and the number of clusters used by each cell."""

    _fields_ = (("label", Int32s), ("centroid", Float32s), ("weight", Float64s), ("used", Int64s))

    def __init__(self, centroids_KD: Floats, weight_K: Doubles, cells: int, label_N: Labels | None = None) -> None:
        self.centroids_KD, self.weight_K = centroids_KD, weight_K
        self.used_C: Ints = np.zeros(cells, np.int64)
        super().__init__(label=label_N, centroid=centroids_KD, weight=weight_K, used=self.used_C)


_status = NeedsMemory(c_int64, 1, "clustering: out of memory: expected fewer threads, or fewer clusters")
library = CLibrary(
    "librowwise_hashing.so",
    {
        "rw_hashing_isa": (c_char_p, []),
        "rw_hashing_limit": (c_int64, [c_char_p]),  # 0: unknown instruction set
        "rw_sample": (None, [Int32s, c_int64, c_int64, c_uint64, Int32s]),
        "rw_nearest": (_status, [Points, c_int64, c_int64, Float32s, c_int64, c_int64, Int32s]),
        "rw_sort": (None, [Int32s, c_int64, Int32s, c_int64, Int32s, Int64s]),
        "rw_survey": (_status, [Points, Numbers, c_int64, c_double, c_int64, Numbers]),
        "rw_distinct": (_status, [Points, c_int64, c_int64, Int32s]),
        "rw_drops": (_status, [Points, Numbers, c_int64, _NativeSettings, c_int64, Float64s]),
        "rw_cells": (_status, [Points, Numbers, Int64s, c_int64, _NativeSettings, c_int64, ClusterBuffers]),
    },
)


def sample_points(order_M: Labels, count: int, seed: int) -> Labels:
    """At most `count` of the points, spread over the range."""
    sample = np.empty(min(len(order_M), count), np.int32)
    library.rw_sample(order_M, len(order_M), len(sample), seed, sample)
    return sample


def distinct_points(points: Points, begin: int, end: int) -> Labels:
    """One point for each distinct vector of a range."""
    first_M = np.empty(end - begin, np.int32)
    return first_M[: library.rw_distinct(points, begin, end, first_M)]


def nearest_of(points: Points, centroids_CD: Floats, threads: int) -> Labels:
    """The nearest centroid of each point, in the order of the points; centroids are scaled as the points are."""
    return _nearest(points, 0, len(points.order_M), centroids_CD, threads)


def _nearest(points: Points, begin: int, end: int, centroids_CD: Floats, threads: int) -> Labels:
    label_M = np.empty(end - begin, np.int32)
    library.rw_nearest(points, begin, end, centroids_CD, len(centroids_CD), threads, label_M)
    return label_M


def sort_by_nearest(points: Points, begin: int, end: int, centroids_CD: Floats, threads: int) -> Ints:
    """Sort a range by the nearest scaled centroid; returns the end of each centroid's points, relative to `begin`."""
    label_M, ends_C = _nearest(points, begin, end, centroids_CD, threads), np.empty(len(centroids_CD), np.int64)
    order_M = points.order_M[begin:end]
    sorted_M = np.empty_like(order_M)
    library.rw_sort(order_M, len(order_M), label_M, len(centroids_CD), sorted_M, ends_C)
    order_M[:] = sorted_M
    return ends_C


def survey_cells(points: Points, cells: Cells, settings: ClusterSettings) -> Cells:
    survey_C = np.zeros(len(cells), SURVEY)
    library.rw_survey(points, cells, len(cells), settings.cap, settings.threads, survey_C)
    return survey_C


def error_drops(points: Points, cells: Cells, settings: ClusterSettings) -> Doubles:
    """Estimated decrease of a cell's error by each further cluster, from the cell's `base` on."""
    drop_K = np.empty(int(cells["clusters"].sum()))
    library.rw_drops(points, cells, len(cells), _native_settings(settings), settings.threads, drop_K)
    return drop_K


def cluster_cells(
    points: Points, cells: Cells, distinct_C: Ints, settings: ClusterSettings, buffers: ClusterBuffers
) -> None:
    """Cluster each cell separately, on all threads; a label is -1 if no cluster of the cell has room for the point."""
    options = _native_settings(settings), settings.threads
    library.rw_cells(points, cells, distinct_C, len(cells), *options, buffers)


def _native_settings(settings: ClusterSettings) -> _NativeSettings:
    return _NativeSettings(seed=settings.seed, rounds=settings.rounds, tries=settings.tries, cap=settings.cap)

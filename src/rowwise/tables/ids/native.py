"""The C++ kernels of clustering: nearest centroids, k-means of a cell, and cutting points into cells.

Arrays are not checked here; `cluster` has checked them. Axes: N points, M points of a range, D dims, C cells, K
clusters.
"""

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_double, c_int64, c_uint64, c_void_p
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import NativeError
from rowwise.base.library import Signatures, bind_library

LIBRARY = "librowwise_hashing.so"
WORD = (1 << 64) - 1
CELL = np.dtype([("begin", "i8"), ("end", "i8"), ("clusters", "i8"), ("base", "i8")])
SURVEY = np.dtype([("weight", "f8"), ("spread", "f8"), ("heavy_weight", "f8"), ("heavy", "i8"), ("distinct", "i8")])
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Labels = NDArray[np.int32]
Cells = NDArray[np.void]  # records of type CELL: ranges of points, and their numbers of clusters


class _Points(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p), ("w", c_void_p), ("dims", c_int64), ("scale", c_double), ("even", c_double),
        ("order", c_void_p),
    ]  # fmt: skip


class _NativeSettings(ctypes.Structure):
    _fields_ = [("seed", c_uint64), ("rounds", c_int64), ("tries", c_int64), ("cap", c_double)]


class _NativeOutput(ctypes.Structure):
    _fields_ = [("label", c_void_p), ("centroid", c_void_p), ("weight", c_void_p), ("used", c_void_p)]


class ClusterSettings(NamedTuple):
    """The settings of k-means, the same for all cells."""

    seed: int
    rounds: int
    cap: float
    threads: int
    tries: int = 1


@final
class Points:
    """Points in an order in which cells are ranges. The arrays are not copied.

    Args:
        vectors_ND: the vectors of all points.
        weights_N: the weights of all points.
        order_M: indices of the points to cluster; cells are ranges of it.
        scale: a power of two that makes the largest coordinate about 1.
        even: a number that is added to each weight.
    """

    def __init__(
        self, vectors_ND: Floats, weights_N: Doubles, order_M: Labels, scale: float, even: float = 0.0
    ) -> None:
        self.order_M, self.dims = order_M, vectors_ND.shape[1]
        self._referenced = (vectors_ND, weights_N)  # `entry` has only their addresses
        self.entry: ctypes.Structure = _Points(
            x=_address(vectors_ND), w=_address(weights_N), dims=self.dims, scale=scale, even=even,
            order=_address(order_M),
        )  # fmt: skip


@final
class ClusterBuffers:
    """Output of `cluster_cells`: arrays of all clusters, and the number of clusters that each cell used."""

    def __init__(self, centroids_KD: Floats, weight_K: Doubles, cells: int) -> None:
        self.centroids_KD, self.weight_K = centroids_KD, weight_K
        self.used_C: Ints = np.zeros(cells, np.int64)


def isa() -> str:
    """The instruction set that the kernels use."""
    return _library().rw_hashing_isa().decode()


def limit_isa(name: str) -> None:
    """Use the kernels of an instruction set: 'base', 'avx2' or 'avx512'. All give the same bits."""
    if not _library().rw_hashing_limit(name.encode()):
        raise NativeError(f"this processor has no {name}", "one of base, avx2, avx512")


def sample_points(order_M: Labels, count: int, seed: int) -> Labels:
    """At most `count` of the points, spread over the range."""
    sample = np.empty(min(len(order_M), count), np.int32)
    _library().rw_sample(_address(order_M), len(order_M), len(sample), seed & WORD, _address(sample))
    return sample


def distinct_points(points: Points, begin: int, end: int) -> Labels:
    """One point for each distinct vector of a range."""
    first_M = np.empty(end - begin, np.int32)
    count = _library().rw_distinct(byref(points.entry), begin, end, _address(first_M))
    _check_memory(count)
    return first_M[:count]


def nearest_of(points: Points, centroids_CD: Floats, threads: int) -> Labels:
    """The nearest centroid of each point, in the order of the points; centroids are scaled as the points are."""
    return _nearest(points, 0, len(points.order_M), centroids_CD, threads)


def _nearest(points: Points, begin: int, end: int, centroids_CD: Floats, threads: int) -> Labels:
    label_M, count = np.empty(end - begin, np.int32), len(centroids_CD)
    addresses = _address(centroids_CD), count, threads, _address(label_M)
    _check_memory(_library().rw_nearest(byref(points.entry), begin, end, *addresses))
    return label_M


def sort_by_nearest(points: Points, begin: int, end: int, centroids_CD: Floats, threads: int) -> Ints:
    """Sort a range by the nearest scaled centroid; returns the end of each centroid's points, relative to `begin`."""
    label_M, ends_C = _nearest(points, begin, end, centroids_CD, threads), np.empty(len(centroids_CD), np.int64)
    count, order_M = len(centroids_CD), points.order_M[begin:end]
    sorted_M = np.empty_like(order_M)
    addresses = _address(label_M), count, _address(sorted_M), _address(ends_C)
    _library().rw_sort(_address(order_M), len(order_M), *addresses)
    order_M[:] = sorted_M
    return ends_C


def survey_cells(points: Points, cells: Cells, settings: ClusterSettings) -> Cells:
    survey_C = np.zeros(len(cells), SURVEY)
    limits = settings.cap, settings.threads
    _check_memory(_library().rw_survey(byref(points.entry), _address(cells), len(cells), *limits, _address(survey_C)))
    return survey_C


def error_drops(points: Points, cells: Cells, settings: ClusterSettings) -> Doubles:
    """An estimate of how much each further cluster lowers the error of its cell, from the cell's `base` on."""
    drop_K = np.empty(int(cells["clusters"].sum()))
    how = byref(_native_settings(settings)), settings.threads
    _check_memory(_library().rw_drops(byref(points.entry), _address(cells), len(cells), *how, _address(drop_K)))
    return drop_K


def cluster_cells(
    points: Points,
    cells: Cells,
    distinct_C: Ints,
    settings: ClusterSettings,
    buffers: ClusterBuffers,
    label_N: Labels | None = None,
) -> None:
    """Cluster each cell by itself, on all threads; a label is -1 if no cluster of the cell has room for the point."""
    output = _NativeOutput(
        label=None if label_N is None else _address(label_N),
        centroid=_address(buffers.centroids_KD),
        weight=_address(buffers.weight_K),
        used=_address(buffers.used_C),
    )
    how = byref(_native_settings(settings)), settings.threads
    addresses = _address(cells), _address(distinct_C), len(cells)
    _check_memory(_library().rw_cells(byref(points.entry), *addresses, *how, byref(output)))


def _native_settings(settings: ClusterSettings) -> _NativeSettings:
    seed = settings.seed & WORD
    return _NativeSettings(seed=seed, rounds=settings.rounds, tries=settings.tries, cap=settings.cap)


def _check_memory(result: int) -> None:
    if not result:
        raise MemoryError("clustering: out of memory: expected fewer threads, or fewer clusters")


def _address(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


@functools.cache
def _library() -> Any:
    points, settings, numbers = POINTER(_Points), POINTER(_NativeSettings), c_void_p
    signatures: Signatures = {
        "rw_hashing_isa": (c_char_p, []),
        "rw_hashing_limit": (c_int64, [c_char_p]),
        "rw_sample": (None, [numbers, c_int64, c_int64, c_uint64, numbers]),
        "rw_nearest": (c_int64, [points, c_int64, c_int64, numbers, c_int64, c_int64, numbers]),
        "rw_sort": (None, [numbers, c_int64, numbers, c_int64, numbers, numbers]),
        "rw_survey": (c_int64, [points, numbers, c_int64, c_double, c_int64, numbers]),
        "rw_distinct": (c_int64, [points, c_int64, c_int64, numbers]),
        "rw_drops": (c_int64, [points, numbers, c_int64, settings, c_int64, numbers]),
        "rw_cells": (c_int64, [points, numbers, numbers, c_int64, settings, c_int64, POINTER(_NativeOutput)]),
    }
    return bind_library(LIBRARY, signatures)

"""The C++ kernels of clustering: assignment of points to centroids, and cutting points into cells.

Arrays come from `cluster`, which has checked what people gave it. Sizes: N points, M points of a range, D dims, C
cells, K clusters.
"""

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_double, c_int64, c_uint64, c_void_p
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import NativeError
from rowwise.library import load_library

LIBRARY = "librowwise_hashing.so"
WORD = (1 << 64) - 1
CELL = np.dtype([("begin", "i8"), ("end", "i8"), ("clusters", "i8"), ("base", "i8")])
SURVEY = np.dtype([("weight", "f8"), ("spread", "f8"), ("heavy_weight", "f8"), ("heavy", "i8"), ("distinct", "i8")])
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Labels = NDArray[np.int32]
Cells = NDArray[np.void]  # of CELL: ranges of points, and their clusters


class _Points(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p), ("w", c_void_p), ("dims", c_int64), ("scale", c_double), ("even", c_double),
        ("order", c_void_p),
    ]  # fmt: skip


class _How(ctypes.Structure):
    _fields_ = [("seed", c_uint64), ("rounds", c_int64), ("tries", c_int64), ("cap", c_double)]


class _Out(ctypes.Structure):
    _fields_ = [("label", c_void_p), ("centroid", c_void_p), ("weight", c_void_p), ("used", c_void_p)]


class ClusterSettings(NamedTuple):
    """The settings of clustering, the same for all cells."""

    seed: int
    rounds: int
    cap: float
    threads: int
    tries: int = 1


@final
class Points:
    """Ordered points, of which cells are ranges. The arrays are not copied.

    Args:
        vectors_ND: of all points.
        weights_N: of all points.
        order_M: which of them there are.
        scale: a power of two that makes the largest coordinate about 1.
        even: what is added to each weight.
    """

    def __init__(
        self, vectors_ND: Floats, weights_N: Doubles, order_M: Labels, scale: float, even: float = 0.0
    ) -> None:
        self.order_M, self.dims = order_M, vectors_ND.shape[1]
        self._held = (vectors_ND, weights_N)
        self.entry: ctypes.Structure = _Points(
            x=_at(vectors_ND), w=_at(weights_N), dims=self.dims, scale=scale, even=even, order=_at(order_M)
        )


@final
class ClusterBuffers:
    """Room for the clusters of some cells; what is not used is 0."""

    def __init__(self, centroids_KD: Floats, weight_K: Doubles, cells: int) -> None:
        """The same clusters may be of several groups of cells, one after another."""
        self.centroids_KD, self.weight_K = centroids_KD, weight_K
        self.used_C: Ints = np.zeros(cells, np.int64)


def isa() -> str:
    """The instruction set that the inner loops use."""
    return _library().rw_hashing_isa().decode()


def limit_isa(name: str) -> None:
    """Use the loops of this instruction set: 'base', 'avx2' or 'avx512'. The results are the same bits."""
    if not _library().rw_hashing_limit(name.encode()):
        raise NativeError(f"this processor has no {name}: want one of base, avx2, avx512")


def sample_points(order_M: Labels, wanted: int, seed: int) -> Labels:
    """Some of these points, from all over the range."""
    sample = np.empty(min(len(order_M), wanted), np.int32)
    _library().rw_sample(_at(order_M), len(order_M), len(sample), seed & WORD, _at(sample))
    return sample


def distinct_points(points: Points, begin: int, end: int) -> Labels:
    """A point for each vector of a range."""
    first_M = np.empty(end - begin, np.int32)
    count = _library().rw_distinct(byref(points.entry), begin, end, _at(first_M))
    _enough(count)
    return first_M[:count]


def nearest_of(points: Points, centroids_CD: Floats, threads: int) -> Labels:
    """For each point, in their order, the nearest of the scaled centroids."""
    return _nearest(points, 0, len(points.order_M), centroids_CD, threads)


def _nearest(points: Points, begin: int, end: int, centroids_CD: Floats, threads: int) -> Labels:
    at_M, count = np.empty(end - begin, np.int32), len(centroids_CD)
    _enough(_library().rw_nearest(byref(points.entry), begin, end, _at(centroids_CD), count, threads, _at(at_M)))
    return at_M


def sort_by_nearest(points: Points, begin: int, end: int, centroids_CD: Floats, threads: int) -> Ints:
    """Puts a range into the order of their nearest centroids, which are scaled; where those of each end, from 0 on."""
    at_M, ends_C = _nearest(points, begin, end, centroids_CD, threads), np.empty(len(centroids_CD), np.int64)
    count, order_M = len(centroids_CD), points.order_M[begin:end]
    sorted_M = np.empty_like(order_M)
    _library().rw_sort(_at(order_M), len(order_M), _at(at_M), count, _at(sorted_M), _at(ends_C))
    order_M[:] = sorted_M
    return ends_C


def survey_cells(points: Points, cells: Cells, how: ClusterSettings) -> Cells:
    survey_C = np.zeros(len(cells), SURVEY)
    _enough(_library().rw_survey(byref(points.entry), _at(cells), len(cells), how.cap, how.threads, _at(survey_C)))
    return survey_C


def error_drops(points: Points, cells: Cells, how: ClusterSettings) -> Doubles:
    """By how much each further cluster of a cell lessens the error, about, from its `base` on."""
    drop_K = np.empty(int(cells["clusters"].sum()))
    made = byref(_native_points(how))
    _enough(_library().rw_drops(byref(points.entry), _at(cells), len(cells), made, how.threads, _at(drop_K)))
    return drop_K


def cluster_cells(
    points: Points,
    cells: Cells,
    distinct_C: Ints,
    how: ClusterSettings,
    places: ClusterBuffers,
    label_N: Labels | None = None,
) -> None:
    """Each cell alone, on all threads; a label is -1 where no cluster of the cell has room."""
    out = _Out(
        label=None if label_N is None else _at(label_N),
        centroid=_at(places.centroids_KD),
        weight=_at(places.weight_K),
        used=_at(places.used_C),
    )
    made = byref(_native_points(how))
    _enough(
        _library().rw_cells(byref(points.entry), _at(cells), _at(distinct_C), len(cells), made, how.threads, byref(out))
    )


def _native_points(how: ClusterSettings) -> _How:
    return _How(seed=how.seed & WORD, rounds=how.rounds, tries=how.tries, cap=how.cap)


def _enough(result: int) -> None:
    if not result:
        raise MemoryError("no memory left for clusters")


def _at(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


@functools.cache
def _library() -> Any:
    library = load_library(LIBRARY)
    library.rw_hashing_isa.restype = c_char_p
    library.rw_hashing_limit.argtypes = [c_char_p]
    library.rw_sample.argtypes = [c_void_p, c_int64, c_int64, c_uint64, c_void_p]
    library.rw_nearest.argtypes = [POINTER(_Points), c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p]
    library.rw_sort.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p]
    library.rw_survey.argtypes = [POINTER(_Points), c_void_p, c_int64, c_double, c_int64, c_void_p]
    library.rw_distinct.argtypes = [POINTER(_Points), c_int64, c_int64, c_void_p]
    library.rw_drops.argtypes = [POINTER(_Points), c_void_p, c_int64, POINTER(_How), c_int64, c_void_p]
    library.rw_cells.argtypes = [
        POINTER(_Points), c_void_p, c_void_p, c_int64, POINTER(_How), c_int64, POINTER(_Out)
    ]  # fmt: skip
    for name in ("rw_hashing_limit", "rw_nearest", "rw_survey", "rw_distinct", "rw_drops", "rw_cells"):
        getattr(library, name).restype = c_int64
    library.rw_sample.restype = library.rw_sort.restype = None
    return library

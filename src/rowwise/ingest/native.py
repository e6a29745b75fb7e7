"""The kernels of ingestion, in C++: ids into rows, lists cut short, text into words, numbers into buckets.

Arrays are checked here, so that what crosses has the right types and lengths; offsets are checked by the kernels.
`mix.py` says in numpy what the hash is; tests hold the two together. Sizes: N ids, R rows, K borders.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int64, c_uint64, c_void_p
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import DataError, NativeError, SpecError
from rowwise.library import load_library

LIBRARY = "librowwise_ingest.so"
ALL = (1 << 63) - 1
KINDS = {np.dtype(name): kind for kind, name in enumerate(("i1", "i2", "i4", "i8", "u1", "u2", "u4"))}
WORD = (1 << 64) - 1
AS_IS, CHECK, REMAINDER, HASH, SIGRID = range(5)
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Floats = NDArray[np.float32]


class _Ids(ctypes.Structure):
    _fields_ = [
        ("values", c_void_p), ("kind", c_int64), ("count", c_int64), ("offsets", c_void_p), ("offset_bytes", c_int64),
        ("base", c_int64), ("row_valid", c_void_p), ("row_bit", c_int64), ("id_valid", c_void_p), ("id_bit", c_int64),
        ("order", c_void_p), ("rows", c_int64), ("first", c_int64),
    ]  # fmt: skip


class _Make(ctypes.Structure):
    _fields_ = [
        ("what", c_int64), ("rows", c_uint64), ("salt", c_uint64), ("multiplier", c_uint64), ("shift", c_int64),
    ]  # fmt: skip


class _Numbers(ctypes.Structure):
    _fields_ = [("x", c_void_p), ("valid", c_void_p), ("bit", c_int64), ("fill", c_float)]


class RowMapping(NamedTuple):
    """The mapping of ids while they are copied: none, a check against `rows`, or a hash to a row."""

    what: int = AS_IS
    rows: int = 1
    salt: int = 0


class Bitmap(NamedTuple):
    """A bit for each element: bit `first` of the bytes is that of the first element."""

    bytes: NDArray[np.uint8]
    first: int


class NumberColumn(NamedTuple):
    """A column of numbers, and what stands for those that are missing."""

    x_R: Floats
    valid: Bitmap | None
    fill: float


class Lists(NamedTuple):
    """Ids as Arrow holds them: row r has values[offsets[r] - base : offsets[r + 1] - base], or just values[r]."""

    values: NDArray[Any]
    offsets: NDArray[np.int32] | NDArray[np.int64] | None = None
    base: int = 0
    row_valid: Bitmap | None = None
    id_valid: Bitmap | None = None

    @property
    def rows(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1


@functools.cache
def _library() -> Any:
    library = load_library(LIBRARY)
    library.rw_ingest_isa.restype = c_char_p
    library.rw_ingest_limit.argtypes = [c_char_p]
    library.rw_count.argtypes = [POINTER(_Ids)]
    library.rw_bags.argtypes = [POINTER(_Ids), POINTER(_Make), c_void_p, c_void_p, c_int64, c_int64]
    library.rw_changes.argtypes = [POINTER(_Ids), c_void_p]
    library.rw_map.argtypes = [c_void_p, c_void_p, c_int64, POINTER(_Make)]
    library.rw_text.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p]
    library.rw_fill.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]
    library.rw_turn.argtypes = [c_void_p, c_int64, c_int64, c_void_p]
    for name in ("rw_buckets32", "rw_buckets64"):
        getattr(library, name).argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]
        getattr(library, name).restype = None
    for name in ("rw_ingest_limit", "rw_count", "rw_bags", "rw_map", "rw_fill"):
        getattr(library, name).restype = c_int64
    library.rw_text.restype = library.rw_turn.restype = library.rw_changes.restype = None
    return library


def isa() -> str:
    """The instruction set that the kernels use."""
    return _library().rw_ingest_isa().decode()


def limit_isa(name: str) -> None:
    """Use the kernels of this instruction set: 'base', 'avx2' or 'avx512'. The results are the same bits."""
    if not _library().rw_ingest_limit(name.encode()):
        raise NativeError(f"this processor has no {name}: want one of base, avx2, avx512")


@final
class PickedIds:
    """The ids of some rows, in an order: counted at once, written when there is a place for them.

    Args:
        lists: all rows.
        order_R: those that are picked, all of which are there; None: all, as they are.
        first: how many ids of a row are used at most; None: all.
    """

    def __init__(self, lists: Lists, order_R: Ints | None = None, first: int | None = None) -> None:
        """Count, and refuse offsets that lie outside the values."""
        assert order_R is None or order_R.dtype == np.int64
        self._held = (lists, order_R)
        self._ids = _Ids(
            values=_at(lists.values),
            kind=KINDS[lists.values.dtype],
            count=len(lists.values),
            offsets=None if lists.offsets is None else _at(lists.offsets),
            offset_bytes=0 if lists.offsets is None else lists.offsets.itemsize,
            base=lists.base,
            row_valid=None if lists.row_valid is None else _at(lists.row_valid.bytes),
            row_bit=0 if lists.row_valid is None else lists.row_valid.first,
            id_valid=None if lists.id_valid is None else _at(lists.id_valid.bytes),
            id_bit=0 if lists.id_valid is None else lists.id_valid.first,
            order=None if order_R is None else _at(order_R),
            rows=lists.rows if order_R is None else len(order_R),
            first=ALL if first is None else first,
        )
        self.rows: int = self._ids.rows
        self.total: int = _library().rw_count(byref(self._ids))
        if self.total < 0:
            raise DataError(f"offsets of lists fall, or lie outside the {len(lists.values)} values that there are")

    def write(self, make: RowMapping, out_N: Ints, offsets_R1: Ints | None) -> bool:
        """The ids to the front of `out_N`, and where each row's begin; whether one was outside its table."""
        assert len(out_N) >= self.total
        assert offsets_R1 is None or len(offsets_R1) == self.rows + 1
        offsets = None if offsets_R1 is None else _at(offsets_R1)
        how = byref(_native_mapping(make))
        return bool(_library().rw_bags(byref(self._ids), how, _at(out_N), offsets, self.total, len(out_N)))

    def mark_changes(self, begins_R: NDArray[np.bool_]) -> None:
        """Mark rows whose ids are not those of the row before. Those that are marked are not looked at, nor the first.

        What `repeats.adjacent` says in numpy, of what is picked.
        """
        assert begins_R.dtype == np.bool_
        assert len(begins_R) == self.rows
        _library().rw_changes(byref(self._ids), _at(begins_R))


@final
class FilledColumns:
    """Columns of numbers, with rows picked in an order and missing numbers filled in."""

    def __init__(self, columns: Sequence[NumberColumn], order_R: Ints | None) -> None:
        self._held = (columns, order_R)
        self._order = None if order_R is None else _at(order_R)
        self._rows = len(columns[0].x_R) if order_R is None else len(order_R)
        self._columns = (_Numbers * len(columns))()
        for entry, (x_R, valid, stand_in) in zip(self._columns, columns, strict=True):
            entry.x, entry.fill = _at(x_R), stand_in
            entry.valid, entry.bit = (None, 0) if valid is None else (_at(valid.bytes), valid.first)

    def write(self, begin: int, out_FR: Floats) -> bool:
        """Rows from `begin` on, column by column; whether one of them was infinite."""
        count, rows = out_FR.shape
        assert count == len(self._columns)
        assert begin + rows <= self._rows
        return bool(_library().rw_fill(self._columns, count, self._order, begin, rows, _at(out_FR)))


def transpose(columns_FR: Floats, out_RF: Floats) -> None:
    assert columns_FR.shape == out_RF.shape[::-1]
    _library().rw_turn(_at(columns_FR), columns_FR.shape[0], columns_FR.shape[1], _at(out_RF))


def hash_rows(values_N: Ints, rows: int, out: Ints | None = None) -> Ints:
    """The row of each id, by the hash of `mix.py`; `out` may be the ids themselves."""
    return _map_values(values_N, RowMapping(HASH, rows), out)


def sigrid_hash(values_N: Ints, salt: int, rows: int, out: Ints | None = None) -> Ints:
    """The row of each id, as torcharrow's `sigrid_hash` gives it; `out` may be the ids themselves."""
    return _map_values(values_N, RowMapping(SIGRID, rows, salt), out)


def first(values_N: Ints, offsets_R1: Ints, count: int) -> tuple[Ints, Ints]:
    """The first `count` ids of each list, and the new offsets, which begin at 0."""
    return _first(values_N, offsets_R1, count, RowMapping())


def first_sigrid(values_N: Ints, offsets_R1: Ints, count: int, salt: int, rows: int) -> tuple[Ints, Ints]:
    """`sigrid_hash` of the first `count` ids of each list, and the new offsets, which begin at 0."""
    return _first(values_N, offsets_R1, count, RowMapping(SIGRID, rows, salt))


def bucketize(x_N: NDArray[np.float32 | np.float64], borders_K: NDArray[np.float32 | np.float64]) -> Ints:
    """The number of ascending borders at or below each x; all of them for NaN, which numpy also sorts last."""
    borders_K = np.asarray(borders_K)
    if np.isnan(borders_K).any() or (borders_K[1:] < borders_K[:-1]).any():
        raise SpecError("borders of buckets: want numbers in ascending order, none of them NaN")
    single = x_N.dtype == np.float32
    x_N = np.ascontiguousarray(x_N, np.float32 if single else np.float64)
    half = 1 << max(len(borders_K) - 1, 0).bit_length()
    if half == len(borders_K):
        half *= 2
    half = max(half // 2, 1)
    padded = np.full(2 * half - 1, np.inf, x_N.dtype)
    padded[: len(borders_K)] = _rounded_up(borders_K) if single else borders_K
    found_N = np.empty(len(x_N), np.int64)
    call = _library().rw_buckets32 if single else _library().rw_buckets64
    call(_at(x_N), len(x_N), _at(padded), half, len(borders_K), _at(found_N))
    return found_N


def mix_bytes(data: NDArray[np.uint8], offsets_N1: Ints) -> Words:
    """The hash of each run of bytes `data[offsets[i]:offsets[i + 1]]`, that of `mix.py`."""
    data, offsets_N1 = np.ascontiguousarray(data, np.uint8), np.ascontiguousarray(offsets_N1, np.int64)
    count = len(offsets_N1) - 1
    if count and (offsets_N1[0] < 0 or offsets_N1[-1] > len(data) or (offsets_N1[1:] < offsets_N1[:-1]).any()):
        raise DataError(f"offsets of text fall, or lie outside the {len(data)} bytes that there are")
    hash_N = np.empty(max(count, 0), np.uint64)
    _library().rw_text(_at(data), _at(offsets_N1), len(hash_N), len(data), _at(hash_N))
    return hash_N


def _first(values_N: Ints, offsets_R1: Ints, count: int, make: RowMapping) -> tuple[Ints, Ints]:
    lists = Lists(_ints(values_N), np.ascontiguousarray(offsets_R1, np.int64))
    picked = PickedIds(lists, first=count)
    out_N, moved_R1 = np.empty(picked.total, np.int64), np.empty(picked.rows + 1, np.int64)
    picked.write(make, out_N, moved_R1)
    return out_N, moved_R1


def _map_values(values_N: Ints, make: RowMapping, out: Ints | None) -> Ints:
    values_N = _ints(values_N)
    out = np.empty(len(values_N), np.int64) if out is None else out
    if out.dtype != np.int64 or out.shape != values_N.shape or not out.flags.c_contiguous:
        raise SpecError(f"out is {out.dtype}{list(out.shape)}: want int64[{len(values_N)}], one after another")
    _library().rw_map(_at(values_N), _at(out), len(values_N), byref(_native_mapping(make)))
    return out


def _native_mapping(make: RowMapping) -> _Make:
    if not 1 <= make.rows <= ALL:
        raise SpecError(f"rows={make.rows}: want 1 to 2**63 - 1")
    return _Make(what=make.what, rows=make.rows, salt=make.salt & WORD)


def _ints(values_N: NDArray[Any]) -> Ints:
    if values_N.dtype == np.uint64:
        values_N = values_N.view(np.int64)
    return np.ascontiguousarray(values_N, np.int64)


def _rounded_up(borders_K: NDArray[np.float32 | np.float64]) -> Floats:
    """No 32-bit number lies between a border and the next one up in 32 bits, so comparing with either is the same."""
    with np.errstate(over="ignore"):
        near_K = borders_K.astype(np.float32)
        return np.where(near_K < borders_K, np.nextafter(near_K, np.float32(np.inf)), near_K)


def _at(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data

"""Bindings of the C++ ingestion kernels: ids to rows, truncated lists, hashes of text, buckets of numbers.

Types and lengths of arrays are checked here, list offsets in the kernels. `mix.py` is the reference of the hash;
tests compare the two. Sizes: N ids, R rows, K borders.
"""

from collections.abc import Sequence
from ctypes import Structure, c_char_p, c_float, c_int64, c_uint64, c_void_p, sizeof
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import DataError, SpecError
from rowwise.base.library import CLibrary, Float32s, Float64s, Int64s, Numbers, Uint8s, address_of
from rowwise.ingest.block import Floats, Ints

ALL = (1 << 63) - 1
KINDS = {np.dtype(name): kind for kind, name in enumerate(("i1", "i2", "i4", "i8", "u1", "u2", "u4"))}
AS_IS, CHECK, REMAINDER, HASH, SIGRID = range(5)
Words = NDArray[np.uint64]


class _Ids(Structure):
    _fields_ = [
        ("values", c_void_p), ("kind", c_int64), ("count", c_int64), ("offsets", c_void_p), ("offset_bytes", c_int64),
        ("base", c_int64), ("row_valid", c_void_p), ("row_bit", c_int64), ("id_valid", c_void_p), ("id_bit", c_int64),
        ("order", c_void_p), ("rows", c_int64), ("first", c_int64),
    ]  # fmt: skip


class _RowMappingFields(Structure):
    _fields_ = [
        ("what", c_int64), ("rows", c_uint64), ("salt", c_uint64), ("multiplier", c_uint64), ("shift", c_int64),
    ]  # fmt: skip


class _Numbers(Structure):
    _fields_ = [("x", c_void_p), ("valid", c_void_p), ("bit", c_int64), ("fill", c_float)]


class RowMapping(NamedTuple):
    """The mapping that a kernel applies to ids while copying them: none, a range check, or a hash to a row."""

    what: int = AS_IS
    rows: int = 1
    salt: int = 0


class Bitmap(NamedTuple):
    """A validity bitmap of Arrow: bit `first` of the bytes belongs to the first element."""

    bytes: NDArray[np.uint8]
    first: int


class Lists(NamedTuple):
    """Ids in Arrow's layout: row r has values[offsets[r] - base : offsets[r + 1] - base], or just values[r]."""

    values: NDArray[Any]
    offsets: NDArray[np.int32] | NDArray[np.int64] | None = None
    base: int = 0
    row_valid: Bitmap | None = None
    id_valid: Bitmap | None = None

    @property
    def rows(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1


library = CLibrary(
    "librowwise_ingest.so",
    {
        "rw_ingest_isa": (c_char_p, []),
        "rw_ingest_limit": (c_int64, [c_char_p]),  # 0 if this processor lacks the instruction set
        "rw_count": (c_int64, [_Ids]),
        "rw_bags": (c_int64, [_Ids, _RowMappingFields, Int64s, Int64s, c_int64, c_int64]),
        "rw_singles": (c_int64, [_Ids, _RowMappingFields, c_int64, Int64s, c_int64, Int64s]),
        "rw_changes": (None, [_Ids, Numbers]),
        "rw_map": (c_int64, [Int64s, Int64s, c_int64, _RowMappingFields]),
        "rw_text": (None, [Uint8s, Int64s, c_int64, c_int64, Numbers]),
        "rw_fill": (c_int64, [_Numbers, c_int64, Int64s, c_int64, c_int64, Float32s]),
        "rw_turn": (None, [Float32s, c_int64, c_int64, Float32s]),
        "rw_buckets32": (None, [Float32s, c_int64, Float32s, c_int64, c_int64, Int64s]),
        "rw_buckets64": (None, [Float64s, c_int64, Float64s, c_int64, c_int64, Int64s]),
    },
)


@final
class PickedIds:
    """The ids of selected rows: `total` is counted at once, `write` copies them into an array of that size.

    Args:
        lists: all rows.
        order_R: row numbers to select, in range; None for all rows in table order.
        first: maximum number of ids per row; None for all.
    """

    def __init__(self, lists: Lists, order_R: Ints | None = None, first: int | None = None) -> None:
        """Count the ids, and refuse offsets outside the values."""
        assert order_R is None or order_R.dtype == np.int64
        self._keep_alive = (lists, order_R)  # the structure below has bare pointers into them
        self._ids = _Ids(
            order=None if order_R is None else address_of(order_R),
            rows=lists.rows if order_R is None else len(order_R),
            first=ALL if first is None else first,
        )
        _point_to(self._ids, lists)
        self.rows: int = self._ids.rows
        self.total = _count(self._ids)

    def write(self, mapping: RowMapping, out_N: Ints, offsets_R1: Ints | None) -> bool:
        """Write the mapped ids to the front of `out_N`, and the offsets; true if CHECK found one out of range."""
        assert len(out_N) >= self.total
        assert offsets_R1 is None or len(offsets_R1) == self.rows + 1
        return bool(library.rw_bags(self._ids, _c_mapping(mapping), out_N, offsets_R1, self.total, len(out_N)))

    def mapped(self, mapping: RowMapping) -> tuple[Ints, Ints]:
        """The mapped ids and their offsets, in new arrays."""
        out_N, offsets_R1 = np.empty(self.total, np.int64), np.empty(self.rows + 1, np.int64)
        self.write(mapping, out_N, offsets_R1)
        return out_N, offsets_R1

    def mark_changes(self, begins_R: NDArray[np.bool_]) -> None:
        """Set begins_R[r] if the ids of rows r and r - 1 differ. Rows already set, and row 0, are not compared."""
        assert begins_R.dtype == np.bool_
        assert len(begins_R) == self.rows
        library.rw_changes(self._ids, begins_R)


@final
class BoundIds:
    """`PickedIds` for one feature of many small tables: the C structures are made once.

    Args:
        mapping: applied to each id.
        first: maximum number of ids per row; None for all.
    """

    def __init__(self, mapping: RowMapping, first: int | None) -> None:
        self._mapping = _c_mapping(mapping)
        self._ids = _Ids(first=ALL if first is None else first)
        self._keep_alive: Lists | None = None

    def point_to(self, lists: Lists) -> None:
        """Read from these ids, lists or single values."""
        self._keep_alive = lists
        _point_to(self._ids, lists)

    def select(self, order_R: Ints) -> int:
        """Select rows for `write`; returns the number of their ids."""
        self._ids.order, self._ids.rows = order_R.ctypes.data, len(order_R)
        return _count(self._ids)

    def write(self, address: int, total: int, offsets_R1: Ints) -> bool:
        """Write the mapped ids to an address with space for `total` ids; true if CHECK found one out of range."""
        return bool(library.rw_bags(self._ids, self._mapping, address, offsets_R1, total, total))


@final
class SingleIds:
    """Ids of several features with one id per row, for many small tables, in one call.

    Args:
        mappings: applied to the ids of each feature.
        kinds: integer type of each feature, see `KINDS`.
    """

    def __init__(self, mappings: Sequence[RowMapping], kinds: Sequence[int]) -> None:
        self._mappings = (_RowMappingFields * len(mappings))(*map(_c_mapping, mappings))
        self._ids = (_Ids * len(kinds))(*(_Ids(kind=kind, first=ALL) for kind in kinds))
        self._fields_FI = np.frombuffer(memoryview(self._ids), np.int64).reshape(len(kinds), sizeof(_Ids) // 8)

    def write(self, addresses: Sequence[int], count: int, order_R: Ints, outs: Ints) -> bool:
        """Write the selected rows of features; true if CHECK found an id out of range.

        Args:
            addresses: address of the values of each feature; 0 skips the feature.
            count: rows of each feature.
            order_R: row numbers to select, in range.
            outs: output address of each feature.
        """
        self._fields_FI[:, 0], self._fields_FI[:, 2] = addresses, count
        return bool(library.rw_singles(self._ids, self._mappings, len(addresses), order_R, len(order_R), outs))


@final
class FilledColumns:
    """The numbers of selected rows of several columns; `fills` replaces null and NaN, by column."""

    def __init__(self, fills: Sequence[float]) -> None:
        self._columns = (_Numbers * len(fills))(*(_Numbers(fill=fill) for fill in fills))
        self._fields_FI = np.frombuffer(memoryview(self._columns), np.int64).reshape(len(fills), sizeof(_Numbers) // 8)

    def point_to(self, addresses: Sequence[int], bitmaps: Sequence[tuple[int, int]]) -> None:
        """Read from these columns, which the caller keeps alive.

        Args:
            addresses: address of the floats of each column.
            bitmaps: address of each column's validity bitmap, or 0, and its first bit.
        """
        self._fields_FI[:, 0], self._fields_FI[:, 1:3] = addresses, bitmaps

    def write(self, order_R: Ints | None, out_FR: Floats, begin: int = 0) -> bool:
        """Write selected rows from `begin` on, column by column; true if a value is infinite.

        Args:
            order_R: row numbers to select, in range; None for all rows in table order.
            out_FR: output.
            begin: first of the selected rows.
        """
        count, rows = out_FR.shape
        assert count == len(self._columns)
        assert order_R is None or begin + rows <= len(order_R)
        return bool(library.rw_fill(self._columns, count, order_R, begin, rows, out_FR))


def transpose(columns_FR: Floats, out_RF: Floats) -> None:
    assert columns_FR.shape == out_RF.shape[::-1]
    library.rw_turn(columns_FR, *columns_FR.shape, out_RF)


def map_ids(values_N: Ints, mapping: RowMapping, out: Ints | None = None) -> Ints:
    """The row of each id; `out` may alias `values_N`."""
    values_N = np.ascontiguousarray(values_N.view(np.int64) if values_N.dtype == np.uint64 else values_N, np.int64)
    out = np.empty(len(values_N), np.int64) if out is None else out
    if out.dtype != np.int64 or out.shape != values_N.shape or not out.flags.c_contiguous:
        raise SpecError(f"out is {out.dtype}{list(out.shape)}", f"contiguous int64[{len(values_N)}]")
    library.rw_map(values_N, out, len(values_N), _c_mapping(mapping))
    return out


def bucketize(x_N: NDArray[np.float32 | np.float64], borders_K: NDArray[np.float32 | np.float64]) -> Ints:
    """The number of ascending borders that are at most x; all of them for NaN, as in numpy's searchsorted."""
    borders_K = np.asarray(borders_K)
    if np.isnan(borders_K).any() or (borders_K[1:] < borders_K[:-1]).any():
        raise SpecError("bucket borders are not ascending, or NaN", "ascending numbers")
    single = x_N.dtype == np.float32
    x_N = np.ascontiguousarray(x_N, np.float32 if single else np.float64)
    # The kernel runs a branchless binary search on 2 * half - 1 borders, padded with infinity.
    half = 1 << max(len(borders_K) - 1, 0).bit_length()
    if half == len(borders_K):
        half *= 2
    half = max(half // 2, 1)
    padded = np.full(2 * half - 1, np.inf, x_N.dtype)
    padded[: len(borders_K)] = _rounded_up(borders_K) if single else borders_K
    bucket_N = np.empty(len(x_N), np.int64)
    call = library.rw_buckets32 if single else library.rw_buckets64
    call(x_N, len(x_N), padded, half, len(borders_K), bucket_N)
    return bucket_N


def mix_bytes(data: NDArray[np.uint8], offsets_N1: Ints) -> Words:
    """`mix.mix_bytes` by the kernel: the hash of each byte string `data[offsets[i]:offsets[i + 1]]`."""
    data, offsets_N1 = np.ascontiguousarray(data, np.uint8), np.ascontiguousarray(offsets_N1, np.int64)
    count = len(offsets_N1) - 1
    if count and (offsets_N1[0] < 0 or offsets_N1[-1] > len(data) or (offsets_N1[1:] < offsets_N1[:-1]).any()):
        raise DataError(f"offsets of text descend, or lie outside the {len(data)} bytes", "an undamaged column")
    hash_N = np.empty(max(count, 0), np.uint64)
    library.rw_text(data, offsets_N1, len(hash_N), len(data), hash_N)
    return hash_N


def _c_mapping(mapping: RowMapping) -> _RowMappingFields:
    if not 1 <= mapping.rows <= ALL:
        raise SpecError(f"rows={mapping.rows}", "1 to 2**63 - 1")
    return _RowMappingFields(what=mapping.what, rows=mapping.rows, salt=mapping.salt)


def _rounded_up(borders_K: NDArray[np.float32 | np.float64]) -> Floats:
    """Borders rounded up to 32 bits: no 32-bit number lies in between, so comparisons do not change."""
    with np.errstate(over="ignore"):
        near_K = borders_K.astype(np.float32)
        return np.where(near_K < borders_K, np.nextafter(near_K, np.float32(np.inf)), near_K)


def _point_to(ids: _Ids, lists: Lists) -> None:
    ids.values, ids.kind, ids.count = address_of(lists.values), KINDS[lists.values.dtype], len(lists.values)
    ids.offsets = None if lists.offsets is None else address_of(lists.offsets)
    ids.offset_bytes = 0 if lists.offsets is None else lists.offsets.itemsize
    ids.base = lists.base
    ids.row_valid, ids.row_bit = bitmap_place(lists.row_valid)
    ids.id_valid, ids.id_bit = bitmap_place(lists.id_valid)


def _count(ids: _Ids) -> int:
    """The number of ids of the selected rows; refuses offsets outside the values."""
    total: int = library.rw_count(ids)
    if total < 0:
        raise DataError(f"offsets of lists descend, or lie outside the {ids.count} values", "an undamaged column")
    return total


def bitmap_place(bitmap: Bitmap | None) -> tuple[int, int]:
    """The address of a bitmap, or 0, and its first bit."""
    return (0, 0) if bitmap is None else (address_of(bitmap.bytes), bitmap.first)

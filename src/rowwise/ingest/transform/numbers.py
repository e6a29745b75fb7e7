"""Transforms of numbers, single or in lists: clamp, logarithm, logit, Box-Cox, fill and buckets.

Nulls and NaN are kept in place, also inside lists; a null list stays null, an empty one empty. `Fill` replaces both
here, `Dense.fill` after all transforms. float32 stays float32, integers stay integers where possible, and all other
numbers become float64.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import types

from rowwise.ingest import native
from rowwise.ingest.bags import decoded, flatten_values, numpy_type, to_offsets
from rowwise.ingest.block import Ints
from rowwise.ingest.kinds import NUMBERS_OR_LISTS, VALUES, decoded_kind, element_of
from rowwise.ingest.transform.arrays import (
    Numeric,
    float_kind,
    list_like,
    lists,
    nulls,
    number_kind,
    plain_kind,
    to_numbers,
)
from rowwise.ingest.transform.transform import (
    Arrays,
    Kinds,
    OneColumn,
    RowPosition,
    ToIds,
    check_borders,
    check_finite,
    is_words,
)

SMALLEST = 1e-6  # lower bound of Box-Cox inputs: the transform diverges at 0
Number = int | float
Float = np.float32 | np.float64


class Bucketize(ToIds, frozen=True, kw_only=True, tag="bucketize", tag_field="kind"):
    """The number of borders that are less than a number: an id from 0 to the number of borders.

    A number on a border belongs to the bucket below. Infinities are in the first and the last bucket; NaN becomes null.
    """

    borders: tuple[float, ...]
    want = NUMBERS_OR_LISTS

    def __post_init__(self) -> None:
        if not self.borders:
            raise self.spec_error("no borders: expected at least one, such as borders: [0.5]")
        check_borders(self, self.borders)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """One kernel call for all rows."""
        numbers = to_numbers(arrays[0])
        return (numbers.with_numbers(buckets(numbers.x_N, self.borders), numbers.missing_N),)


def buckets(x_N: Numeric, borders: tuple[float, ...]) -> Ints:
    """The number of borders below each number; whole numbers are compared as 64-bit floats."""
    x_N = x_N if x_N.dtype.kind == "f" else x_N.astype(np.float64)
    return native.bucketize(x_N, just_above(borders, x_N.dtype.type))


def just_above(borders: tuple[float, ...], kind: type[Float]) -> NDArray[Float]:
    """The smallest floats above the borders, so that `result <= x` is equivalent to `border < x`."""
    with np.errstate(over="ignore"):
        rounded_K = np.array(borders, np.float64).astype(kind)
    # A border that was rounded up is already that float.
    return np.where(rounded_K > np.array(borders), rounded_K, np.nextafter(rounded_K, kind(np.inf)))


class Clamp(OneColumn, frozen=True, kw_only=True, tag="clamp", tag_field="kind"):
    """Numbers below `low` become `low`, those above `high` become `high`, infinities too. Whole numbers stay whole."""

    low: Number | None = None
    high: Number | None = None
    want = NUMBERS_OR_LISTS

    def __post_init__(self) -> None:
        check_finite(self, low=self.low, high=self.high)
        if self.low is None and self.high is None:
            raise self.spec_error("neither low nor high: expected at least one")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise self.spec_error(f"low={self.low} and high={self.high}: expected low at most as large as high")

    def type_problem(self, kinds: Kinds) -> str:
        """Refuse fractions as bounds of whole numbers."""
        fractions = [b for b in (self.low, self.high) if b is not None and b != int(b)]
        if fractions and types.is_integer(element_of(kinds[0])):
            return f"whole numbers are cut at {fractions[0]}: expected whole bounds"
        return ""

    def types(self, kinds: Kinds) -> Kinds:
        return (list_like(kinds[0], number_kind(element_of(kinds[0]))),)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Compare all at once."""
        numbers = to_numbers(arrays[0])
        low, high = (_bound(bound, numbers.x_N.dtype) for bound in (self.low, self.high))
        return (numbers.with_numbers(np.clip(numbers.x_N, low, high), numbers.null_N),)


def _bound(bound: Number | None, kind: np.dtype[Any]) -> np.generic | None:
    """A bound in the type of the numbers; bounds of integers saturate."""
    if bound is None:
        return None
    if kind.kind == "f":
        with np.errstate(over="ignore"):
            return kind.type(bound)
    limits = np.iinfo(kind)
    return kind.type(min(max(int(bound), limits.min), limits.max))


def _map_float64(array: pa.Array, function: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> pa.Array:
    """Apply a function in float64; the result has the column's float type."""
    numbers = to_numbers(array)
    kind = np.float32 if numbers.x_N.dtype == np.float32 else np.float64
    with np.errstate(over="ignore"):  # overflows become infinite
        return numbers.with_numbers(function(numbers.x_N.astype(np.float64)).astype(kind), numbers.null_N)


class FloatTransform(OneColumn, frozen=True, kw_only=True):
    """A transform of numbers into floats."""

    want = NUMBERS_OR_LISTS

    def types(self, kinds: Kinds) -> Kinds:
        return (list_like(kinds[0], float_kind(element_of(kinds[0]))),)


class Log1p(FloatTransform, frozen=True, kw_only=True, tag="log1p", tag_field="kind"):
    """log(1 + max(x, 0)); infinity stays infinity."""

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Computed in the type of the column: float32 is precise enough."""
        numbers = to_numbers(arrays[0])
        x_N = numbers.x_N if numbers.x_N.dtype.kind == "f" else numbers.x_N.astype(np.float64)
        return (numbers.with_numbers(np.log1p(np.maximum(x_N, x_N.dtype.type(0))), numbers.null_N),)


class Logit(FloatTransform, frozen=True, kw_only=True, tag="logit", tag_field="kind"):
    """log(x / (1 - x)), with x clamped to [eps, 1 - eps], infinities too."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse an `eps` that leaves an empty interval."""
        if not 1e-12 <= self.eps < 0.5:
            raise self.spec_error(f"eps={self.eps}: expected at least 1e-12, and less than 0.5")

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Computed in float64, as 1 - eps rounds to 1 in float32."""
        return (_map_float64(arrays[0], self._logit),)

    def _logit(self, x_N: NDArray[np.float64]) -> NDArray[np.float64]:
        inside_N = np.clip(x_N, self.eps, 1 - self.eps)
        return np.log(inside_N / (1 - inside_N))


class BoxCox(FloatTransform, frozen=True, kw_only=True, tag="box_cox", tag_field="kind"):
    """(y ** power - 1) / power with y = x + shift, or log(y) where power is 0; y below 1e-6 counts as 1e-6.

    `power` is the lambda of the literature. Infinity gives the limit.
    """

    power: float
    shift: float = 0.0

    def __post_init__(self) -> None:
        check_finite(self, power=self.power, shift=self.shift)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        return (_map_float64(arrays[0], self._box_cox),)

    def _box_cox(self, x_N: NDArray[np.float64]) -> NDArray[np.float64]:
        y_N = np.maximum(x_N + self.shift, SMALLEST)
        return np.log(y_N) if self.power == 0 else (y_N**self.power - 1) / self.power


class Fill(OneColumn, frozen=True, kw_only=True, tag="fill", tag_field="kind"):
    """Replaces null and NaN by `value`, also in lists. A null list becomes a list with only the value.

    Empty lists stay empty, infinities stay. Ids can be filled with an id, texts with a text.
    """

    value: int | float | str
    want = VALUES

    def __post_init__(self) -> None:
        check_finite(self, value=None if isinstance(self.value, str) else self.value)

    def type_problem(self, kinds: Kinds) -> str:
        """Refuse a value that the column's type cannot hold."""
        kind = _filled_kind(kinds[0])
        if is_words(kind) != isinstance(self.value, str):
            return f"filled with {self.value!r}: expected {'a text' if is_words(kind) else 'a number'}"
        if types.is_integer(kind):
            limits = np.iinfo(numpy_type(kind))
            number = float("nan") if isinstance(self.value, str) else self.value
            if not (number == number // 1 and limits.min <= number <= limits.max):
                return f"whole numbers are filled with {self.value}: expected a whole number that 64 bits hold"
        return ""

    def types(self, kinds: Kinds) -> Kinds:
        return (list_like(kinds[0], _filled_kind(kinds[0])),)

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Fill elements, then rows."""
        array = arrays[0]
        kind = _filled_kind(array.type)
        value = pa.scalar(self.value if is_words(kind) else numpy_type(kind).type(self.value), kind)
        values, offsets_R1 = flatten_values(array)
        values = pc.fill_null(decoded(values).cast(kind, safe=False), value)
        if types.is_floating(kind):
            values = pc.call_function("if_else", [pc.call_function("is_nan", [values]), value, values])
        if offsets_R1 is None:
            return (values,)
        null_R = nulls(array)
        return (lists(values, offsets_R1, None) if null_R is None else _with_rows(values, offsets_R1, null_R, value),)


def _filled_kind(kind: pa.DataType) -> pa.DataType:
    inner = decoded_kind(element_of(kind))
    return number_kind(inner) if not is_words(inner) else plain_kind(inner)


def _with_rows(values: pa.Array, offsets_R1: Ints, null_R: NDArray[np.bool_], value: pa.Scalar) -> pa.Array:
    """Replace each null list by a list of one value."""
    filled_R1 = to_offsets(np.diff(offsets_R1) + null_R)
    at_N = np.zeros(filled_R1[-1], np.int64)
    new_N = np.zeros(filled_R1[-1], np.bool_)
    new_N[filled_R1[:-1][null_R]] = True
    at_N[~new_N] = np.arange(len(values))
    at_N[new_N] = len(values)

    longer = pa.concat_arrays([values, pa.array([value.as_py()], value.type)])
    return lists(longer.take(pa.array(at_N)), filled_R1, None)

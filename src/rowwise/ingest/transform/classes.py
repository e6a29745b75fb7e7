"""One-hot encoding of ids or bucketed numbers."""

from typing import Literal

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from rowwise.ingest.bags import decoded, flatten_values
from rowwise.ingest.block import Ints
from rowwise.ingest.kinds import IDS, NUMBERS_OR_LISTS, element_of
from rowwise.ingest.transform.arrays import lists, number_kind, row_of_each, to_numbers
from rowwise.ingest.transform.numbers import buckets
from rowwise.ingest.transform.transform import (
    Arrays,
    Kinds,
    OneColumn,
    RowPosition,
    check_borders,
    is_words,
)


class Onehot(OneColumn, frozen=True, kw_only=True, tag="onehot", tag_field="kind"):
    """1 for the class of a value and 0 for all others; classes are named, or are the buckets between borders.

    A list has a 1 for each class in it (multi-hot). Nulls, NaN and values of no class have no 1; a null row and an
    empty list are all zeros. K borders make K + 1 buckets, as in `bucketize`; infinities are in the first and the last.
    """

    classes: tuple[int | str, ...] = ()
    borders: tuple[float, ...] = ()
    # One column of 32-bit numbers for each class, called like the result with _0, _1 and so on, as `Dense` reads them;
    # or one column of lists with as many numbers as there are classes.
    into: Literal["columns", "lists"] = "columns"

    def __post_init__(self) -> None:
        """Refuse classes that are ambiguous or of several types."""
        if bool(self.classes) == bool(self.borders):
            number = "both" if self.borders else "neither"
            raise self.spec_error(f"got {number} of classes and borders: expected exactly one")
        check_borders(self, self.borders)
        if len({type(c) for c in self.classes}) > 1:
            raise self.spec_error(f"classes: {self.classes}: expected whole numbers only, or texts only")
        twice = [c for c in self.classes if self.classes.count(c) > 1]
        if twice:
            raise self.spec_error(f"classes: {twice[0]!r} appears twice: expected each class once")
        if self.into not in ("columns", "lists"):
            raise self.spec_error(f"into={self.into!r}: expected 'columns' or 'lists'")

    @property
    def width(self) -> int:
        """The number of classes."""
        return len(self.classes) or len(self.borders) + 1

    @property
    def makes(self) -> tuple[str, ...]:
        """One column of lists, or one column per class."""
        name = self.to or self.column
        return (name,) if self.into == "lists" else tuple(f"{name}_{n}" for n in range(self.width))

    @property
    def wants(self) -> tuple[str, ...]:
        """Numbers for buckets, or ids for classes."""
        return (NUMBERS_OR_LISTS if self.borders else IDS,)

    def type_problem(self, kinds: Kinds) -> str:
        """Refuse to compare numbers with words."""
        if self.classes and is_words(kinds[0]) != isinstance(self.classes[0], str):
            wanted = "texts" if is_words(kinds[0]) else "whole numbers"
            return f"compared with class {self.classes[0]!r}: expected {wanted}"
        low, high = (0, 1 << 64) if element_of(kinds[0]) == pa.uint64() else (-(1 << 63), 1 << 63)
        outside = [c for c in self.classes if isinstance(c, int) and not low <= c < high]
        return f"compared with class {outside[0]}: expected {low} to {high - 1}" if outside else ""

    def types(self, kinds: Kinds) -> Kinds:
        """Single or listed float32."""
        return (pa.large_list(pa.float32()),) if self.into == "lists" else (pa.float32(),) * self.width

    def run(self, arrays: Arrays, where: RowPosition) -> Arrays:
        """Set the ones of all rows by one assignment."""
        class_N, offsets_R1 = self._classes(arrays[0])
        rows, width = len(arrays[0]), self.width
        row_N = np.arange(rows) if offsets_R1 is None else row_of_each(offsets_R1)
        has_class_N = class_N >= 0
        ones_RK = np.zeros((rows, width), np.float32, order="C" if self.into == "lists" else "F")
        ones_RK[row_N[has_class_N], class_N[has_class_N]] = 1
        if self.into == "lists":
            return (lists(pa.array(ones_RK.reshape(-1)), np.arange(rows + 1) * width, None),)
        return tuple(pa.array(ones_RK[:, n]) for n in range(width))

    def _classes(self, array: pa.Array) -> tuple[Ints, Ints | None]:
        """The class of each element, -1 for none."""
        if self.borders:
            numbers = to_numbers(array)
            class_N = buckets(numbers.x_N, self.borders)
            return np.where(
                numbers.missing_N, -1, class_N
            ) if numbers.missing_N is not None else class_N, numbers.offsets_R1
        values, offsets_R1 = flatten_values(array)
        values = decoded(values)
        values = values.cast(pa.large_binary()) if is_words(values.type) else values.cast(number_kind(values.type))
        known = pa.array([c.encode() if isinstance(c, str) else c for c in self.classes], values.type)
        indices = pc.call_function("index_in", [values], pc.SetLookupOptions(value_set=known)).fill_null(-1)
        return indices.to_numpy(zero_copy_only=False).astype(np.int64), offsets_R1

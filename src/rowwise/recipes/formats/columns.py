"""Raw columns in a graph of plain torch operators: the transforms that have such operators, and the rows of ids.

A column is a tensor of one value per row, or the values of all its lists with their offsets, as in the Open Inference
Protocol (`serve/oip.py`). A missing number is NaN, and a missing whole number is `MISSING`. Sizes: B rows, N values.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rowwise.base.errors import SpecError
from rowwise.ingest.columns import Dense
from rowwise.ingest.mix import FACTORS, GOLDEN
from rowwise.ingest.transform import (
    BoxCox,
    Bucketize,
    Clamp,
    Fill,
    FirstX,
    Log1p,
    Logit,
    MapId,
    PositiveModulus,
    Transform,
)
from rowwise.ingest.transform.numbers import SMALLEST, just_above

MISSING = -(1 << 63)  # a whole number that stands for null
WORD_bits = 64


class GraphColumn(NamedTuple):
    """A column of single values, or of lists."""

    values_N: Tensor
    missing_N: Tensor  # values that do not count: of null, or dropped
    offsets_B1: Tensor | None = None  # of lists

    @classmethod
    def of(cls, values_N: Tensor, offsets_B1: Tensor | None) -> "GraphColumn":
        """A column of the data; missing values become 0."""
        missing_N = values_N.isnan() if values_N.is_floating_point() else values_N == MISSING
        return cls(torch.where(missing_N, 0, values_N), missing_N, offsets_B1)

    @property
    def row_of_each(self) -> Tensor:
        """The row of each value of a list."""
        assert self.offsets_B1 is not None
        count, ends_B = self.values_N.shape[0], self.offsets_B1[1:]
        ends_N1 = torch.zeros(count + 1, dtype=torch.int64).index_add(0, ends_B, torch.ones_like(ends_B))
        return ends_N1.cumsum(0)[:count]

    def with_values(self, values_N: Tensor) -> "GraphColumn":
        return self._replace(values_N=values_N)

    def without(self, dropped_N: Tensor) -> "GraphColumn":
        return self._replace(missing_N=self.missing_N | dropped_N)

    def first(self, count: int, *, counts_missing: bool) -> "GraphColumn":
        """The first values of each list."""
        if self.offsets_B1 is None:
            return self
        used_N = torch.ones_like(self.missing_N) if counts_missing else ~self.missing_N
        before_N1 = torch.cat([torch.zeros(1, dtype=torch.int64), used_N.to(torch.int64).cumsum(0)])
        place_N = before_N1[:-1] - before_N1[self.offsets_B1[self.row_of_each]]
        return self.without(place_N >= count)


def dense_numbers(column: GraphColumn, dense: Dense) -> Tensor:
    """A dense input [B] of the model, as `ingest/encode.py` computes it."""
    x_B = torch.where(column.missing_N, dense.fill, column.values_N.to(torch.float32))
    if dense.log1p:
        x_B = torch.log1p(x_B.clamp(min=0))
    return (x_B - dense.mean) / dense.std if dense.mean or dense.std != 1 else x_B


def hashed_rows(ids_N: Tensor, rows: int) -> Tensor:
    """Rows of whole numbers whose ids are hashed: `ingest/mix.py` in signed words."""
    x_N = ids_N + _signed(GOLDEN)
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        x_N = (x_N ^ _shift(x_N, shift)) * _signed(factor)
    x_N = x_N ^ _shift(x_N, 31)
    return (_shift(x_N, 1) % rows * 2 + (x_N & 1)) % rows  # of the unsigned word


def apply_transform(transform: Transform, column: GraphColumn) -> GraphColumn:
    """The result of a transform of one column; raises for one without torch operators."""
    function = OPERATORS.get(type(transform))
    if function is None:
        raise SpecError(
            f"transform {transform.kind} of {', '.join(transform.reads)}: a graph has no operators for it",
            f"transforms among {', '.join(str(kind.__struct_config__.tag) for kind in OPERATORS)}",
            hint="write its result into the data, or export with --mlflow or --triton, which call rowwise",
        )
    return function(transform, column)


def _shift(x_N: Tensor, bits: int) -> Tensor:
    """A right shift of unsigned words."""
    return (x_N >> bits) & ((1 << (WORD_bits - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << WORD_bits) if word >> (WORD_bits - 1) else word


def _floats(column: GraphColumn) -> Tensor:
    return column.values_N if column.values_N.is_floating_point() else column.values_N.double()


def _fill(t: Fill, column: GraphColumn) -> GraphColumn:
    if column.offsets_B1 is not None:
        raise SpecError(
            f"transform fill of {t.column}: a graph cannot tell a null list from an empty one",
            "no fill of lists",
            hint="fill the lists of the data",
        )
    assert not isinstance(t.value, str)  # text is no input of a graph
    values_B = torch.where(column.missing_N, t.value, column.values_N)
    return GraphColumn(values_B.to(column.values_N.dtype), torch.zeros_like(column.missing_N))


def _clamp(t: Clamp, column: GraphColumn) -> GraphColumn:
    return column.with_values(column.values_N.clamp(t.low, t.high))


def _log1p(_: Log1p, column: GraphColumn) -> GraphColumn:
    return column.with_values(torch.log1p(_floats(column).clamp(min=0)))


def _logit(t: Logit, column: GraphColumn) -> GraphColumn:
    x_N = _floats(column)
    inside_N = x_N.double().clamp(t.eps, 1 - t.eps)
    return column.with_values((inside_N / (1 - inside_N)).log().to(x_N.dtype))


def _box_cox(t: BoxCox, column: GraphColumn) -> GraphColumn:
    x_N = _floats(column)
    y_N = (x_N.double() + t.shift).clamp(min=SMALLEST)
    return column.with_values((y_N.log() if t.power == 0 else (y_N**t.power - 1) / t.power).to(x_N.dtype))


def _bucketize(t: Bucketize, column: GraphColumn) -> GraphColumn:
    x_N = _floats(column)
    kind = np.float32 if x_N.dtype == torch.float32 else np.float64
    borders_K = torch.from_numpy(just_above(t.borders, kind))
    return column.with_values((x_N.unsqueeze(-1) >= borders_K).sum(-1))


def _first_x(t: FirstX, column: GraphColumn) -> GraphColumn:
    return column.first(t.count, counts_missing=column.values_N.is_floating_point())


def _modulus(t: PositiveModulus, column: GraphColumn) -> GraphColumn:
    return column.with_values(column.values_N % t.rows)


def _map_id(t: MapId, column: GraphColumn) -> GraphColumn:
    """A binary search among the known ids."""
    known = sorted((int(key), number) for key, number in t.mapping.items())
    keys_K, numbers_K = torch.tensor(known).unbind(1)
    at_N = torch.zeros_like(column.values_N)
    for bit in reversed(range(len(known).bit_length())):
        next_N = at_N + (1 << bit)
        inside_N = next_N < len(known)
        below_N = keys_K[torch.where(inside_N, next_N, 0)] <= column.values_N
        at_N = torch.where(inside_N & below_N, next_N, at_N)
    unknown_N = keys_K[at_N] != column.values_N
    if t.unknown == "drop":
        return column.with_values(numbers_K[at_N]).without(unknown_N)
    number = -1 if t.unknown == "raise" else t.unknown  # which no table has
    return column.with_values(torch.where(unknown_N, number, numbers_K[at_N]))


OPERATORS: dict[type[Transform], Callable[[Any, GraphColumn], GraphColumn]] = {
    BoxCox: _box_cox,
    Bucketize: _bucketize,
    Clamp: _clamp,
    Fill: _fill,
    FirstX: _first_x,
    Log1p: _log1p,
    Logit: _logit,
    MapId: _map_id,
    PositiveModulus: _modulus,
}

"""Compares two checkpoints: which tensors differ, in how many rows and by how much; and the data of the manifests.

Reads both window by window. Equal row types are compared bit by bit, different ones as float32. Times (keys that end in
`_s`) are ignored, as they differ between any two runs.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rowwise.checkpoint.manifest import Span, TensorEntry
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.windows import ProgressCounter, Tell, windows
from rowwise.tables.ops.rowtype import unpack
from rowwise.tables.spec import Value

Kind = Literal["only in the first", "only in the second", "shape", "type", "values"]


class Difference(Value, frozen=True):
    """A tensor that differs."""

    name: str
    kind: Kind
    first: str = ""  # its shape or type in the first checkpoint
    second: str = ""
    rows: int | None = None  # number of unequal rows; None if not comparable
    of_rows: int | None = None
    largest: float | None = None  # largest difference of two numbers; NaN if one of the two is NaN


class Differences(Value, frozen=True):
    """All differences between two checkpoints."""

    equal: int  # number of tensors that are equal bit by bit
    tensors: tuple[Difference, ...]
    data: dict[str, tuple[Any, Any]]  # values of both manifests by dotted path

    @property
    def any(self) -> bool:
        return bool(self.tensors or self.data)


class _UnequalRows(NamedTuple):
    rows: int
    largest: float


def diff(first: Checkpoint, second: Checkpoint, tell: Tell | None = None) -> Differences:
    """Compare all tensors, and the data of the manifests."""
    a, b = first.manifest.tensors, second.manifest.tensors
    differences: list[Difference] = [Difference(name=name, kind="only in the first") for name in a if name not in b]
    differences += [Difference(name=name, kind="only in the second") for name in b if name not in a]
    both = [name for name in a if name in b]
    progress, equal = ProgressCounter(tell, sum(a[name].rows * a[name].columns for name in both)), 0
    for name in both:
        difference = _compare(first, second, name)
        equal += difference is None
        differences += [] if difference is None else [difference]
        progress.add(a[name].rows * a[name].columns)
    return Differences(equal=equal, tensors=tuple(differences), data=_data(first.manifest.data, second.manifest.data))


def _compare(first: Checkpoint, second: Checkpoint, name: str) -> Difference | None:
    a, b = first.entry(name), second.entry(name)
    if a.shape != b.shape:
        return Difference(name=name, kind="shape", first=str(a.shape), second=str(b.shape))
    types = (a.dtype, a.row_type, a.column_group), (b.dtype, b.row_type, b.column_group)
    type_a, type_b = (_type(entry) for entry in (a, b))
    if types[0] != types[1] and not (a.row_type and b.row_type):
        return Difference(name=name, kind="type", first=type_a, second=type_b)
    rows, largest = 0, 0.0
    for span in windows(a, b):
        unequal = _unequal(_window(first, name, span), _window(second, name, span), types[0] == types[1])
        rows += unequal.rows
        largest = math.nan if math.isnan(unequal.largest) else max(largest, unequal.largest)
    if types[0] != types[1]:
        return Difference(
            name=name, kind="type", first=type_a, second=type_b, rows=rows, of_rows=a.rows, largest=largest
        )
    return Difference(name=name, kind="values", rows=rows, of_rows=a.rows, largest=largest) if rows else None


class _TensorWindow(NamedTuple):
    stored: Tensor
    numbers: Tensor  # float32 of rows of tables


def _window(checkpoint: Checkpoint, name: str, rows: Span) -> _TensorWindow:
    entry = checkpoint.entry(name)
    if not entry.shape:
        stored = checkpoint.load(name).view(1)
        return _TensorWindow(stored, stored)
    stored = checkpoint.load(name, rows)
    if entry.row_type is None:
        return _TensorWindow(stored, stored)
    return _TensorWindow(stored, unpack(stored, entry.columns, entry.row_type, entry.column_group))


def _unequal(a: _TensorWindow, b: _TensorWindow, same_type: bool) -> _UnequalRows:
    """The number of rows that differ, and the largest difference."""
    x, y = (_bits(window.stored if same_type else window.numbers) for window in (a, b))
    differ_N = (x != y).any(1) if x.numel() else torch.zeros(len(x), dtype=torch.bool)
    if not bool(differ_N.any()):
        return _UnequalRows(0, 0.0)
    u, v = (x.numbers.reshape(len(x.numbers), -1)[differ_N].double() for x in (a, b))
    gap = (u - v).abs()
    gap[(u == v) | (u.isnan() & v.isnan())] = 0.0  # inf - inf and NaN - NaN would be NaN
    return _UnequalRows(int(differ_N.sum()), gap.max().item() if gap.numel() else 0.0)


def _bits(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1).contiguous().view(torch.uint8)


def _type(entry: TensorEntry) -> str:
    if entry.row_type is None:
        return entry.dtype
    group = f" in groups of {entry.column_group}" if entry.column_group else ""
    return f"{entry.row_type} rows{group}"


def _data(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    keys = [key for key in dict.fromkeys([*flat_a, *flat_b]) if not key.endswith("_s")]
    return {key: (flat_a.get(key), flat_b.get(key)) for key in keys if flat_a.get(key) != flat_b.get(key)}


def _flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts by dotted path; lists are leaves."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{at}.{key}" if at else str(key))
    else:
        yield at, value

"""Helpers shared by all metrics: saving, restoring and merging their states.

A state is a flat dict of tensors, numbers and strings, for JSON and safetensors. Tensors may come back as nested lists,
as JSON returns them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rowwise.base.errors import SpecError, StateError

T = TypeVar("T")
State = dict[str, Tensor | int | float | str]


def join(parts: Mapping[str, State]) -> State:
    """One state of several parts; each key is prefixed with its part's name."""
    return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}


def part(state: Mapping[str, object], name: str) -> dict[str, object]:
    """The state of one part of a joined state; the inverse of `join`."""
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


def read_int(state: Mapping[str, object], key: str) -> int:
    value = _read(state, key)
    if type(value) is not int:
        raise StateError(f"{key!r} in the state of a metric: got {value!r}", "a whole number")
    return value


def read_tensor(
    state: Mapping[str, object], key: str, shape: Sequence[int | None], dtype: torch.dtype = torch.float64
) -> Tensor:
    """A copy of a tensor of the state; raises unless it has this shape, in which None is any size."""
    value = _read(state, key)
    try:
        tensor = torch.as_tensor(value, dtype=dtype).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"{key!r} in the state of a metric does not make a tensor of {dtype}: {error}") from error
    if tensor.numel() == 0 and not all(shape):  # JSON returns an empty tensor as an empty list, without its shape
        return tensor.new_zeros([size or 0 for size in shape])
    if tensor.dim() != len(shape) or any(w not in (None, g) for g, w in zip(tensor.shape, shape, strict=True)):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise StateError(f"{key!r} in the state of a metric: got shape {tuple(tensor.shape)}", f"({expected})")
    return tensor


def narrow(numbers: Tensor) -> Tensor:
    """The same numbers in 8 or 32 bits, where these have all of them; `read_tensor` widens them."""
    for dtype in (torch.uint8, torch.float32):
        narrowed = numbers.to(dtype)
        if torch.equal(narrowed.to(numbers.dtype), numbers):
            return narrowed
    return numbers.clone()


def check_equal(setting: str, a: object, b: object) -> None:
    """Raise unless two metrics to merge have the same setting."""
    if a != b:
        raise StateError(f"metrics with {setting} {a} and {b} do not merge", f"the same {setting} for both")


def merge_newest(window_a: Sequence[T], window_b: Sequence[T], add: Callable[[T, T], T]) -> list[T]:
    """Merge two windows of batches, oldest first: newest is added to newest, as both belong to the same step."""
    longer, shorter = (window_a, window_b) if len(window_a) >= len(window_b) else (window_b, window_a)
    unmatched = len(longer) - len(shorter)
    return [*longer[:unmatched], *(add(a, b) for a, b in zip(longer[unmatched:], shorter, strict=True))]


def check_positive(name: str, value: int) -> int:
    """The value; raises unless it is a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise SpecError(f"{name}={value!r}", "a whole number of at least 1")
    return value


def _read(state: Mapping[str, object], key: str) -> object:
    if key not in state:
        keys = ", ".join(map(repr, state)) or "nothing"
        raise StateError(f"the state of a metric has no {key!r}; it has {keys}", "the result of its state()")
    return state[key]

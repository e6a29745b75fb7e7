"""The shared interface of metrics: saving, restoring and merging.

A state is one flat dict of tensors, numbers and strings, which JSON and safetensors both hold. Tensors may come back
as nested lists, as JSON returns them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rowwise.errors import SpecError, StateError

T = TypeVar("T")
State = dict[str, Tensor | int | float | str]


class Stateful(Protocol):
    """An object with a state that checkpoints save."""

    def state(self) -> State: ...


def join(parts: Mapping[str, Stateful]) -> State:
    """The states of the parts of a whole, each key led by its part's name."""
    return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state().items()}


def part(state: Mapping[str, object], name: str) -> dict[str, object]:
    """The state of one part of a whole."""
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


def read_int(state: Mapping[str, object], key: str) -> int:
    value = _read(state, key)
    if type(value) is not int:
        raise StateError(f"{key!r} in the state of a metric: got {value!r}; want a whole number")
    return value


def read_tensor(
    state: Mapping[str, object], key: str, shape: Sequence[int | None], dtype: torch.dtype = torch.float64
) -> Tensor:
    """A tensor of a shape, in which None stands for any size; a copy, so that training on leaves the state as it is."""
    value = _read(state, key)
    try:
        tensor = torch.as_tensor(value, dtype=dtype).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"{key!r} in the state of a metric does not make a tensor of {dtype}: {error}") from error
    if tensor.numel() == 0 and not all(shape):  # a list of nothing has no shape to come back with
        return tensor.new_zeros([size or 0 for size in shape])
    if tensor.dim() != len(shape) or any(w not in (None, g) for g, w in zip(tensor.shape, shape, strict=True)):
        want = ", ".join("any" if size is None else str(size) for size in shape)
        raise StateError(f"{key!r} in the state of a metric: got shape {tuple(tensor.shape)}; want ({want})")
    return tensor


def check_alike(what: str, mine: object, other: object) -> None:
    """Only metrics of the same settings can be merged."""
    if mine != other:
        raise StateError(f"metrics with {what} {mine} and {other} do not merge: make both with the same {what}")


def merge_newest(mine: Sequence[T], others: Sequence[T], add: Callable[[T, T], T]) -> list[T]:
    """Two windows, oldest batch first, as one: newest is added to newest, as ranks take their steps together."""
    longer, shorter = (mine, others) if len(mine) >= len(others) else (others, mine)
    alone = len(longer) - len(shorter)
    return [*longer[:alone], *(add(a, b) for a, b in zip(longer[alone:], shorter, strict=True))]


def check_positive(name: str, value: int) -> int:
    """A size that a metric can be made with."""
    if type(value) is not int or value < 1:
        raise SpecError(f"{name}={value!r}: want a whole number of at least 1")
    return value


def _read(state: Mapping[str, object], key: str) -> object:
    if key not in state:
        has = ", ".join(map(repr, state)) or "nothing"
        raise StateError(f"the state of a metric has no {key!r}; it has {has}: want what its state() returned")
    return state[key]

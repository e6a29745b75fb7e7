"""Builds the model of an untrusted version, with layers bounded by the size of its weights."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rowwise.base.errors import SpecError
from rowwise.checkpoint.read import Checkpoint
from rowwise.recipes.code import file_of
from rowwise.recipes.compose import build_model
from rowwise.recipes.resolved import ModelParts
from rowwise.serve.contents import reading_export
from rowwise.serve.package import MODEL
from rowwise.train.snapshot import check_weights

FACTORIES = frozenset((torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye))
TIMES, MIN_bytes = 8, 64 << 20  # bound over the bytes of weights: models also have indices and temporaries


def build_checked(version: Checkpoint, parts: ModelParts) -> nn.Module:
    """The model with its tables on the meta device; raises unless the version has the weights of both."""
    entries = version.manifest.tensors.values()
    size_bytes = sum(entry.rows * entry.row_bytes for entry in entries)
    # User code cannot be bounded.
    bounded = nullcontext() if file_of(parts.model) is not None else _BoundedTensors(TIMES * size_bytes + MIN_bytes)
    with reading_export(version.folder / MODEL), bounded:
        model = build_model(parts, on_meta=True)
    check_weights(version, model)
    return model


@final
class _BoundedTensors(TorchFunctionMode):
    """Limits the total bytes of new tensors; tensors on the meta device are free."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes, self._left_bytes = max_bytes, max_bytes

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if func in FACTORIES and str(kwargs.get("device")) != "meta":
            try:
                planned = func(*args, **{k: v for k, v in kwargs.items() if k != "generator"} | {"device": "meta"})
            except RuntimeError as error:  # the size overflows 64 bits
                raise SpecError(f"a layer cannot be made: {str(error)[:100]}") from None
            self._left_bytes -= planned.nbytes
            if self._left_bytes < 0:
                raise SpecError(
                    f"layers of {tuple(planned.shape)} numbers",
                    f"at most {self._max_bytes:,} bytes, as the version has few weights",
                )
        return func(*args, **kwargs)

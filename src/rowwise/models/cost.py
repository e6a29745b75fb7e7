"""Cost of the dense part of a model: parameters, and floating-point operations per sample."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rowwise.tables.batch import Batch
from rowwise.tables.spec import Value


class ModelCost(Value, frozen=True):
    """Cost of the dense part of a model, without its tables."""

    parameters: int
    flops: int  # of matrix products in a forward, per sample; a step takes about three times as many


def model_cost(model: nn.Module, batch: Batch) -> ModelCost:
    """Parameters that an optimizer trains, and a sample's share of a forward of this batch."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, which no run on a CPU needs

    counter = FlopCounterMode(display=False, custom_mapping=flop_formulas())
    with counter:  # and gradients, without which the counter fails on parameters that are no layer's weights
        model(batch)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return ModelCost(parameters, counter.get_total_flops() // len(batch.labels_BK))


def activation_bytes(model: nn.Module, batch: Batch, units: Sequence[nn.Module]) -> tuple[int, int]:
    """Bytes per sample that a forward saves for its backward: without and with recomputation of `units`.

    With recomputation units save their inputs only; the peak adds the activations of the largest unit.
    """
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: list[Tensor] = []  # keeps storages alive, so that no address is used twice
    sizes: dict[int, int] = {}
    inside: dict[nn.Module | None, set[int]] = {unit: set() for unit in (None, *units)}  # None: outside of units
    entered: list[nn.Module] = []

    def keep(tensor: Tensor, unit: nn.Module | None) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            alive.append(tensor)
            sizes[storage.data_ptr()] = storage.nbytes()
            inside[unit].add(storage.data_ptr())
        return tensor

    def enter(unit: nn.Module, inputs: tuple[Any, ...]) -> None:
        for x in inputs:
            if isinstance(x, Tensor):
                keep(x, None)
        entered.append(unit)

    def leave(*_: Any) -> None:
        entered.pop()

    hooks = [unit.register_forward_pre_hook(enter) for unit in units]
    hooks += [unit.register_forward_hook(leave) for unit in units]
    try:
        with saved_tensors_hooks(lambda x: keep(x, entered[-1] if entered else None), lambda x: x):
            alive.append(model(batch))
    finally:
        for hook in hooks:
            hook.remove()
    outside = inside.pop(None)
    largest = max((sum(sizes[at] for at in storages - outside) for storages in inside.values()), default=0)
    samples, always = len(batch.labels_BK), sum(sizes[at] for at in outside)
    kept = sum(sizes[at] for at in outside.union(*inside.values()))
    return kept // samples, (always + largest) // samples


def flop_formulas() -> dict[Any, Any]:
    """Formulas from input shapes to operations, for operators unknown to torch's counter."""
    formulas: dict[Any, Any] = {
        torch.ops.rowwise.interact: _dots,
        torch.ops.rowwise.pair_sums: _pair_sums,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    }
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        formulas[torch.ops.mkldnn._linear_pointwise] = _product
    return formulas


def _product(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * x[0] * x[1] * weight[0]


def _attention(query: Sequence[int], key: Sequence[int], *_: Any, **__: Any) -> int:
    batch, heads, queries, width = query
    return 4 * batch * heads * queries * key[2] * width


def _dots(dense: Sequence[int], pooled: Sequence[int], *_: Any, **__: Any) -> int:
    vectors = 1 + pooled[1] // dense[1]
    return dense[0] * vectors * (vectors - 1) // 2 * 2 * dense[1]


def _pair_sums(dense: Sequence[int], pooled: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * dense[0] * (dense[1] + pooled[1])

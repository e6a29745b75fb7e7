"""What the dense part of a model costs: parameters, and floating-point operations for a sample."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rowwise.batch import Batch
from rowwise.spec import Value


class ModelCost(Value, frozen=True):
    """Of all but the tables."""

    parameters: int
    flops: int  # of matrix products in a forward, for a sample; a step takes about three times as many


def model_cost(model: nn.Module, batch: Batch) -> ModelCost:
    """Parameters that an optimizer trains, and a sample's share of a forward of this batch."""
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    with counter:  # and gradients, without which the counter fails on parameters that are no layer's weights
        model(batch)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return ModelCost(parameters, counter.get_total_flops() // len(batch.labels_BK))


def _formulas() -> dict[Any, Any]:
    """By operator that torch's counter does not know: operations for shapes of the inputs."""
    found: dict[Any, Any] = {
        torch.ops.rowwise.interact: _dots,
        torch.ops.rowwise.pair_sums: _pair_sums,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    }
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found[torch.ops.mkldnn._linear_pointwise] = _product
    return found


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

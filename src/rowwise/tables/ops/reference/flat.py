"""The reference of operators on bags, under the flat signatures that are registered with torch."""

from typing import Any

from torch import Tensor

from rowwise.tables.ops import reference
from rowwise.tables.ops.reference import FeatureBags, UpdateMemory


def pool(arena: Tensor, *args: Any) -> Tensor:
    features, values, offsets, weights, batch, columns = args
    return reference.pool(arena, FeatureBags(features, values, offsets, weights, batch), columns)


def pool_weight_grad(arena: Tensor, *args: Any) -> Tensor:
    features, values, offsets, weights, grad, batch = args
    return reference.pool_weight_grad(arena, FeatureBags(features, values, offsets, weights, batch), grad)


def gather(arena: Tensor, *args: Any) -> Tensor:
    features, values, offsets, batch = args
    return reference.gather(arena, FeatureBags(features, values, offsets, None, batch))


def update(*args: Any) -> None:
    arena, state, tables, hyper, keys, features, values, offsets, weights, grad, batch, per_id, *slot_rows = args
    bags = FeatureBags(features, values, offsets, weights, batch)
    reference.update(UpdateMemory(arena, state, tables, hyper, keys, *slot_rows), bags, grad, per_id)


def mark(touched: Tensor, starts: Tensor, arena: Tensor, *args: Any) -> None:
    features, values, offsets, batch = args
    reference.mark(touched, starts, FeatureBags(features, values, offsets, None, batch))

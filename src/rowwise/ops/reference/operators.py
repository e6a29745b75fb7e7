"""`operators`: the reference under the flat signatures that are registered with torch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rowwise.ops import reference
from rowwise.ops.reference import FeatureBags, UpdateMemory


def operators() -> dict[str, Callable[..., Any]]:
    """The reference by the names of the operators."""

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

    return {
        "offsets": reference.offsets,
        "pool": pool,
        "pool_weight_grad": pool_weight_grad,
        "gather": gather,
        "update": update,
        "mark": mark,
        "pack4": reference.pack4,
        "unpack4": reference.unpack4,
        "keep_largest": reference.keep_largest,
        "fill_uniform": reference.fill_uniform,
        "fill_uniform_rows": reference.fill_uniform_rows,
        "pack": reference.pack,
        "unpack": reference.unpack,
        "lengths": reference.lengths,
        "in_range": reference.in_range,
        "find_newer": reference.find_newer,
        "take": reference.take,
        "bucketize": reference.bucketize,
        "expand": reference.expand,
        "spread": reference.spread,
        "deduplicate": reference.deduplicate,
        "place": reference.place,
        "pack_ids": reference.pack_ids,
        "interact": reference.interact,
        "interact_grad": reference.interact_grad,
        "pair_sums": reference.pair_sums,
        "pair_sums_grad": reference.pair_sums_grad,
        "dots": reference.dots,
        "relu_grad": reference.relu_grad,
        "map_ids": reference.map_ids,
    }

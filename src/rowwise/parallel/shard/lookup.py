"""`LocalLookup`: looks up a rank's pieces for the samples of all ranks, and replicated tables for its own samples.

Pooled gradients are staged by hand, not by autograd: for shared bags and on the path `per_id` the vectors
that are sent and the gradients that come back have different shapes.
"""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from rowwise.parallel.shard.exchange import LookupOutputs, VectorGradients
from rowwise.parallel.shard.pack import BagSet, RoutedBatch
from rowwise.parallel.shard.routes import ExchangePath, PieceGroup
from rowwise.tables.ops.tiles import Tiles


@final
class LocalLookup:
    """Looks up the piece groups and the replicated tables of a rank, and stages their gradients."""

    def __init__(self, groups: Sequence[tuple[PieceGroup, Tiles]], replicated: Tiles | None) -> None:
        self._groups, self._replicated = groups, replicated

    def look_up(self, routed: RoutedBatch) -> tuple[LookupOutputs, Mapping[str, Tensor]]:
        """The outputs to exchange, and the sequences of replicated tables by feature."""
        own, device = routed.bag_sets[0], routed.jagged.values_N.device
        sequences = [
            tiles.look_up_sequences(own.received, own.samples_W).flat
            for group, tiles in self._groups
            if group.path is not ExchangePath.PER_ID and own.received is not None
        ]
        flat, rows = torch.empty(0, device=device), dict[str, Tensor]()
        pooled = flat.new_empty(routed.jagged.batch_size, 0)
        if self._replicated is not None:
            output = self._replicated.look_up(routed.jagged)
            pooled, rows = output.matrix_BS, self._replicated.split(output)
        bag_sets = [self._pooled(bag_set) for bag_set in routed.bag_sets]
        return LookupOutputs(bag_sets=bag_sets, sequences=_concat(sequences, 0, flat), replicated=pooled), rows

    def _pooled(self, bag_set: BagSet) -> dict[ExchangePath, Tensor]:
        outputs: dict[ExchangePath, list[Tensor]] = {path: [] for path in ExchangePath}
        for group, tiles in self._groups:
            if bag_set.received is not None:
                look_up = tiles.gather if group.path is ExchangePath.PER_ID else tiles.pool
                outputs[group.path].append(look_up(bag_set.received))
        flat = torch.empty(0, device=bag_set.sent.jagged.values_N.device)
        matrix = flat.new_empty(sum(bag_set.samples_W), 0)
        return {
            path: _concat(parts, 0, flat) if path is ExchangePath.PER_ID else _concat(parts, 1, matrix)
            for path, parts in outputs.items()
        }

    def stage(self, routed: RoutedBatch, gradients: VectorGradients) -> Tensor | None:
        """Stage the gradients of this rank's pieces; returns the gradient of received per-id weights, if any."""
        rest, received, weight_grad = [dict(one) for one in gradients.bag_sets], routed.received, None
        for group, tiles in self._groups:
            if received is None or not tiles.pooled.tables:
                continue
            # One gradient matrix per path holds the columns of all groups on it, in the order of the groups: each group
            # takes its columns from the front. With `merge_shared` there is one matrix per bag set, else one in all.
            shared_features = received.all_features[len(received.features) :]
            features_of = (received.features, shared_features) if len(rest) > 1 else (received.all_features,)
            grads: list[Tensor] = []
            for by_path, features in zip(rest, features_of, strict=True):
                columns = tiles.columns_of(features)
                grads.append(by_path[group.path][:, :columns].contiguous())
                by_path[group.path] = by_path[group.path][:, columns:]
            staged = tiles.stage_pooled(received, grads, routed.samples_W)
            if staged.weights is not None and routed.weights is not None:
                more = staged.call.weight_grad(tiles.arena, staged.weights, staged.grad)
                weight_grad = more if weight_grad is None else weight_grad + more
        return weight_grad


def _concat(parts: Sequence[Tensor], dim: int, empty: Tensor) -> Tensor:
    """torch.cat, without a copy of a single part; `empty` if there is none."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), dim) if parts else empty

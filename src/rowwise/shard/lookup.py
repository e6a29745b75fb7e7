"""What a rank's pieces give for the samples of all ranks, and its copies for its own; pooled gradients staged by hand.

Autograd does not know of pooled vectors here: of bags that samples share, or that the requesting rank adds up, there
are other vectors than gradients.
"""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from rowwise.ops.tiles import Tiles
from rowwise.shard.exchange import LookupOutputs
from rowwise.shard.ids import RoutedBatch, Stream
from rowwise.shard.routes import ExchangePath, PieceGroup


@final
class LocalLookup:
    """Looks up what a rank holds: pieces by the path that their vectors take, and copies."""

    def __init__(self, shelves: Sequence[tuple[PieceGroup, Tiles]], copies: Tiles | None) -> None:
        """No memory of its own."""
        self._shelves, self._copies = shelves, copies

    def look_up(self, routed: RoutedBatch) -> tuple[LookupOutputs, Mapping[str, Tensor]]:
        """What this rank's pieces give for the samples of all ranks; its copies for its own, and their sequences."""
        own = routed.streams[0]
        sequences = [
            tiles.look_up_sequences(own.received, own.samples_W).flat
            for part, tiles in self._shelves
            if part.path is not ExchangePath.PER_ID and own.received is not None
        ]
        copies, copied = torch.empty(routed.jagged.batch_size, 0), dict[str, Tensor]()
        if self._copies is not None:
            looked = self._copies.look_up(routed.jagged)
            copies, copied = looked.matrix_BS, self._copies.split(looked)
        streams = [self._pooled(stream) for stream in routed.streams]
        return LookupOutputs(streams=streams, sequences=_in_a_row(sequences), copies=copies), copied

    def _pooled(self, stream: Stream) -> dict[ExchangePath, Tensor]:
        found: dict[ExchangePath, list[Tensor]] = {path: [] for path in ExchangePath}
        for part, tiles in self._shelves:
            if stream.received is not None:
                look_up = tiles.gather if part.path is ExchangePath.PER_ID else tiles.pool
                found[part.path].append(look_up(stream.received))
        total = sum(stream.samples_W)
        return {
            path: _in_a_row(parts) if path is ExchangePath.PER_ID else _side_by_side(parts, total)
            for path, parts in found.items()
        }

    def stage(self, routed: RoutedBatch, given: LookupOutputs) -> Tensor | None:
        """Stage the gradients of pieces; gives those of their weights, if they learn."""
        left, received, learned = [dict(one) for one in given.streams], routed.received, None
        for part, tiles in self._shelves:
            if received is None or not tiles.pooled.tables:
                continue
            # Of all features together, or of each stream's.
            common = received.all_features[len(received.features) :]
            by_stream = (received.features, common) if len(left) > 1 else (received.all_features,)
            grads: list[Tensor] = []
            for one, features in zip(left, by_stream, strict=True):
                columns = tiles.columns_of(features)
                grads.append(one[part.path][:, :columns].contiguous())
                one[part.path] = one[part.path][:, columns:]
            staged = tiles.stage_pooled(received, grads, routed.samples_W)
            if staged.weights is not None and routed.weights is not None:
                more = staged.call.weight_grad(tiles.arena.rows, staged.weights, staged.grad)
                learned = more if learned is None else learned + more
        return learned


def _side_by_side(matrices: Sequence[Tensor], samples: int) -> Tensor:
    if len(matrices) == 1:
        return matrices[0]
    return torch.cat(list(matrices), 1) if matrices else torch.empty(samples, 0)


def _in_a_row(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts)) if parts else torch.empty(0)

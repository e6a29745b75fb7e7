"""What a rank's pieces give for the samples of all ranks, and its copies for its own; gradients staged by hand.

Mostly autograd leads gradients to where they are staged. It cannot where vectors are made up of parts elsewhere: bags
that whoever asked adds up, and bags that samples share, of which it has fewer vectors than there are gradients. Its own
file because `embeddings.py` is what a model sees of all this.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.ops.tiles import Tiles
from rowwise.shard.exchange import Made
from rowwise.shard.ids import Routed
from rowwise.shard.routes import Part


@final
class HeldLookup:
    """Looks up what a rank holds: pieces by the way that their vectors take, and copies."""

    def __init__(self, shelves: Sequence[tuple[Part, Tiles]], copies: Tiles | None) -> None:
        """No memory of its own."""
        self._shelves, self._copies = shelves, copies

    def look_up(self, routed: Routed) -> tuple[list[Made], dict[str, Tensor]]:
        """What this rank's pieces give for the samples of all ranks, and its copies for its own."""
        if routed.halves is not None:
            return self._look_up_halves(routed.halves)
        total, batch = sum(routed.samples_W), routed.asked.jagged.batch_size
        matrices: dict[str, list[Tensor]] = {"flat": [], "host": []}
        flat: dict[str, list[Tensor]] = {"flat": [], "rows": []}
        for part, tiles in self._shelves:
            assert routed.received is not None
            if part.way == "rows":
                flat["rows"].append(_gather(tiles, routed.received))
                continue
            looked = tiles.look_up(routed.received, routed.samples_W)
            matrices[part.way].append(looked.matrix_BS)
            flat["flat"].append(looked.flat)
        copies = torch.empty(batch, 0)
        copied: dict[str, Tensor] = {}
        if self._copies is not None:
            looked = self._copies.look_up(routed.asked.jagged)
            copies, copied = looked.matrix_BS, self._copies.split(looked)
        made = Made(
            flat=_side_by_side(matrices["flat"], total),
            host=_side_by_side(matrices["host"], total),
            copies=copies,
            sequences=_in_a_row(flat["flat"]),
            rows=_in_a_row(flat["rows"]),
        )
        return [made], copied

    def _look_up_halves(self, halves: tuple[Routed, Routed]) -> tuple[list[Made], dict[str, Tensor]]:
        """The same where samples share bags: for own features and for shared ones; gradients are staged by `stage`."""
        made: list[Made] = []
        sequences: list[Tensor] = []
        for half in halves:
            parts: dict[str, list[Tensor]] = {"flat": [], "host": [], "rows": []}
            for part, tiles in self._shelves:
                if half.received is not None:
                    look_up = tiles.gather_some if part.way == "rows" else tiles.pool_some
                    parts[part.way].append(look_up(half.received))
            total, jagged = sum(half.samples_W), half.asked.jagged
            copies = torch.empty(jagged.batch_size, 0) if self._copies is None else self._copies.pool_some(jagged)
            made.append(
                Made(
                    flat=_side_by_side(parts["flat"], total),
                    host=_side_by_side(parts["host"], total),
                    copies=copies,
                    sequences=torch.empty(0),
                    rows=_in_a_row(parts["rows"]),
                )
            )
        own = halves[0]
        for part, tiles in self._shelves:
            if part.way != "rows" and own.received is not None:
                sequences.append(tiles.look_up_sequences(own.received, own.samples_W).flat)
        made[0] = replace(made[0], sequences=_in_a_row(sequences))
        if self._copies is None:
            return made, {}
        return made, self._copies.split(self._copies.look_up_sequences(own.asked.jagged))

    def stage(self, routed: Routed, given: Sequence[Made]) -> Tensor | None:
        """Stage the gradients of what autograd does not know of; gives those of their weights, if they learn.

        Those are bags that this rank did not add up, and all bags where samples share some: `given` is one, or of own
        features and of distinct bags, where those were added up.
        """
        if len(given) > 1:
            self._stage_merged(routed, given)
            return None
        left = {"flat": given[0].flat, "host": given[0].host, "rows": given[0].rows}
        learned, received, shared = None, routed.received, routed.halves is not None
        for part, tiles in self._shelves:
            if part.way != "rows" and not shared:
                continue
            assert received is not None
            columns = tiles.pooled.columns
            grad_GS, left[part.way] = left[part.way][:, :columns], left[part.way][:, columns:]
            staged = tiles.stage_pooled(received, grad_GS.contiguous(), routed.samples_W)
            if staged.weights is not None and routed.weights is not None:
                more = staged.call.weight_grad(tiles.arena.rows, staged.weights, staged.grad)
                learned = more if learned is None else learned + more
        if shared and self._copies is not None:
            self._copies.stage_pooled(routed.asked.jagged, given[0].copies)
        return learned

    def _stage_merged(self, routed: Routed, given: Sequence[Made]) -> None:
        """The same for gradients of distinct bags. See [Note: Merged bags]."""
        left = [{"flat": one.flat, "host": one.host, "rows": one.rows} for one in given]
        received, common = routed.received, None if routed.received is None else routed.received.shared
        for part, tiles in self._shelves:
            assert received is not None
            mine: list[Tensor] = []
            for k, features in enumerate((received.features, () if common is None else common.jagged.features)):
                columns, grad = tiles.columns_of(features), left[k][part.way]
                mine.append(grad[:, :columns])
                left[k][part.way] = grad[:, columns:]
            tiles.stage_merged(received, mine[0], mine[1], routed.samples_W)
        if self._copies is not None:
            self._copies.stage_merged(routed.asked.jagged, given[0].copies, given[1].copies)


def _gather(tiles: Tiles, jagged: Jagged) -> Tensor:
    """The rows of all ids, piece by piece."""
    features, _ = tiles.features_for(jagged)
    offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
    return torch.ops.rowwise.gather(tiles.arena.rows, features, jagged.values_N, offsets, jagged.batch_size)


def _side_by_side(matrices: Sequence[Tensor], samples: int) -> Tensor:
    if len(matrices) == 1:
        return matrices[0]
    return torch.cat(list(matrices), 1) if matrices else torch.empty(samples, 0)


def _in_a_row(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts)) if parts else torch.empty(0)

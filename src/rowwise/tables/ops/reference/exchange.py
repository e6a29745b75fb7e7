"""Reference of the operators of the exchange between ranks: packing ids into messages, moving columns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rowwise.base.errors import IdError
from rowwise.tables.ops.reference.lookup import offsets


def place(blocks: Sequence[Tensor], segments: Tensor, out: Tensor) -> None:
    """Copy columns of blocks [B, columns] to columns of `out` [B, S], or add them, segment by segment.

    A segment is (block, first column in it, first column of `out`, width, whether to add).
    """
    for block, source, target, width, add in segments.tolist():
        columns = blocks[block][:, source : source + width]
        out[:, target : target + width] = out[:, target : target + width] + columns if add else columns


def pack_ids(
    values: Tensor, lengths: Tensor, weights: Tensor | None, slices: Tensor, messages: Tensor, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Bags of slices as messages of 32-bit words; raises for an id that is not below its slice's number of rows.

    A slice is (first bag, rows), a message (number of slices, whether ids take two words, whether weights follow): the
    lengths of its bags, their ids, their weights. Also returns the starts of messages, and the ids of each slice.
    """
    begins = offsets(lengths)
    words: list[Tensor] = []
    starts: list[int] = [0]
    counts: list[int] = []
    remaining = iter(slices.tolist())
    for number, wide, weighted in messages.tolist():
        message_slices = [next(remaining) for _ in range(number)]
        ranges = [slice(int(begins[first]), int(begins[first + batch])) for first, _ in message_slices]
        for ids, (_, rows) in zip(ranges, message_slices, strict=True):
            if bool(((values[ids] < 0) | (values[ids] >= rows)).any()):
                raise IdError("rowwise: an id is outside its table")
        parts = [lengths[first : first + batch].to(torch.int32) for first, _ in message_slices]
        parts += [values[s].long().view(torch.int32) if wide else values[s].to(torch.int32) for s in ranges]
        parts += [weights[s].view(torch.int32) for s in ranges] if weighted and weights is not None else []
        words += parts
        counts += [ids.stop - ids.start for ids in ranges]
        starts.append(starts[-1] + sum(len(part) for part in parts))
    none = torch.empty(0, dtype=torch.int32, device=values.device)
    return torch.cat([none, *words]), torch.tensor(starts), torch.tensor(counts, dtype=torch.int64)

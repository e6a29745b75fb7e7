"""Reference of the operators of the exchange between ranks: packing ids into messages, moving columns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rowwise.errors import IdError
from rowwise.ops.reference.lookup import offsets


def place(blocks: Sequence[Tensor], runs: Tensor, out: Tensor) -> None:
    """Copy or add columns to `out`, one run (block, first column, first output column, width, add) after the other."""
    for block, source, target, width, add in runs.tolist():
        columns = blocks[block][:, source : source + width]
        out[:, target : target + width] = out[:, target : target + width] + columns if add else columns


def pack_ids(
    values: Tensor, lengths: Tensor, weights: Tensor | None, slices: Tensor, messages: Tensor, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs of bags (first bag, rows that its ids are in) as messages (runs, wide ids, weighted) of 32-bit words.

    A message is the lengths of its bags, then their ids, in two words each if they are wide, then the ids' weights.
    Also where each message begins, and how many ids each run has.
    """
    begins = offsets(lengths)
    words: list[Tensor] = []
    starts: list[int] = [0]
    counts: list[int] = []
    rest = iter(slices.tolist())
    for number, wide, weighted in messages.tolist():
        runs = [next(rest) for _ in range(number)]
        spans = [slice(int(begins[first]), int(begins[first + batch])) for first, _ in runs]
        for span, (_, rows) in zip(spans, runs, strict=True):
            if bool(((values[span] < 0) | (values[span] >= rows)).any()):
                raise IdError("rowwise: an id is outside its table")
        parts = [lengths[first : first + batch].to(torch.int32) for first, _ in runs]
        parts += [values[s].long().view(torch.int32) if wide else values[s].to(torch.int32) for s in spans]
        parts += [weights[s].view(torch.int32) for s in spans] if weighted and weights is not None else []
        words += parts
        counts += [span.stop - span.start for span in spans]
        starts.append(starts[-1] + sum(len(part) for part in parts))
    none = torch.empty(0, dtype=torch.int32, device=values.device)
    return torch.cat([none, *words]), torch.tensor(starts), torch.tensor(counts, dtype=torch.int64)

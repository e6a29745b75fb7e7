"""`CollectiveCall`: a collective as data, and the pure functions that all transports share.

The segment of a tensor for each rank, mismatches between two ranks' calls, the order of sums, and bytes by link. All
four collectives are described alike, by the elements to and from each rank.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowwise.base.errors import PeerError, SpecError
from rowwise.tables.ops.output_cache import empty_cached
from rowwise.tables.spec import Link, Topology

SENDS_FULL_TENSOR = ("all_gather", "all_reduce")  # other collectives send each rank a segment
SUMS = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective as one rank calls it; splits in elements, by rank of the group."""

    collective: str
    purpose: str
    dtype: torch.dtype
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.collective} of {self.purpose!r}"


def check_call(call: CollectiveCall, send_N: Tensor, ranks: Sequence[int], rank: int) -> None:
    """Raise if the sizes do not match the tensor or the group, before anything is sent."""
    w, n, shape = len(ranks), send_N.numel(), tuple(send_N.shape)
    where = f"rank {ranks[rank]}: {call}"
    if len(call.input_splits) != w or len(call.output_splits) != w:
        splits = f"{len(call.input_splits)} input splits and {len(call.output_splits)} output splits"
        raise PeerError(f"{where} has {splits}", f"one for each of the {w} ranks")
    if send_N.dim() != 1 or min(call.input_splits + call.output_splits) < 0:
        raise PeerError(f"{where} has splits {call.input_splits} for a tensor {shape}", "a flat tensor")
    if call.collective not in SENDS_FULL_TENSOR and sum(call.input_splits) != n:
        raise PeerError(f"{where} has {n} elements and input splits {call.input_splits}", f"splits of {n} in total")


def find_mismatch(calls_W: Sequence[CollectiveCall], ranks: Sequence[int]) -> str | None:
    """The first mismatch between the calls of two ranks, or None."""
    w = range(len(ranks))
    pairs = ((i, j) for i in w for j in w[i:])
    return next((text for i, j in pairs if (text := describe_mismatch(calls_W[i], calls_W[j], i, j, ranks))), None)


def describe_mismatch(
    first: CollectiveCall, second: CollectiveCall, i: int, j: int, ranks: Sequence[int]
) -> str | None:
    """The mismatch between the calls of the i-th and the j-th rank, or None."""
    if (first.collective, first.purpose) != (second.collective, second.purpose):
        calls = f"rank {ranks[i]} calls {first} where rank {ranks[j]} calls {second}"
        return f"{calls}: expected the same calls in the same order"
    for a, b, sender, receiver in ((i, j, first, second), (j, i, second, first)):
        sent, expected = sender.input_splits[b], receiver.output_splits[a]
        if sent != expected or sender.dtype != receiver.dtype:
            sends = f"{sender}: rank {ranks[a]} sends {sent} elements of {sender.dtype} to rank {ranks[b]}"
            return f"{sends}, which expects {expected} of {receiver.dtype}"
    return None


def segment_for(call: CollectiveCall, send_N: Tensor, rank: int) -> Tensor:
    """The segment of a sent tensor for rank `rank` of the group."""
    if call.collective in SENDS_FULL_TENSOR:
        return send_N
    return send_N.narrow(0, sum(call.input_splits[:rank]), call.input_splits[rank])


def combine_segments(call: CollectiveCall, segments_W: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The segments of all ranks concatenated or, for sums, added in rank order.

    A sum may be written to `out`, which may be one of the first two segments; other results are new memory.
    """
    if call.collective not in SUMS:
        return torch.cat(list(segments_W), out=empty_cached((sum(map(len, segments_W)),), segments_W[0]))
    if len(segments_W) == 1:
        return segments_W[0].clone()
    total = torch.add(segments_W[0], segments_W[1], out=out)
    for segment in segments_W[2:]:
        total += segment
    return total


def count_sent(call: CollectiveCall, ranks: Sequence[int], rank: int, topology: Topology) -> dict[Link, int]:
    """Bytes that a rank sends to others, by link.

    All-reduce counts as a ring, which sends 2 (W - 1) / W of the tensor to the next rank, whatever the transport does.
    """
    w, counts = len(ranks), Counter[Link]()
    if call.collective == "all_reduce":
        next_rank = ranks[(rank + 1) % w]
        counts[topology.link(ranks[rank], next_rank)] = 2 * (w - 1) * call.input_splits[rank] * call.dtype.itemsize // w
        return counts
    for peer, size in enumerate(call.input_splits):
        if peer != rank:
            counts[topology.link(ranks[rank], ranks[peer])] += size * call.dtype.itemsize
    return counts


def find_group(groups: Sequence[Sequence[int]], ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """The group of this rank of the world; raises unless the groups partition `ranks`."""
    members = [r for group in groups for r in group]
    if sorted(members) != sorted(ranks) or any(list(group) != sorted(group) for group in groups):
        raise SpecError(
            f"rank {rank}: groups {[tuple(g) for g in groups]}",
            f"each of the ranks {tuple(ranks)} in one group, in ascending order",
        )
    return next(tuple(group) for group in groups if rank in group)

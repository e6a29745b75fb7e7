"""What one rank asks of the others, as data, and the rules that hold for it however it travels.

Its own file because every transport goes by the same rules: which run is for whom, when two ranks do not agree, in
which order is added, how many bytes go where. All four collectives are one thing here: how much goes to each rank
and how much comes from it. Pure functions.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rowwise.errors import PeerError, SpecError
from rowwise.spec import Link, Topology

WHOLE = ("all_gather", "all_reduce")  # everybody is sent everything, not a run each
SUMS = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective as one rank calls it; sizes in elements, by rank of the group."""

    collective: str
    what: str
    dtype: torch.dtype
    sizes_W: tuple[int, ...]
    receives_W: tuple[int, ...]

    def __str__(self) -> str:
        """As messages name it."""
        return f"{self.collective} of {self.what!r}"


def check_call(call: Call, send_N: Tensor, ranks: Sequence[int], rank: int) -> None:
    """Refuse sizes that do not fit the tensor or the group, before anything is sent."""
    w, n = len(ranks), send_N.numel()
    found = f"rank {ranks[rank]}: {call}"
    if len(call.sizes_W) != w or len(call.receives_W) != w:
        given = f"{len(call.sizes_W)} sizes to send and {len(call.receives_W)} to receive"
        raise PeerError(f"{found} has {given}: want one for each of the {w} ranks")
    if send_N.dim() != 1 or min(call.sizes_W + call.receives_W) < 0:
        raise PeerError(f"{found} has sizes {call.sizes_W} for a tensor {tuple(send_N.shape)}: want a flat tensor")
    if call.collective not in WHOLE and sum(call.sizes_W) != n:
        raise PeerError(f"{found} has {n} elements in runs of {call.sizes_W}: want runs of {n} in total")


def find_mismatch(calls_W: Sequence[Call], ranks: Sequence[int]) -> str | None:
    """What two ranks do not agree about, if any do."""
    for (a, first), (b, second) in pairwise(zip(ranks, calls_W, strict=True)):
        if (first.collective, first.what) != (second.collective, second.what):
            return f"rank {a} calls {first} where rank {b} calls {second}: want the same calls in the same order"
    for i, sender in enumerate(calls_W):
        for j, receiver in enumerate(calls_W):
            sent, wanted = sender.sizes_W[j], receiver.receives_W[i]
            if sent != wanted or sender.dtype != receiver.dtype:
                sends = f"{sender}: rank {ranks[i]} sends {sent} elements of {sender.dtype} to rank {ranks[j]}"
                return f"{sends}, which expects {wanted} of {receiver.dtype}"
    return None


def run_for(call: Call, send_N: Tensor, rank: int) -> Tensor:
    """The part of a rank's tensor that another is sent."""
    if call.collective in WHOLE:
        return send_N
    return send_N.narrow(0, sum(call.sizes_W[:rank]), call.sizes_W[rank])


def join(call: Call, runs_W: Sequence[Tensor]) -> Tensor:
    """What came from each rank as one result, in memory of its own: one after the other, or added in rank order."""
    if call.collective not in SUMS:
        return torch.cat(list(runs_W))
    if len(runs_W) == 1:
        return runs_W[0].clone()
    total = runs_W[0] + runs_W[1]
    for run in runs_W[2:]:
        total += run
    return total


def count_sent(call: Call, ranks: Sequence[int], rank: int, topology: Topology) -> dict[Link, int]:
    """Bytes that a rank sends to others, by link.

    All-reduce is counted as a ring, which sends 2 (W - 1) / W of the tensor to the next rank, whatever really happens.
    """
    w, counts = len(ranks), Counter[Link]()
    if call.collective == "all_reduce":
        after = ranks[(rank + 1) % w]
        counts[topology.link(ranks[rank], after)] = 2 * (w - 1) * call.sizes_W[rank] * call.dtype.itemsize // w
        return counts
    for other, size in enumerate(call.sizes_W):
        if other != rank:
            counts[topology.link(ranks[rank], ranks[other])] += size * call.dtype.itemsize
    return counts


def find_group(groups: Sequence[Sequence[int]], ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """The group of several that a rank of the world is in."""
    members = [r for group in groups for r in group]
    if sorted(members) != sorted(ranks) or any(list(group) != sorted(group) for group in groups):
        want = f"want each of the ranks {tuple(ranks)} in one of them, in ascending order"
        raise SpecError(f"rank {rank}: groups {[tuple(g) for g in groups]}: {want}")
    return next(tuple(group) for group in groups if rank in group)

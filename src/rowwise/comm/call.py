"""What one rank asks of the others, as data, and the rules that hold for it however it travels.

All four collectives are one thing here: how much goes to each rank and how much comes from it. Pure functions.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowwise.errors import PeerError, SpecError
from rowwise.ops.output_cache import empty_cached
from rowwise.spec import Link, Topology

WHOLE = ("all_gather", "all_reduce")  # everybody is sent everything, not a run each
SUMS = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """A collective as one rank calls it; sizes in elements, by rank of the group."""

    collective: str
    what: str
    dtype: torch.dtype
    sizes_W: tuple[int, ...]
    receives_W: tuple[int, ...]

    def __str__(self) -> str:
        """As messages name it."""
        return f"{self.collective} of {self.what!r}"


def check_call(call: CollectiveCall, send_N: Tensor, ranks: Sequence[int], rank: int) -> None:
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


def find_mismatch(calls_W: Sequence[CollectiveCall], ranks: Sequence[int]) -> str | None:
    """What two ranks do not agree about, if any do."""
    w = range(len(ranks))
    pairs = ((i, j) for i in w for j in w[i:])
    return next((found for i, j in pairs if (found := compare(calls_W[i], calls_W[j], i, j, ranks))), None)


def compare(first: CollectiveCall, second: CollectiveCall, i: int, j: int, ranks: Sequence[int]) -> str | None:
    """What the i-th and the j-th of the ranks do not agree about."""
    if (first.collective, first.what) != (second.collective, second.what):
        calls = f"rank {ranks[i]} calls {first} where rank {ranks[j]} calls {second}"
        return f"{calls}: want the same calls in the same order"
    for a, b, sender, receiver in ((i, j, first, second), (j, i, second, first)):
        sent, wanted = sender.sizes_W[b], receiver.receives_W[a]
        if sent != wanted or sender.dtype != receiver.dtype:
            sends = f"{sender}: rank {ranks[a]} sends {sent} elements of {sender.dtype} to rank {ranks[b]}"
            return f"{sends}, which expects {wanted} of {receiver.dtype}"
    return None


def run_for(call: CollectiveCall, send_N: Tensor, rank: int) -> Tensor:
    """The part of a rank's tensor that another is sent."""
    if call.collective in WHOLE:
        return send_N
    return send_N.narrow(0, sum(call.sizes_W[:rank]), call.sizes_W[rank])


def join(call: CollectiveCall, runs_W: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """What came from each rank as one result: one after the other, or added in rank order.

    A sum may go to `out`, which may be one of the first two runs; any other result is memory of its own.
    """
    if call.collective not in SUMS:
        return torch.cat(list(runs_W), out=empty_cached((sum(run.numel() for run in runs_W),), runs_W[0]))
    if len(runs_W) == 1:
        return runs_W[0].clone()
    total = torch.add(runs_W[0], runs_W[1], out=out)
    for run in runs_W[2:]:
        total += run
    return total


def count_sent(call: CollectiveCall, ranks: Sequence[int], rank: int, topology: Topology) -> dict[Link, int]:
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

"""Bytes and memory of dense parameters that ranks share (FSDP: arXiv 2304.11277).

A unit is what is gathered at once. With F ranks that share M bytes of parameters, and W / F such groups, a rank sends
for each backward

    replicated   2 M (W - 1) / W                                 one all-reduce
    full         M (F - 1) / F for each gather and for the sums of gradients: 3 M (F - 1) / F, or 2 without reshard
    hybrid       besides 2 (M / F) (W / F - 1) / (W / F)          an all-reduce over the ranks with the same part
"""

from collections.abc import Sequence
from math import prod

from rowwise.spec import Value

FLOAT_bytes, BF16_bytes = 4, 2
Shape = Sequence[int]


class DenseCost(Value, frozen=True):
    """Bytes that a rank sends and holds for its dense parameters."""

    sent_bytes: float  # in a forward and its backward
    resident_bytes: int  # parameters, gradients and optimizer state between steps
    gathered_bytes: int  # parameters that are whole for a while and their gradients; no buffers of collectives


class DenseUnits(Value, frozen=True):
    """Shapes of the parameters of each unit; those of the model beside them are its own."""

    units: tuple[tuple[tuple[int, ...], ...], ...]
    own: tuple[tuple[int, ...], ...]


def replicated_cost(shapes: DenseUnits, world: int, state_slots: int) -> DenseCost:
    """Each rank has all parameters."""
    count = sum(prod(shape) for group in (*shapes.units, shapes.own) for shape in group)
    sent = 2 * count * FLOAT_bytes * (world - 1) / world
    return DenseCost(sent, count * FLOAT_bytes * (2 + state_slots), 0)


def fsdp_cost(  # noqa: PLR0913 - the settings of a run
    shapes: DenseUnits, world: int, shards: int, state_slots: int, *, reshard: bool = True, bf16: bool = False,
    prefetch: int = 1,
) -> DenseCost:  # fmt: skip
    """`shards` ranks share the parameters."""
    wire, others = BF16_bytes if bf16 else FLOAT_bytes, (shards - 1) / shards
    units = [padded_numel(group, shards) for group in shapes.units]
    own = padded_numel(shapes.own, shards)
    total, replicas = sum(units) + own, world // shards
    gathers = (wire * (2 if reshard else 1) * sum(units) + FLOAT_bytes * own) * others
    sums = FLOAT_bytes * total * others
    same = 2 * FLOAT_bytes * (total / shards) * (replicas - 1) / replicas
    whole = sum(sorted(units)[-(1 + prefetch) :]) if reshard else sum(units)
    largest = max([*units, own])
    return DenseCost(
        sent_bytes=gathers + sums + same,
        resident_bytes=total // shards * FLOAT_bytes * (2 + state_slots),
        gathered_bytes=wire * whole + FLOAT_bytes * (own + largest),
    )


def padded_numel(shapes: Sequence[Shape], shards: int) -> int:
    """Numbers of parameters whose first dimension is filled up to a multiple of the ranks."""
    return sum(-(-shape[0] // shards) * shards * prod(shape[1:]) for shape in shapes)

"""Bytes and memory of dense parameters that ranks share (FSDP: arXiv 2304.11277).

A unit is the parameters of one all-gather. With F ranks that share M bytes of parameters, and W / F such groups, a
rank sends for each backward

    replicated   2 M (W - 1) / W                                 one all-reduce
    full         M (F - 1) / F for each gather and for the sums of gradients: 3 M (F - 1) / F, or 2 without reshard
    hybrid       besides 2 (M / F) (W / F - 1) / (W / F)          an all-reduce over the ranks with the same part
"""

from collections.abc import Sequence
from math import prod
from typing import Literal

from msgspec import structs

from rowwise.planning.perf.hardware import Hardware
from rowwise.tables.spec import Topology, Value

FLOAT_bytes, BF16_bytes = 4, 2
Shape = Sequence[int]


class DenseCost(Value, frozen=True):
    """Bytes that a rank sends and holds for its dense parameters."""

    sent_bytes: float  # in a forward and its backward
    resident_bytes: int  # parameters, gradients and optimizer state between steps
    gathered_bytes: int  # parameters while they are gathered, and their gradients; no buffers of collectives
    across_bytes: float = 0.0  # of those sent: between groups of ranks that share parameters

    @property
    def memory_bytes(self) -> int:
        return self.resident_bytes + self.gathered_bytes


class DenseUnits(Value, frozen=True):
    """Shapes of the parameters of each unit; `own` are those outside of units."""

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
    wire, remote = BF16_bytes if bf16 else FLOAT_bytes, (shards - 1) / shards
    units = [padded_numel(group, shards) for group in shapes.units]
    own = padded_numel(shapes.own, shards)
    total, replicas = sum(units) + own, world // shards
    gathers = (wire * (2 if reshard else 1) * sum(units) + FLOAT_bytes * own) * remote
    scattered = FLOAT_bytes * total * remote
    across = 2 * FLOAT_bytes * (total / shards) * (replicas - 1) / replicas
    gathered = sum(sorted(units)[-(1 + prefetch) :]) if reshard else sum(units)
    largest = max([*units, own])
    return DenseCost(
        across_bytes=across,
        sent_bytes=gathers + scattered + across,
        resident_bytes=total // shards * FLOAT_bytes * (2 + state_slots),
        gathered_bytes=wire * gathered + FLOAT_bytes * (own + largest),
    )


def padded_numel(shapes: Sequence[Shape], shards: int) -> int:
    """Numbers in parameters whose first dimension is padded to a multiple of `shards`."""
    return sum(-(-shape[0] // shards) * shards * prod(shape[1:]) for shape in shapes if shape)


class ActivationBytes(Value, frozen=True):
    """Bytes that a forward keeps for its backward, for a sample."""

    kept: int
    recomputed: int  # with `recompute`: inputs of layers, and what the largest layer keeps while it runs again


NO_ACTIVATIONS = ActivationBytes(0, 0)
Kind = Literal["replicate", "full", "hybrid"]
KINDS: tuple[Kind, ...] = ("replicate", "full", "hybrid")


class DenseSide(Value, frozen=True, kw_only=True):
    """The dense parameters of a run, and how ranks store them: `train.dense_parallel`."""

    shapes: DenseUnits
    state_slots: int  # numbers of optimizer state for each parameter
    kind: Kind = "replicate"
    shards: int | None = None
    reshard: bool = True
    bf16: bool = False
    prefetch: int = 1
    recompute: bool = False
    activations: ActivationBytes = NO_ACTIVATIONS  # 0 if unknown
    passes: int = 1  # forwards and backwards of a step, one after the other
    can_shard: bool = True
    can_recompute: bool = True

    def shards_on(self, topology: Topology) -> int:
        """Number of ranks that share the parameters; 1 if each has all of them."""
        if self.kind == "replicate" or topology.world == 1:
            return 1
        return topology.world if self.kind == "full" else self.shards or topology.devices

    def cost(self, topology: Topology) -> DenseCost:
        """Bytes and memory of one pass, without activations."""
        shards = self.shards_on(topology)
        if shards == 1:
            return replicated_cost(self.shapes, topology.world, self.state_slots)
        options = {"reshard": self.reshard, "bf16": self.bf16, "prefetch": self.prefetch}
        return fsdp_cost(self.shapes, topology.world, shards, self.state_slots, **options)

    def activation_bytes(self, topology: Topology, batch: int) -> int:
        """Of a rank, in a step of `batch` samples of all ranks."""
        sample_bytes = self.activations.recomputed if self.recompute else self.activations.kept
        return sample_bytes * -(-batch // (topology.world * self.passes))

    def memory_bytes(self, topology: Topology, batch: int) -> int:
        """Of a rank: parameters, gradients, optimizer state and activations."""
        return self.cost(topology).memory_bytes + self.activation_bytes(topology, batch)

    def sending_passes(self, topology: Topology) -> int:
        """Passes of a step that send: whole parameters are summed once, after the last one."""
        return 1 if self.shards_on(topology) == 1 else self.passes

    def sent_bytes(self, topology: Topology) -> float:
        """Bytes that a rank sends in a step."""
        return self.cost(topology).sent_bytes * self.sending_passes(topology)

    def seconds(self, topology: Topology, hardware: Hardware) -> float:
        """Of the transfers of a step, one after the other, without their latencies."""
        cost, across = self.cost(topology), hardware.slowest_link(topology)
        within = hardware.host if 1 < self.shards_on(topology) <= topology.devices else across
        if self.shards_on(topology) == 1:
            return cost.sent_bytes / across.all_reduce_Bps
        inside_bytes = cost.sent_bytes - cost.across_bytes
        once_s = inside_bytes / within.reduce_scatter_Bps + cost.across_bytes / across.all_reduce_Bps
        return once_s * self.sending_passes(topology)

    def ways(self, topology: Topology) -> list["DenseSide"]:
        """All kinds that can run on these ranks, first without `recompute`, which needs known activations."""
        kinds = [kind for kind in KINDS if kind == "replicate" or (self.can_shard and topology.world > 1)]
        again = (False, True) if self.activations.kept and self.can_recompute else (self.recompute,)
        sides = [structs.replace(self, kind=kind, recompute=choice) for choice in again for kind in kinds]
        # On one host a hybrid of the host's ranks is full.
        return [side for side in sides if side.kind != "hybrid" or topology.hosts > 1 or side.shards is not None]

    def fastest(self, topology: Topology, hardware: Hardware, batch: int, room_bytes: float) -> "DenseSide | None":
        """The kind with the fastest transfers of those that fit a rank's memory; None if none fits.

        Activations are recomputed only if nothing fits without: that takes about a third more of dense computation.
        """
        fitting = [side for side in self.ways(topology) if side.memory_bytes(topology, batch) <= room_bytes]
        return min(fitting, key=lambda side: (side.recompute, side.seconds(topology, hardware)), default=None)

    def setting(self) -> str:
        """The recipe setting that selects it."""
        keys = {"kind": self.kind, "shards": self.shards if self.kind == "hybrid" else None}
        keys |= {"recompute": "true" if self.recompute else None}
        return f"train.dense_parallel={{{', '.join(f'{key}: {value}' for key, value in keys.items() if value)}}}"

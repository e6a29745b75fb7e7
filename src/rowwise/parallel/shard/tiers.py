"""The memory tiers that the runtime supports: `ShardedEmbeddings` rejects others, and runs are planned with these."""

from rowwise.parallel.plan import Tier

DEVICE_TIERS: frozenset[Tier] = frozenset({"device"})  # supported on devices of any type
CPU_TIERS: frozenset[Tier] = frozenset({"host", "disk"})  # a CPU's device memory is the host's


def runnable_tiers(device_type: str) -> frozenset[Tier]:
    """The tiers in which a device of this type may have rows."""
    return DEVICE_TIERS | CPU_TIERS if device_type == "cpu" else DEVICE_TIERS

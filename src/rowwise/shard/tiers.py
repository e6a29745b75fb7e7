"""The tiers of memory that this runtime runs: what it refuses and what planning is given both follow from here."""

from rowwise.plan import Tier

RUNS: frozenset[Tier] = frozenset({"device"})  # on devices of any type; a tier is switched on here


def tiers_of(device_type: str) -> frozenset[Tier]:
    """That a device of a type runs; the memory of a CPU is its host's."""
    same: frozenset[Tier] = frozenset({"host"} if device_type == "cpu" else ())
    return RUNS | same

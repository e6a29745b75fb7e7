"""The tiers of memory that this runtime runs: what it refuses and what planning is given both follow from here."""

from rowwise.plan import Tier

RUNS: frozenset[Tier] = frozenset({"device"})  # on devices of any type; a tier is switched on here
OF_CPUS: frozenset[Tier] = frozenset({"host"})  # whose memory is their host's


def tiers_of(device_type: str) -> frozenset[Tier]:
    """That a device of a type runs."""
    return RUNS | OF_CPUS if device_type == "cpu" else RUNS

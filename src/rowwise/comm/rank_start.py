"""How ranks are made on one machine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """How rank processes are started."""

    timeout_s: float = 300.0  # that a rank waits for another in a collective
    shared_memory: bool = False
    threads: int | None = 1  # None: the machine's, divided
    preload: tuple[str, ...] = ()  # modules that are loaded once for all

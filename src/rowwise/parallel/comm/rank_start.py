"""`RankStart`: settings of rank processes; loads no torch, as the parent process imports it."""

from dataclasses import dataclass

from rowwise.parallel.comm.simulated_link import SimulatedLink


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """Settings with which `spawn` starts the ranks of a machine."""

    timeout_s: float = 300.0  # longest wait for another rank in a collective
    shared_memory: bool = False
    threads: int | None = 1  # torch threads per rank; None divides the machine's among the ranks
    preload: tuple[str, ...] = ()  # modules that the fork server imports once for all ranks
    link: SimulatedLink | None = None  # None if no link is simulated

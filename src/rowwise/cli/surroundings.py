"""What the environment says, as a frozen value that `main` reads once and hands down.

Its own file because commands need it and may not read the environment themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Torchrun:
    """Who this process is, if torchrun has started it."""

    rank: int
    world: int
    attempt: int  # restarts before this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Of a command."""

    omp_wait_policy: str
    torchrun: Torchrun | None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """From the variables of a process."""
        torchrun = None
        if all(environment.get(name) for name in SET_BY_TORCHRUN):
            numbers = (environment.get(name, "0") for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
            rank, world, attempt = (int(number) if number.isdecimal() else 0 for number in numbers)
            torchrun = Torchrun(rank=rank, world=world, attempt=attempt)
        return cls(omp_wait_policy=environment.get("OMP_WAIT_POLICY", "not set"), torchrun=torchrun)

"""What the environment says, as a frozen value that `main` reads once and hands down."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rowwise.errors import SpecError

SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1"}
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
OUT = "start the program with torchrun, or unset what it sets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Torchrun:
    """Who this process is, if torchrun has started it."""

    rank: int
    world: int
    attempt: int  # restarts before this one


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnvironment:
    """The environment variables that a command reads."""

    omp_wait_policy: str
    variables: tuple[tuple[str, str], ...]  # those of torchrun's that are set

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        found = tuple((name, environment[name]) for name in (*SET_BY_TORCHRUN, ATTEMPT) if environment.get(name))
        return cls(omp_wait_policy=environment.get("OMP_WAIT_POLICY", "not set"), variables=found)

    @property
    def torchrun(self) -> Torchrun | None:
        """Refused when it is asked for: a command that needs no ranks runs in any environment."""
        found = dict(self.variables)
        missing = [name for name in SET_BY_TORCHRUN if name not in found]
        if missing:
            for name, alone in OF_ONE_RANK.items():
                if found.get(name, alone) != alone:
                    raise SpecError(f"{name}={found[name]} without {', '.join(missing)}: {OUT}")
            return None
        rank, world = _number("RANK", found), _number("WORLD_SIZE", found)
        if rank >= world:
            raise SpecError(f"RANK={rank} with WORLD_SIZE={world}: want a rank less than that: {OUT}")
        return Torchrun(rank=rank, world=world, attempt=_number(ATTEMPT, {ATTEMPT: "0"} | found))


def _number(name: str, found: Mapping[str, str]) -> int:
    try:
        number = int(found[name])
    except ValueError:
        number = -1
    if number < 0:
        raise SpecError(f"{name}={found[name]}: want a number that is not negative: {OUT}")
    return number

"""The environment variables that the command line uses, read once by `main` and handed to commands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rowwise.errors import SpecError

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEFAULT_RANK = {"RANK": "0", "WORLD_SIZE": "1"}
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
WANT = "start the command with torchrun, or unset the variables that torchrun sets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Torchrun:
    """The rank and the world size that torchrun gave to this process."""

    rank: int
    world: int
    attempt: int  # restarts before this one


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnvironment:
    """The variables OMP_WAIT_POLICY and torchrun's."""

    omp_wait_policy: str
    variables: tuple[tuple[str, str], ...]  # those of torchrun that are set

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        found = tuple((name, environment[name]) for name in (*TORCHRUN_VARIABLES, ATTEMPT) if environment.get(name))
        return cls(omp_wait_policy=environment.get("OMP_WAIT_POLICY", "not set"), variables=found)

    @property
    def torchrun(self) -> Torchrun | None:
        """Raises for incomplete variables only when used: commands without ranks run in any environment."""
        found = dict(self.variables)
        missing = [name for name in TORCHRUN_VARIABLES if name not in found]
        if missing:
            for name, alone in DEFAULT_RANK.items():
                if found.get(name, alone) != alone:
                    raise SpecError(f"{name}={found[name]} without {', '.join(missing)}: {WANT}")
            return None
        rank, world = _number("RANK", found), _number("WORLD_SIZE", found)
        if rank >= world:
            raise SpecError(f"RANK={rank} with WORLD_SIZE={world}: the rank has to be less than the world size: {WANT}")
        return Torchrun(rank=rank, world=world, attempt=_number(ATTEMPT, {ATTEMPT: "0"} | found))


def _number(name: str, found: Mapping[str, str]) -> int:
    try:
        number = int(found[name])
    except ValueError:
        number = -1
    if number < 0:
        raise SpecError(f"{name}={found[name]}: want a whole number of at least 0: {WANT}")
    return number

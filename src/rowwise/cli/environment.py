"""The environment variables of the command line; `main` reads them once and hands them to commands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rowwise.base.errors import SpecError
from rowwise.base.textfile import parse_whole

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEFAULT_RANK = {"RANK": "0", "WORLD_SIZE": "1"}
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
LISTENER = "ROWWISE_LISTENER"  # descriptor of a socket at MASTER_PORT, inherited by rank 0
RAY_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # in order of precedence, as in Ray
HINT = "start the command with torchrun, or unset the variables that torchrun sets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Torchrun:
    """Rank, world size and attempt of this process, set by torchrun or a launcher in its place."""

    rank: int
    world: int
    attempt: int  # number of earlier restarts
    listener: int | None = None  # see LISTENER


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnvironment:
    """OMP_WAIT_POLICY, the variables that torchrun sets, and the address of a Ray cluster."""

    omp_wait_policy: str
    variables: tuple[tuple[str, str], ...]  # of torchrun, as far as set
    ray_address: str = ""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        names = (*TORCHRUN_VARIABLES, ATTEMPT, LISTENER)
        variables = tuple((name, environment[name]) for name in names if environment.get(name))
        address = next((environment[name] for name in RAY_VARIABLES if environment.get(name)), "")
        policy = environment.get("OMP_WAIT_POLICY", "not set")
        return cls(omp_wait_policy=policy, variables=variables, ray_address=address)

    @property
    def torchrun(self) -> Torchrun | None:
        """None outside of torchrun; incomplete variables raise here, as commands without ranks never read it."""
        variables = dict(self.variables)
        missing = [name for name in TORCHRUN_VARIABLES if name not in variables]
        if missing:
            for name, default in DEFAULT_RANK.items():
                if variables.get(name, default) != default:
                    raise SpecError(f"{name}={variables[name]} without {', '.join(missing)}", hint=HINT)
            return None
        rank, world = _parse_number("RANK", variables), _parse_number("WORLD_SIZE", variables)
        if rank >= world:
            raise SpecError(f"RANK={rank} with WORLD_SIZE={world}", "a rank below the world size", hint=HINT)
        attempt = _parse_number(ATTEMPT, {ATTEMPT: "0"} | variables)
        listener = _parse_number(LISTENER, variables) if rank == 0 and LISTENER in variables else None
        return Torchrun(rank=rank, world=world, attempt=attempt, listener=listener)


def _parse_number(name: str, variables: Mapping[str, str]) -> int:
    number = parse_whole(variables[name])
    if number is None:
        raise SpecError(f"{name}={variables[name]}", "a whole number of at least 0", hint=HINT)
    return number

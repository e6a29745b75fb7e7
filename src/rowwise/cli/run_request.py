"""The arguments of train and resume, as ranks receive them, and short notes that survive a restart by torchrun."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rowwise.spec import Topology

if TYPE_CHECKING:
    from rowwise.recipes.recipe import Recipe


class NoteStore(Protocol):
    """Short texts that outlive a rank."""

    def get(self, name: str) -> str | None:
        """What was left under a name, if anything was."""
        ...

    def put(self, name: str, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The arguments of `train` or `resume`, as they are handed to the ranks."""

    recipe: "Recipe | None" = None
    folder: Path  # of all runs, or of the one
    changes: tuple[str, ...] = ()
    which: str = "last"
    as_json: bool = False

    def resuming(self, run: Path, topology: Topology) -> str:
        """The command that goes on with a run as it was."""
        if topology.hosts > 1:
            return f"torchrun ... -m rowwise resume {run}"
        return f"rowwise resume {run}" + (f" --nproc {topology.world}" if topology.world > 1 else "")

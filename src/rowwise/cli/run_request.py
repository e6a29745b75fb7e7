"""What was asked for of a run, as it is handed to its ranks; and where they leave a word for those who come after them.

Its own file because whoever makes the ranks and the ranks themselves need it, and neither needs the other.
"""

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

    def put(self, name: str, text: str) -> None:
        """Leave something."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What was asked for: a new run by a recipe, or one to go on with."""

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

"""RunRequest: the arguments of train or resume, pickled to ranks. NoteStore: notes that survive a restart of ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

from rowwise.tables.spec import Topology

if TYPE_CHECKING:
    from rowwise.recipes.recipe import Recipe

RUN = "run"  # key of the note with the run folder


class NoteStore(Protocol):
    """Key-value notes that outlive a rank."""

    def get(self, name: str) -> str | None: ...

    def put(self, name: str, text: str) -> None: ...


@final
class MemoryNotes:
    """Notes in the memory of this process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def get(self, name: str) -> str | None:
        return self._texts.get(name)

    def put(self, name: str, text: str) -> None:
        self._texts[name] = text


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A new run of a recipe, or without a recipe an existing run to resume."""

    recipe: "Recipe | None" = None
    folder: Path  # parent folder of runs for a new run, else the run to resume
    run: Path | None = None  # folder of the run of a recipe, new or to resume; None for a numbered one in `folder`
    changes: tuple[str, ...] = ()
    which: str = "last"
    as_json: bool = False
    baseline: bool | None = None  # train trees on the same rows afterwards; None if that is quick

    @property
    def network(self) -> str | None:
        """The network to order hosts by; empty for none, and None for a resume that does not change it."""
        from rowwise.recipes.text import apply_changes

        if self.recipe is not None:
            return self.recipe.network
        changed: dict[str, Any] = {}
        apply_changes(changed, [change for change in self.changes if change.startswith("network=")])
        return (changed["network"] or "") if changed else None

    def check_network(self) -> None:
        """Raise unless the network file is valid."""
        from rowwise.planning.perf.links import read_network
        from rowwise.recipes.recipe import PROBE

        if self.network and self.network != PROBE:
            read_network(self.network)

    def resume_command(self, run: Path, topology: Topology) -> str:
        """The shell command that resumes a run on the same number of ranks."""
        if topology.hosts > 1:
            return f"torchrun ... -m rowwise resume {run}"
        return f"rowwise resume {run}" + (f" --nproc {topology.world}" if topology.world > 1 else "")

"""The folder of a run that starts: made when the run needs it, and removed if the run does not start."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Self, final

import torch

from rowwise.base.errors import RowwiseError, SpecError
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import all_gather_uneven, on_first_rank
from rowwise.train.run_folder import RunFolder


@final
class StartFolder:
    """A folder to come; a context that ends in an error of rowwise or of the system leaves none.

    Args:
        root: the parent of runs by name, or a folder that is given.
        name: of the recipe.
        comm: the first rank makes the folder.
    """

    def __init__(self, root: Path | RunFolder, name: str, comm: Comm) -> None:
        """The folder is not there yet."""
        self._root, self._name, self._comm = root, name, comm
        self._made: RunFolder | None = None

    @property
    def near(self) -> Path:
        """A path of its file system."""
        return self._root.path if isinstance(self._root, RunFolder) else self._root

    def make(self) -> RunFolder:
        """Make the folder, unless it is made; a collective."""
        if self._made is None:
            self._made = open_on_all_ranks(self._comm, self._make_held)
        return self._made

    def _make_held(self) -> RunFolder:
        """A folder that is held at once, as another start may be about to use it."""
        root = self._root
        made = root.make() if isinstance(root, RunFolder) else RunFolder.create(root, self._name)
        made.hold()
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, (RowwiseError, OSError))
        if failed and self._made is not None and self._comm.rank == 0:
            self._made.release()
            shutil.rmtree(self._made.path, ignore_errors=True)


def open_on_all_ranks(comm: Comm, open_folder: Callable[[], RunFolder]) -> RunFolder:
    """The folder that the first rank opens; ranks with another working directory use its absolute path."""
    on_this_rank: list[RunFolder] = []

    def open_here() -> tuple[Path, Path]:
        on_this_rank.append(open_folder())
        return on_this_rank[0].path, on_this_rank[0].path.absolute()

    relative, absolute = on_first_rank(comm, open_here)
    seen_W = all_gather_uneven(comm, torch.tensor([int(absolute.is_dir())]), "folder")
    if not all(map(bool, seen_W)):
        ranks = ", ".join(str(rank) for rank, seen in enumerate(seen_W) if not seen)
        raise SpecError(
            f"{absolute}: rank 0 has this folder, and the hosts of ranks {ranks} do not",
            "a folder that all hosts share, by --runs or --run",
        )
    return on_this_rank[0] if on_this_rank else RunFolder(relative if relative.absolute() == absolute else absolute)

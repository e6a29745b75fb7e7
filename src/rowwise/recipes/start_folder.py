"""The folder of a new run: made on demand, and removed if the run does not start."""

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
    """A run folder that is made on demand; the context removes it on a RowwiseError or OSError.

    Args:
        root: the parent of runs by name, or the run's folder itself.
        name: name of the recipe.
        comm: the first rank makes the folder.
    """

    def __init__(self, root: Path | RunFolder, name: str, comm: Comm) -> None:
        self._root, self._name, self._comm = root, name, comm
        self._folder: RunFolder | None = None

    @property
    def near(self) -> Path:
        """A path on the same file system."""
        return self._root.path if isinstance(self._root, RunFolder) else self._root

    def make(self) -> RunFolder:
        """Make the folder on the first call; a collective."""
        if self._folder is None:
            self._folder = open_on_all_ranks(self._comm, self._make_held)
        return self._folder

    def _make_held(self) -> RunFolder:
        """Hold the folder at once, against a concurrent start."""
        root = self._root
        folder = root.make() if isinstance(root, RunFolder) else RunFolder.create(root, self._name)
        folder.hold()
        return folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, (RowwiseError, OSError))
        if failed and self._folder is not None and self._comm.rank == 0:
            self._folder.release()
            shutil.rmtree(self._folder.path, ignore_errors=True)


def open_on_all_ranks(comm: Comm, open_folder: Callable[[], RunFolder]) -> RunFolder:
    """Open the folder on the first rank and send its path; ranks in another working directory use the absolute one."""
    opened: list[RunFolder] = []

    def open_here() -> tuple[Path, Path]:
        opened.append(open_folder())
        return opened[0].path, opened[0].path.absolute()

    relative, absolute = on_first_rank(comm, open_here)
    exists_W = all_gather_uneven(comm, torch.tensor([int(absolute.is_dir())]), "folder")
    if not all(map(bool, exists_W)):
        ranks = ", ".join(str(rank) for rank, exists in enumerate(exists_W) if not exists)
        raise SpecError(
            f"{absolute}: rank 0 has this folder, and the hosts of ranks {ranks} do not",
            "a folder that all hosts share, by --runs or --run",
        )
    return opened[0] if opened else RunFolder(relative if relative.absolute() == absolute else absolute)

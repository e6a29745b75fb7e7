"""Resolves names from users: a run or a checkpoint by its path, tables of a checkpoint by name."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rowwise.base.errors import CheckpointError
from rowwise.base.inside import number_in
from rowwise.base.storage.folder import Folder, StorageFolder
from rowwise.base.storage.interface import MissingObjectError
from rowwise.checkpoint.manifest import NAME, CheckpointManifest, TensorEntry
from rowwise.checkpoint.read import Checkpoint, nearest_name
from rowwise.checkpoint.write import PART
from rowwise.tables.managed import ID
from rowwise.tables.spec import RowType, Table, Value

FAILED = "failed"
NONE_YET = "a run that has saved one, at its end or every save.every steps"
STEP = re.compile(r"step-([0-9]{1,18})")  # as users write it; folder names have leading zeros
STEP_DIGITS, VERSION_DIGITS = 9, 6
VERSIONS = "versions"  # the folder of versions in a served folder


class SavedTable(Value, frozen=True):
    """A table in a checkpoint, and its tensors."""

    table: str
    path: str  # path of its module
    name: str  # name of the tensor of its rows
    entry: TensorEntry
    state: dict[str, str]  # names of tensors by slot of the optimizer

    @property
    def ids(self) -> str | None:
        """The tensor with the id of each row, if the table is managed; else None, as ids are row numbers."""
        return self.state.get(ID)

    def spec(self, row_type: RowType | None = None) -> Table:
        """The table for plans, with another row type if given."""
        kind = row_type or self.entry.row_type
        group = self.entry.column_group if kind is self.entry.row_type else None
        rows, dim = self.entry.shape
        return Table(name=self.table, rows=rows, dim=dim, row_type=kind or RowType.FP32, column_group=group)


def open_named(path: Folder) -> Checkpoint:
    """Open a checkpoint, or the last complete one of a run."""
    chosen = [folder for folder in checkpoints_of(path) if folder == path or step_in(folder) is not None]
    if not chosen:
        raise CheckpointError(f"{path} has no checkpoint yet", NONE_YET)
    checkpoint = Checkpoint.open(chosen[0])
    checkpoint.check_headers()
    return checkpoint


def is_checkpoint(folder: Folder) -> bool:
    """Whether a folder has a manifest, valid or not."""
    if isinstance(folder, Path):
        return (folder / NAME).exists()
    try:
        folder.storage.stat(folder.inside(NAME))
    except MissingObjectError:
        return False
    return True


def checkpoints_of(path: Folder) -> Sequence[Folder]:
    """The complete checkpoints of a run, newest first; or the one at this path."""
    if isinstance(path, StorageFolder):
        return _checkpoints_at_url(path)
    if is_checkpoint(path):
        return [path]
    return _newest_first(x.parent for x in home_of(path).glob(f"*/{NAME}") if not x.parent.name.endswith(PART))


def _checkpoints_at_url(path: StorageFolder) -> Sequence[Folder]:
    """The complete checkpoints at the URL of a checkpoint, of its parent folder, or of a run."""
    names = path.relative_names()
    if NAME in names:
        return [path]
    folders = {name.removesuffix(f"/{NAME}").removeprefix("ckpt/") for name in names if name.endswith(f"/{NAME}")}
    parent = path / "ckpt" if any(name.startswith("ckpt/") for name in names) else path
    if not names:
        raise CheckpointError(
            f"{path} has no objects",
            "the URL of a checkpoint, or of a folder that rowwise ckpt copy wrote checkpoints to",
        )
    return _newest_first(parent / folder for folder in folders if "/" not in folder)


def home_of(path: Path) -> Path:
    """The folder of a run's checkpoints; `path` is that folder, or the run's."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder", "a checkpoint or a run, such as runs/dlrm-synthetic/1")
    for name in ("ckpt", VERSIONS):
        if (path / name).is_dir():
            return path / name
    if path.is_dir() and not path.name.endswith(PART) and any(map(step_in, path.iterdir())):
        return path
    problem = "was not completed" if path.name.endswith(PART) else f"is no checkpoint: it has no {NAME}; nor a run"
    raise CheckpointError(f"{path} {problem}", "a folder such as runs/dlrm-synthetic/1 or .../ckpt/step-000000100")


def step_in(path: Folder) -> int | None:
    """The step in the name of a checkpoint's folder, or the number of a version."""
    if path.name.startswith("step-"):
        return number_in(path.name.removeprefix("step-"), STEP_DIGITS)
    return number_in(path.name, VERSION_DIGITS)


def tables_of(manifest: CheckpointManifest) -> dict[str, SavedTable]:
    """The tables by name; by path and name if several modules have a table of that name."""
    tables: list[SavedTable] = []
    for name, entry in manifest.tensors.items():
        if entry.row_type is None:
            continue
        full_name = name.removeprefix("model/")
        path, _, table = full_name.rpartition(".")
        lead = f"rows/{full_name}/"
        state = {key.removeprefix(lead): key for key in manifest.tensors if key.startswith(lead)}
        tables.append(SavedTable(table=table, path=path, name=name, entry=entry, state=state))
    names = [table.table for table in tables]
    return {t.table if names.count(t.table) == 1 else f"{t.path}.{t.table}": t for t in tables}


def choose_tables(tables: Mapping[str, SavedTable], wanted: Sequence[str], where: Folder) -> dict[str, SavedTable]:
    if not tables:
        raise CheckpointError(f"{where} has no tables", "a checkpoint of a model with embedding tables")
    for name in wanted:
        if name not in tables:
            raise CheckpointError(f"{where} has no table {name!r}; {nearest_name(name, tables)}")
    return {name: tables[name] for name in dict.fromkeys(wanted)} if wanted else dict(tables)


def _newest_first(folders: Iterable[Folder]) -> list[Folder]:
    """The folders with a checkpoint's name; a failed run's checkpoint comes last."""
    steps = {folder: step_in(folder) for folder in folders}
    named = [folder for folder, step in steps.items() if step is not None or folder.name == FAILED]
    return sorted(named, key=lambda folder: (steps[folder] is None, -(steps[folder] or 0)))

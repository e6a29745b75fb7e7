"""Verifies checkpoints: reads every byte and lists the damaged chunks."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rowwise.base.errors import CheckpointError
from rowwise.base.storage.folder import Folder
from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.named import NONE_YET, checkpoints_of, step_in
from rowwise.checkpoint.read import Checkpoint, DamagedChunk
from rowwise.checkpoint.windows import ProgressCounter, Tell
from rowwise.tables.spec import Value

FindDamage = Callable[[Folder], Sequence[DamagedChunk]]


class CheckedCheckpoint(Value, frozen=True):
    """A fully read checkpoint and its damage."""

    name: str
    damage: tuple[DamagedChunk, ...] = ()


class CheckResult(Value, frozen=True):
    """Counts of checked files and tensors, and the damage found."""

    checked: tuple[CheckedCheckpoint, ...]
    whole: str | None  # the newest checkpoint without damage, among those checked

    @property
    def good(self) -> bool:
        return not any(checkpoint.damage for checkpoint in self.checked)


def verify(path: Folder, tell: Tell | None = None, find_more: FindDamage = lambda folder: ()) -> CheckResult:
    """Verify a checkpoint, or all of a run. If it is damaged, also older ones of its run, up to an undamaged one.

    Args:
        path: of a checkpoint, or of a run.
        tell: called with (bytes read, total).
        find_more: finds damage in files that no manifest lists.
    """
    checkpoints = checkpoints_of(path)
    if not checkpoints:
        raise CheckpointError(f"{path} has no checkpoint yet", NONE_YET)
    checked = [check(checkpoint, tell, find_more) for checkpoint in checkpoints]
    undamaged = _first_undamaged(checked)
    if undamaged is None and checkpoints == [path]:
        for older in _older(path):
            checked.append(check(older, tell, find_more))
            undamaged = _first_undamaged(checked[-1:])
            if undamaged is not None:
                break
    return CheckResult(checked=tuple(checked), whole=undamaged)


def check(folder: Folder, tell: Tell | None = None, find_more: FindDamage = lambda folder: ()) -> CheckedCheckpoint:
    try:
        checkpoint = Checkpoint.open(folder)
    except CheckpointError as error:
        return CheckedCheckpoint(
            name=folder.name, damage=(DamagedChunk(tensor="", place="", file=NAME, why=str(error)),)
        )
    entries = checkpoint.manifest.tensors.values()
    progress = ProgressCounter(tell, sum(entry.chunk_bytes(chunk) for entry in entries for chunk in entry.chunks))
    damage = checkpoint.find_damage(lambda entry, chunk: progress.add(entry.chunk_bytes(chunk)))
    return CheckedCheckpoint(name=folder.name, damage=(*damage, *find_more(folder)))


def _first_undamaged(checked: Sequence[CheckedCheckpoint]) -> str | None:
    return next((c.name for c in checked if not c.damage and step_in(Path(c.name)) is not None), None)


def _older(path: Folder) -> Sequence[Folder]:
    """Earlier checkpoints of the same run, newest first."""
    path = path.resolve() if isinstance(path, Path) else path
    try:
        checkpoints = checkpoints_of(path.parent)
    except CheckpointError:  # its folder is not a run
        return []
    return checkpoints[checkpoints.index(path) + 1 :] if path in checkpoints and step_in(path) is not None else []

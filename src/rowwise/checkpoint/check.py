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
    """A checkpoint that was read whole."""

    name: str
    damage: tuple[DamagedChunk, ...] = ()


class CheckResult(Value, frozen=True):
    """Counts of checked files and tensors, and the damage found."""

    checked: tuple[CheckedCheckpoint, ...]
    whole: str | None  # the newest checkpoint without damage, among those checked

    @property
    def good(self) -> bool:
        return not any(one.damage for one in self.checked)


def verify(path: Folder, tell: Tell | None = None, more: FindDamage = lambda folder: ()) -> CheckResult:
    """Verify a checkpoint, or all of a run. If it is damaged, also older ones of its run, until one is whole.

    Args:
        path: of a checkpoint, or of a run.
        tell: called with the bytes that were read, and with all.
        more: finds damage in files that are in no manifest.
    """
    checkpoints = checkpoints_of(path)
    if not checkpoints:
        raise CheckpointError(f"{path} has no checkpoint yet", NONE_YET)
    checked = [check(one, tell, more) for one in checkpoints]
    whole = _first_whole(checked)
    if whole is None and checkpoints == [path]:
        for older in _older(path):
            checked.append(check(older, tell, more))
            whole = _first_whole(checked[-1:])
            if whole is not None:
                break
    return CheckResult(checked=tuple(checked), whole=whole)


def check(folder: Folder, tell: Tell | None = None, more: FindDamage = lambda folder: ()) -> CheckedCheckpoint:
    try:
        checkpoint = Checkpoint.open(folder)
    except CheckpointError as error:
        return CheckedCheckpoint(
            name=folder.name, damage=(DamagedChunk(tensor="", place="", file=NAME, why=str(error)),)
        )
    entries = checkpoint.manifest.tensors.values()
    progress = ProgressCounter(tell, sum(entry.chunk_bytes(chunk) for entry in entries for chunk in entry.chunks))
    damage = checkpoint.find_damage(lambda entry, chunk: progress.add(entry.chunk_bytes(chunk)))
    return CheckedCheckpoint(name=folder.name, damage=(*damage, *more(folder)))


def _first_whole(checked: Sequence[CheckedCheckpoint]) -> str | None:
    return next((one.name for one in checked if not one.damage and step_in(Path(one.name)) is not None), None)


def _older(path: Folder) -> Sequence[Folder]:
    """The checkpoints of the same run that were written before."""
    path = path.resolve() if isinstance(path, Path) else path
    try:
        checkpoints = checkpoints_of(path.parent)
    except CheckpointError:  # its folder is no run
        return []
    return checkpoints[checkpoints.index(path) + 1 :] if path in checkpoints and step_in(path) is not None else []

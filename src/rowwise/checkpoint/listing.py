"""Lists the checkpoints of a run and the tensors of a checkpoint, from manifests alone."""

import re
from pathlib import Path
from typing import Any

from rowwise.base.errors import CheckpointError
from rowwise.base.storage.folder import Folder
from rowwise.base.textfile import file_time
from rowwise.checkpoint.manifest import NAME, CheckpointManifest
from rowwise.checkpoint.named import FAILED, checkpoints_of, home_of, step_in
from rowwise.checkpoint.write import PART
from rowwise.tables.spec import Value

RANK = re.compile(r"(?:.+\.)?([0-9]{5})-[0-9]+\.safetensors")  # name of a rank's file


class ListedCheckpoint(Value, frozen=True):
    """A checkpoint of a run."""

    name: str
    marks: tuple[str, ...]  # last, best, failed
    step: int | None = None
    samples: int | None = None
    saved_at: str = ""
    size_bytes: int = 0  # of the folder; an increment shares files with its base
    written_bytes: int = 0  # without files shared with its base
    tensors: int = 0
    ranks: int = 0  # number of ranks that wrote it
    how: str = "full"  # full or which increment, and bits of rounded tables
    problem: str = ""  # why it cannot be used


class ListedTensor(Value, frozen=True, rename={"chunks": "pieces"}):
    """A tensor of a checkpoint."""

    name: str
    kind: str  # row type of a table, else the dtype
    shape: tuple[int, ...]
    size_bytes: int
    chunks: int  # in JSON: pieces


def list_checkpoints(path: Folder) -> list[ListedCheckpoint]:
    """The checkpoints of a run, newest first; including damaged and incomplete ones."""
    manifests: dict[Folder, CheckpointManifest | str] = {}
    for folder in checkpoints_of(path):
        try:
            manifests[folder] = CheckpointManifest.read(folder)
        except CheckpointError as error:
            manifests[folder] = str(error)
    last = next((folder for folder in manifests if step_in(folder) is not None), None)
    newest = manifests[last] if last is not None else ""
    best = best_step(newest.data) if isinstance(newest, CheckpointManifest) else None
    listed = [_list(folder, manifest, _marks(folder, last, best)) for folder, manifest in manifests.items()]
    unfinished = sorted(filter(_is_checkpoint_name, _without_manifest(path)))
    return listed + [ListedCheckpoint(name=name, marks=(), problem="not complete") for name in unfinished]


def _without_manifest(path: Folder) -> list[str]:
    """The names of folders among the checkpoints without a manifest."""
    if isinstance(path, Path):
        return [x.name for x in home_of(path).iterdir() if x.is_dir() and not (x / NAME).exists()]
    names = [name.removeprefix("ckpt/") for name in path.relative_names()]
    folders = {name.partition("/")[0] for name in names if "/" in name}
    return [name for name in folders if f"{name}/{NAME}" not in names]


def list_tensors(manifest: CheckpointManifest) -> list[ListedTensor]:
    return [
        ListedTensor(
            name=name,
            kind=entry.dtype if entry.row_type is None else f"{entry.row_type} rows",
            shape=entry.shape,
            size_bytes=sum(entry.chunk_bytes(chunk) for chunk in entry.chunks),
            chunks=len(entry.chunks),
        )
        for name, entry in manifest.tensors.items()
    ]


def progress_in(data: dict[str, Any], key: str) -> Any:
    """A field of the saved progress, such as `step` or `samples`; None if absent."""
    progress = data.get("progress", data)
    return progress.get(key) if isinstance(progress, dict) else None


def best_step(data: dict[str, Any]) -> int | None:
    """The step of the best checkpoint, according to this checkpoint's data."""
    best = progress_in(data, "best")
    return _whole_number(best.get("step")) if isinstance(best, dict) else None


def _whole_number(number: object) -> int | None:
    return number if type(number) is int and 0 <= number < 1 << 62 else None


def _marks(folder: Folder, last: Folder | None, best: int | None) -> tuple[str, ...]:
    is_best = best is not None and step_in(folder) == best
    marks = {"last": folder == last, "best": is_best, FAILED: folder.name == FAILED}
    return tuple(mark for mark, holds in marks.items() if holds)


def _list(folder: Folder, manifest: CheckpointManifest | str, marks: tuple[str, ...]) -> ListedCheckpoint:
    if isinstance(manifest, str):
        return ListedCheckpoint(name=folder.name, marks=marks, step=step_in(folder), problem=manifest)
    ranks = {match[1] for match in map(RANK.fullmatch, manifest.files) if match}
    size_bytes = sum(file.size_bytes for file in manifest.files.values())
    saved_s = (folder / NAME).stat().st_mtime if isinstance(folder, Path) else folder.relative_names()[NAME].modified_s
    saved_at = file_time(saved_s).astimezone()
    return ListedCheckpoint(
        name=folder.name,
        marks=marks,
        step=_whole_number(progress_in(manifest.data, "step")),
        samples=_whole_number(progress_in(manifest.data, "samples")),
        saved_at=saved_at.isoformat(timespec="seconds"),
        size_bytes=size_bytes,
        written_bytes=manifest.chain_bytes[-1] if manifest.chain_bytes else size_bytes,
        tensors=len(manifest.tensors),
        ranks=len(ranks),
        how=_describe_chain(manifest),
    )


def _describe_chain(manifest: CheckpointManifest) -> str:
    """Full or increment, and the bits of rounded tables."""
    increments = max(0, len(manifest.chain_bytes) - 1)
    bits = {chunk.bits for entry in manifest.tensors.values() for chunk in entry.chunks if chunk.bits}
    kind = f"increment {increments} on a full one" if increments else "full"
    return f"{kind}, tables in {min(bits)} bits" if bits else kind


def _is_checkpoint_name(name: str) -> bool:
    bare_name = name.removesuffix(PART)
    return step_in(Path(bare_name)) is not None or bare_name == FAILED

"""Copies a run to another place while it trains (`save.mirror`), and fetches it back to a machine (`fetch_run`).

[Note: Mirrored runs]
A thread of the first rank polls the folder of the run. On a new checkpoint it first copies the small files, then the
checkpoint, whose manifest comes last. However the run ends, the mirror thus has a checkpoint, and log lines up to at
least its step; a resume cuts off the later ones. Checkpoints that the run has removed are removed from the mirror once
a newer one is there. A mirror belongs to one run, and to the process that holds it: a resume takes over the mirror, and
the earlier process, if it still lives, stops copying.
"""

import os
import secrets
import threading
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import final

import msgspec

from rowwise.base.errors import CheckpointError, DataError, RowwiseError, SpecError, StorageError, one_line
from rowwise.base.inside import fault_of_name
from rowwise.base.quantity import format_bytes
from rowwise.base.storage.folder import Folder, StorageFolder, as_storage, parse_folder, read_file, read_pieces
from rowwise.base.storage.interface import ObjectExistsError
from rowwise.base.storage.local import LocalStorage
from rowwise.base.textfile import MAX_BYTES, decode_json
from rowwise.checkpoint.copy import OtherCheckpointError, copy_checkpoint, remove_copy
from rowwise.checkpoint.listing import best_step
from rowwise.checkpoint.manifest import NAME, CheckpointManifest
from rowwise.checkpoint.named import STEP, checkpoints_of, step_in
from rowwise.checkpoint.read import Checkpoint
from rowwise.recipes.text import RECIPE, parse
from rowwise.tables.spec import Value
from rowwise.train.run_folder import UNBEGUN, RunFolder, now
from rowwise.train.saved import CheckpointFolder

RESULT, OWNER = "result.json", "mirror.json"  # in the mirror, and in the folder of the run
NOT_COPIED = ("ckpt", "disk", OWNER)  # not among the small files; checkpoints are copied by step
POLL_s, FILES_s = 0.25, 30.0  # intervals between polls of the folder, and between copies of small files


class MirrorOwner(Value, frozen=True):
    """The run that a mirror belongs to."""

    run: str
    holder: str = ""  # token of the process that may write

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


@final
class RunMirror:
    """Copies a run until `close`; see [Note: Mirrored runs]."""

    def __init__(self, url: str, run: RunFolder) -> None:
        """Claim a mirror for a run, or take over the run's own mirror."""
        self.place, self._run = as_storage(parse_folder(url)), run
        self._checkpoints = CheckpointFolder(run.checkpoints)
        if isinstance(self.place.storage, LocalStorage) and _is_inside(self.place.storage.folder, run.path):
            raise SpecError(f"save.mirror={url} is in the folder of the run itself", "another place, or null")
        self.copying: int | None = None  # the step of the checkpoint that is being read
        self._holder = secrets.token_hex(8)
        self._claim(url)
        self._copied: dict[str, tuple[int, int]] = {}  # size and mtime of each file when it was copied
        self._files_at_s = 0.0  # next copy of small files without a checkpoint
        self._failed = False  # in the last attempt
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)

    def start(self) -> None:
        """Copy the small files and start the thread; raises if another process has taken over the mirror."""
        self._check_holder()
        if not (self._run.path / RESULT).exists():  # of an earlier process
            self.place.storage.delete(self.place.inside(RESULT))
        self._copy_small_files()
        self._check_holder()
        self._thread.start()

    def close(self) -> str | None:
        """Copy the remaining files; returns an error line if the mirror stays incomplete."""
        self.stop()
        try:
            self._copy()
        except (RowwiseError, OSError) as error:
            problem = f"{self._run.path} is saved, but its mirror {self.place} is not: {one_line(error) or error}"
            return f"{problem}; rowwise ckpt copy copies the checkpoint"
        return None

    def stop(self) -> None:
        """Stop the thread after its current copy."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _claim(self, url: str) -> None:
        own = as_storage(self._run.path)
        run = _read_owner(own).run if (self._run.path / OWNER).is_file() else secrets.token_hex(8)
        claim = MirrorOwner(run=run, holder=self._holder).to_json()
        storage, name = self.place.storage, self.place.inside(OWNER)
        entries = {file.removeprefix("ckpt/").partition("/")[0] for file in self.place.relative_names()}
        has_run = RECIPE in entries or any(entry.startswith("step-") for entry in entries)
        hint = f"resume that run: rowwise resume {url}"
        if OWNER in entries:
            if _read_owner(self.place).run == run:
                self._check_newest(url)
            elif has_run:
                raise SpecError(f"save.mirror={url} is the mirror of another run", "another place", hint=hint)
            storage.write(name, lambda: [claim], len(claim))
        elif has_run:
            raise SpecError(f"save.mirror={url} has a run that is no mirror", "another place")
        else:
            try:
                storage.create(name, claim)
            except ObjectExistsError:
                raise SpecError(
                    f"save.mirror={url} has just become the mirror of another run", "another place", hint=hint
                ) from None
        self._run.write(OWNER, MirrorOwner(run=run).to_json().decode())

    def _check_newest(self, url: str) -> None:
        """Raise if the mirror has a later state of the run than its folder."""
        remote, local = max(_checkpoints_by_step(self.place), default=0), max(self._steps(), default=0)
        if remote > local:
            raise SpecError(
                f"save.mirror={url} has step {remote} of this run, and {self._run.path} step {local}",
                "another place",
                hint=f"resume from the mirror: rowwise resume {url}",
            )

    def _check_holder(self) -> None:
        if _read_owner(self.place).holder != self._holder:
            raise StorageError("another process has resumed this run, and holds the mirror: this process stops copying")

    def _follow(self) -> None:
        wait_s = POLL_s
        while not self._ending.wait(wait_s):
            try:
                self._copy()
                if self._failed:
                    self._run.log(f"{now()} mirror {self.place}: copied again")
                self._failed, wait_s = False, POLL_s
            except Exception as error:  # the run goes on, and the copy is retried
                if not self._failed:  # one line per outage
                    line = one_line(error) or repr(error)
                    self._run.warn(f"mirror {self.place}: {line}")
                    self._run.log(f"{now()} mirror {self.place}: {line}")
                self._failed, wait_s = True, min(2 * wait_s, FILES_s)

    def _copy(self) -> None:
        """Copy new files, if there is a new checkpoint, the run is over, or `FILES_s` have passed."""
        steps = self._steps()
        manifests = {step: self._manifest_of(step) for step in steps}
        new = {step for step, name in manifests.items() if self._copied.get(name) != self._state_of(name)}
        if not new and not self._ending.is_set() and perf_counter() < self._files_at_s:
            return
        self._files_at_s = perf_counter() + FILES_s
        self._check_holder()
        self._copy_small_files()
        for step in self._by_priority(steps):
            if step in new:
                self._copy_checkpoint(step)
        ending = self._ending.is_set()
        # At the end also without a new checkpoint: the run may have removed old ones since the last copy.
        if (new or ending) and steps and self._manifest_of(steps[-1]) in self._copied:
            self._check_holder()
            self._remove_stale(steps)
        if ending:  # the log has grown
            self._copy_small_files()
            self._copy_file(RESULT)

    def _by_priority(self, steps: list[int]) -> list[int]:
        """The best checkpoint first: a resume from the newest one needs it. Then the newest, and older ones."""
        if not steps:
            return []
        try:
            best = best_step(CheckpointManifest.read(self._checkpoints.path(steps[-1])).data)
        except CheckpointError:  # the run has removed it
            best = None
        return sorted(steps, key=lambda step: (step != best, -step))

    def _manifest_of(self, step: int) -> str:
        return f"ckpt/{self._checkpoints.path(step).name}/{NAME}"

    def _steps(self) -> list[int]:
        return self._checkpoints.steps()

    def _state_of(self, name: str) -> tuple[int, int] | None:
        try:
            status = (self._run.path / name).stat()
        except FileNotFoundError:
            return None
        return status.st_size, status.st_mtime_ns

    def _copy_small_files(self) -> None:
        """Copy changed small files but the result, which comes last and marks the mirror complete."""
        for top, folders, names in os.walk(self._run.path):
            inside = Path(top).relative_to(self._run.path)
            folders[:] = [name for name in folders if not fault_of_name(name) and str(inside / name) not in NOT_COPIED]
            for name in names:
                if not fault_of_name(name) and str(inside / name) not in (*NOT_COPIED, RESULT):
                    self._copy_file(str(inside / name))

    def _copy_file(self, name: str) -> None:
        state = self._state_of(name)
        if state is None or self._copied.get(name) == state:
            return
        size_bytes = state[0]
        path = self._run.path / name  # bytes appended during the copy are copied the next time
        pieces = partial(read_pieces, path.parent, path.name, size_bytes)
        self.place.storage.write(self.place.inside(name), pieces, size_bytes)
        self._copied[name] = state

    def _copy_checkpoint(self, step: int) -> None:
        """Copy a checkpoint, unless the run has removed it meanwhile."""
        name, begin_s = self._manifest_of(step), perf_counter()
        self.copying = step
        state = self._state_of(name)
        try:
            if state is None:
                return
            self._check_holder()
            checkpoint = Checkpoint.open(self._checkpoints.path(step))
            try:
                copy_checkpoint(checkpoint, self.place / "ckpt")
            except OtherCheckpointError:  # of a timeline that a resume has discarded
                remove_copy(self.place / "ckpt" / self._checkpoints.path(step).name)
                copy_checkpoint(checkpoint, self.place / "ckpt")
        except (RowwiseError, OSError):
            if self._state_of(name) is None:
                return
            raise
        finally:
            self.copying = None
        size_bytes = sum(file.size_bytes for file in checkpoint.manifest.files.values())
        self._copied[name] = state
        summary = f"{format_bytes(size_bytes)} in {perf_counter() - begin_s:.1f} s"
        self._run.log(f"copied {self._checkpoints.path(step).name} to {self.place}: {summary}")

    def _remove_stale(self, steps: list[int]) -> None:
        """Remove checkpoints that the run has removed, and partial copies."""
        names = {name.partition("/")[0] for name in (self.place / "ckpt").relative_names()}
        for name in names - {self._checkpoints.path(step).name for step in steps}:
            remove_copy(self.place / "ckpt" / name)


def is_mirror(path: Path) -> bool:
    """Whether a folder is a mirror, and not a run that has one."""
    return (path / OWNER).is_file() and bool(_read_owner(path).holder)


def fetch_run(url: str, runs: Path, which: str = "last") -> Path:
    """Fetch a mirrored run to runs/<recipe>/<last part of the URL>, or update that folder from the mirror.

    Copies the newest and the best checkpoint, and the one that `which` names.
    """
    place = as_storage(parse_folder(url))
    try:
        owner, recipe = _read_owner(place), read_file(place, RECIPE, MAX_BYTES)
    except FileNotFoundError:
        raise DataError(
            f"{url} is no mirror of a run: it has no {OWNER} and {RECIPE}", "the URL that a run had as save.mirror"
        ) from None
    path = runs / _name_of(recipe, url) / place.name
    own = path / OWNER
    has_files = path.exists() and any(entry.name not in UNBEGUN for entry in path.iterdir())
    if has_files and not (own.is_file() and _read_owner(as_storage(path)).run == owner.run):
        raise DataError(f"{path} exists, and is not the run of {url}", hint="remove it, or use another working folder")
    path.mkdir(parents=True, exist_ok=True)
    local, remote = LocalStorage(path), _checkpoints_by_step(place)
    folder = RunFolder(path)
    folder.hold()
    try:
        local_copies = _checkpoints_by_step(path) if (path / "ckpt").is_dir() else {}
        if (path / RECIPE).is_file() and max(remote, default=0) <= max(local_copies, default=0):
            return path
        folder.write(OWNER, MirrorOwner(run=owner.run).to_json().decode())  # lets a killed fetch continue
        _fetch_files(place, local)
        if remote:
            newest = Checkpoint.open(remote[max(remote)])
            best = best_step(newest.manifest.data)
            named = int(match[1]) if (match := STEP.fullmatch(which)) else None
            for step in remote.keys() & {max(remote), *(step for step in (best, named) if step is not None)}:
                copy_checkpoint(Checkpoint.open(remote[step]), path / "ckpt")
        local.write(RECIPE, lambda: [recipe], len(recipe))  # last: it makes the folder a run
    finally:
        folder.release()
    return path


def _fetch_files(place: StorageFolder, local: LocalStorage) -> None:
    for name, entry in place.relative_names().items():
        if name.partition("/")[0] in (*NOT_COPIED, RECIPE):
            continue
        local.write(name, partial(read_pieces, place, name, entry.size_bytes), entry.size_bytes)


def _checkpoints_by_step(place: Folder) -> dict[int, Folder]:
    return {step: folder for folder in checkpoints_of(place) if (step := step_in(folder)) is not None}


def _name_of(recipe: bytes, url: str) -> str:
    """The name of a recipe, which must be valid as a folder name."""
    name = parse(recipe.decode(errors="replace"), f"{url}/{RECIPE}").get("name")
    fault = fault_of_name(name) if isinstance(name, str) else "there is none"
    if fault:
        raise DataError(f"{url}/{RECIPE}: its name {str(name)[:80]!r} cannot name a folder: {fault}")
    return str(name)


def _read_owner(place: Folder) -> MirrorOwner:
    try:
        return decode_json(read_file(place, OWNER, MAX_BYTES), MirrorOwner)
    except ValueError as error:
        raise DataError(f"{place / OWNER} is damaged: {error}", hint="use the mirror of another run") from None


def _is_inside(place: Path, folder: Path) -> bool:
    return place.resolve().is_relative_to(folder.resolve())

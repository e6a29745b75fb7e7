"""Copies a run to another place while it trains (`save.mirror`), and brings it back to a machine (`fetch_run`).

[Note: Mirrored runs]
A thread of the first rank looks at the folder of the run. When there is a new checkpoint it first copies the small
files, then the checkpoint, whose manifest comes last. So whatever ends the run, the mirror has a checkpoint, and lines
of at least its step; a resume cuts off the later ones. Checkpoints that the run has removed leave the mirror after a
newer one has arrived. A mirror belongs to one run, and to the process that holds it: a resume takes it over, and the
former process, should it still live, copies no more.
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
NOT_COPIED = ("ckpt", "disk", OWNER)  # of the run's folder; checkpoints are copied by themselves
LOOK_s, FILES_s = 0.25, 30.0  # between two looks at the folder, and two copies of small files


class MirrorOwner(Value, frozen=True):
    """Whose a mirror is."""

    run: str
    holder: str = ""  # the process that may write

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


@final
class RunMirror:
    """Copies a run until `close`; see [Note: Mirrored runs]."""

    def __init__(self, url: str, run: RunFolder) -> None:
        """Claim a mirror for a run, or take it over where it is the run's already."""
        self.place, self._run = as_storage(parse_folder(url)), run
        self._checkpoints = CheckpointFolder(run.checkpoints)
        if isinstance(self.place.storage, LocalStorage) and _is_inside(self.place.storage.folder, run.path):
            raise SpecError(f"save.mirror={url} is in the folder of the run itself", "another place, or null")
        self.copying: int | None = None  # the step of the checkpoint that is being read
        self._holder = secrets.token_hex(8)
        self._claim(url)
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of change of files as they were copied
        self._files_at_s = 0.0  # when small files are copied even without a checkpoint
        self._failed = False  # at the newest attempt
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)

    def start(self) -> None:
        """Copy what there is but checkpoints, and begin to follow; raises if another process has the mirror by now."""
        self._check_holder()
        if not (self._run.path / RESULT).exists():  # that of a former process
            self.place.storage.delete(self.place.inside(RESULT))
        self._copy_small_files()
        self._check_holder()
        self._thread.start()

    def close(self) -> str | None:
        """Copy what is left; returns what the mirror lacks then, and why."""
        self.stop()
        try:
            self._copy()
        except (RowwiseError, OSError) as error:
            why = f"{self._run.path} is saved, but its mirror {self.place} is not: {one_line(error) or error}"
            return f"{why}; rowwise ckpt copy copies the checkpoint"
        return None

    def stop(self) -> None:
        """Stop the thread, after the copy that is under way."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _claim(self, url: str) -> None:
        own = as_storage(self._run.path)
        run = _read_owner(own).run if (self._run.path / OWNER).is_file() else secrets.token_hex(8)
        mine = MirrorOwner(run=run, holder=self._holder).to_json()
        storage, name = self.place.storage, self.place.inside(OWNER)
        there = {one.removeprefix("ckpt/").partition("/")[0] for one in self.place.relative_names()}
        has_run = RECIPE in there or any(one.startswith("step-") for one in there)
        hint = f"go on with that run: rowwise resume {url}"
        if OWNER in there:
            if _read_owner(self.place).run == run:
                self._check_newest(url)
            elif has_run:
                raise SpecError(f"save.mirror={url} is the mirror of another run", "another place", hint=hint)
            storage.write(name, lambda: [mine], len(mine))
        elif has_run:
            raise SpecError(f"save.mirror={url} has a run, which is no mirror", "another place")
        else:
            try:
                storage.create(name, mine)
            except ObjectExistsError:
                raise SpecError(
                    f"save.mirror={url} is the mirror of another run by now", "another place", hint=hint
                ) from None
        self._run.write(OWNER, MirrorOwner(run=run).to_json().decode())

    def _check_newest(self, url: str) -> None:
        """Raise if the mirror has a later state of the run than its folder."""
        there, here = max(_checkpoints_by_step(self.place), default=0), max(self._steps(), default=0)
        if there > here:
            raise SpecError(
                f"save.mirror={url} has step {there} of this run, and {self._run.path} step {here}",
                "another place",
                hint=f"go on from there: rowwise resume {url}",
            )

    def _check_holder(self) -> None:
        if _read_owner(self.place).holder != self._holder:
            raise StorageError("another process has resumed this run, and holds the mirror: this one copies no more")

    def _follow(self) -> None:
        wait_s = LOOK_s
        while not self._ending.wait(wait_s):
            try:
                self._copy()
                if self._failed:
                    self._run.log(f"{now()} mirror {self.place}: copied again")
                self._failed, wait_s = False, LOOK_s
            except Exception as error:  # the run goes on, and tries again
                if not self._failed:  # of an outage one line
                    line = one_line(error) or repr(error)
                    self._run.warn(f"mirror {self.place}: {line}")
                    self._run.log(f"{now()} mirror {self.place}: {line}")
                self._failed, wait_s = True, min(2 * wait_s, FILES_s)

    def _copy(self) -> None:
        """Copy what is new since the last call, if there is a checkpoint, the run is over, or some time has passed."""
        steps = self._steps()
        manifests = {step: self._manifest_of(step) for step in steps}
        new = {step for step, name in manifests.items() if self._copied.get(name) != self._state_of(name)}
        if not new and not self._ending.is_set() and perf_counter() < self._files_at_s:
            return
        self._files_at_s = perf_counter() + FILES_s
        self._check_holder()
        self._copy_small_files()
        for step in self._in_order(steps):
            if step in new:
                self._copy_checkpoint(step)
        ending = self._ending.is_set()
        # At the end also without a new one: the run may have removed others after the last copy.
        if (new or ending) and steps and self._manifest_of(steps[-1]) in self._copied:
            self._check_holder()
            self._remove_others(steps)
        if ending:  # the log has more lines now
            self._copy_small_files()
            self._copy_file(RESULT)

    def _in_order(self, steps: list[int]) -> list[int]:
        """The best checkpoint first: a resume from the newest one needs it. Then the newest, and older ones."""
        if not steps:
            return []
        try:
            best = best_step(CheckpointManifest.read(self._checkpoints.path(steps[-1])).data)
        except CheckpointError:  # the run has removed it meanwhile
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
        """Copy what has changed but the result, which says that all else is there."""
        for top, folders, names in os.walk(self._run.path):
            inside = Path(top).relative_to(self._run.path)
            folders[:] = [one for one in folders if not fault_of_name(one) and str(inside / one) not in NOT_COPIED]
            for name in names:
                if not fault_of_name(name) and str(inside / name) not in (*NOT_COPIED, RESULT):
                    self._copy_file(str(inside / name))

    def _copy_file(self, name: str) -> None:
        state = self._state_of(name)
        if state is None or self._copied.get(name) == state:
            return
        size_bytes = state[0]
        path = self._run.path / name  # what is appended meanwhile is left for the next time
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
            except OtherCheckpointError:  # of steps that a resume from an earlier one has taken back
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
        took = f"{format_bytes(size_bytes)} in {perf_counter() - begin_s:.1f} s"
        self._run.log(f"copied {self._checkpoints.path(step).name} to {self.place}: {took}")

    def _remove_others(self, steps: list[int]) -> None:
        """Remove checkpoints that the run does not have any more, or that are the rests of a copy."""
        names = {name.partition("/")[0] for name in (self.place / "ckpt").relative_names()}
        for name in names - {self._checkpoints.path(step).name for step in steps}:
            remove_copy(self.place / "ckpt" / name)


def is_mirror(path: Path) -> bool:
    """Whether a folder is a mirror that a process holds or held, and not a run with one."""
    return (path / OWNER).is_file() and bool(_read_owner(path).holder)


def fetch_run(url: str, runs: Path, which: str = "last") -> Path:
    """Bring a mirrored run to runs/<recipe>/<last part of the URL>, or what the mirror has more than that folder.

    Its newest and its best checkpoint are copied, and that which is named.
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
    known = path.exists() and any(one.name not in UNBEGUN for one in path.iterdir())
    if known and not (own.is_file() and _read_owner(as_storage(path)).run == owner.run):
        raise DataError(f"{path} exists, and is not the run of {url}", hint="remove it, or use another working folder")
    path.mkdir(parents=True, exist_ok=True)
    local, there = LocalStorage(path), _checkpoints_by_step(place)
    folder = RunFolder(path)
    folder.hold()
    try:
        here = _checkpoints_by_step(path) if (path / "ckpt").is_dir() else {}
        if (path / RECIPE).is_file() and max(there, default=0) <= max(here, default=0):
            return path
        folder.write(OWNER, MirrorOwner(run=owner.run).to_json().decode())  # so that a fetch that is killed goes on
        _fetch_files(place, local)
        if there:
            newest = Checkpoint.open(there[max(there)])
            best = best_step(newest.manifest.data)
            named = int(match[1]) if (match := STEP.fullmatch(which)) else None
            for step in there.keys() & {max(there), *(one for one in (best, named) if one is not None)}:
                copy_checkpoint(Checkpoint.open(there[step]), path / "ckpt")
        local.write(RECIPE, lambda: [recipe], len(recipe))  # last: with it the folder is a run
    finally:
        folder.release()
    return path


def _fetch_files(place: StorageFolder, local: LocalStorage) -> None:
    for name, one in place.relative_names().items():
        if name.partition("/")[0] in (*NOT_COPIED, RECIPE):
            continue

        local.write(name, partial(read_pieces, place, name, one.size_bytes), one.size_bytes)


def _checkpoints_by_step(place: Folder) -> dict[int, Folder]:
    return {step: one for one in checkpoints_of(place) if (step := step_in(one)) is not None}


def _name_of(recipe: bytes, url: str) -> str:
    """The name in a recipe, as a part of a path."""
    name = parse(recipe.decode(errors="replace"), f"{url}/{RECIPE}").get("name")
    fault = fault_of_name(name) if isinstance(name, str) else "there is none"
    if fault:
        raise DataError(f"{url}/{RECIPE}: its name {str(name)[:80]!r} cannot be that of a folder: {fault}")
    return str(name)


def _read_owner(place: Folder) -> MirrorOwner:
    try:
        return decode_json(read_file(place, OWNER, MAX_BYTES), MirrorOwner)
    except ValueError as error:
        raise DataError(f"{place / OWNER} is damaged: {error}", hint="use the mirror of another run") from None


def _is_inside(place: Path, folder: Path) -> bool:
    return place.resolve().is_relative_to(folder.resolve())

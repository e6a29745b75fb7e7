"""The folder of `rowwise compress`, which keeps measurements so that a killed command continues.

    order.json              what is measured: recipe, history, rows, seed
    probe.safetensors       frequencies and learned vectors of ids; probe-all: of the whole history
    trials.jsonl            a line for each trial
    maps/<table>.idmap      the chosen maps
    recipe.yaml             the recipe with the maps
    advice.json, report.html

Another recipe, history, rows or seed needs another folder. Another ratio, budget or set of methods uses the recorded
trials.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import msgspec

from rowwise.calibrate.folder import lock_exclusively
from rowwise.errors import SpecError
from rowwise.recipes.compress.schedule import TrialSpec
from rowwise.recipes.recipe import Recipe
from rowwise.spec import Value
from rowwise.textfile import append, decode_json, read_bytes, write_new

ORDER, TRIALS, PROBE = "order.json", "trials.jsonl", "probe.safetensors"
MATTER = (
    "seed",
    "data",
    "transforms",
    "columns",
    "tables",
    "model",
    "train",
    "evaluate",
)  # sections of a recipe that change measurements


class TrialFolderSpec(Value, frozen=True, kw_only=True):
    """The settings of trials; trials with equal settings can be compared."""

    recipe: dict[str, Any]  # the sections that matter
    history: tuple[str, ...] = ()
    rows: int | None = None
    seed: int = 0

    @classmethod
    def of(cls, recipe: Recipe, history: tuple[str, ...], rows: int | None, seed: int) -> "TrialFolderSpec":
        """The spec for a resolved recipe."""
        sections = msgspec.to_builtins(recipe)
        plain = {name: sections.get(name) for name in MATTER}
        # Through JSON and back, so that it compares equal to the content of a file.
        return cls(recipe=msgspec.json.decode(msgspec.json.encode(plain)), history=history, rows=rows, seed=seed)


class Trial(Value, frozen=True, kw_only=True):
    """A recorded trial. Without metrics the method cannot make the table that small."""

    asked: TrialSpec
    size_bytes: int = 0  # of the table, its map included
    map_bytes: int = 0
    digest: str = ""  # of the map of one table
    metrics: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)  # of each label
    took_s: float = 0.0


@final
class TrialFolder:
    """An existing folder; see `open_folder`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def trials(self) -> Path:
        return self.path / TRIALS

    @property
    def maps(self) -> Path:
        return self.path / "maps"

    def read(self) -> dict[TrialSpec, Trial]:
        if not self.trials.exists():
            return {}
        found: dict[TrialSpec, Trial] = {}
        for number, line in enumerate(read_bytes(self.trials).split(b"\n")[:-1], start=1):
            try:
                trial = decode_json(line, Trial)
            except msgspec.DecodeError as error:
                raise SpecError(f"{self.trials}, line {number}: not a trial: {error}: want the line deleted") from None
            found[trial.asked] = trial
        return found

    def add(self, trial: Trial) -> None:
        """Append a line and sync it to disk."""
        append(self.trials, msgspec.json.encode(trial) + b"\n", sync=True)

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file through a temporary one."""
        part = self.path / f".{name}.part"
        write_new(part, content if isinstance(content, bytes) else content.encode())
        return part.replace(self.path / name)


def open_folder(path: Path, spec: TrialFolderSpec) -> TrialFolder:
    """A new folder, or an existing one with the same spec."""
    if path.exists() and not path.is_dir():
        raise SpecError(f"{path} is a file: want a folder for measurements")
    folder, at = TrialFolder(path), path / ORDER
    if at.exists():
        _check_same(at, _read_order(at), spec)
        return folder
    if path.exists() and any(path.iterdir()):
        raise SpecError(f"{path} has other files and no {ORDER}: want --out with a new folder")
    path.mkdir(parents=True, exist_ok=True)
    folder.write(ORDER, msgspec.json.format(msgspec.json.encode(spec), indent=1))
    return folder


def recorded_rows(path: Path) -> int | None:
    """The rows that trials of a folder train on; None: all, or no trials yet."""
    at = path / ORDER
    return _read_order(at).rows if at.is_file() else None


def lock_folder(folder: TrialFolder) -> AbstractContextManager[None]:
    """Nobody else measures into the folder meanwhile; cuts off what a killed process left half written."""
    return lock_exclusively(folder.path / ORDER, folder.path, TRIALS)


def _read_order(path: Path) -> TrialFolderSpec:
    try:
        return decode_json(read_bytes(path), TrialFolderSpec)
    except msgspec.DecodeError as error:
        raise SpecError(f"{path}: not written by `rowwise compress`: {error}: want another folder") from None


def _check_same(at: Path, found: TrialFolderSpec, wanted: TrialFolderSpec) -> None:
    """Raise for the first difference."""
    want = "want the same again, or --out with another folder"
    other = [name for name in MATTER if found.recipe.get(name) != wanted.recipe.get(name)]
    if other:
        raise SpecError(f"{at}: measured with another recipe, which differs in {', '.join(other)}: {want}")
    if found.history != wanted.history:
        there, here = (" and ".join(history) or "none" for history in (found.history, wanted.history))
        raise SpecError(f"{at}: measured with --history {there}, not {here}: {want}")
    for name in ("rows", "seed"):
        there, here = getattr(found, name), getattr(wanted, name)
        if there != here:
            raise SpecError(f"{at}: measured with --{name} {there}, not {here}: {want}")

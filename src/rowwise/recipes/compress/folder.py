"""The folder of `rowwise compress`, which keeps measurements so that a killed command continues.

    order.json              the settings of all trials: recipe, history, rows, seed
    probe.safetensors       counts and learned vectors of ids; probe-all: those of the whole history
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

from rowwise.base.errors import SpecError
from rowwise.base.textfile import append, decode_json, read_bytes, write_new
from rowwise.planning.calibrate.folder import lock_exclusively
from rowwise.recipes.compress.schedule import TrialSpec
from rowwise.recipes.recipe import Recipe
from rowwise.tables.spec import Value

SPEC, TRIALS, PROBE = "order.json", "trials.jsonl", "probe.safetensors"
# Sections of a recipe that change measurements
SECTIONS = ("seed", "data", "transforms", "columns", "tables", "model", "train", "evaluate")


class TrialFolderSpec(Value, frozen=True, kw_only=True):
    """The settings of trials; trials with equal settings can be compared."""

    recipe: dict[str, Any]  # SECTIONS of the recipe
    history: tuple[str, ...] = ()
    rows: int | None = None
    seed: int = 0

    @classmethod
    def of(cls, recipe: Recipe, history: tuple[str, ...], rows: int | None, seed: int) -> "TrialFolderSpec":
        """The spec of a resolved recipe."""
        plain = msgspec.to_builtins(recipe)
        sections = {name: plain.get(name) for name in SECTIONS}
        # Through JSON and back, so that it compares equal to the content of a file.
        return cls(recipe=msgspec.json.decode(msgspec.json.encode(sections)), history=history, rows=rows, seed=seed)


class Trial(Value, frozen=True, kw_only=True):
    """A recorded trial. It has no metrics if the method cannot make the table that small."""

    spec: TrialSpec = msgspec.field(name="asked")
    size_bytes: int = 0  # bytes of the table with its map
    map_bytes: int = 0
    digest: str = ""  # digest of the table's map; empty if several tables are compressed
    metrics: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)  # by label
    took_s: float = 0.0


@final
class TrialFolder:
    """An existing folder, as `open_folder` returns it."""

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
        trials: dict[TrialSpec, Trial] = {}
        for number, line in enumerate(read_bytes(self.trials).split(b"\n")[:-1], start=1):
            try:
                trial = decode_json(line, Trial)
            except msgspec.DecodeError as error:
                raise SpecError(f"{self.trials}, line {number}: not a trial: {error}", hint="delete the line") from None
            trials[trial.spec] = trial
        return trials

    def add(self, trial: Trial) -> None:
        """Append a line and sync it to disk."""
        append(self.trials, msgspec.json.encode(trial) + b"\n", sync=True)

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file through a temporary one; returns its path."""
        part = self.path / f".{name}.part"
        write_new(part, content if isinstance(content, bytes) else content.encode())
        return part.replace(self.path / name)


def open_folder(path: Path, spec: TrialFolderSpec) -> TrialFolder:
    """A new folder, or an existing one with the same spec; raises for other folders."""
    if path.exists() and not path.is_dir():
        raise SpecError(f"{path} is a file", "a folder for measurements")
    folder, file = TrialFolder(path), path / SPEC
    if file.exists():
        _check_same(file, _read_spec(file), spec)
        return folder
    if path.exists() and any(path.iterdir()):
        raise SpecError(f"{path} has other files and no {SPEC}", "--out with a new folder")
    path.mkdir(parents=True, exist_ok=True)
    folder.write(SPEC, msgspec.json.format(msgspec.json.encode(spec), indent=1))
    return folder


def recorded_rows(path: Path) -> int | None:
    """The rows that trials of a folder train on; None: all, or no trials yet."""
    file = path / SPEC
    return _read_spec(file).rows if file.is_file() else None


def lock_folder(folder: TrialFolder) -> AbstractContextManager[None]:
    """Lock the folder against other processes; first deletes a half-written trial of a killed process."""
    return lock_exclusively(folder.path / SPEC, folder.path, TRIALS)


def _read_spec(path: Path) -> TrialFolderSpec:
    try:
        return decode_json(read_bytes(path), TrialFolderSpec)
    except msgspec.DecodeError as error:
        raise SpecError(f"{path}: not written by `rowwise compress`: {error}", "another folder") from None


def _check_same(file: Path, saved: TrialFolderSpec, requested: TrialFolderSpec) -> None:
    """Raise for the first difference of two specs."""
    expected = "the same settings, or --out with another folder"
    differing = [name for name in SECTIONS if saved.recipe.get(name) != requested.recipe.get(name)]
    if differing:
        raise SpecError(f"{file}: measured with another recipe, which differs in {', '.join(differing)}", expected)
    if saved.history != requested.history:
        old, new = (" and ".join(history) or "none" for history in (saved.history, requested.history))
        raise SpecError(f"{file}: measured with --history {old}, not {new}", expected)
    for name in ("rows", "seed"):
        old, new = getattr(saved, name), getattr(requested, name)
        if old != new:
            raise SpecError(f"{file}: measured with --{name} {old}, not {new}", expected)

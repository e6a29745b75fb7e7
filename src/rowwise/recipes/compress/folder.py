"""The folder of `rowwise compress`: what is measured, and everything that was, so that a killed command goes on.

    order.json              the recipe, the history and how it is measured
    probe.safetensors       how often ids come, and what a small model learned of them; probe-all: on all of the history
    trials.jsonl            a line for each training run
    maps/<table>.idmap      what was chosen
    recipe.yaml             trains with it
    advice.json, report.html

A folder holds measurements of one kind: another recipe or history is refused. Another ratio, budget or other methods
are not: they use what is there.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import msgspec

from rowwise.calibrate.folder import lock_and_repair
from rowwise.errors import SpecError
from rowwise.recipes.compress.schedule import TrialSpec
from rowwise.recipes.recipe import Recipe
from rowwise.spec import Value
from rowwise.textfile import append, decode_json, read_bytes, write_new

ORDER, TRIALS = "order.json", "trials.jsonl"
MATTER = ("seed", "data", "transforms", "columns", "tables", "model", "train", "evaluate")  # of a recipe


class TrialFolderSpec(Value, frozen=True, kw_only=True):
    """The recipe, rows and seed of trials: those of one folder are comparable."""

    recipe: dict[str, Any]  # the sections that matter
    history: tuple[str, ...] = ()
    rows: int | None = None
    seed: int = 0

    @classmethod
    def of(cls, recipe: Recipe, history: tuple[str, ...], rows: int | None, seed: int) -> "TrialFolderSpec":
        sections = msgspec.to_builtins(recipe)
        plain = {name: sections.get(name) for name in MATTER}
        # Through JSON and back, so that what is compared is what a file holds.
        return cls(recipe=msgspec.json.decode(msgspec.json.encode(plain)), history=history, rows=rows, seed=seed)


class Trial(Value, frozen=True, kw_only=True):
    """A trial that was made; without metrics, the method cannot make the table that small."""

    asked: TrialSpec
    size_bytes: int = 0  # of the table, its map included
    map_bytes: int = 0
    digest: str = ""  # of the map of one table
    metrics: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)  # of each label
    took_s: float = 0.0


@final
class TrialFolder:
    """An existing folder of trials; `open_folder` makes one."""

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
                raise SpecError(f"{self.trials}, line {number}: not a trial: {error}; delete the line") from None
            found[trial.asked] = trial
        return found

    def add(self, trial: Trial) -> None:
        """A line that outlasts a kill and a power failure."""
        append(self.trials, msgspec.json.encode(trial) + b"\n", sync=True)

    def write(self, name: str, content: str | bytes) -> Path:
        """A file that is whole or not there."""
        part = self.path / f".{name}.part"
        write_new(part, content if isinstance(content, bytes) else content.encode())
        return part.replace(self.path / name)


def open_folder(path: Path, order: TrialFolderSpec) -> TrialFolder:
    """A new folder, or one where the same is measured."""
    if path.exists() and not path.is_dir():
        raise SpecError(f"{path}: that is a file: want a folder for measurements")
    folder, at = TrialFolder(path), path / ORDER
    if at.exists():
        _check_same(at, _read_order(at), order)
        return folder
    if path.exists() and any(path.iterdir()):
        raise SpecError(f"{path}: a folder with other things in it, and no {ORDER}: want a new one, by --out")
    path.mkdir(parents=True, exist_ok=True)
    folder.write(ORDER, msgspec.json.format(msgspec.json.encode(order), indent=1))
    return folder


def lock_folder(folder: TrialFolder) -> AbstractContextManager[None]:
    """Nobody else measures into the folder meanwhile; cuts off what a killed process left half written."""
    return lock_and_repair(folder.path / ORDER, folder.path, TRIALS)


def _read_order(path: Path) -> TrialFolderSpec:
    try:
        return decode_json(read_bytes(path), TrialFolderSpec)
    except msgspec.DecodeError as error:
        raise SpecError(f"{path}: not an order of `rowwise compress`: {error}; take another folder") from None


def _check_same(at: Path, found: TrialFolderSpec, wanted: TrialFolderSpec) -> None:
    out = "go on as it began, or measure into another folder by --out"
    other = [name for name in MATTER if found.recipe.get(name) != wanted.recipe.get(name)]
    if other:
        raise SpecError(f"{at}: measured with another recipe, whose {', '.join(other)} differ: {out}")
    if found.history != wanted.history:
        there, here = (" and ".join(history) or "none" for history in (found.history, wanted.history))
        raise SpecError(f"{at}: measured with another --history, {there} and not {here}: {out}")
    for name in ("rows", "seed"):
        there, here = getattr(found, name), getattr(wanted, name)
        if there != here:
            raise SpecError(f"{at}: measured with --{name} {there}, and not {here}: {out}")

"""`rowwise.fit` for notebooks: the commands `data inspect`, `train`, `report` and `predict` for a frame in memory.

The frame is written as Parquet beside the runs, as workers and resumed runs read files; equal frames share one file, so
that their runs are comparable. All other steps are those of the commands, and other commands accept the run:
`rowwise resume`, `eval`, `export`.
"""

import hashlib
import html
import json
import os
import re
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, final

import numpy as np
import pyarrow as pa
import typer
from numpy.typing import NDArray
from pyarrow import parquet as pq

from rowwise.base.errors import DataError, SpecError, escape_newlines
from rowwise.base.textfile import decode_json, read_bytes, read_text
from rowwise.cli.console import show_warning
from rowwise.cli.environment import CommandEnvironment
from rowwise.cli.launch import launch
from rowwise.cli.progress import splits_bar
from rowwise.cli.run_request import RunRequest
from rowwise.cli.terminal import make_terminal, say
from rowwise.ingest.frames import FrameReader
from rowwise.ingest.inspect import DatasetCard, find_separators, inspect
from rowwise.ingest.kinds import is_list
from rowwise.ingest.roles import Role, parse_roles
from rowwise.recipes.find import load
from rowwise.recipes.predict import Predictor, predict
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.rows import RowSelection
from rowwise.recipes.run_result import RunResult
from rowwise.recipes.starter import recipe_name, write_starter
from rowwise.recipes.text import read
from rowwise.recipes.trained import load_predictor
from rowwise.train.run_folder import FRAME, RunFolder

FRAMES = "frames"  # folder beside the runs, with the rows of frames by digest
SHOWN = ("auc", "loss", "ne", "calibration", "rmse", "mae", "r2")  # metrics of a run that its repr prints
DIGITS = 16  # hexadecimal digits of a digest
REPORT_HEIGHT_em = 45  # in a notebook
OPTION = re.compile(r"--(label|sparse|dense|ignore|time|key)[ =]")  # options that are arguments of `fit`


@final
class Report:
    """The report of a run, rendered by notebooks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        page = html.escape(read_text(self.path))
        style = f"width:100%;height:{REPORT_HEIGHT_em}em;border:0"
        return f'<iframe srcdoc="{page}" style="{style}"></iframe>'


@final
class FittedRun:
    """A finished run, by its folder: from `rowwise.fit` or from any command.

    Args:
        folder: the run folder, such as runs/clicked/1.
        card: summary of the frame's columns, from `rowwise.fit`.
    """

    def __init__(self, folder: str | Path, card: DatasetCard | None = None) -> None:
        self.folder, self.card = RunFolder.open(Path(folder)).path, card

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in self.test.items() if name in SHOWN and value)
        return f"FittedRun({str(self.folder)!r}): {shown or 'not tested'}"

    @property
    def report(self) -> Report:
        """The report: rendered by notebooks, with an HTML file at its `path`."""
        return Report(self.folder / "report.html")

    @property
    def outcome(self) -> RunResult:
        """Status of the run, and the metrics of all its labels."""
        return decode_json(read_bytes(self.folder / "result.json"), RunResult)

    @property
    def test(self) -> dict[str, float | None]:
        """Test metrics of the (first) label."""
        return next(iter(self.outcome.test.values()), {})

    def predict(self, frame: object) -> NDArray[np.float32]:
        """The probability that the label is 1, for each row of a frame in order; several labels have a column each.

        The frame needs the input columns of the model, and no label.
        """
        rows = to_table(frame)
        if not rows.num_rows:
            raise DataError("frame: no rows to predict for", "at least one row")
        if self._predictor.items is not None:
            raise SpecError(f"{self.folder} ranks items for lists", "a run with a label", hint="use rowwise predict")
        tasks = self._predictor.parts.tasks
        with TemporaryDirectory(prefix="rowwise-") as folder:
            out = Path(folder) / "predictions.parquet"
            predict(self._predictor, RowSelection(FrameReader(rows)), out)
            predictions = pq.read_table(out)
        numbers = predictions.drop_columns(predictions.column_names[:1])  # the first one is the key of the row
        columns_per_label = numbers.num_columns // len(tasks)  # the last column of a label is its prediction
        values = np.stack(
            [numbers.column(columns_per_label * k + columns_per_label - 1).to_numpy() for k in range(len(tasks))], 1
        )
        return values[:, 0] if len(tasks) == 1 else values

    @cached_property
    def _predictor(self) -> Predictor:
        return load_predictor(self.folder, warn=partial(show_warning, make_terminal(stderr=True)))


def fit(  # noqa: PLR0913 - public options
    frame: object,
    label: str | None = None,
    *,
    folder: str | Path = "runs",
    name: str | None = None,
    recipe: str | Path | None = None,
    set: Mapping[str, object] | Iterable[str] = (),
    sparse: Sequence[str] = (),
    dense: Sequence[str] = (),
    ignore: Sequence[str] = (),
    time: str | None = None,
    key: str | None = None,
) -> FittedRun:
    """Train a model that predicts a column of a frame: `rowwise data inspect` and `rowwise train` in one call.

    The run folder has all outputs of the commands, with the recipe. Ctrl-C, or the stop button of a notebook, ends the
    run after its current step with a checkpoint, from which `rowwise resume` continues.

    Args:
        frame: of pandas, polars, pyarrow, or any object with `__arrow_c_stream__`. Named index levels are columns.
        label: the column to predict (default: the column named label or click).
        folder: parent folder of runs.
        name: name of the recipe, and of the folder of its runs (default: the name of the label).
        recipe: a file or the name of a built-in recipe, instead of one written for the frame.
        set: changes to the recipe, such as {"train.epochs": 2}.
        sparse: columns to treat as ids.
        dense: columns to treat as numbers.
        ignore: columns to leave out.
        time: column with the time of each row; the last rows are the test rows.
        key: column with the key of each row.
    """
    table, changes = to_table(frame), _parse_changes(set)
    if not table.num_rows:
        raise DataError("frame: no rows", "rows to train on")
    roles = parse_roles({"sparse": sparse, "dense": dense, "unused": ignore, "time": time, "key": key})
    if recipe is not None and (label is not None or name is not None or roles):
        raise SpecError("recipe= with label=, name= or roles of columns, which the recipe has: leave them out")
    run_name = load(str(recipe)).name if recipe is not None else name or recipe_name(label or "frame")
    rows = _write_frame(table, Path(folder) / FRAMES)
    run = RunFolder.create(Path(folder), run_name)
    try:
        card: DatasetCard | None = None
        if recipe is not None:
            loaded = load(str(recipe), (f"data.dataset=parquet:{rows.path}", *changes))
        else:
            try:
                recipe_path = run.path.absolute() / FRAME / f"{run_name}.yaml"
                loaded, card = _start_recipe(table, rows.path, label, recipe_path, roles, changes)
            except (DataError, SpecError) as error:
                raise type(error)(_as_arguments(str(error))) from None
        launch(RunRequest(recipe=loaded, folder=Path(folder), run=run.path), None, None, CommandEnvironment.read({}))
    except typer.Exit as ended:
        if ended.exit_code == 128 + signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(ended.exit_code) from None
    finally:
        if not run.has_begun:
            shutil.rmtree(run.path, ignore_errors=True)
            if rows.is_new:
                rows.path.unlink()
            for emptied in (run.path.parent, rows.path.parent):
                with suppress(OSError):
                    emptied.rmdir()
    return FittedRun(run.path, card)


def to_table(frame: Any) -> pa.Table:
    """A frame as an Arrow table; of a pandas index, named levels become columns."""
    try:
        if hasattr(frame, "iloc") and hasattr(
            frame, "columns"
        ):  # the Arrow stream of pandas includes unnamed index levels
            has_named_index = any(name is not None for name in frame.index.names)
            table = pa.Table.from_pandas(frame, preserve_index=has_named_index)
            table = table.drop_columns([name for name in table.column_names if name.startswith("__index_level_")])
        elif hasattr(frame, "__arrow_c_stream__"):
            table = pa.table(frame)
        else:
            raise DataError(
                f"frame: got {type(frame).__name__}",
                "a frame of pandas or polars, a table of pyarrow, or another with __arrow_c_stream__",
            )
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"frame: {escape_newlines(str(error))}") from None
    duplicates = [name for name in dict.fromkeys(table.column_names) if table.column_names.count(name) > 1]
    if duplicates:
        raise DataError(
            f"frame: column {duplicates[0]!r} occurs {table.column_names.count(duplicates[0])} times",
            "each column once",
        )
    return table.cast(pa.schema([field.with_type(_storable_type(field.type)) for field in table.schema]))


def _storable_type(kind: pa.DataType) -> pa.DataType:
    """The type to store: pyarrow cannot select rows of view types, which polars uses."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return pa.large_list(_storable_type(kind.value_type)) if is_list(kind) else kind


def _parse_changes(changes: Mapping[str, object] | Iterable[str]) -> tuple[str, ...]:
    """Changes of a recipe as KEY=VALUE; values are JSON, a subset of YAML."""
    if isinstance(changes, Mapping):
        return tuple(f"{name}={json.dumps(value)}" for name, value in changes.items())
    return (changes,) if isinstance(changes, str) else tuple(changes)


class _FrameFile(NamedTuple):
    path: Path
    is_new: bool


def _write_frame(table: pa.Table, folder: Path) -> _FrameFile:
    """Write the rows of a frame to a file named by their digest."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{os.getpid()}.part"
    try:
        pq.write_table(table, part)
        with part.open("rb") as file:
            path = folder.absolute() / f"{hashlib.file_digest(file, 'sha256').hexdigest()[:DIGITS]}.parquet"
        is_new = not path.exists()
        part.replace(path)
    except pa.ArrowException as error:
        raise DataError(f"frame: {escape_newlines(str(error))}", "other types of columns") from None
    finally:
        part.unlink(missing_ok=True)
    return _FrameFile(path, is_new)


def _start_recipe(
    table: pa.Table,
    rows: Path,
    label: str | None,
    path: Path,
    roles: Mapping[str, Role],
    changes: Sequence[str],
) -> tuple[Recipe, DatasetCard]:
    """Inspect the frame as `rowwise data inspect` does: writes a recipe with vocabularies, and returns both."""
    reader, console = FrameReader(table), make_terminal(stderr=True)
    with splits_bar(console, "reading") as tell:
        separators = find_separators(reader, [n for n, role in roles.items() if role == "unused"])
        inspection = inspect(reader, label, name="frame", roles=roles, separators=separators, progress=tell)
    path.parent.mkdir()
    write_starter(inspection, reader, f"parquet:{rows}", path)
    for warning in inspection.card.warnings:
        say(console, f"! {_as_arguments(warning)}", "yellow")
    return read(path, changes), inspection.card


def _as_arguments(text: str) -> str:
    """Replace command line options in a message by arguments of `fit`."""
    return OPTION.sub(r"\1=", text)

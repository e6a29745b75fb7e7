"""`rowwise data bench`: rows per second of one worker, a profile of its time, and workers needed for training."""

import re
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from msgspec import structs
from rich.console import Console
from rich.table import Table as Grid

from rowwise.base.errors import DataError, SpecError
from rowwise.cli.code import load_recipe
from rowwise.cli.options import AsJson
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import make_terminal, print_json, say

if TYPE_CHECKING:
    from rowwise.ingest.bench.verdict import BenchVerdict, HintFacts
    from rowwise.ingest.prepare import PreparationTask
    from rowwise.ingest.reader import Reader
    from rowwise.recipes.recipe import Recipe

BAR_WIDTH = 32
RECIPE_ENDINGS = (".yaml", ".yml")
SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kM]?)")
SCALES = {"": 1, "k": 1_000, "M": 1_000_000}
BATCH = 2048  # batch size without a recipe
DIM = 16


class _BenchSubject(NamedTuple):
    """The preparation to measure, and facts for its hints."""

    task: "PreparationTask"
    facts: "HintFacts"
    batch: int


def bench(
    path: Annotated[str, typer.Argument(help="Parquet, CSV or TSV: a file, folder or pattern; or a recipe (YAML).")],
    recipe: Annotated[
        str | None, typer.Option(help="Apply the columns, transforms and tables of this recipe to PATH.")
    ] = None,
    samples_s: Annotated[
        str | None,
        typer.Option("--samples-s", metavar="N", help="Target training speed in samples/s, such as 300k."),
    ] = None,
    splits: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of splits to prepare, evenly spaced in the data.")
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the preparation rate of one worker, profile its time, and estimate the workers that training needs.

    Runs the work of one worker in this process several times and prints the fastest, usually within 20 seconds. Without
    a recipe, it uses the columns suggested by rowwise data inspect.

    Example: rowwise data bench logs/

    Example: rowwise data bench logs/ --recipe my.yaml --samples-s 300k

    Example: rowwise data bench runs/dlrm-synthetic/1/recipe.yaml --json
    """
    from rowwise.ingest.bench.verdict import SPEEDS, judge

    speeds = SPEEDS if samples_s is None else (_parse_speed(samples_s),)
    with splits_bar(make_terminal(stderr=True), "preparing rows") as tell:
        subject = _open_subject(path, recipe)
        from rowwise.ingest.bench.measure import measure

        measured = measure(subject.task, subject.batch, splits, tell=tell)
    if not measured.rows:
        raise DataError(
            f"{subject.facts.source}: {measured.splits} splits have no row that the recipe uses",
            hint="give more --splits",
        )
    verdict = judge(measured, subject.facts, speeds)
    if as_json:
        print_json(verdict)
    else:
        _show(verdict, make_terminal())


def _parse_speed(text: str) -> int:
    match = SPEED.fullmatch(text.strip())
    speed = float(match[1]) * SCALES[match[2]] if match else 0.0
    if speed < 1:
        raise SpecError(f"--samples-s {text}", "samples a second, such as 50000, 300k or 1M")
    return int(speed)


def _open_subject(path: str, recipe: str | None) -> _BenchSubject:
    if not path.endswith(RECIPE_ENDINGS):
        return _subject_of_files(path) if recipe is None else _subject_of_recipe(path, recipe)
    if recipe is not None:
        raise SpecError(f"{path} and --recipe {recipe} are both recipes", "one of them, or data files as PATH")
    return _subject_of_recipe(None, path)


def _subject_of_files(path: str) -> _BenchSubject:
    """All columns, in the roles that `inspect` suggests from the first split."""
    from rowwise.ingest.datasets.files import open_files
    from rowwise.ingest.inspect import inspect
    from rowwise.recipes.recipe import Data, Recipe, Tables

    reader = open_files(path)
    card = inspect(reader, splits=1).card
    columns, tables = structs.replace(card, label=card.label or "").suggest(DIM)
    labels = columns.labels if card.label else ()
    # Models need neither key nor time, and later splits may lack values of them.
    columns = structs.replace(columns, labels=labels, key=None, time=None)
    recipe = Recipe(data=Data(dataset=path), columns=columns, tables=Tables(list=tables))
    recipe = structs.replace(recipe, train=structs.replace(recipe.train, batch=BATCH))
    return _make_subject(path, reader, recipe)


def _subject_of_recipe(path: str | None, name: str) -> _BenchSubject:
    """The recipe's preparation, applied to its own rows or to those at `path`."""
    from rowwise.ingest.datasets.files import from_files, make_dataset, open_files, open_named
    from rowwise.ingest.where import parse
    from rowwise.recipes.rows import open_data

    loaded = load_recipe(name)
    data, columns, tables = loaded.data, loaded.columns, loaded.tables.list
    if path is None:
        reader = open_named(data.dataset, parse(data.where), dialect=data.text)
    else:
        reader = open_files(path, data.text)
    source = path or (data.dataset if reader is None else data.dataset.partition(":")[2])
    if reader is None:
        dataset = open_data(data, columns, tables).dataset
        reader = dataset.train
    elif columns is not None and tables:
        dataset = make_dataset(reader, columns, tables)
    else:
        dataset = from_files(reader, columns.labels if columns and columns.labels else data.label)
    columns, resolved = columns or dataset.columns, loaded.tables.resolve(dataset.tables)
    return _make_subject(
        source,
        reader,
        structs.replace(loaded, columns=columns, tables=structs.replace(loaded.tables, list=resolved, each={})),
    )


def _make_subject(source: str, reader: "Reader", recipe: "Recipe") -> _BenchSubject:
    """The task of a worker; checks all names and types."""
    from rowwise.ingest.batcher import Batcher, Batching
    from rowwise.ingest.bench.verdict import facts_of
    from rowwise.ingest.delimited import CsvReader
    from rowwise.ingest.transform import load
    from rowwise.ingest.where import parse

    assert recipe.columns is not None
    train, data = recipe.train, recipe.data
    batching = Batching(
        size=train.batch,
        seed=recipe.seed,
        shuffle=train.shuffle,
        where=parse(data.where),
        together=data.together,
        quarantine="" if data.on_bad_rows == "quarantine" else None,
    )
    transforms = load(recipe.transforms) if recipe.transforms else None
    task = Batcher(reader, recipe.columns, recipe.tables.list, batching, None, transforms).task
    facts = facts_of(source, reader.schema, recipe.columns, lines=isinstance(reader, CsvReader))
    return _BenchSubject(task, facts, train.batch)


def _show(verdict: "BenchVerdict", console: Console) -> None:
    measured = verdict.measured
    amount = f"{verdict.columns} columns, {measured.rows:,} rows of {measured.splits} of {measured.of} splits"
    say(console, f"{verdict.source}: {amount}, best of {measured.rounds} rounds")
    console.print(
        f"\none worker  {verdict.rows_s_core:,.0f} rows/s a core by CPU time, {verdict.rows_s:,.0f} on the clock",
        markup=False,
    )
    console.print(_make_grid(verdict))
    if measured.bytes_read:
        compression = measured.codec or "not compressed"
        first_mb_s = measured.bytes_read / 1e6 / max(measured.first_read_s, 1e-9)
        ratio = f"{verdict.over_read:.2f} times the needed bytes"
        read = f"{measured.bytes_read / 1e6:,.1f} MB ({compression}), {ratio}; {verdict.read_mb_s:,.0f} MB/s a worker"
        console.print(f"read        {read}; files gave {first_mb_s:,.0f} MB/s at first", markup=False)
    console.print(
        f"hand-off    a trainer takes at most {verdict.rows_s_trainer:,.0f} rows/s: maps and copies into batches",
        markup=False,
    )
    workers = ", ".join(f"{workers:,} for {speed:,} samples/s" for speed, workers in verdict.workers.items())
    say(console, f"workers     {workers}")
    say(console, f"hint        {verdict.hint}", "yellow")


def _make_grid(verdict: "BenchVerdict") -> Grid:
    from rowwise.ingest.bench.verdict import PARTS

    grid = Grid(box=None, padding=(0, 1), show_header=False)
    grid.add_column(justify="left", min_width=10)
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_column(min_width=BAR_WIDTH)
    grid.add_column(style="dim")
    rows = max(verdict.measured.rows, 1)
    for name, share in verdict.shares.items():
        seconds = getattr(verdict.measured.parts, f"{name}_s")
        style = "orange3" if name == verdict.slowest else "cyan"
        bar = "\u2588" * round(BAR_WIDTH * share) or ("\u258f" if share > 0.002 else "")
        description = PARTS[name]
        grid.add_row(name, f"{share:.0%}", f"{seconds / rows * 1e9:,.0f} ns/row", f"[{style}]{bar}[/]", description)
    return grid

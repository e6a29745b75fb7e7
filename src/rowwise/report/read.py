"""Reads a run folder, complete or not, as one frozen value.

Types of the trainer and of recipes are not imported, so that folders of other versions can be read. Problems are
listed in `RecordedRun.notes`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml

from rowwise.base.errors import DataError
from rowwise.base.plainyaml import load_yaml
from rowwise.base.quantity import is_finite
from rowwise.base.records import ModelExplanation, Recommended
from rowwise.base.textfile import decode_json, file_time, reject_duplicate_keys
from rowwise.base.value import MAX_RANKS, MAX_STEPS
from rowwise.planning.perf.step_program import RESOURCES, ScheduledStage
from rowwise.report.csvfile import CsvRow, CsvTable, read_bytes, read_csv

RECIPE = "recipe.yaml"
FILES = (RECIPE, "env.json", "metrics.csv", "steps.csv", "tables.csv", "slices.csv", "warnings.txt", "result.json")
OPTIONAL = {  # CSV files that a run may lack, with their required columns
    "slices": ("feature", "value", "task"),
    "reliability": ("task", "predicted", "observed"),
    "stages": ("step", "rank", "phase", "measured_s"),
    "timeline": ("step", "rank", "resource", "stage", "begin_s", "end_s"),
    "caches": ("step", "table", "hits", "misses"),
}
PLAN = "plan-explained.json"
UNSET = ("", "null")
MAX_TIME_s = 1e7  # of a recorded interval
MAX_DEPTH = 20  # nesting levels of a recipe that are flattened
Numbers = dict[str, float | None]
T = TypeVar("T", bound=msgspec.Struct)


class RecordedBest(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation of the best checkpoint."""

    step: float
    split: str = ""
    task: str = ""
    metric: str = ""
    value: float | None = None


class RecordedResult(msgspec.Struct, frozen=True, kw_only=True):
    """The content of result.json. Unknown keys are ignored: later versions may write more."""

    status: str
    message: str | None = None
    recipe: str | None = None
    steps: float | None = None
    samples: float | None = None
    epochs: float | None = None
    wall_s: float | None = None
    samples_s: float | None = None
    peak_memory_bytes: float | None = None
    bad_rows: float | None = None
    bad_reasons: tuple[str, ...] = ()
    best: RecordedBest | None = None
    test: dict[str, Numbers] = {}
    ceiling: dict[str, Numbers] = {}
    expected: Numbers | None = None
    published: Numbers | None = None


class Reading(NamedTuple):
    """A value of a metric at a step."""

    samples: float
    time_s: float
    step: float
    value: float


class Curve(NamedTuple):
    """The key of a curve."""

    task: str
    metric: str
    split: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTable:
    """A line of tables.csv."""

    name: str
    rows: float
    dim: float
    row_type: str
    optimizer: str
    features: str
    weight_bytes: float
    state_bytes: float
    ids_per_sample: float
    unique_share: float
    top_share: float
    traffic_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSlice:
    """A line of slices.csv."""

    split: str
    task: str
    feature: str
    value: str
    count: float
    base_rate: float
    loss: float
    ne: float
    auc: float
    auc_bound: float
    calibration: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRates:
    """A line of reliability.csv: test rows of similar probability."""

    task: str
    count: float
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLine:
    """A line of stages.csv: mean seconds of a phase per step, on one rank."""

    step: float
    rank: int
    phase: str
    measured_s: float  # of the main thread
    busy_s: float  # of the phase's resource; NaN if not measured, as in runs of earlier versions
    predicted_s: float  # NaN without a forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLine:
    """A line of caches.csv: counts of a cached table since the line before."""

    step: float
    table: str
    hits: float
    misses: float
    evictions: float
    writes: float
    memory_bytes: float


class RecordedForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast in plan.json, as far as reports need it."""

    model: str = ""
    batch: float = 0.0
    stages_s: dict[str, tuple[float, ...]] = {}


class RecordedBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """Test metrics of boosted trees in baseline.json."""

    task: str
    trees: int
    test: dict[str, float | None]


class RecordedEnsemble(msgspec.Struct, frozen=True, kw_only=True):
    """Test metrics of the mean of several runs in ensemble.json, by task."""

    runs: int
    test: dict[str, dict[str, float | None]]


class _RecordedPlan(msgspec.Struct, frozen=True, kw_only=True):
    forecast: RecordedForecast | None = None


class RecordedNodes(msgspec.Struct, frozen=True, kw_only=True):
    """Users or items of a graph, with their degrees."""

    name: str
    count: int
    mean: float
    counts: tuple[int, ...]  # number of nodes of degree 0, 1 to 2, 3 to 6, and so on


class RecordedGraph(msgspec.Struct, frozen=True, kw_only=True):
    """The graph of a run."""

    edges: int
    sampled: int | None
    nodes: tuple[RecordedNodes, ...]


class RecordedPictureSize(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of pictures at one size."""

    size: int
    bytes: float
    share: float
    products: int


class RecordedPictureChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that a scale model chose for the items of a run; mean bytes and products of a picture."""

    shares: tuple[float, ...]  # of pictures by size
    bytes: float
    products: int


class RecordedPictures(msgspec.Struct, frozen=True, kw_only=True):
    """The pictures of a run's items."""

    missing: int
    sizes: tuple[RecordedPictureSize, ...]
    chosen: RecordedPictureChoice | None = None


class RecordedTowers(msgspec.Struct, frozen=True, kw_only=True):
    """The content of towers.json."""

    graph: RecordedGraph | None = None
    pictures: RecordedPictures | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The content of a run folder."""

    name: str
    recipe: str  # YAML text
    settings: Mapping[str, str]  # the recipe by dotted key
    environment: Mapping[str, str]
    curves: Mapping[Curve, tuple[Reading, ...]]
    steps: Mapping[str, tuple[float, ...]]  # columns of steps.csv
    tables: tuple[RecordedTable, ...]
    stages: tuple[StageLine, ...]
    timeline: tuple[ScheduledStage, ...]  # intervals in which a resource of a rank worked for a step
    caches: tuple[CacheLine, ...]  # empty without tables on disk
    forecast: RecordedForecast | None
    slices: tuple[RecordedSlice, ...]
    rates: tuple[RecordedRates, ...]  # of the test rows
    warnings: tuple[str, ...]
    result: RecordedResult | None
    baseline: RecordedBaseline | None  # boosted trees on the same rows
    ensemble: RecordedEnsemble | None  # of this run and runs with other seeds
    explanation: ModelExplanation | None  # importance and drift of features
    towers: RecordedTowers | None  # a graph, or pictures of items
    recommended: Recommended | None  # what `rowwise recommend` wrote last
    plan: bytes  # explanation of the plan as JSON; empty without one
    changed: datetime
    notes: tuple[str, ...]


def read_run(folder: Path) -> RecordedRun:
    """Read a run folder; raises only for a folder without a recipe."""
    folder = folder.resolve()
    content, problem = read_bytes(folder / RECIPE)
    if problem:
        raise DataError(f"{folder} is not a run folder: {problem}: {_suggest_folder(folder)}")
    recipe = content.decode("utf-8", errors="replace")
    settings, recipe_problem = _parse_settings(recipe)
    environment, environment_problem = _read_json(folder / "env.json")
    result, result_problem = _read_result(folder / "result.json")
    metrics = read_csv(folder / "metrics.csv", ("samples", "split", "task", "metric", "value"))
    steps = read_csv(folder / "steps.csv", ("samples",))
    tables = read_csv(folder / "tables.csv", ("table",))
    parts = {name: read_csv(folder / f"{name}.csv", needed, optional=True) for name, needed in OPTIONAL.items()}
    forecast, forecast_problem = _read_forecast(folder / "plan.json")
    problems = (recipe_problem, environment_problem, result_problem, forecast_problem)
    unread = (problem for file in (metrics, steps, tables, *parts.values()) for problem in file.problems)
    return RecordedRun(
        name=_name_run(folder, result),
        recipe=recipe,
        settings=settings,
        environment=flatten(environment),
        curves=_collect_curves(metrics.rows),
        steps=_collect_steps(steps),
        tables=tuple(row.record(RecordedTable, name="table", weight_bytes="bytes") for row in tables.rows),
        stages=tuple(filter(None, map(_parse_stage, parts["stages"].rows))),
        timeline=tuple(filter(None, map(_parse_interval, parts["timeline"].rows))),
        caches=tuple(filter(None, map(_parse_cache, parts["caches"].rows))),
        forecast=forecast,
        slices=tuple(row.record(RecordedSlice) for row in parts["slices"].rows),
        rates=tuple(row.record(RecordedRates) for row in parts["reliability"].rows),
        warnings=_read_warnings(folder / "warnings.txt"),
        result=result,
        baseline=_read_record(folder / "baseline.json", RecordedBaseline),
        ensemble=_read_record(folder / "ensemble.json", RecordedEnsemble),
        explanation=_read_record(folder / "explanation.json", ModelExplanation),
        towers=_read_record(folder / "towers.json", RecordedTowers),
        recommended=_read_record(folder / "recommended.json", Recommended),
        plan=read_bytes(folder / PLAN)[0],
        changed=_find_last_change(folder),
        notes=(*filter(None, problems), *unread),
    )


def _read_record(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(read_bytes(path)[0], type=kind)
    except msgspec.DecodeError:
        return None


def _suggest_folder(folder: Path) -> str:
    recipes = sorted(folder.glob(f"**/{RECIPE}"), key=lambda path: path.stat().st_mtime)[-1:] if folder.is_dir() else []
    if recipes:
        return f"did you mean {recipes[0].parent}?"
    return "expected the folder that training wrote, runs/<recipe>/<n>"


def _name_run(folder: Path, result: RecordedResult | None) -> str:
    return f"{(result and result.recipe) or folder.parent.name} / {folder.name}"


def _find_last_change(folder: Path) -> datetime:
    times = [path.stat().st_mtime for path in map(folder.joinpath, FILES) if path.exists()]
    return file_time(max(times))


def _parse_settings(recipe: str) -> tuple[dict[str, str], str | None]:
    try:
        # Scalars stay text, so that recipes are compared as written. Runs of older versions omitted null values.
        return {key: value for key, value in flatten(load_yaml(recipe)).items() if value not in UNSET}, None
    except yaml.YAMLError as error:
        return {}, f"{RECIPE} is not YAML and is shown as text: {str(error).splitlines()[0]}"


def _read_json(path: Path) -> tuple[Any, str | None]:
    content, problem = read_bytes(path)
    if problem:
        return None, problem
    try:
        return json.loads(content, object_pairs_hook=reject_duplicate_keys), None  # unlike msgspec, json reads NaN
    except (ValueError, RecursionError) as error:
        return None, f"{path.name} is truncated or not JSON and was not used: {error}"


def _read_result(path: Path) -> tuple[RecordedResult | None, str | None]:
    content, problem = _read_json(path)
    if problem:
        return None, problem
    try:
        return msgspec.convert(content, RecordedResult), None
    except (msgspec.ValidationError, OverflowError) as error:
        return None, f"{path.name} was not used: {error}"


def _read_forecast(path: Path) -> tuple[RecordedForecast | None, str | None]:
    """The forecast in a plan; runs of older versions have no plan."""
    content, _ = read_bytes(path)
    if not content:
        return None, None
    try:
        return decode_json(content, _RecordedPlan).forecast, None
    except msgspec.DecodeError as error:
        return None, f"{path.name} was not used: {error}"


def _read_warnings(path: Path) -> tuple[str, ...]:
    lines = read_bytes(path)[0].decode("utf-8", errors="replace").splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def flatten(value: Any, key: str = "", depth: int = 0) -> dict[str, str]:
    """Nested maps and lists as text by dotted key; the key of a list item is its name, if any, else its index."""
    if depth < MAX_DEPTH and isinstance(value, Mapping) and value:
        parts = [(str(name), inner) for name, inner in value.items()]
    elif depth < MAX_DEPTH and isinstance(value, list) and any(isinstance(v, (Mapping, list)) for v in value):
        parts = [(_name_item(inner, k), inner) for k, inner in enumerate(value)]
    else:
        if value is None and not key:
            return {}
        return {key or "value": _format_value(value, depth)}
    flat: dict[str, str] = {}
    for name, inner in parts:
        flat |= flatten(inner, f"{key}.{name}" if key else name, depth + 1)
    return flat


def _name_item(item: Any, k: int) -> str:
    name = item.get("name") if isinstance(item, Mapping) else None
    return name if isinstance(name, str) and name else str(k)


def _format_value(value: Any, depth: int) -> str:
    if depth >= MAX_DEPTH:
        return "..."
    if isinstance(value, list):
        return ", ".join(str(v) for v in value)
    return "" if value is None or value == {} else str(value)


def _collect_curves(rows: Sequence[CsvRow]) -> dict[Curve, tuple[Reading, ...]]:
    curves: dict[Curve, dict[float, Reading]] = {}
    for row in rows:
        samples = row.number("samples")
        if not is_finite(samples) or samples < 0:
            continue
        curve = Curve(row.text("task"), row.text("metric"), row.text("split"))
        reading = Reading(samples, row.number("time_s"), row.number("step"), row.number("value"))
        # A killed and resumed run repeats steps: the last value counts.
        curves.setdefault(curve, {})[samples] = reading
    return {curve: tuple(readings[s] for s in sorted(readings)) for curve, readings in curves.items()}


def _collect_steps(records: CsvTable) -> dict[str, tuple[float, ...]]:
    last = {row.number("samples"): row for row in records.rows}
    rows = [last[samples] for samples in sorted(last) if is_finite(samples) and samples >= 0]
    return {name: tuple(row.number(name) for row in rows) for name in records.columns if rows}


def _parse_stage(row: CsvRow) -> StageLine | None:
    """The line, or None without a usable time."""
    line = row.record(StageLine)
    usable = all(is_finite(value) and value >= 0 for value in (line.step, line.rank, line.measured_s))
    return replace(line, rank=int(line.rank)) if usable else None


def _parse_interval(row: CsvRow) -> ScheduledStage | None:
    """The interval, or None without usable times; times count from a step's begin, so they may be negative."""
    step, rank, begin_s, end_s = (row.number(name) for name in ("step", "rank", "begin_s", "end_s"))
    in_range = 0 <= step <= MAX_STEPS and 0 <= rank < MAX_RANKS
    resource = row.text("resource")
    if not in_range or not (-MAX_TIME_s < begin_s <= end_s < MAX_TIME_s) or resource not in RESOURCES:
        return None
    return ScheduledStage(row.text("stage"), resource, int(rank), int(step), begin_s, end_s)


def _parse_cache(row: CsvRow) -> CacheLine | None:
    """The line, or None without usable counts."""
    line = row.record(CacheLine)
    return line if all(is_finite(value) and value >= 0 for value in (line.step, line.hits, line.misses)) else None

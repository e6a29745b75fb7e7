"""The page that compares runs: overlaid curves, final metrics with the best marked, and differences of recipes.

Recipes are compared as text by dotted key, so runs of other versions can be compared. Runs may have different metrics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rowwise.base.errors import DataError
from rowwise.base.quantity import DASH, format_count, format_duration, format_metric, format_size, is_finite
from rowwise.report.charts import COLOURS, Chart, ChartLine, ChartMark, draw_chart
from rowwise.report.curves import metric_names
from rowwise.report.markup import Html, div, figure, join, legend_entry, note, section, span, tag, text
from rowwise.report.metric import find_metric, metric_position
from rowwise.report.overview import HIDDEN_METRICS, describe_status, final_metrics, run_totals, task_names
from rowwise.report.page import draw_page, write_page
from rowwise.report.read import Curve, Reading, RecordedRun, read_run

MIN_RUNS, MAX_RUNS = 2, len(COLOURS)
ROW_KEYS = {"dataset", "folder", "valid", "test", "valid_share", "test_share", "share", "rows", "test_rows", "where"}
MAX_CHARACTERS = 160  # of a value
BEST = "\u2605 marks the best of a line."
APART = (
    "These runs predict different labels, or were tested on different rows: their metrics cannot be compared. The runs "
    "of each group below can be."
)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run with its unique name and its colour."""

    run: RecordedRun
    name: str
    colour: str


def compare(runs: Sequence[Path], out: Path) -> Path:
    if not MIN_RUNS <= len(runs) <= MAX_RUNS:
        raise DataError(f"{len(runs)} runs to compare", f"{MIN_RUNS} to {MAX_RUNS}")
    recorded = [read_run(folder) for folder in runs]
    compared = tuple(map(ComparedRun, recorded, _name_runs(recorded, runs), COLOURS))
    write_page(out, draw_comparison(compared))
    return out


def draw_comparison(compared: Sequence[ComparedRun]) -> str:
    names = ", ".join(e.name for e in compared)
    legend = div("legend cubes", *(_draw_legend_entry(e) for e in compared))
    head = tag("header", None, tag("h1", None, text(f"{len(compared)} runs compared")), legend)
    recipes = _draw_differences("recipe", "Recipes", "recipe.yaml", compared, [e.run.settings for e in compared])
    environments = [e.run.environment for e in compared]
    machines = _draw_differences("environment", "Environments", "env.json", compared, environments)
    notes = join(_draw_notes(e) for e in compared)
    groups = group_comparable(compared)
    charts = _draw_curves(groups, compared), _draw_resources(compared)
    return draw_page(names, head, _draw_metrics(groups, compared), *charts, recipes, machines, notes)


def group_comparable(compared: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Groups of runs with comparable metrics: tested on the same rows, with a label in common."""
    groups: list[list[ComparedRun]] = []
    for candidate in compared:
        run = candidate.run
        for group in groups:
            if any(_selected_rows(run) == _selected_rows(e.run) and _share_task(run, e.run) for e in group):
                group.append(candidate)
                break
        else:
            groups.append([candidate])
    return groups


def _share_task(run_a: RecordedRun, run_b: RecordedRun) -> bool:
    tasks_a, tasks_b = set(task_names(run_a)), set(task_names(run_b))
    return bool(tasks_a & tasks_b) or not (tasks_a and tasks_b)


def _selected_rows(run: RecordedRun) -> dict[str, str]:
    """The recipe's settings that select rows for training, validation and test."""
    return {key: value for key, value in run.settings.items() if _selects_rows(key)}


def _draw_group_title(group: Sequence[ComparedRun]) -> Html:
    """The heading of a group of comparable runs; used if there are several groups."""
    labels = ", ".join(_all_tasks(group)) or "no label"
    names = ", ".join(e.name for e in group)
    return join([tag("h3", None, text(f"{labels}: {names}")), note(_describe_rows(group[0].run))])


def _describe_rows(run: RecordedRun) -> str:
    rows = (f"{key.removeprefix('data.')} {value}" for key, value in _selected_rows(run).items())
    return f"Rows: {', '.join(rows) or 'not known'}."


def _name_runs(runs: Sequence[RecordedRun], folders: Sequence[Path]) -> list[str]:
    """Names of the runs; their paths if names are not unique, then numbered."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        names = [f"{name} ({k})" for k, name in enumerate(names, 1)]
    return names


def _draw_legend_entry(compared: ComparedRun) -> Html:
    status, style = describe_status(compared.run)
    return legend_entry(compared.colour, compared.name, span(f"pill {style}", status))


def _draw_notes(compared: ComparedRun) -> Html:
    if not compared.run.notes:
        return Html("")
    return note(f"{compared.name}: {'; '.join(compared.run.notes)}.")


def _draw_run_table(compared: Sequence[ComparedRun], rows: Sequence[Html]) -> Html:
    names = (tag("th", None, span(f"swatch {e.colour}", ""), text(f" {e.name}")) for e in compared)
    head = tag("thead", None, tag("tr", None, tag("th"), *names))
    return div("wide", tag("table", {"class": "runs"}, head, tag("tbody", None, *rows)))


def _draw_group(compared: Sequence[ComparedRun], title: str) -> Html:
    return tag("tr", {"class": "group"}, tag("th", {"colspan": str(len(compared) + 1)}, text(title)))


def _draw_metrics(groups: Sequence[Sequence[ComparedRun]], compared: Sequence[ComparedRun]) -> Html:
    parts = [note(APART)] if len(groups) > 1 else []
    for group in groups:
        parts += [_draw_group_title(group)] if len(groups) > 1 else []
        parts += [_draw_run_table(group, [row for task in _all_tasks(group) for row in _draw_task(group, task)])]
    parts += [tag("h3", None, text("Time and memory"))] if len(groups) > 1 else []
    return section("numbers", "Final metrics", *parts, _draw_totals(compared, len(groups) == 1), note(BEST))


def _draw_task(group: Sequence[ComparedRun], task: str) -> list[Html]:
    """The rows of a task's final metrics."""
    finals = [final_metrics(e.run, task) for e in group]
    splits = tuple(dict.fromkeys(split for split, _ in finals if split))
    no_best = "; from different splits, so no best is marked" if len(splits) > 1 else ""
    rows = [_draw_group(group, f"{task}, {' or '.join(splits)}{no_best}")]
    names = dict.fromkeys(n for _, values in finals for n in values if n not in HIDDEN_METRICS)
    for name in sorted(names, key=metric_position):
        values = [metrics.get(name) for _, metrics in finals]
        cost = find_metric(name).cost if len(splits) == 1 else _no_cost
        rows.append(_draw_row(find_metric(name).title, values, format_metric, cost))
    return rows


def _draw_totals(compared: Sequence[ComparedRun], comparable: bool) -> Html:
    """Speed, time and memory of all runs; the best is marked if all runs are comparable."""
    speed, wall, peak, samples, steps = (
        list(column) for column in zip(*(run_totals(e.run) for e in compared), strict=True)
    )
    rows = [
        _draw_group(compared, "Run"),
        _draw_row("Samples/s", speed, format_count, (lambda value: -value) if comparable else _no_cost),
        _draw_row("Wall time", wall, format_duration, _no_cost),
        _draw_row("Peak memory", peak, format_size, (lambda value: value) if comparable else _no_cost),
        _draw_row("Samples", samples, format_count, _no_cost),
        _draw_row("Steps", steps, format_count, _no_cost),
    ]
    return _draw_run_table(compared, rows)


def _selects_rows(key: str) -> bool:
    section, _, rest = key.partition(".")
    return section == "data" and rest.partition(".")[0].partition("[")[0] in ROW_KEYS


def _no_cost(value: float) -> None:
    """A cost of None: no value is better than another."""


def _draw_row(
    title: str,
    values: Sequence[float | None],
    format_value: Callable[[float | None], str],
    cost: Callable[[float], float | None],
) -> Html:
    costs = [cost(v) if v is not None and is_finite(v) else None for v in values]
    known = [c for c in costs if c is not None]
    # No value is best if all are equal.
    lowest = min(known) if len(set(known)) > 1 else None
    cells = (
        tag("td", {"class": "best"} if c is not None and c == lowest else None, text(format_value(v)))
        for v, c in zip(values, costs, strict=True)
    )
    return tag("tr", None, tag("th", {"scope": "row"}, text(title)), *cells)


def _all_tasks(compared: Sequence[ComparedRun]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(task for e in compared for task in task_names(e.run)))


def _draw_curves(groups: Sequence[Sequence[ComparedRun]], compared: Sequence[ComparedRun]) -> Html:
    sets = []
    for group in groups:
        for task in _all_tasks(group):
            names = list(dict.fromkeys(name for e in group for name in metric_names(e.run, task)))
            if not names:
                continue
            figures = [_draw_figure(group, task, name) for name in names]
            figures.append(_draw_figure(group, task, names[0], over_time=True))
            title = f"{task}: {', '.join(e.name for e in group)}" if len(groups) > 1 else task
            sets.append(join([tag("h3", None, text(title)), div("charts", *figures)]))
    if not sets:
        sets.append(note("No run has values in its metrics.csv, so there is nothing to draw."))
    legend = div("legend cubes", *(_draw_legend_entry(e) for e in compared))
    return section("curves", "Curves", legend, *sets)


def _draw_figure(compared: Sequence[ComparedRun], task: str, name: str, over_time: bool = False) -> Html:
    """A metric of all runs, over samples or over training time."""
    readings_by_run = {e.name: _find_readings(e.run, task, name) for e in compared}
    longest_s = max(
        (r.time_s for _, readings in readings_by_run.values() for r in readings if is_finite(r.time_s)), default=0.0
    )
    unit_s, unit = _choose_time_unit(longest_s)
    lines: list[ChartLine] = []
    marks: list[ChartMark] = []
    for e in compared:
        split, readings = readings_by_run[e.name]
        points = [(r.time_s / unit_s if over_time else r.samples, r.value) for r in readings]
        points = sorted(p for p in points if is_finite(p[0]))
        noisy = split in ("train", "lifetime")
        lines.append(
            ChartLine(name=e.name, points=points, colour=e.colour, noisy=noisy, spread=split == "train", dots=not noisy)
        )
        final = final_metrics(e.run, task)
        if final[0] == "test" and is_finite(final[1].get(name)) and points and not over_time:
            marks.append(ChartMark(name=f"{e.name}, test", point=(points[-1][0], final[1][name]), colour=e.colour))
    splits = " or ".join(dict.fromkeys(split for split, readings in readings_by_run.values() if readings))
    title = find_metric(name).title + (" over time" if over_time else "")
    hint = splits + (", \u25c6 test" if marks else "")
    axis = unit if over_time else "samples"
    key = f"{name}-time" if over_time else name
    chart = Chart(key=key, label=f"{title} of {task} by run, {splits}", lines=lines, marks=marks, x_title=axis)
    return figure(title, draw_chart(chart), span("hint", hint))


def _find_readings(run: RecordedRun, task: str, name: str) -> tuple[str, tuple[Reading, ...]]:
    """The split and readings of a curve, of the first split that the run has: valid, lifetime, train, then any."""
    for split in ("valid", "lifetime", "train"):
        readings = run.curves.get(Curve(task, name, split))
        if readings:
            return split, readings
    curves = (c for c in run.curves if (c.task, c.metric) == (task, name))
    return next(((c.split, run.curves[c]) for c in curves), ("", ()))


def _choose_time_unit(longest_s: float) -> tuple[float, str]:
    if longest_s < 180:
        return 1.0, "seconds of training"
    return (60.0, "minutes of training") if longest_s < 3 * 3600 else (3600.0, "hours of training")


def _draw_resources(compared: Sequence[ComparedRun]) -> Html:
    figures = []
    for column, title, unit in (("samples_s", "Throughput", ""), ("memory_bytes", "Memory", "B")):
        lines = []
        for e in compared:
            samples = e.run.steps.get("samples", ())
            points = list(zip(samples, e.run.steps.get(column, ()), strict=False))
            lines.append(ChartLine(name=e.name, points=points, colour=e.colour, noisy=True, spread=True))
        key = "throughput" if column == "samples_s" else "memory"
        chart = Chart(key=key, label=f"{title} by run", lines=lines, unit=unit, from_zero=True)
        hint = span("hint", "" if unit else "samples/s")
        figures.append(figure(title, draw_chart(chart), hint))
    return section("speed", "Throughput and memory", div("charts", *figures))


def _draw_differences(
    key: str, title: str, file: str, compared: Sequence[ComparedRun], settings: Sequence[Mapping[str, str]]
) -> Html:
    """A table of the dotted keys whose values differ between runs."""
    keys = dict.fromkeys(name for values in settings for name in values)
    # Runs without the file are left out.
    readable = [values for values in settings if values]
    different = [name for name in keys if len({values.get(name) for values in readable}) > 1]
    same = len(keys) - len(different)
    if not different:
        unreadable = f"Fewer than two runs have a readable {file}."
        return section(key, title, note(f"All {same} values are the same." if len(readable) > 1 else unreadable))
    rows = [_draw_difference(name, [values.get(name) for values in settings]) for name in different]
    return section(key, title, _draw_run_table(compared, rows), note(f"{same} other values are the same."))


def _draw_difference(name: str, values: Sequence[str | None]) -> Html:
    """The row of a key; values that differ from the first run's are highlighted."""
    first = next(value for value in values if value is not None)
    cells = (tag("td", {"class": "differs"} if value != first else None, text(_shorten(value))) for value in values)
    return tag("tr", None, tag("th", {"scope": "row"}, text(name)), *cells)


def _shorten(value: str | None) -> str:
    if value is None:
        return DASH
    return value if len(value) <= MAX_CHARACTERS else value[:MAX_CHARACTERS] + "\u2026"

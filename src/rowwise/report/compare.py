"""The page that compares runs: overlaid curves, final metrics with the best marked, and differences of recipes.

Recipes are compared as text by dotted key, so that runs of other versions can be compared. Runs may have different
metrics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rowwise import quantity
from rowwise.errors import DataError
from rowwise.report.charts import COLOURS, Chart, ChartLine, ChartMark, draw
from rowwise.report.curves import metrics_of
from rowwise.report.markup import Html, div, join, note, section, span, tag, text
from rowwise.report.metric import metric, order
from rowwise.report.overview import HIDDEN_METRICS, final_metrics, status, tasks, totals
from rowwise.report.page import page, save
from rowwise.report.read import Curve, Reading, RecordedRun, read

FEWEST, MOST = 2, len(COLOURS)
ROW_KEYS = {"dataset", "folder", "valid", "test", "valid_share", "test_share", "share", "rows", "test_rows", "where"}
CUT = 160  # longest shown value, in characters


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run with its unique name and its colour."""

    run: RecordedRun
    name: str
    colour: str


def compare(runs: Sequence[Path], out: Path) -> Path:
    if not FEWEST <= len(runs) <= MOST:
        raise DataError(f"{len(runs)} runs to compare: want {FEWEST} to {MOST}")
    found = [read(folder) for folder in runs]
    compared = tuple(map(ComparedRun, found, _names(found, runs), COLOURS))
    save(out, render(compared))
    return out


def render(compared: Sequence[ComparedRun]) -> str:
    names = ", ".join(e.name for e in compared)
    legend = div("legend cubes", *(_legend(e) for e in compared))
    head = tag("header", None, tag("h1", None, text(f"{len(compared)} runs compared")), legend)
    recipes = _differences("recipe", "Recipes", "recipe.yaml", compared, [e.run.settings for e in compared])
    machines = _differences("environment", "Environments", "env.json", compared, [e.run.environment for e in compared])
    notes = join(_notes(e) for e in compared)
    return page(names, head, _numbers(compared), _curves(compared), _resources(compared), recipes, machines, notes)


def _names(runs: Sequence[RecordedRun], folders: Sequence[Path]) -> list[str]:
    """Names of the runs; their paths if names are not unique, then numbered."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        names = [f"{name} ({k})" for k, name in enumerate(names, 1)]
    return names


def _legend(one: ComparedRun) -> Html:
    word, look = status(one.run)
    pill = span(f"pill {look}", word)
    return tag("span", {"class": "entry"}, span(f"swatch {one.colour}", ""), text(one.name), pill)


def _notes(one: ComparedRun) -> Html:
    if not one.run.notes:
        return Html("")
    return note(f"{one.name}: {'; '.join(one.run.notes)}.")


def _run_table(compared: Sequence[ComparedRun], rows: Sequence[Html]) -> Html:
    names = (tag("th", None, span(f"swatch {e.colour}", ""), text(f" {e.name}")) for e in compared)
    head = tag("thead", None, tag("tr", None, tag("th"), *names))
    return div("wide", tag("table", {"class": "runs"}, head, tag("tbody", None, *rows)))


def _group(compared: Sequence[ComparedRun], words: str) -> Html:
    return tag("tr", {"class": "group"}, tag("th", {"colspan": str(len(compared) + 1)}, text(words)))


def _numbers(compared: Sequence[ComparedRun]) -> Html:
    rows = []
    for task in _all_tasks(compared):
        finals = [final_metrics(e.run, task) for e in compared]
        splits = tuple(dict.fromkeys(split for split, _ in finals if split))
        why = "from different splits" if len(splits) > 1 else "of different rows" if _rows_differ(compared) else ""
        mixed = f"; {why}, so no best is marked" if why else ""
        rows.append(_group(compared, f"{task}, {' or '.join(splits)}{mixed}"))
        for name in sorted(
            dict.fromkeys(n for _, values in finals for n in values if n not in HIDDEN_METRICS), key=order
        ):
            values = [found.get(name) for _, found in finals]
            cost = _no_cost if why or not splits else metric(name).cost
            rows.append(_row(metric(name).title, values, quantity.number, cost))
    speed, wall, peak, samples, steps = (
        list(column) for column in zip(*(totals(e.run) for e in compared), strict=True)
    )
    rows.append(_group(compared, "Run"))
    rows.append(_row("Samples/s", speed, quantity.count, lambda value: -value))
    rows.append(_row("Wall time", wall, quantity.duration, _no_cost))
    rows.append(_row("Peak memory", peak, quantity.size, lambda value: value))
    rows.append(_row("Samples", samples, quantity.count, _no_cost))
    rows.append(_row("Steps", steps, quantity.count, _no_cost))
    return section("numbers", "Final metrics", _run_table(compared, rows), note("\u2605 marks the best of a line."))


def _rows_differ(compared: Sequence[ComparedRun]) -> bool:
    """Whether the runs' recipes choose other rows for training, validation or test."""
    chosen = [{k: v for k, v in e.run.settings.items() if _is_of_rows(k)} for e in compared]
    return any(one != chosen[0] for one in chosen)


def _is_of_rows(key: str) -> bool:
    section, _, rest = key.partition(".")
    return section == "data" and rest.partition(".")[0].partition("[")[0] in ROW_KEYS


def _no_cost(value: float) -> None:
    """No value is better than another."""


def _row(
    title: str,
    values: Sequence[float | None],
    said: Callable[[float | None], str],
    cost: Callable[[float], float | None],
) -> Html:
    costs = [cost(v) if v is not None and quantity.usable(v) else None for v in values]
    known = [c for c in costs if c is not None]
    # Where all are the same, none is best.
    least = min(known) if len(set(known)) > 1 else None
    cells = (
        tag("td", {"class": "best"} if c is not None and c == least else None, text(said(v)))
        for v, c in zip(values, costs, strict=True)
    )
    return tag("tr", None, tag("th", {"scope": "row"}, text(title)), *cells)


def _all_tasks(compared: Sequence[ComparedRun]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(task for e in compared for task in tasks(e.run)))


def _curves(compared: Sequence[ComparedRun]) -> Html:
    sets = []
    for task in _all_tasks(compared):
        names = list(dict.fromkeys(name for e in compared for name in metrics_of(e.run, task)))
        if not names:
            continue
        figures = [_figure(compared, task, name) for name in names]
        figures.append(_figure(compared, task, names[0], over_time=True))
        sets.append(join([tag("h3", None, text(task)), div("charts", *figures)]))
    if not sets:
        sets.append(note("No run has values in its metrics.csv, so there is nothing to draw."))
    legend = div("legend cubes", *(_legend(e) for e in compared))
    return section("curves", "Curves", legend, *sets)


def _figure(compared: Sequence[ComparedRun], task: str, name: str, over_time: bool = False) -> Html:
    """A metric of all runs, over samples or over training time."""
    found = {e.name: _readings(e.run, task, name) for e in compared}
    longest = max(
        (r.time_s for _, readings in found.values() for r in readings if quantity.usable(r.time_s)), default=0.0
    )
    second, unit = _time_unit(longest)
    lines: list[ChartLine] = []
    marks: list[ChartMark] = []
    for e in compared:
        split, readings = found[e.name]
        points = [(r.time_s / second if over_time else r.samples, r.value) for r in readings]
        points = sorted(p for p in points if quantity.usable(p[0]))
        noisy = split in ("train", "lifetime")
        lines.append(
            ChartLine(name=e.name, points=points, colour=e.colour, noisy=noisy, spread=split == "train", dots=not noisy)
        )
        value = final_metrics(e.run, task)
        if value[0] == "test" and quantity.usable(value[1].get(name)) and points and not over_time:
            marks.append(ChartMark(name=f"{e.name}, test", point=(points[-1][0], value[1][name]), colour=e.colour))
    splits = " or ".join(dict.fromkeys(split for split, readings in found.values() if readings))
    title = metric(name).title + (" over time" if over_time else "")
    hint = splits + (", \u25c6 test" if marks else "")
    axis = unit if over_time else "samples"
    key = f"{name}-time" if over_time else name
    chart = Chart(key=key, label=f"{title} of {task} by run, {splits}", lines=lines, marks=marks, x_title=axis)
    caption = tag("figcaption", None, tag("b", None, text(title)), span("hint", hint))
    return tag("figure", {"class": "chart"}, caption, draw(chart))


def _readings(run: RecordedRun, task: str, name: str) -> tuple[str, tuple[Reading, ...]]:
    """The curve of the most telling split that the run has: valid, lifetime, train, then any."""
    for split in ("valid", "lifetime", "train"):
        readings = run.curves.get(Curve(task, name, split))
        if readings:
            return split, readings
    other = (c for c in run.curves if (c.task, c.metric) == (task, name))
    return next(((c.split, run.curves[c]) for c in other), ("", ()))


def _time_unit(longest: float) -> tuple[float, str]:
    if longest < 180:
        return 1.0, "seconds of training"
    return (60.0, "minutes of training") if longest < 3 * 3600 else (3600.0, "hours of training")


def _resources(compared: Sequence[ComparedRun]) -> Html:
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
        caption = tag("figcaption", None, tag("b", None, text(title)), hint)
        figures.append(tag("figure", {"class": "chart"}, caption, draw(chart)))
    return section("speed", "Throughput and memory", div("charts", *figures))


def _differences(
    key: str, title: str, file: str, compared: Sequence[ComparedRun], settings: Sequence[Mapping[str, str]]
) -> Html:
    """A table of the dotted keys whose values differ between runs."""
    keys = dict.fromkeys(name for found in settings for name in found)
    # Runs without the file are left out.
    known = [found for found in settings if found]
    different = [name for name in keys if len({found.get(name) for found in known}) > 1]
    same = len(keys) - len(different)
    if not different:
        words = f"All {same} values are the same." if len(known) > 1 else f"Fewer than two runs have a readable {file}."
        return section(key, title, note(words))
    rows = [_difference(name, [found.get(name) for found in settings]) for name in different]
    return section(key, title, _run_table(compared, rows), note(f"{same} other values are the same."))


def _difference(name: str, values: Sequence[str | None]) -> Html:
    """The row of a key; values that differ from the first run's are highlighted."""
    first = next(value for value in values if value is not None)
    cells = (tag("td", {"class": "differs"} if value != first else None, text(_shorten(value))) for value in values)
    return tag("tr", None, tag("th", {"scope": "row"}, text(name)), *cells)


def _shorten(value: str | None) -> str:
    if value is None:
        return quantity.NONE
    return value if len(value) <= CUT else value[:CUT] + "\u2026"

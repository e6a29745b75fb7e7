"""What a plan was expected to take, and what the run took: by stage of a step, and by rank.

Known limits: phases of a step for which nobody makes a forecast.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowwise import quantity
from rowwise.quantity import usable
from rowwise.report.charts import stacked_bar
from rowwise.report.markup import Html, div, join, note, section, span, tag, text
from rowwise.report.plot import HEIGHT, WIDTH, axes, plot
from rowwise.report.read import RecordedRun, StageLine
from rowwise.report.scale import ticks

TITLE = "Predicted and measured"
STAGES = {  # of a forecast, and the phases of a step that are part of it; the last one has the prediction
    "lookup": ("lookup",),
    "exchange": ("route", "exchange"),
    "wait": ("wait",),
    "update": ("update",),
}
SAID = {
    "lookup": "rows looked up",
    "exchange": "ids, vectors and gradients that travel",
    "wait": "for the rank that comes last",
    "update": "rows updated",
}
HEADS = ("Stage", "Predicted", "Measured", "Measured over predicted")
COLOURS = {"predicted": "grey", "measured": "blue"}
WAY = "rowwise train --hardware takes a preset, or a profile that rowwise calibrate has measured"
WAITS = (
    "Wait: from when a rank comes to a collective until the last one does, in all of a step; what travels does not "
    "include it. It is predicted where lookups and updates of ranks differ; that ranks also read data, run dense "
    "layers, write lines of the run and share processors is measured and not predicted."
)
MANY_RANKS = 32
RANK_TICKS = 8
GAP = 0.2  # of a rank's width, between two
Row = tuple[float, float]  # predicted and measured seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of a stage, predicted and measured, on each rank."""

    name: str
    predicted_W: tuple[float, ...]
    measured_W: tuple[float, ...]

    @property
    def most(self) -> float:
        return max((*self.predicted_W, *self.measured_W))


def forecast(run: RecordedRun) -> Html:
    """The section; nothing for a run that counted no stages."""
    lines = _of_last_plan(run.stages)
    if not lines:
        return Html("")
    told = [name for name in STAGES if set(STAGES[name]) <= lines[0][0].keys() & lines[-1][0].keys()]
    found = [stage for name in told if (stage := _stage(name, lines)) is not None]
    if not found:
        return section("forecast", TITLE, note(_why_not(run)))
    legend = (tag("span", {"class": "entry"}, span(f"swatch {c}", ""), text(name)) for name, c in COLOURS.items())
    charts = div("charts", *(_figure(stage) for stage in found))
    said = note(f"{_by_what(run)} {_how_measured(len(lines))} {WAITS if len(found[0].measured_W) > 1 else ''}".strip())
    return section("forecast", TITLE, div("legend cubes", *legend), _table(found), said, charts)


def _of_last_plan(lines: Sequence[StageLine]) -> list[dict[int, dict[str, StageLine]]]:
    """By line of the run, rank and phase: those since it began to be executed as it was in the end, but for the first.

    A run may go on with other ranks, or with another plan, of which its forecasts tell.
    """
    by_step: dict[float, dict[int, dict[str, StageLine]]] = {}
    for line in lines:
        by_step.setdefault(line.step, {}).setdefault(line.rank, {})[line.phase] = line
    ordered = [by_step[step] for step in sorted(by_step)]
    kept = [one for one in ordered if _whole(one)]
    last = len(kept)
    while last > 0 and _sign(kept[last - 1]) == _sign(kept[-1]):
        last -= 1
    newest = kept[last:]
    return newest[1:] or newest


def _whole(line: Mapping[int, Mapping[str, StageLine]]) -> bool:
    """Whether it has all ranks up to its last, with their phases: a run may be killed in between.

    Runs of earlier versions have no `wait`.
    """
    phases = {phase for stage in STAGES.values() for phase in stage} - {"wait"}
    return all(rank in line and phases <= line[rank].keys() for rank in range(len(line)))


def _sign(line: Mapping[int, Mapping[str, StageLine]]) -> list[str]:
    """What is the same as long as a plan is."""
    phases = [phases[-1] for phases in STAGES.values()]
    return [str(line[rank][phase].predicted_s) for rank in sorted(line) for phase in phases if phase in line[rank]]


def _stage(name: str, lines: Sequence[Mapping[int, Mapping[str, StageLine]]]) -> StageSeconds | None:
    """What was predicted and measured of a stage; nothing where there is no forecast, or nothing of the kind."""
    phases, ranks = STAGES[name], range(len(lines[-1]))
    predicted = [lines[-1][rank][phases[-1]].predicted_s for rank in ranks]
    if not all(usable(value) and value >= 0 for value in predicted):
        return None
    measured = [statistics.median(sum(line[rank][p].measured_s for p in phases) for line in lines) for rank in ranks]
    if not any(measured):  # one process sends nothing
        return None
    return StageSeconds(name=name, predicted_W=tuple(predicted), measured_W=tuple(measured))


def _why_not(run: RecordedRun) -> str:
    """Where there is nothing to compare: what would help."""
    facts, batch = run.forecast, _batch(run)
    if facts is None:
        return f"Nobody predicted what a step takes: {WAY}."
    if not facts.stages_s:
        return f"The plan's forecast does not tell stages apart; one of this version does, and {WAY}."
    if batch is not None and facts.batch != batch:
        of = f"The plan's forecast is of steps of {facts.batch:,.0f} samples, and this run's have {batch:,}"
        return f"{of}, so they are not compared: rowwise plan --batch {batch} predicts these."
    return "The plan's forecast has no usable numbers for these ranks, so nothing is compared."


def _batch(run: RecordedRun) -> int | None:
    """Samples of a step, as the recipe has it."""
    found = [run.settings.get(f"train.{name}", default) for name, default in (("batch", ""), ("accumulate", "1"))]
    whole = all(text.isdecimal() and len(text) < 16 for text in found)
    return int(found[0]) * int(found[1]) if whole else None


def _by_what(run: RecordedRun) -> str:
    if run.forecast is None:
        return "The plan's forecast is not there any more."
    by = f"Predicted by {run.forecast.model or 'a model'}, for {run.forecast.batch:,.0f} samples a step"
    guessed = not (run.settings.get("hardware") or run.settings.get("plan"))
    return f"{by}, whose rates are of a typical machine: {WAY}." if guessed else f"{by}."


def _how_measured(lines: int) -> str:
    many = f"median of {lines} lines after the first" if lines > 1 else "mean of one line"
    return f"Measured: {many}, on the rank where it is most."


def _table(stages: Sequence[StageSeconds]) -> Html:
    rows = {stage.name: (max(stage.predicted_W), max(stage.measured_W)) for stage in stages}
    whole = max(max(row) for row in rows.values())
    head = tag("tr", None, *(tag("th", None, text(name)) for name in HEADS))
    body = [_row(stage.name, SAID[stage.name], rows[stage.name], whole, _busiest(stage)) for stage in stages]
    if len(stages) > 1:
        total = sum(row[0] for row in rows.values()), sum(row[1] for row in rows.values())
        body.append(_row("together", "", total, 0.0, ("", "")))
    return div("wide", tag("table", {"class": "cards"}, tag("thead", None, head), tag("tbody", None, *body)))


def _busiest(stage: StageSeconds) -> tuple[str, str]:
    """The ranks where it is most, if there are several."""
    if len(stage.measured_W) == 1:
        return "", ""
    predicted, measured = (values.index(max(values)) for values in (stage.predicted_W, stage.measured_W))
    return f"rank {predicted}", f"rank {measured}"


def _row(name: str, said: str, row: Row, whole: float, ranks: tuple[str, str]) -> Html:
    cells = [tag("th", {"scope": "row"}, text(name), tag("small", None, text(said)))]
    for (kind, colour), seconds, rank in zip(COLOURS.items(), row, ranks, strict=True):
        inside = [text(quantity.duration(seconds))]
        if whole:
            inside.insert(0, stacked_bar(f"stage-{kind}", f"{name}, {kind}: {inside[0]}", ((seconds, colour),), whole))
            inside = [tag("span", {"class": "amount"}, *inside), tag("small", None, text(rank))]
        cells.append(tag("td", {"data-head": kind.capitalize()}, *inside))
    ratio = f"{row[1] / row[0]:.2f}\u00d7" if row[0] > 0 else quantity.NONE
    return tag("tr", None, *cells, tag("td", {"data-head": HEADS[-1]}, text(ratio)))


def _figure(stage: StageSeconds) -> Html:
    predicted, measured = (quantity.duration(max(values)) for values in (stage.predicted_W, stage.measured_W))
    ends = span("ends", f"predicted {predicted}, measured {measured}")
    caption = tag("figcaption", None, tag("b", None, text(stage.name.capitalize())), span("hint", "a step"), ends)
    return tag("figure", {"class": "chart"}, caption, _pairs(stage))


def _pairs(stage: StageSeconds) -> Html:
    ranks = len(stage.measured_W)
    area = plot((-0.5, ranks - 0.5), (0.0, stage.most * 1000), "rank", "ms")
    whole = [t for t in ticks(0, max(ranks - 1, 1), RANK_TICKS) if t == int(t) and t < ranks]
    area = dataclasses.replace(area, x_ticks=tuple(whole))
    width = (area.x.end - area.x.begin) / ranks
    gap = GAP * width if ranks <= 4 * MANY_RANKS else 0.0
    parts: list[Html] = []
    for rank, values in enumerate(zip(stage.predicted_W, stage.measured_W, strict=True)):
        for number, ((kind, colour), seconds) in enumerate(zip(COLOURS.items(), values, strict=True)):
            top, left = area.y.at(seconds * 1000), area.x.begin + rank * width + gap / 2 + number * (width - gap) / 2
            place = {"x": left, "y": top, "width": (width - gap) / 2, "height": area.y.begin - top}
            said = tag("title", None, text(f"rank {rank}, {kind}: {quantity.duration(seconds)}"))
            parts.append(tag("g", None, said, tag("rect", {"class": f"bar {colour}"} | place)))
    label = f"{stage.name.capitalize()} by rank, predicted and measured"
    box = {"role": "img", "aria-label": label, "data-chart": f"stage-{stage.name}"}
    return tag("svg", box | {"viewBox": f"0 0 {WIDTH:.0f} {HEIGHT:.0f}"}, axes(area), join(parts))

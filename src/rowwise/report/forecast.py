"""The section that compares the plan's forecast with measured times (stages.csv), by stage of a step and by rank.

Known limit: phases without a forecast are not shown.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowwise.base.quantity import DASH, format_duration, is_finite
from rowwise.base.textfile import parse_whole
from rowwise.report.charts import draw_amount, draw_rank_bars
from rowwise.report.markup import Html, data_table, div, figure, legend, named_cell, note, row, section, span, text
from rowwise.report.read import RecordedRun, StageLine

TITLE = "Predicted and measured time of a step"
STAGES = {  # stages of a forecast and their measured phases; the last phase has the prediction
    "lookup": ("lookup",),
    "exchange": ("route", "return", "exchange"),
    "wait": ("wait",),
    "update": ("update",),
}
LATER = frozenset({"wait", "return"})  # phases that runs of earlier versions do not have
DESCRIPTIONS = {
    "lookup": "rows looked up",
    "exchange": "ids, vectors and gradients sent",
    "wait": "for the slowest rank",
    "update": "rows updated",
}
HEADERS = ("Stage", "Predicted", "Measured", "Measured over predicted")
COLOURS = {"predicted": "grey", "measured": "blue"}
HARDWARE_HINT = "rowwise train --hardware takes a preset, or a profile that rowwise calibrate has measured"
WAIT_NOTE = (
    "Wait: time of a step from when a rank reaches a collective until the last rank does; exchange does not include "
    "it. Predicted are differences of lookups and updates between ranks. Reading data, dense layers, writing logs and "
    "sharing processors also make ranks wait; these are measured and not predicted."
)
SecondsPair = tuple[float, float]  # predicted and measured seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Predicted and measured seconds of a stage in a step, for each rank."""

    name: str
    predicted_W: tuple[float, ...]
    measured_W: tuple[float, ...]

    @property
    def max_s(self) -> float:
        return max((*self.predicted_W, *self.measured_W))


def draw_forecast(run: RecordedRun) -> Html:
    """The section; empty for a run without stages."""
    lines = _select_last_plan(run.stages)
    if not lines:
        return Html("")
    names = [name for name in STAGES if STAGES[name][-1] in lines[0][0].keys() & lines[-1][0].keys()]
    stages = [stage for name in names if (stage := _compare_stage(name, lines)) is not None]
    if not stages:
        return section("forecast", TITLE, note(_explain_missing(run)))
    colours = legend(*((colour, name) for name, colour in COLOURS.items()), style="legend cubes")
    charts = div("charts", *(_draw_figure(stage) for stage in stages))
    wait_note = WAIT_NOTE if len(stages[0].measured_W) > 1 else ""
    explanation = note(f"{_describe_forecast(run)} {_describe_measurement(len(lines))} {wait_note}".strip())
    return section("forecast", TITLE, colours, _draw_table(stages), explanation, charts)


def _select_last_plan(lines: Sequence[StageLine]) -> list[dict[int, dict[str, StageLine]]]:
    """Lines by rank and phase since the run last changed its plan or ranks, without the first line.

    A run may be resumed with another plan; a change of the predictions reveals it.
    """
    by_step: dict[float, dict[int, dict[str, StageLine]]] = {}
    for line in lines:
        by_step.setdefault(line.step, {}).setdefault(line.rank, {})[line.phase] = line
    in_order = [by_step[step] for step in sorted(by_step)]
    complete = [line for line in in_order if _is_complete(line)]
    begin = len(complete)
    while begin > 0 and _predictions(complete[begin - 1]) == _predictions(complete[-1]):
        begin -= 1
    newest = complete[begin:]
    return newest[1:] or newest


def _is_complete(line: Mapping[int, Mapping[str, StageLine]]) -> bool:
    """Whether a line has all ranks and phases: a run may be killed in the middle of a line."""
    phases = {phase for stage in STAGES.values() for phase in stage} - LATER
    return all(rank in line and phases <= line[rank].keys() for rank in range(len(line)))


def _predictions(line: Mapping[int, Mapping[str, StageLine]]) -> list[str]:
    """The predictions of a line, which change with the plan."""
    phases = [phases[-1] for phases in STAGES.values()]
    return [str(line[rank][phase].predicted_s) for rank in sorted(line) for phase in phases if phase in line[rank]]


def _compare_stage(name: str, lines: Sequence[Mapping[int, Mapping[str, StageLine]]]) -> StageSeconds | None:
    """Seconds of a stage, or None without forecast or measured time."""
    phases, ranks = STAGES[name], range(len(lines[-1]))
    predicted = [lines[-1][rank][phases[-1]].predicted_s for rank in ranks]
    if not all(is_finite(value) and value >= 0 for value in predicted):
        return None
    measured = [
        statistics.median(sum(line[rank][p].measured_s for p in phases if p in line[rank]) for line in lines)
        for rank in ranks
    ]
    if not any(measured):  # such as exchanges of a single rank
        return None
    return StageSeconds(name=name, predicted_W=tuple(predicted), measured_W=tuple(measured))


def _explain_missing(run: RecordedRun) -> str:
    """The reason for a missing comparison, and its remedy."""
    forecast, batch = run.forecast, _global_batch(run)
    if forecast is None:
        return f"The run has no forecast: {HARDWARE_HINT}. It is of use where tables are spread over processes."
    if not forecast.stages_s:
        return f"The plan's forecast has no stages, which plans of this version have; {HARDWARE_HINT}."
    if batch is not None and forecast.batch != batch:
        mismatch = f"The plan's forecast is for steps of {forecast.batch:,.0f} samples, but this run has {batch:,}"
        return f"{mismatch}: rowwise plan --batch {batch} predicts these."
    return "The plan's forecast has no usable values for these ranks."


def _global_batch(run: RecordedRun) -> int | None:
    """The global number of samples of a step, from the recipe."""
    batch = parse_whole(run.settings.get("train.batch", ""))
    accumulate = parse_whole(run.settings.get("train.accumulate", "1"))
    return None if batch is None or accumulate is None else batch * accumulate


def _describe_forecast(run: RecordedRun) -> str:
    if run.forecast is None:
        return "The plan's forecast is missing."
    model = f"Predicted by {run.forecast.model or 'a model'}, for {run.forecast.batch:,.0f} samples a step"
    by_default = not (run.settings.get("hardware") or run.settings.get("plan"))
    return f"{model}, with rates of a typical machine: {HARDWARE_HINT}." if by_default else f"{model}."


def _describe_measurement(lines: int) -> str:
    average = f"median of {lines} lines after the first" if lines > 1 else "mean of one line"
    return f"Measured: {average}, on the rank that took longest."


def _draw_table(stages: Sequence[StageSeconds]) -> Html:
    rows = {stage.name: (max(stage.predicted_W), max(stage.measured_W)) for stage in stages}
    max_s = max(map(max, rows.values()))
    body = [
        _draw_row(stage.name, DESCRIPTIONS[stage.name], rows[stage.name], max_s, _busiest_ranks(stage))
        for stage in stages
    ]
    if len(stages) > 1:
        total = sum(pair[0] for pair in rows.values()), sum(pair[1] for pair in rows.values())
        body.append(_draw_row("together", "", total, 0.0, ("", "")))
    return data_table(HEADERS, body, "cards")


def _busiest_ranks(stage: StageSeconds) -> tuple[str, str]:
    """The slowest rank as predicted and as measured; empty for one rank."""
    if len(stage.measured_W) == 1:
        return "", ""
    predicted, measured = (values.index(max(values)) for values in (stage.predicted_W, stage.measured_W))
    return f"rank {predicted}", f"rank {measured}"


def _draw_row(name: str, description: str, pair: SecondsPair, max_s: float, ranks: tuple[str, str]) -> Html:
    """The row of a stage; without bars if `max_s`, the seconds of a full bar, is 0."""
    cells: list[Html] = []
    for (kind, colour), seconds, rank in zip(COLOURS.items(), pair, ranks, strict=True):
        duration = format_duration(seconds)
        bar = draw_amount(f"stage-{kind}", f"{name}, {kind}: {duration}", ((seconds, colour),), max_s, duration)
        cells.append(named_cell(kind.capitalize(), bar if max_s else text(duration), rank))
    ratio = f"{pair[1] / pair[0]:.2f}\u00d7" if pair[0] > 0 else DASH
    return row(name, description, *cells, named_cell(HEADERS[-1], text(ratio)))


def _draw_figure(stage: StageSeconds) -> Html:
    predicted, measured = (format_duration(max(values)) for values in (stage.predicted_W, stage.measured_W))
    ends = span("ends", f"predicted {predicted}, measured {measured}")
    name, seconds = stage.name.capitalize(), (stage.predicted_W, stage.measured_W)
    series = {kind: (seconds_W, COLOURS[kind]) for kind, seconds_W in zip(COLOURS, seconds, strict=True)}
    bars = draw_rank_bars(f"stage-{stage.name}", f"{name} by rank, predicted and measured", series, stage.max_s)
    return figure(name, bars, span("hint", "per step"), ends)

"""The page of a study of `rowwise tune`: best trial, importance of settings, and the metric over each setting."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rowwise.base.quantity import format_duration, format_metric
from rowwise.base.records import StudyOutcome, TrialRecord
from rowwise.report.charts import Chart, ChartLine, ChartMark, draw_chart, draw_strip
from rowwise.report.markup import Html, cells, data_table, div, note, row, section, tag, text, text_table
from rowwise.report.page import draw_page, write_page

MAX_SETTINGS = 12
LEFT_OUT = ("count", "base_rate", "auc_bound")  # test metrics that are not listed
NOTE = (
    "Importance: the share of the metric's variation among the better trials that a setting explains (PED-ANOVA). "
    "A trial is pruned where it is worse than the median of the trials before it. Validation metrics of the best "
    "trial are too good, as it was chosen by them; the test metrics were measured once, at the end."
)


def write_study(folder: Path, study: StudyOutcome) -> Path:
    """Write report.html of a study."""
    out = folder / "report.html"
    write_page(out, draw_study(study))
    return out


def draw_study(study: StudyOutcome) -> str:
    best = next((trial for trial in study.trials if trial.number == study.best), None)
    states = [trial.state for trial in study.trials]
    lead = f"{len(states)} trials: {states.count('complete')} complete, {states.count('pruned')} pruned, "
    seconds = sum(trial.seconds for trial in study.trials)
    lead += f"{states.count('failed')} failed; {format_duration(seconds)} of training."
    head = tag("header", None, tag("h1", None, text(f"Tuning of {study.recipe}")), tag("p", None, text(lead)))
    parts = [_draw_progress(study), _draw_importance(study), _draw_settings(study, best), _draw_trials(study)]
    return draw_page(f"tuning of {study.recipe}", head, _draw_best(study, best), *parts, note(NOTE))


def _draw_best(study: StudyOutcome, best: TrialRecord | None) -> Html:
    if best is None:
        return section("best", "Best trial", note("No trial is complete yet."))
    rows = [("trial", str(best.number)), (f"{study.metric} on validation rows", format_metric(best.value or 0.0))]
    for task, values in study.test.items():
        rows += [
            (f"test {task}: {name}", format_metric(x))
            for name, x in values.items()
            if x is not None and name not in LEFT_OUT
        ]
    rows += [(key, _format_setting(value)) for key, value in best.values.items()]
    return section("best", "Best trial", text_table(("", ""), rows))


def _draw_progress(study: StudyOutcome) -> Html:
    complete = [trial for trial in study.trials if trial.value is not None and trial.state == "complete"]
    pruned = [trial for trial in study.trials if trial.value is not None and trial.state == "pruned"]
    points, best = list[tuple[float, float]](), None
    for trial in complete:
        assert trial.value is not None
        better = best is None or (trial.value < best if study.smaller_is_better else trial.value > best)
        best = trial.value if better or best is None else best
        points.append((float(trial.number), best))
    marks = [ChartMark(name="complete", point=(float(t.number), t.value or 0.0), colour="blue") for t in complete]
    marks += [ChartMark(name="pruned", point=(float(t.number), t.value or 0.0), colour="grey") for t in pruned]
    line = ChartLine(name="best so far", points=points, colour="vermillion")
    chart = Chart(key="progress", label=study.metric, lines=(line,), marks=marks, x_title="trial")
    return section("progress", f"{study.metric} by trial", div("charts", tag("figure", None, draw_chart(chart))))


def _draw_importance(study: StudyOutcome) -> Html:
    if not study.importance:
        return Html("")
    largest = max(study.importance.values())
    rows = []
    for key, value in sorted(study.importance.items(), key=lambda item: -item[1]):
        bar = draw_strip("setting-importance", f"{key}: {value:.3f}", ((value, "blue"),), largest)
        rows.append(row(key, "", tag("td", {"class": "bars"}, bar), *cells(f"{value:.3f}")))
    return section("importance", "Importance of settings", data_table(("Setting", "", "Share"), rows, "slices"))


def _draw_settings(study: StudyOutcome, best: TrialRecord | None) -> Html:
    """The metric over each setting; the x coordinate of a choice is its index, shortest text first."""
    complete = [trial for trial in study.trials if trial.value is not None and trial.state == "complete"]
    keys = sorted({key for trial in complete for key in trial.values}, key=lambda key: -study.importance.get(key, 0.0))
    figures = []
    for key in keys[:MAX_SETTINGS]:
        texts = {_format_setting(trial.values[key]) for trial in complete if isinstance(trial.values.get(key), str)}
        choices = sorted(texts, key=lambda choice: (len(choice), choice))  # whole numbers by size
        marks = [
            ChartMark(
                name="best" if best is not None and trial.number == best.number else "trial",
                point=(_position(trial.values[key], choices), trial.value or 0.0),
                colour="vermillion" if best is not None and trial.number == best.number else "blue",
            )
            for trial in complete
            if key in trial.values
        ]
        title = f"{key}: {', '.join(f'{i} is {choice}' for i, choice in enumerate(choices))}" if choices else key
        chart = Chart(key="setting", label=study.metric, lines=(), marks=marks, x_title=key)
        figures.append(tag("figure", None, tag("figcaption", None, text(title)), draw_chart(chart)))
    return section("settings", "Settings", div("charts", *figures)) if figures else Html("")


def _position(value: Any, choices: Sequence[str]) -> float:
    return float(choices.index(_format_setting(value))) if choices else float(value)


def _draw_trials(study: StudyOutcome) -> Html:
    keys = list(dict.fromkeys(key for trial in study.trials for key in trial.values))
    rows = []
    for trial in study.trials:
        cells = [_format_setting(trial.values[key]) if key in trial.values else "" for key in keys]
        value = "" if trial.value is None else format_metric(trial.value)
        rows.append((str(trial.number), trial.state if not trial.why else f"failed: {trial.why}", value, *cells))
    return section("trials", "Trials", div("wide", text_table(("Trial", "State", study.metric, *keys), rows)))


def _format_setting(value: Any) -> str:
    """A setting as text; choices are JSON already."""
    if isinstance(value, str):
        return value
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)

"""Waits for data: their share of training time, charts of waits and workers, and the advice of report and console."""

from rowwise.base.quantity import format_percent, is_finite, pluralise
from rowwise.report.charts import FEW, Chart, ChartLine, draw_chart, draw_series
from rowwise.report.markup import Html, figure, lead, legend_entry, span
from rowwise.report.read import RecordedRun
from rowwise.report.scale import positive

MIN_SHARE = 0.05  # of training time spent waiting, for advice
MIN_TRAINING_S = 60.0  # for advice: workers take seconds to start, so shorter runs gain nothing
DATA = "data_s"


def is_worth_advice(waited_s: float, training_s: float) -> bool:
    """Whether workers would make the run faster."""
    return training_s >= MIN_TRAINING_S and waited_s > MIN_SHARE * training_s


def advice(share: float, workers: float | None, recipe: str) -> str:
    """A sentence on the wait for rows and its remedy.

    Args:
        share: share of training time spent waiting.
        workers: number of workers; None if the trainer prepares its batches.
        recipe: the recipe's file, for the command in the advice.
    """
    remedy = "set data.workers" if workers is None else f"set data.workers to more than {workers:.0f}"
    command = f"rowwise data bench {recipe} computes how many"
    return f"training waited {share:.0%} of the time for rows: {remedy}; {command}"


def wait_note(run: RecordedRun, names: list[str]) -> Html:
    """A sentence on the wait of all steps, without the first line, which includes the start of workers."""
    spent = {name: sum(map(positive, run.steps[name][1:])) for name in names}
    total_s = sum(spent.values())
    if DATA not in spent or not total_s:
        return Html("")
    share, workers = spent[DATA] / total_s, newest_workers(run)
    synthetic = run.result is not None and bool(run.result.ceiling)  # rows are generated, not read
    if is_worth_advice(spent[DATA], total_s) and not synthetic:
        sentence = advice(share, workers, "recipe.yaml, in the folder of the run,")
        return lead(f"{sentence[0].upper()}{sentence[1:]}.")
    by_workers = "" if workers is None else f" by {pluralise(workers, 'worker')}"
    assessment = (
        "as they were generated"
        if synthetic
        else f"which are prepared fast enough{by_workers}"
        if share <= MIN_SHARE
        else "but the run is too short to need action"
    )
    return lead(f"Training waited {format_percent(share)} of the time for rows, {assessment}.")


def newest_workers(run: RecordedRun) -> float | None:
    """The last number of workers, if there were any."""
    return next((count for count in reversed(run.steps.get("workers", ())) if is_finite(count)), None)


def feeding_figures(run: RecordedRun, names: list[str]) -> list[Html]:
    """Charts of the share of time spent waiting, and of workers."""
    if DATA not in names:
        return []
    totals = [sum(positive(value) for value in line) for line in zip(*(run.steps[name] for name in names), strict=True)]
    waits = zip(run.steps[DATA], totals, strict=True)
    shares = tuple(100 * positive(wait_s) / total_s if total_s else float("nan") for wait_s, total_s in waits)
    return [_draw_waits(run, shares), _draw_workers(run)]


def _draw_waits(run: RecordedRun, shares: tuple[float, ...]) -> Html:
    known = sorted(share for share in shares if is_finite(share))
    if not known:
        return Html("")
    points = list(zip(run.steps["samples"], shares, strict=True))
    summary = f"median {format_percent(known[len(known) // 2] / 100)}"
    line = ChartLine(name="Waiting for rows", points=points, colour="orange", noisy=True, spread=True)
    return draw_series(line, "data_wait", summary, "share of the time of a step", unit="%", from_zero=True)


def _draw_workers(run: RecordedRun) -> Html:
    last = newest_workers(run)
    if last is None:
        return Html("")
    styles = {"workers": ("workers", "blue"), "ready": ("splits ready", "orange")}
    lines = [
        ChartLine(
            name=name,
            points=list(zip(run.steps["samples"], run.steps[column], strict=True)),
            colour=colour,
            dots=len(run.steps[column]) < FEW,
        )
        for column, (name, colour) in styles.items()
        if any(map(is_finite, run.steps.get(column, ())))
    ]
    restarts = max((count for count in run.steps.get("restarts", ()) if is_finite(count)), default=0.0)
    summary = f"last {pluralise(last, 'worker')}" + (f", {restarts:.0f} restarts" if restarts else "")
    chart = Chart(key="workers", label=f"Workers over samples: {summary}", lines=lines, from_zero=True)
    entries = (legend_entry(line.colour, line.name) for line in lines)
    return figure("Preparing rows", draw_chart(chart), *entries, span("ends", summary))

"""The section on data: time that a run waited for rows, number of workers, and the console's advice."""

from rowwise.base.quantity import format_percent, is_finite, pluralise
from rowwise.report.charts import FEW, Chart, ChartLine, draw_chart, draw_series
from rowwise.report.markup import Html, figure, lead, legend_entry, span
from rowwise.report.read import RecordedRun
from rowwise.report.scale import positive

MUCH = 0.05  # least share of the time that is worth advice
LONG_S = 60.0  # of training: workers take seconds to start, and a shorter run gains nothing
DATA = "data_s"


def is_worth_advice(waited_s: float, training_s: float) -> bool:
    """Whether workers would make the run faster."""
    return training_s >= LONG_S and waited_s > MUCH * training_s


def advice(share: float, workers: float | None, recipe: str) -> str:
    """A sentence on the wait for rows and what to do about it.

    Args:
        share: of the time, spent waiting.
        workers: number of workers; None without any.
        recipe: the recipe's file, for the command in the advice.
    """
    more = "set data.workers" if workers is None else f"set data.workers to more than {workers:.0f}"
    how = f"rowwise data bench {recipe} computes how many"
    return f"training waited {share:.0%} of the time for rows: {more}; {how}"


def wait_note(run: RecordedRun, names: list[str]) -> Html:
    """A sentence on the wait of all steps, without the first line, which includes the start of workers."""
    spent = {name: sum(map(positive, run.steps[name][1:])) for name in names}
    whole = sum(spent.values())
    if DATA not in spent or not whole:
        return Html("")
    share, workers = spent[DATA] / whole, newest_workers(run)
    synthetic = run.result is not None and bool(run.result.ceiling)  # rows are drawn, nothing reads them
    if is_worth_advice(spent[DATA], whole) and not synthetic:
        said = advice(share, workers, "recipe.yaml, in the folder of the run,")
        words = f"{said[0].upper()}{said[1:]}."
    else:
        by = "" if workers is None else f" by {pluralise(workers, 'worker')}"
        end = (
            "as they were drawn"
            if synthetic
            else f"which are prepared fast enough{by}"
            if share <= MUCH
            else "which is nothing to act on in so short a run"
        )
        words = f"Training waited {format_percent(share)} of the time for rows, {end}."
    return lead(words)


def newest_workers(run: RecordedRun) -> float | None:
    """The last number of workers, if there were any."""
    return next((count for count in reversed(run.steps.get("workers", ())) if is_finite(count)), None)


def feeding_figures(run: RecordedRun, names: list[str]) -> list[Html]:
    """Charts of the share of time spent waiting, and of workers."""
    if DATA not in names:
        return []
    wholes = [sum(positive(value) for value in line) for line in zip(*(run.steps[name] for name in names), strict=True)]
    waits = zip(run.steps[DATA], wholes, strict=True)
    shares = tuple(100 * positive(wait) / whole if whole else float("nan") for wait, whole in waits)
    return [_waits(run, shares), _workers(run)]


def _waits(run: RecordedRun, shares: tuple[float, ...]) -> Html:
    known = sorted(share for share in shares if is_finite(share))
    if not known:
        return Html("")
    points = list(zip(run.steps["samples"], shares, strict=True))
    said = f"median {format_percent(known[len(known) // 2] / 100)}"
    line = ChartLine(name="Waiting for rows", points=points, colour="orange", noisy=True, spread=True)
    return draw_series(line, "data_wait", said, "part of the time of a step", unit="%", from_zero=True)


def _workers(run: RecordedRun) -> Html:
    last = newest_workers(run)
    if last is None:
        return Html("")
    looks = {"workers": ("workers", "blue"), "ready": ("splits ready", "orange")}
    lines = [
        ChartLine(
            name=name,
            points=list(zip(run.steps["samples"], run.steps[column], strict=True)),
            colour=colour,
            dots=len(run.steps[column]) < FEW,
        )
        for column, (name, colour) in looks.items()
        if any(map(is_finite, run.steps.get(column, ())))
    ]
    restarts = max((count for count in run.steps.get("restarts", ()) if is_finite(count)), default=0.0)
    said = f"last {pluralise(last, 'worker')}" + (f", {restarts:.0f} restarts" if restarts else "")
    chart = Chart(key="workers", label=f"Workers over samples: {said}", lines=lines, from_zero=True)
    entries = (legend_entry(line.colour, line.name) for line in lines)
    return figure("Preparing rows", draw_chart(chart), *entries, span("ends", said))

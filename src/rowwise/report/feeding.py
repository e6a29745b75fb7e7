"""Whether a run had its rows in time: what it waited for them, and how many workers prepared them.

The console says the same words at the end of a run.
"""

from rowwise import quantity
from rowwise.quantity import usable
from rowwise.report.charts import Chart, ChartLine, draw
from rowwise.report.markup import Html, span, tag, text
from rowwise.report.read import RecordedRun

MUCH, LONG_S = 0.05, 0.5  # of the time, and seconds: what is worth doing something about
DATA = "data_s"
FEW = 3  # values, which are shown as dots


def advice(share: float, workers: float | None, recipe: str) -> str:
    """What a wait means and what to do, in one sentence.

    Args:
        share: of the time, that went by in waiting.
        workers: that prepared rows; None: there were none.
        recipe: its file, of which `rowwise data bench` says how many workers it takes.
    """
    more = "give data.workers, or more of them" if workers is None else f"give data.workers more than {workers:.0f}"
    how = f"rowwise data bench {recipe} says how many it takes"
    return f"trainers waited {share:.0%} of the time for rows: {more}; {how}"


def waited(run: RecordedRun, names: list[str]) -> Html:
    """A sentence on what all steps waited but those of the first line, which waits until everything has started."""
    spent = {name: sum(map(_known, run.steps[name][1:])) for name in names}
    whole = sum(spent.values())
    if DATA not in spent or not whole:
        return Html("")
    share, workers = spent[DATA] / whole, newest_workers(run)
    if share > MUCH and spent[DATA] > LONG_S:
        said = advice(share, workers, "recipe.yaml, in the folder of the run,")
        words = f"{said[0].upper()}{said[1:]}."
    else:
        by = "" if workers is None else f" by {_several(workers)}"
        words = f"Trainers waited {quantity.share(share)} of the time for rows: they are prepared fast enough{by}."
    return tag("p", {"class": "lead"}, text(words))


def newest_workers(run: RecordedRun) -> float | None:
    """How many there were at the end, if there were any."""
    return next((count for count in reversed(run.steps.get("workers", ())) if usable(count)), None)


def feeding(run: RecordedRun, names: list[str]) -> list[Html]:
    """Charts: the part of each interval that was spent waiting, and the workers."""
    if DATA not in names:
        return []
    wholes = [sum(_known(value) for value in line) for line in zip(*(run.steps[name] for name in names), strict=True)]
    waits = zip(run.steps[DATA], wholes, strict=True)
    shares = tuple(100 * _known(wait) / whole if whole else float("nan") for wait, whole in waits)
    return [_waits(run, shares), _workers(run)]


def _waits(run: RecordedRun, shares: tuple[float, ...]) -> Html:
    known = sorted(share for share in shares if usable(share))
    if not known:
        return Html("")
    line = ChartLine(
        name="Waiting for rows",
        points=list(zip(run.steps["samples"], shares, strict=True)),
        colour="orange",
        noisy=True,
        spread=True,
        dots=len(shares) < FEW,
    )
    said = f"median {quantity.share(known[len(known) // 2] / 100)}"
    chart = Chart(
        key="data_wait", label=f"Waiting for rows over samples: {said}", lines=[line], unit="%", from_zero=True
    )
    words = (tag("b", None, text("Waiting for rows")), span("hint", "part of the time of a step"), span("ends", said))
    return tag("figure", {"class": "chart"}, tag("figcaption", None, *words), draw(chart))


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
        if any(map(usable, run.steps.get(column, ())))
    ]
    restarts = max((count for count in run.steps.get("restarts", ()) if usable(count)), default=0.0)
    said = f"last {_several(last)}" + (f", {restarts:.0f} restarts" if restarts else "")
    chart = Chart(key="workers", label=f"Workers over samples: {said}", lines=lines, from_zero=True)
    entries = (tag("span", {"class": "entry"}, span(f"swatch {line.colour}", ""), text(line.name)) for line in lines)
    caption = (tag("b", None, text("Preparing rows")), *entries, span("ends", said))
    return tag("figure", {"class": "chart"}, tag("figcaption", None, *caption), draw(chart))


def _several(count: float) -> str:
    return f"{count:.0f} worker{'s' * (count != 1)}"


def _known(value: float) -> float:
    return value if usable(value) and value > 0 else 0.0

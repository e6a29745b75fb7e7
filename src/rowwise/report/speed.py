"""Where the time of the steps went, how many samples a second that made, and what memory it took."""

from rowwise import quantity
from rowwise.quantity import usable
from rowwise.report.charts import COLOURS, Chart, ChartBand, ChartLine, draw, draw_stack, stacked_bar
from rowwise.report.feeding import feeding, waited
from rowwise.report.markup import Html, div, note, section, span, tag, text
from rowwise.report.read import RecordedRun

PHASES = {  # as they follow each other in a step; a run may have others
    "data_s": ("waiting for data", "orange"),
    "route_s": ("ids to their rows", "black"),
    "lookup_s": ("lookup", "sky"),
    "exchange_s": ("exchange", "vermillion"),
    "wait_s": ("waiting for other ranks", "grey"),
    "forward_s": ("forward", "blue"),
    "backward_s": ("backward", "green"),
    "update_s": ("update", "purple"),
    "other_s": ("all else", "grey"),
}
NOT_PHASES = frozenset({"time_s", "samples_s"})
BINS = 160


def speed(run: RecordedRun) -> Html:
    if not run.steps:
        return section("speed", "Time and memory", note("steps.csv has no values, so there is nothing to draw."))
    names = phases(run)
    figures = [
        _breakdown(run, names),
        *feeding(run, names),
        _over_samples(run, "samples_s", "throughput", "Throughput", "samples/s"),
        _over_samples(run, "memory_bytes", "memory", "Memory", "B"),
        _over_samples(run, "gradient_norm", "gradient_norm", "Gradient norm", ""),
        _over_samples(run, "rate", "rate", "Learning rate of the dense layers", ""),
    ]
    told = (_totals(run, names), waited(run, names))
    return section("speed", "Time and memory", *told, div("charts", *figures))


def phases(run: RecordedRun) -> list[str]:
    """The columns that say what an interval's seconds went to: those known, then any others."""
    other = [name for name in run.steps if name.endswith("_s") and name not in NOT_PHASES and name not in PHASES]
    return [name for name in PHASES if name in run.steps] + other


def phase_look(names: list[str], name: str) -> tuple[str, str]:
    """What a phase is called, and its colour."""
    if name in PHASES:
        return PHASES[name]
    spare = ("black", "vermillion", *COLOURS)
    return name.removesuffix("_s"), spare[names.index(name) % len(spare)]


def seconds(run: RecordedRun, name: str) -> list[float]:
    """A phase's seconds by interval; nothing where there is no number."""
    return [value if usable(value) and value > 0 else 0.0 for value in run.steps[name]]


def _totals(run: RecordedRun, names: list[str]) -> Html:
    total = {name: sum(seconds(run, name)) for name in names}
    whole = sum(total.values())
    if not whole:
        return note("steps.csv has no seconds by phase, so there is no breakdown.")
    looks = {name: phase_look(names, name) for name in names}
    said = {name: f"{looks[name][0]} {quantity.share(total[name] / whole)}" for name in names}
    label = "Time of all steps: " + ", ".join(said.values())
    bar = stacked_bar("step-total", label, [(total[name], looks[name][1]) for name in names], whole)
    entries = (_entry(looks[name][1], said[name], quantity.duration(total[name])) for name in names)
    return div("total", bar, div("legend", *entries))


def _entry(colour: str, words: str, beside: str) -> Html:
    return tag("span", {"class": "entry"}, span(f"swatch {colour}", ""), text(words), span("hint", beside))


def _breakdown(run: RecordedRun, names: list[str]) -> Html:
    xs, shares = _shares(run, names)
    bands = [ChartBand(name=phase_look(names, n)[0], shares=shares[n], colour=phase_look(names, n)[1]) for n in names]
    label = "Parts of the time of a step over samples"
    caption = tag("figcaption", None, tag("b", None, text("Time of a step")), span("hint", "parts of the whole"))
    return tag("figure", {"class": "chart"}, caption, draw_stack("steps", label, xs, bands if xs else ()))


def _shares(run: RecordedRun, names: list[str]) -> tuple[list[float], dict[str, list[float]]]:
    """Shares of the time, over at most BINS stretches of intervals; the first one reaches back to its beginning."""
    columns = {name: seconds(run, name) for name in names}
    samples = run.steps["samples"]
    bins = min(BINS, len(samples))
    xs: list[float] = []
    shares: dict[str, list[float]] = {name: [] for name in names}
    for k in range(bins):
        begin, end = len(samples) * k // bins, len(samples) * (k + 1) // bins
        spent = {name: sum(column[begin:end]) for name, column in columns.items()}
        whole = sum(spent.values())
        if not whole:
            continue
        places = (samples[end - 1],) if xs else (0.0 if begin == 0 else samples[begin], samples[end - 1])
        xs.extend(places)
        for name in names:
            shares[name].extend(spent[name] / whole for _ in places)
    return xs, shares


def _over_samples(run: RecordedRun, column: str, key: str, title: str, unit: str) -> Html:
    values = run.steps.get(column, ())
    if not any(usable(value) for value in values):
        return Html("")
    line = ChartLine(
        name=title,
        points=list(zip(run.steps["samples"], values, strict=True)),
        colour="blue",
        noisy=column != "rate",
        spread=column not in ("rate", "memory_bytes"),
        dots=len(values) < 3,
    )
    known = [value for value in values if usable(value)]
    said = _said(column, known)
    axis = unit if unit == "B" else ""
    from_zero = column in ("samples_s", "memory_bytes")
    label = f"{title} over samples: {said}"
    chart = Chart(key=key, label=label, lines=[line], unit=axis, from_zero=from_zero)
    beside = "" if unit == "B" else unit
    caption = tag("figcaption", None, tag("b", None, text(title)), span("hint", beside), span("ends", said))
    return tag("figure", {"class": "chart"}, caption, draw(chart))


def _said(column: str, known: list[float]) -> str:
    middle = sorted(known)[len(known) // 2]
    match column:
        case "memory_bytes":
            return f"peak {quantity.size(max(known))}"
        case "samples_s":
            return f"median {quantity.count(middle)}"
        case "rate":
            return f"last {quantity.short(known[-1])}"
        case "gradient_norm":
            return f"median {quantity.number(middle)}"
        case other:
            raise AssertionError(f"column {other!r} has no words")

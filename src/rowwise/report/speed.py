"""The section with the time of steps by phase, throughput, memory, gradient norm and learning rate."""

from rowwise.base import quantity
from rowwise.base.quantity import is_finite
from rowwise.report.charts import COLOURS, ChartBand, ChartLine, draw_series, draw_stack, draw_strip
from rowwise.report.feeding import feeding_figures, wait_note
from rowwise.report.markup import Html, div, figure, legend_entry, note, section, span
from rowwise.report.read import RecordedRun
from rowwise.report.scale import positive

PHASES = {  # in the order of a step; runs of other versions may have others
    "data_s": ("waiting for data", "orange"),
    "route_s": ("sending ids to their tables", "black"),
    "prefetch_s": ("reading table rows from the disk", "orange"),
    "lookup_s": ("looking up the vectors of ids", "sky"),
    "exchange_s": ("sending vectors", "vermillion"),
    "wait_s": ("waiting for other processes", "grey"),
    "forward_s": ("layers, forward", "blue"),
    "backward_s": ("layers, backward", "green"),
    "return_s": ("sending gradients of vectors", "vermillion"),
    "reduce_s": ("summing gradients of layers", "black"),
    "status_s": ("agreeing with other processes", "grey"),
    "update_s": ("updating table rows", "purple"),
    "other_s": ("other", "grey"),
}
NOT_PHASES = frozenset({"time_s", "samples_s", "disk_wait_s", "disk_busy_s"})
BINS = 160
MIN_SHARE = 0.0005  # of the total time, for a phase to be listed


def draw_speed(run: RecordedRun) -> Html:
    if not run.steps:
        return section("speed", "Time and memory", note("steps.csv has no values, so there is nothing to draw."))
    names = phase_names(run)
    figures = [
        _draw_breakdown(run, names),
        *feeding_figures(run, names),
        _draw_over_samples(run, "samples_s", "throughput", "Throughput", "samples/s"),
        _draw_over_samples(run, "memory_bytes", "memory", "Memory", "B"),
        _draw_over_samples(
            run,
            "gradient_norm",
            "gradient_norm",
            "Gradient norm",
            "norm of the dense gradients; jumps mean that training is unstable",
        ),
        _draw_over_samples(run, "rate", "rate", "Learning rate of the dense layers", ""),
    ]
    totals = (_draw_totals(run, names), wait_note(run, names))
    return section("speed", "Time and memory", *totals, div("charts", *figures))


def phase_names(run: RecordedRun) -> list[str]:
    """The columns with seconds of phases: known ones in order, then others."""
    other = [name for name in run.steps if name.endswith("_s") and name not in NOT_PHASES and name not in PHASES]
    return [name for name in PHASES if name in run.steps] + other


def phase_style(names: list[str], name: str) -> tuple[str, str]:
    """The label and the colour of a phase."""
    if name in PHASES:
        return PHASES[name]
    colours = ("black", "vermillion", *COLOURS)
    return name.removesuffix("_s"), colours[names.index(name) % len(colours)]


def interval_seconds(run: RecordedRun, name: str) -> list[float]:
    """Seconds of a phase by interval; 0 for unusable values."""
    return [positive(value) for value in run.steps[name]]


def _draw_totals(run: RecordedRun, names: list[str]) -> Html:
    total = {name: sum(interval_seconds(run, name)) for name in names}
    total_s = sum(total.values())
    names = [name for name in names if total[name] > MIN_SHARE * total_s]
    if not total_s:
        return note("steps.csv has no seconds by phase, so there is no breakdown.")
    styles = {name: phase_style(names, name) for name in names}
    spent = {name: span("hint", quantity.format_duration(total[name])) for name in names}
    parts = {name: f"{styles[name][0]} {quantity.format_percent(total[name] / total_s)}" for name in names}
    label = "Time of all steps: " + ", ".join(parts.values())
    bar = draw_strip("step-total", label, [(total[name], styles[name][1]) for name in names], total_s)
    entries = (legend_entry(styles[name][1], parts[name], spent[name]) for name in names)
    return div("total", bar, div("legend", *entries))


def _draw_breakdown(run: RecordedRun, names: list[str]) -> Html:
    xs, shares = _bin_phases(run, names)
    bands = [ChartBand(name=phase_style(names, n)[0], shares=shares[n], colour=phase_style(names, n)[1]) for n in names]
    label = "Shares of the time of a step over samples"
    chart = draw_stack("steps", label, xs, bands if xs else ())
    return figure("Time of a step", chart, span("hint", "shares by phase"))


def _bin_phases(run: RecordedRun, names: list[str]) -> tuple[list[float], dict[str, list[float]]]:
    """Shares of time by phase over at most BINS bins; the first bin also has a point at its beginning."""
    columns = {name: interval_seconds(run, name) for name in names}
    samples = run.steps["samples"]
    bins = min(BINS, len(samples))
    xs: list[float] = []
    shares: dict[str, list[float]] = {name: [] for name in names}
    for k in range(bins):
        begin, end = len(samples) * k // bins, len(samples) * (k + 1) // bins
        spent_s = {name: sum(column[begin:end]) for name, column in columns.items()}
        total_s = sum(spent_s.values())
        if not total_s:
            continue
        ends = (samples[end - 1],) if xs else (0.0 if begin == 0 else samples[begin], samples[end - 1])
        xs.extend(ends)
        for name in names:
            shares[name].extend(spent_s[name] / total_s for _ in ends)
    return xs, shares


def _draw_over_samples(run: RecordedRun, column: str, key: str, title: str, unit: str) -> Html:
    values = run.steps.get(column, ())
    if not any(is_finite(value) for value in values):
        return Html("")
    known = [value for value in values if is_finite(value)]
    points = list(zip(run.steps["samples"], values, strict=True))
    spread = column not in ("rate", "memory_bytes")
    line = ChartLine(name=title, points=points, colour="blue", noisy=column != "rate", spread=spread)
    axis, hint = (unit, "") if unit == "B" else ("", unit)
    from_zero = column in ("samples_s", "memory_bytes")
    return draw_series(line, key, _summarise(column, known), hint, unit=axis, from_zero=from_zero)


def _summarise(column: str, known: list[float]) -> str:
    median = sorted(known)[len(known) // 2]
    match column:
        case "memory_bytes":
            return f"peak {quantity.format_size(max(known))}"
        case "samples_s":
            return f"median {quantity.format_count(median)}"
        case "rate":
            return f"last {quantity.format_short(known[-1])}"
        case "gradient_norm":
            return f"median {quantity.format_metric(median)}"
        case other:
            raise AssertionError(f"column {other!r} has no summary")

"""The section on cached tables: hits, misses and evictions by table, hit rate and disk reads over samples.

Rows of cached tables are on disk, or in host memory behind a GPU's cache.
"""

from collections.abc import Sequence

from rowwise.base.quantity import format_count, format_percent, format_size, is_finite
from rowwise.report.charts import ChartLine, draw_amount, draw_series
from rowwise.report.markup import Html, data_table, div, lead, named_cell, note, row, section, text
from rowwise.report.read import CacheLine, RecordedRun
from rowwise.report.scale import positive
from rowwise.report.speed import interval_seconds, phase_names

HEADERS = ("Table", "Hit rate", "Misses", "Evictions", "Rows written", "Memory")
MAX_TABLES = 40
NOTE = (
    "Hit rate: lookups of a training step whose row was cached, over all; validation and checkpoints do not count. "
    "Misses, evictions and rows written back: of all lines of the run, over all ranks. "
)
NOTE_OF_DISK = (
    "Waits for the disk: time in which a step did nothing but wait for reads and writes that no computation hid. "
    "Memory: of cached rows, their optimizer state, and the index of all rows."
)
NOTE_OF_DEVICE = "Memory: of the GPU, for cached rows and their optimizer state."


def draw_caches(run: RecordedRun) -> Html:
    """The section; empty for a run without cached tables."""
    if not run.caches:
        return Html("")
    names = list(dict.fromkeys(line.table for line in run.caches))
    totals = sorted((_total(run.caches, name) for name in names), key=lambda t: (-t.misses, t.table))
    max_misses = max(total.misses for total in totals)
    grid = data_table(HEADERS, [_draw_row(total, max_misses) for total in totals[:MAX_TABLES]], "cards")
    omitted = len(totals) - MAX_TABLES
    more = note(f"The {MAX_TABLES} with most misses are shown, of {len(totals)}.") if omitted > 0 else Html("")
    on_disk = not _is_on_device(run)
    charts = div("charts", _draw_hit_rate(run), _draw_reads(run) if on_disk else Html(""))
    title, rest = ("Tables on disk", NOTE_OF_DISK) if on_disk else ("Tables in host memory", NOTE_OF_DEVICE)
    return section("caches", title, _sum_up(run, totals), grid, more, note(NOTE + rest), charts)


def _is_on_device(run: RecordedRun) -> bool:
    """Whether rows are cached in device memory, rather than in host memory in front of a disk."""
    return run.settings.get("train.device", "cpu") != "cpu"


def _total(lines: Sequence[CacheLine], name: str) -> CacheLine:
    """The sum of a table's lines, with the memory of the last line."""
    selected = [line for line in lines if line.table == name]
    counts = ("hits", "misses", "evictions", "writes")
    sums = {count: sum(positive(getattr(line, count)) for line in selected) for count in counts}
    return CacheLine(step=selected[-1].step, table=name, memory_bytes=positive(selected[-1].memory_bytes), **sums)


def _sum_up(run: RecordedRun, totals: Sequence[CacheLine]) -> Html:
    memory, rate = sum(total.memory_bytes for total in totals), hit_rate(totals)
    disk = next((size for size in reversed(run.steps.get("disk_bytes", ())) if is_finite(size)), None)
    tier, owner = ("in host memory", " of the GPU") if _is_on_device(run) else ("on disk", "")
    tables = f"{len(totals)} table{'s' * (len(totals) > 1)} {tier}"
    where = f"{format_size(memory)} of memory{owner}" + (
        f" and {format_size(disk)} of disk" if disk is not None else ""
    )
    return lead(f"{tables}, in {where}: {format_percent(rate)} of lookups met their row.{_describe_waits(run)}")


def _describe_waits(run: RecordedRun) -> str:
    """The share of training time spent waiting for the disk; empty if it was not recorded."""
    phases = [interval_seconds(run, name) for name in phase_names(run)]
    columns = zip(run.steps.get("disk_wait_s", ()), *phases, strict=False)
    lines = [(wait_s, sum(spent)) for wait_s, *spent in columns if is_finite(wait_s)]
    wait_s, training_s = (sum(column) for column in zip(*lines, strict=True)) if lines else (0.0, 0.0)
    return f" Waits for the disk: {format_percent(wait_s / training_s)} of the step." if training_s > 0 else ""


def _draw_row(total: CacheLine, max_misses: float) -> Html:
    rate = hit_rate([total])
    percent, misses = format_percent(rate), ((total.misses, "orange"),)
    cells = (
        draw_amount("cache-hits", f"{total.table}: hit rate {percent}", ((rate, "green"),), 1.0, percent),
        draw_amount("cache-misses", f"{total.table}: misses", misses, max_misses, format_count(total.misses)),
        text(format_count(total.evictions)),
        text(format_count(total.writes)),
        text(format_size(total.memory_bytes)),
    )
    return row(total.table, "", *map(named_cell, HEADERS[1:], cells))


def _draw_hit_rate(run: RecordedRun) -> Html:
    by_step: dict[float, list[CacheLine]] = {}
    for line in run.caches:
        by_step.setdefault(line.step, []).append(line)
    samples = dict(zip(run.steps.get("step", ()), run.steps.get("samples", ()), strict=False))
    points = [(samples[step], 100 * hit_rate(lines)) for step, lines in by_step.items() if is_finite(samples.get(step))]
    summary = f"last {format_percent(points[-1][1] / 100)}" if points else ""
    line = ChartLine(name="Hit rate", points=points, colour="green")
    return draw_series(line, "hit_rate", summary, "lookups whose row was in memory", unit="%")


def _draw_reads(run: RecordedRun) -> Html:
    """Reads per step, from the reads per line of steps.csv."""
    steps, reads = run.steps.get("step", ()), run.steps.get("reads", ())
    counts = [after - before for before, after in zip((0.0, *steps), steps, strict=False)]
    lines = zip(run.steps.get("samples", ()), reads, counts, strict=False)
    points = [(x, read / count) for x, read, count in lines if is_finite(read) and is_finite(x) and count > 0]
    summary = f"last {format_count(points[-1][1])}" if points else ""
    line = ChartLine(name="Disk reads", points=points, colour="blue")
    return draw_series(line, "reads", summary, "per step", from_zero=True)


def hit_rate(lines: Sequence[CacheLine]) -> float:
    hits, misses = sum(line.hits for line in lines), sum(line.misses for line in lines)
    return hits / max(1.0, hits + misses)

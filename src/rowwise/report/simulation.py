"""The page of a simulation or a sweep, as a single HTML file without script."""

from rowwise.base.quantity import format_bytes, format_count, format_duration, format_percent
from rowwise.base.records import Simulation, Sweep, SweptRow
from rowwise.report.markup import Html, header, note, section, text_table, tiles
from rowwise.report.page import draw_page


def draw_simulation(found: Simulation | Sweep) -> str:
    """The page of `rowwise simulate`."""
    if isinstance(found, Simulation):
        return _draw_page(found, _draw_step(found))
    first = found.fastest or found.rows[0].simulation
    return _draw_page(first, section("sweep", "Combinations", _draw_rows(found)), _draw_step(first))


def _draw_page(found: Simulation, *parts: Html) -> str:
    machine = f"{found.hosts:,} x {found.devices} {found.machine}, {found.batch:,} samples a step"
    return draw_page(
        "Simulation", header("Simulation", found.model, machine), *parts, *map(note, found.notes), script=False
    )


def _draw_step(found: Simulation) -> Html:
    """The step, its resources, its stages, its memory and what would help."""
    memory = [
        (m.tier, format_bytes(m.tables_bytes), format_bytes(m.dense_bytes), format_bytes(m.limit_bytes))
        for m in found.memory
    ]
    memory_table = text_table(("Tier", "Tables", "Dense layers", "There is"), memory)
    if found.step_s is None:
        lacks = note(f"It does not fit: a rank lacks {format_bytes(found.lacking_bytes)}.")
        return section("step", "The step", lacks, memory_table)
    facts = (
        ("step", format_duration(found.step_s), ""),
        ("samples/s", format_count(found.samples_s), ""),
        ("dense layers", found.dense, ""),
        ("wire", found.wire, ""),
    )
    uses = [(u.resource, format_duration(u.busy_s), format_duration(u.exposed_s)) for u in found.uses]
    helped = [(h.what, format_duration(h.step_s), format_percent(h.saved)) for h in found.help]
    stages = [(s.stage, s.resource, format_duration(s.seconds)) for s in found.stages if s.seconds]
    return section(
        "step",
        "The step",
        tiles(facts),
        note(found.limits),
        text_table(("Resource", "Busy", "Exposed"), uses),
        text_table(("Twice as fast, or without", "A step", "Less"), helped),
        memory_table,
        text_table(("Stage", "Resource", "Time"), stages),
    )


def _draw_rows(swept: Sweep) -> Html:
    names = list(swept.rows[0].settings)
    lines = [
        (
            *(row.settings[name] for name in names),
            format_duration(row.simulation.step_s),
            format_count(row.simulation.samples_s) if row.simulation.step_s else "",
            "" if row.factor is None else f"{row.factor:.2f}x",
            _remark(row),
        )
        for row in swept.rows
    ]
    return text_table((*names, "A step", "Samples/s", "Of all sharded", ""), lines)


def _remark(row: SweptRow) -> str:
    if row.simulation.step_s is None:
        return f"lacks {format_bytes(row.simulation.lacking_bytes)}"
    best = f"best {row.best}" if row.best else ""
    return best if row.simulation.runs_here else "not run here"

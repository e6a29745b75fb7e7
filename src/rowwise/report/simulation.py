"""The page of a simulation or a sweep, as a single HTML file without script."""

from rowwise.base.quantity import format_bytes, format_count, format_duration, format_percent
from rowwise.base.records import Simulation, Sweep, SweptRow
from rowwise.report.markup import Html, header, note, section, text_table, tiles
from rowwise.report.page import draw_page


def draw_simulation(outcome: Simulation | Sweep) -> str:
    """The page of `rowwise simulate`; of a sweep, with the step of its fastest combination."""
    if isinstance(outcome, Simulation):
        return _draw_page(outcome, _draw_step(outcome))
    shown = outcome.fastest or outcome.rows[0].simulation
    return _draw_page(shown, section("sweep", "Combinations", _draw_rows(outcome)), _draw_step(shown))


def _draw_page(simulation: Simulation, *parts: Html) -> str:
    machine = f"{simulation.hosts:,} x {simulation.devices} {simulation.machine}, {simulation.batch:,} samples a step"
    head, notes = header("Simulation", simulation.model, machine), map(note, simulation.notes)
    return draw_page("Simulation", head, *parts, *notes, script=False)


def _draw_step(simulation: Simulation) -> Html:
    """The step: its resources, stages and memory, and the gain of faster resources."""
    memory = [
        (m.tier, format_bytes(m.tables_bytes), format_bytes(m.dense_bytes), format_bytes(m.limit_bytes))
        for m in simulation.memory
    ]
    memory_table = text_table(("Tier", "Tables", "Dense layers", "Available"), memory)
    if simulation.step_s is None:
        lacks = note(f"It does not fit: a rank lacks {format_bytes(simulation.lacking_bytes)}.")
        return section("step", "The step", lacks, memory_table)
    facts = (
        ("step", format_duration(simulation.step_s), ""),
        ("samples/s", format_count(simulation.samples_s), ""),
        ("dense layers", simulation.dense, ""),
        ("wire", simulation.wire, ""),
    )
    uses = [(u.resource, format_duration(u.busy_s), format_duration(u.exposed_s)) for u in simulation.uses]
    helped = [(h.what, format_duration(h.step_s), format_percent(h.saved)) for h in simulation.help]
    counted = [(c.what, format_duration(c.step_s), format_count(c.samples_s)) for c in simulation.counted]
    stages = [(s.stage, s.resource, format_duration(s.seconds)) for s in simulation.stages if s.seconds]
    return section(
        "step",
        "The step",
        tiles(facts),
        note(simulation.limits),
        text_table(("Resource", "Busy", "Exposed"), uses),
        text_table(("Twice as fast, or without", "A step", "Less"), helped),
        memory_table,
        *(text_table(("Counted as in the paper", "A step", "Samples/s"), counted) for _ in counted[:1]),
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

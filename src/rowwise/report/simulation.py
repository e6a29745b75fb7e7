"""The page of a simulation or a sweep, as a single HTML file without script; reads what `rowwise simulate` computed."""

import msgspec

from rowwise.quantity import format_bytes, format_count, format_duration, format_percent
from rowwise.report.markup import Html, note, section, span, tag, text, text_table, tiles
from rowwise.report.page import draw_page
from rowwise.textfile import decode_json


class DrawnUse(msgspec.Struct, frozen=True, kw_only=True):
    """How long a resource works."""

    resource: str
    busy_s: float
    exposed_s: float


class DrawnHelp(msgspec.Struct, frozen=True, kw_only=True):
    """A step with something faster."""

    what: str
    step_s: float
    saved: float


class DrawnTier(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a rank."""

    tier: str
    tables_bytes: float
    dense_bytes: float
    limit_bytes: float


class DrawnStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of the step."""

    stage: str
    resource: str
    seconds: float


class DrawnSimulation(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated step; unknown keys are ignored."""

    model: str
    machine: str
    hosts: int
    devices: int
    batch: int
    dense: str
    wire: str
    step_s: float | None
    samples_s: float = 0.0
    lacking_bytes: float = 0
    memory: tuple[DrawnTier, ...] = ()
    uses: tuple[DrawnUse, ...] = ()
    stages: tuple[DrawnStage, ...] = ()
    help: tuple[DrawnHelp, ...] = ()
    limits: str = ""
    notes: tuple[str, ...] = ()
    runs_here: bool = True


class DrawnRow(msgspec.Struct, frozen=True, kw_only=True):
    """A combination of a sweep."""

    settings: dict[str, str]
    simulation: DrawnSimulation
    factor: float | None = None
    best: str = ""


class DrawnSweep(msgspec.Struct, frozen=True, kw_only=True):
    """All combinations of a sweep."""

    rows: tuple[DrawnRow, ...]
    fastest: DrawnSimulation | None = None


def draw_simulation(content: bytes) -> str:
    """The page of `rowwise simulate --json`."""
    if b'"rows":' in content:
        swept = decode_json(content, DrawnSweep)
        first = swept.fastest or swept.rows[0].simulation
        return _draw_page(first, section("sweep", "Combinations", _draw_rows(swept)), _draw_step(first))
    found = decode_json(content, DrawnSimulation)
    return _draw_page(found, _draw_step(found))


def _draw_page(found: DrawnSimulation, *parts: Html) -> str:
    title = tag("h1", None, text("Simulation"), span("number", found.model))
    machine = f"{found.hosts:,} x {found.devices} {found.machine}, {found.batch:,} samples a step"
    head = tag("header", None, title, tag("p", {"class": "when"}, text(machine)))
    return draw_page("Simulation", head, *parts, *map(note, found.notes), script=False)


def _draw_step(found: DrawnSimulation) -> Html:
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


def _draw_rows(swept: DrawnSweep) -> Html:
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


def _remark(row: DrawnRow) -> str:
    if row.simulation.step_s is None:
        return f"lacks {format_bytes(row.simulation.lacking_bytes)}"
    best = f"best {row.best}" if row.best else ""
    return best if row.simulation.runs_here else "not run here"

"""`rowwise plan`: a sharding plan for tables on a machine, with predicted cost and lower bound; also for TorchRec.

Arguments are checked before the search. Tables from a file need no torch; those of a recipe are its model's and do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from rowwise.base.errors import SpecError
from rowwise.base.quantity import format_bytes
from rowwise.base.textfile import read_bytes, replace_file
from rowwise.cli.code import load_recipe
from rowwise.cli.options import BATCH, MAX_SEED, Changes, Dim, GlobalBatch, HtmlFile
from rowwise.cli.progress import activity_bar
from rowwise.cli.terminal import escape_json, make_terminal, say
from rowwise.tables.spec import LINKS, Codecs, Wire

if TYPE_CHECKING:
    from rowwise.parallel.plan import Plan, Tier
    from rowwise.planning.perf.access import Workload
    from rowwise.planning.perf.cost import CostModel
    from rowwise.planning.perf.hardware import Machine
    from rowwise.planning.planner.constraints import Constraints
    from rowwise.planning.planner.explain import Explanation
    from rowwise.planning.planner.inputs import PlanInputs
    from rowwise.planning.planner.pipeline import PlanResult
    from rowwise.planning.planner.problem import PlanRequest

SECONDS = 1.0
PROGRESS_AFTER_s = 2.0  # longer searches show a bar
MODELS = ("learned", "roofline", "torchrec")
PUBLISHED_METHODS = "random, size, dim, lookup, size-lookup, ldm, neuroshard-grid, neuroshard, dreamshard, recshard"
MAX_MEASURED = 16
STDOUT = Path("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments:
    """Command line arguments that describe the tables and the machine."""

    tables: Path | None
    recipe: str | None
    changes: tuple[str, ...]
    topology: str | None
    batch: int | None
    dim: int | None
    constraints: Path | None
    layouts: str | None
    tiers: str | None  # None for the device, and the tiers below it that the tables need
    memory: str | None = None  # per host without GPUs; None for that of the machine
    wire: tuple[str, ...]
    model: str | None  # None for the best one of the profile


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Command line arguments of the search."""

    seconds: float | None  # None for the default
    seed: int
    certify_s: float
    measured: int = 0  # number of best plans to measure
    method: str | None = None  # a published method instead of the search

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("certify", self.certify_s)):
            if value is not None and not 0 <= value < 1e6:
                raise SpecError(f"--{name} {value}", "0 seconds or more")

    @property
    def expected_s(self) -> float:
        return (SECONDS if self.seconds is None else self.seconds) + self.certify_s


def plan(  # noqa: PLR0913 - one for each option
    tables: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Tables as CSV or JSON: table_id, num_rows, dim, pooling; zipf_a, optimizer, ..."
        ),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe whose tables to plan, instead of --tables.")] = None,
    changes: Changes = None,
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE",
            help="Hosts x devices x preset or profile: 8xa100-like, 16x8xzionex; or a JSON file.",
        ),
    ] = None,
    batch: GlobalBatch = None,
    dim: Dim = None,
    constraints: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Constraints as JSON: pin, forbid, together, layouts, reserve.")
    ] = None,
    layouts: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Layouts to use, such as table_wise,column_wise (default: all)."),
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Memory tiers to plan for: device,host,disk (default: device, others as tables need them).",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for tables per host without GPUs, such as 4GB; the rest is on disk."),
    ] = None,
    wire: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINK.WAY=TYPE",
            help="With --tables: wire types of vectors by link and way: network.forward=int8, uplink.backward=bf16.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Cost model: learned (for measured profiles), roofline or torchrec."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help=f"Search budget in seconds (default: {SECONDS:g}; with --replan, 0.05)."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the search.")] = 0,
    certify: Annotated[
        str, typer.Option(metavar="S", help="Budget to tighten the lower bound after the search: --certify 30s.")
    ] = "0",
    measure: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_MEASURED,
            metavar="K",
            help="Measure the K best plans on this machine, and choose the fastest.",
        ),
    ] = 0,
    method: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"A published method instead of the search: {PUBLISHED_METHODS}."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the reason for the placement of each table.")
    ] = False,
    html: HtmlFile = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as JSON; - prints it.")] = None,
    diff: Annotated[Path | None, typer.Option(metavar="PLAN", help="Print the differences from another plan.")] = None,
    replan: Annotated[
        Path | None,
        typer.Option(metavar="PLAN", help="Start from this plan, and move rows only where a faster step repays it."),
    ] = None,
    torchrec: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan for TorchRec.")] = None,
) -> None:
    """Find a sharding plan: for each table its layout, its ranks and its memory tier.

    Prints the predicted step time, and a lower bound for any plan. Does not need the machine itself.

    Example: rowwise plan --tables tables.csv --topology 8xa100-like --json plan.json

    Example: rowwise plan --recipe dlrm-synthetic --topology 2xcpu --json plan.json

    Example: rowwise plan --tables tables.csv --topology 2xcpu --memory 4GB

    Example: rowwise plan --tables tables.csv --topology 16x8xzionex:device=32GB --certify 30s --explain

    Example: rowwise plan --recipe dlrm-synthetic --topology 2xcalibration/machine.json --measure 4 --json plan.json
    """
    files = {"--html": html, "--json": json, "--torchrec": torchrec}
    check_outputs(files)
    options = SearchOptions(
        seconds=seconds, seed=seed, certify_s=_parse_seconds(certify), measured=measure, method=method
    )
    old_plans = {path: read_plan(path) for path in (diff, replan) if path is not None}
    arguments = PlanArguments(
        tables=tables, recipe=recipe, changes=tuple(changes or ()), topology=topology, batch=batch, dim=dim,
        constraints=constraints, layouts=layouts, tiers=tiers, memory=memory, wire=tuple(wire or ()), model=model,
    )  # fmt: skip
    console = make_terminal(stderr=json == STDOUT)
    request, notes = make_request(arguments)
    hidden = options.expected_s <= PROGRESS_AFTER_s
    with activity_bar(make_terminal(stderr=True), f"searching, about {options.expected_s:.0f} s", hidden=hidden):
        result, search_notes = _make_plan(request, options, old_plans[replan] if replan else None)
    _show(result, (*notes, *search_notes), console, {diff: old_plans[diff]} if diff else {})
    explanation = None
    if explain or html:
        from rowwise.planning.planner.explain import explain as explain_plan

        explanation = explain_plan(result)
    if explanation is not None and explain:
        say(console, explanation.text(console.width).rstrip())
    _write_files(result, explanation, files, console)


def make_request(arguments: PlanArguments) -> "tuple[PlanRequest, tuple[str, ...]]":
    """The request to the planner, and notes on values that were filled in or left out."""
    from rowwise.planning.perf.learned import profile_warnings
    from rowwise.planning.planner.machines import TOPOLOGIES, machine_named
    from rowwise.planning.planner.problem import PlanRequest

    if arguments.topology is None:
        raise SpecError("--topology is not given", TOPOLOGIES)
    machine = machine_named(arguments.topology)
    if arguments.memory is not None:
        machine, arguments = _limit_memory(machine, arguments.memory), replace(arguments, tiers="device,disk")
    inputs, notes = _read_tables(arguments, machine)
    request = PlanRequest(
        workloads=inputs.workloads,
        machine=machine,
        model=_choose_model(arguments, machine, inputs.wire),
        batch=inputs.batch,
        constraints=_read_constraints(arguments, inputs.workloads, machine),
        tiers=_parse_tiers(arguments.tiers, machine),
        dense=inputs.dense,
    )
    if arguments.tiers is None:
        request, notes = _with_needed_tiers(request, notes)
    _check_dense(request)
    warnings = profile_warnings(machine.hardware) if arguments.model is None else ()
    return request, (*notes, *warnings)


def _with_needed_tiers(request: "PlanRequest", notes: tuple[str, ...]) -> "tuple[PlanRequest, tuple[str, ...]]":
    """The request with the memory below the devices that its tables need, and a note of it."""
    from rowwise.planning.planner.infeasible import add_needed_tiers

    extended = add_needed_tiers(request)
    added = [tier for tier in request.unused if tier in extended.tiers]
    if added:
        notes += (f"tables are too large for the devices alone: rows are on the {' and the '.join(added)}, too",)
    return extended, notes


def _limit_memory(machine: "Machine", memory: str) -> "Machine":
    """A copy of the machine with `memory` for tables on each host, and with disks."""
    from msgspec import structs

    from rowwise.planning.planner.machines import MAX_SIZE, parse_size

    hardware, size = machine.hardware, parse_size(memory, "--memory")
    if hardware.host_bytes or not size:
        problem = "0 bytes" if not size else f"{hardware.name} has memory of its own and of its host"
        raise SpecError(f"--memory {memory}: {problem}", "a size such as 4GB for a machine without GPUs, else --tiers")
    disk_bytes = hardware.disk_bytes or MAX_SIZE
    limited = structs.replace(hardware, device_bytes=size // machine.topology.devices, disk_bytes=disk_bytes)
    return structs.replace(machine, hardware=limited)


def _choose_model(arguments: PlanArguments, machine: "Machine", wire: Wire) -> "CostModel":
    from rowwise.planning.perf.learned import LearnedModel, model_of
    from rowwise.planning.perf.roofline import Roofline
    from rowwise.planning.perf.torchrec import TorchRecModel

    match arguments.model:
        case None:
            return model_of(machine.hardware, machine.topology, wire)
        case "learned":
            if machine.hardware.kernels is None:
                raise SpecError(
                    f"--model learned: the profile {machine.hardware.name} was not measured",
                    "a profile that `rowwise calibrate` wrote",
                )
            return LearnedModel.of(machine.hardware, machine.topology, wire)
        case "roofline":
            return Roofline(machine.hardware, machine.topology, wire)
        case "torchrec":
            if arguments.wire:
                raise SpecError(f"--wire {arguments.wire[0]}: --model torchrec does not model wires", "another model")
            return TorchRecModel(machine.topology)
        case _:
            raise SpecError(f"--model {arguments.model!r}", ", ".join(MODELS))


def _check_dense(request: "PlanRequest") -> None:
    """Raise if the dense parameters leave a rank no memory for tables."""
    if request.dense is None or request.limits_bytes[0]:
        return
    dense, topology, batch = request.dense, request.machine.topology, request.batch
    available_bytes = request.machine.memory_bytes[0] * (1 - request.constraints.reserve)
    smallest = min(dense.ways(topology), key=lambda side: side.memory_bytes(topology, batch))
    size, min_size = (format_bytes(side.memory_bytes(topology, batch)) for side in (dense, smallest))
    problem = f"dense parameters with kind={dense.kind} take {size} of the {format_bytes(available_bytes)} of a rank"
    fits = smallest.memory_bytes(topology, batch) < available_bytes
    alternative = f"{smallest.setting()} ({min_size}), " if fits else ""
    raise SpecError(problem, f"{alternative}more memory or a smaller model")


def _read_tables(arguments: PlanArguments, machine: "Machine") -> "tuple[PlanInputs, tuple[str, ...]]":
    from rowwise.planning.planner.inputs import PlanInputs, read_tables

    if arguments.tables is not None:
        read = read_tables(arguments.tables, dim=arguments.dim)
        wire = _parse_wire(arguments.wire)
        return PlanInputs(read.workloads, arguments.batch or BATCH, wire), read.notes
    from rowwise.recipes.plan import plan_inputs

    assert arguments.recipe is not None
    inputs = plan_inputs(load_recipe(arguments.recipe, arguments.changes), machine)
    return inputs._replace(batch=arguments.batch or inputs.batch), ()


def _parse_wire(texts: tuple[str, ...]) -> Wire:
    codecs: dict[str, dict[str, Any]] = {link: {} for link in LINKS}
    for text in texts:
        link_and_way, _, wire_type = text.partition("=")
        link, _, way = link_and_way.partition(".")
        if link not in codecs or way not in Codecs.__struct_fields__:
            raise SpecError(
                f"--wire {text!r}",
                f"LINK.WAY=TYPE with {', '.join(LINKS)}, and forward or backward, such as network.forward=int8",
            )
        if way in codecs[link]:
            raise SpecError(f"--wire {text!r}: {link_and_way} is given twice", "one type")
        codecs[link][way] = wire_type
    return msgspec.structs.replace(Wire(), **{link: Codecs(**ways) for link, ways in codecs.items() if ways})


def _read_constraints(arguments: PlanArguments, workloads: "tuple[Workload, ...]", machine: "Machine") -> "Constraints":
    """The constraints of the file; --layouts replaces its layouts for tables that it does not name."""
    from msgspec import structs

    from rowwise.planning.planner.constraints import ALL, Constraints

    constraints = Constraints()
    if arguments.constraints is not None:
        try:
            constraints = Constraints.from_json(read_bytes(arguments.constraints))
            constraints.check([w.table.name for w in workloads], machine.topology)
        except SpecError as error:
            raise SpecError(f"{arguments.constraints}: {error}") from None
    if arguments.layouts is None:
        return constraints
    return structs.replace(constraints, layouts={**constraints.layouts, ALL: _parse_layouts(arguments.layouts)})


def _parse_layouts(text: str) -> tuple[str, ...]:
    from rowwise.planning.planner.layouts import NAMES

    names = tuple(name.strip().replace("-", "_") for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        problem = repr(unknown[0]) if unknown else "none"
        raise SpecError(f"--layouts {text!r}: {problem}", f"one or more of {', '.join(NAMES)}")
    return names


def _parse_tiers(text: str | None, machine: "Machine") -> "frozenset[Tier]":
    from rowwise.parallel.plan import TIERS
    from rowwise.parallel.shard.tiers import DEVICE_TIERS

    if text is None:
        return DEVICE_TIERS
    names = {name.strip() for name in text.split(",") if name.strip()}
    tiers = frozenset(tier for tier in TIERS if tier in names)
    unknown = sorted(names - tiers)
    if unknown or "device" not in tiers:
        problem = repr(unknown[0]) if unknown else "no device"
        raise SpecError(f"--tiers {text!r}: {problem}", f"device, and optionally {', '.join(TIERS[1:])}")
    for tier, size in zip(TIERS, machine.memory_bytes, strict=True):
        if tier in tiers and not size:
            raise SpecError(
                f"--tiers {text!r}: {machine.hardware.name} has no {tier} memory for tables",
                f"its size in --topology, such as :{tier}=1TB",
            )
    return tiers


def _make_plan(
    request: "PlanRequest", options: SearchOptions, old: "Plan | None"
) -> "tuple[PlanResult, tuple[str, ...]]":
    """The plan, and notes on the search."""
    from rowwise.parallel.shard.tiers import DEVICE_TIERS

    if options.measured and not request.tiers <= DEVICE_TIERS:
        raise SpecError("--measure with rows below the device", "tables that fit into devices, or no --measure")
    if options.method is not None:
        from rowwise.planning.perf.learned import unmeasured_note
        from rowwise.planning.planner.methods.named import LEARNED_COSTS
        from rowwise.planning.planner.pipeline import plan_by_method

        learned = options.method in LEARNED_COSTS
        notes = unmeasured_note(request.machine.hardware, request.model) if learned else ()
        return plan_by_method(request, options.method, options.seed), notes
    if options.measured:
        return _measure_plans(request, options)
    if old is None:
        from rowwise.planning.planner.pipeline import make_plan

        seconds = SECONDS if options.seconds is None else options.seconds
        return make_plan(request, seconds=seconds, seed=options.seed, certify_s=options.certify_s), ()
    from rowwise.cli.plan_show import describe_replan
    from rowwise.planning.planner.replan import SECONDS as REPLAN_SECONDS
    from rowwise.planning.planner.replan import replan

    replanned = replan(
        request, old, seconds=REPLAN_SECONDS if options.seconds is None else options.seconds, seed=options.seed
    )
    return replanned.planned, describe_replan(replanned)


def _measure_plans(request: "PlanRequest", options: SearchOptions) -> "tuple[PlanResult, tuple[str, ...]]":
    """The plan that was fastest on this machine, and a note with the time of each."""
    from rowwise.planning.calibrate.measure_plans import measure_plan_results
    from rowwise.planning.planner.pipeline import make_plans

    seconds = SECONDS if options.seconds is None else options.seconds
    measured = measure_plan_results(make_plans(request, options.measured, seconds=seconds, seed=options.seed))
    return measured.best, measured.lines()


def _show(planned: "PlanResult", notes: tuple[str, ...], console: Console, old: "Mapping[Path, Plan]") -> None:
    from rowwise.cli import plan_show
    from rowwise.cli.plan_show import show_differences, show_note

    plan_show.show_plan(planned, console)
    plan_notes = (*plan_show.note_one_device(planned), *plan_show.note_dense(planned))
    for note in (*notes, *plan_notes, *plan_show.note_unsupported_tiers(planned.plan)):
        show_note(note, console)
    for path, plan in old.items():
        show_differences(plan, planned.plan, console, str(path))


def _parse_seconds(text: str) -> float:
    try:
        return float(text.strip().removesuffix("s"))
    except ValueError:
        raise SpecError(f"--certify {text!r}", "a number of seconds, such as 30 or 30s") from None


def read_plan(path: Path) -> "Plan":
    from rowwise.parallel.plan import Plan

    try:
        return Plan.from_json(read_bytes(path))
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def check_outputs(files: "Mapping[str, Path | None]") -> None:
    option_of: dict[Path, str] = {}
    for option, path in files.items():
        if path is None or (path == STDOUT and option == "--json"):
            continue
        if path == STDOUT:
            raise SpecError(f"{option} -", "the name of a file")
        if not path.parent.is_dir():
            raise SpecError(f"{option} {path}: the folder {path.parent} does not exist: create it first")
        if path.is_dir():
            raise SpecError(f"{option} {path}: this is a folder", "the name of a file")
        if path.absolute() in option_of:
            raise SpecError(f"{option} {path}: {option_of[path.absolute()]} writes the same file", "another name")
        option_of[path.absolute()] = option


def _write_files(
    planned: "PlanResult", explanation: "Explanation | None", files: "Mapping[str, Path | None]", console: Console
) -> None:
    """Write the requested files; all texts are rendered first, so that an error leaves every file unchanged."""
    texts: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        if option == "--torchrec":
            from rowwise.planning.planner.export import torchrec_json

            tables = [workload.table for workload in planned.problem.request.workloads]
            texts[path] = torchrec_json(planned.plan, tables, planned.problem.topology)
        elif explanation is not None and option == "--html":
            from rowwise.report.plan import draw_plan

            texts[path] = draw_plan(explanation)
        else:
            texts[path] = planned.plan.to_json() + "\n"
    for path, text in texts.items():
        if path == STDOUT:
            print(escape_json(text), end="")
        else:
            write_atomically(path, text)
            say(console, f"wrote   {path}")
    if not texts:
        console.print("the plan was not written; add --json plan.json to keep it", markup=False)


def write_atomically(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():  # /dev/stdout and the like
        path.write_text(text)
    else:
        replace_file(path, text.encode())

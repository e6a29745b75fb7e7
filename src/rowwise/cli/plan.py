"""`rowwise plan`: where tables should live, how good that is, and why; written down for training here or in TorchRec.

Only asks and shows: questions are built here, plans are made in `planner`. Tables from a file need no torch; a recipe
does, as its tables are those of its model. Everything that can be refused is refused before the search.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rowwise.cli.code import load_recipe
from rowwise.cli.terminal import terminal
from rowwise.errors import SpecError
from rowwise.spec import Codecs, Wire
from rowwise.textfile import read_bytes, write_new

if TYPE_CHECKING:
    from rowwise.perf.access import Workload
    from rowwise.perf.cost import CostModel
    from rowwise.perf.hardware import Machine
    from rowwise.plan import Plan, Tier
    from rowwise.planner.constraints import Constraints
    from rowwise.planner.explain import Explanation
    from rowwise.planner.make import PlanResult
    from rowwise.planner.problem import PlanRequest

BATCH = 65536
SECONDS = 1.0
LONG_s = 2.0  # a search of more than this shows that it goes on
MODELS = ("learned", "roofline", "torchrec")
PUBLISHED = "random, size, dim, lookup, size-lookup, ldm, neuroshard-grid, neuroshard, dreamshard"
MOST_MEASURED = 16
STDOUT = Path("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments:
    """The arguments of `rowwise plan` that make a request."""

    tables: Path | None
    recipe: str | None
    changes: tuple[str, ...]
    topology: str | None
    batch: int | None
    dim: int | None
    constraints: Path | None
    layouts: str | None
    tiers: str | None  # None: those that the runtime runs
    wire: tuple[str, ...]
    model: str | None  # None: what the profile has


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The arguments of `rowwise plan` that limit the search."""

    seconds: float | None  # None: as long as is usual
    seed: int
    certify_s: float
    measured: int = 0  # of the best plans
    method: str | None = None  # instead of the search

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("certify", self.certify_s)):
            if value is not None and not 0 <= value < 1e6:
                raise SpecError(f"--{name} {value}: want a number of seconds that is not negative")
        if not 0 <= self.measured <= MOST_MEASURED:
            raise SpecError(f"--measure {self.measured}: want 1 to {MOST_MEASURED} plans")
        if not 0 <= self.seed < 1 << 31:
            raise SpecError(f"--seed {self.seed}: want at least 0, and less than 2**31")

    @property
    def expected_s(self) -> float:
        return (SECONDS if self.seconds is None else self.seconds) + self.certify_s


def plan(  # noqa: PLR0913 - one for each option
    tables: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV or JSON: table_id, num_rows, dim, pooling; zipf_a, optimizer, ..."),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Or a recipe, for the tables of its model.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the recipe.")
    ] = None,
    topology: Annotated[
        str | None, typer.Option(metavar="MACHINE", help="8xa100-like, 16x8xzionex (hosts x devices), or a JSON file.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help=f"Samples of a step, of all ranks: {BATCH}, or as the recipe has it.")
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Columns of tables whose file does not say.")] = None,
    constraints: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON: pin, forbid, together, layouts, reserve.")
    ] = None,
    layouts: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Only these, such as table_wise,column_wise.")
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Plan for memory that is not run yet, too: device,host,disk."),
    ] = None,
    wire: Annotated[
        list[str] | None,
        typer.Option(metavar="LINK.WAY=TYPE", help="How vectors travel: network.forward=int8. A recipe says it."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="What predicts costs: learned (where a profile was measured), roofline or torchrec."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="How long to search: 0.2, or less with --replan.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    certify: Annotated[
        str, typer.Option(metavar="S", help="Seconds to prove how good the plan is: --certify 30s.")
    ] = "0",
    measure: Annotated[
        int, typer.Option(metavar="K", help="Run the best K plans on this machine, and keep the fastest.")
    ] = 0,
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Plan by a published method instead of the search: {PUBLISHED}.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why each table is where it is.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="The explanation as a page.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan; - prints it.")] = None,
    diff: Annotated[Path | None, typer.Option(metavar="PLAN", help="Show what is not as in another plan.")] = None,
    replan: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Start at this plan, and count what it takes to move rows.")
    ] = None,
    torchrec: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a sharding plan for TorchRec.")] = None,
) -> None:
    """Decide where tables live: on which ranks, cut how, in which memory.

    Needs none of the machine it plans for. Says what a step is expected to take and how much better any plan could be.

    Example: rowwise plan --tables tables.csv --topology 8xa100-like --json plan.json

    Example: rowwise plan --recipe dlrm-synthetic --topology 2xcpu --json plan.json

    Example: rowwise plan --tables tables.csv --topology 16x8xzionex:device=32GB --certify 30s --explain

    Example: rowwise plan --recipe dlrm-synthetic --topology 2xcalibration/machine.json --measure 4 --json plan.json
    """
    files = {"--html": html, "--json": json, "--torchrec": torchrec}
    _check_places(files)
    effort = SearchOptions(seconds=seconds, seed=seed, certify_s=_seconds(certify), measured=measure, method=method)
    old = {path: _read_plan(path) for path in (diff, replan) if path is not None}
    asked = PlanArguments(
        tables=tables, recipe=recipe, changes=tuple(changes or ()), topology=topology, batch=batch, dim=dim,
        constraints=constraints, layouts=layouts, tiers=tiers, wire=tuple(wire or ()), model=model,
    )  # fmt: skip
    console = _console(to_stderr=json == STDOUT)
    question, notes = question_of(asked)
    with _showing(effort):
        planned, moved = _made(question, effort, old[replan] if replan else None)
    _show(planned, (*notes, *moved), console, {diff: old[diff]} if diff else {})
    explained = _explained(planned) if explain or html else None
    if explained is not None and explain:
        console.print(explained.text(console.width).rstrip(), markup=False, soft_wrap=True)
    _write(planned, explained, files, console)


def question_of(asked: PlanArguments) -> "tuple[PlanRequest, tuple[str, ...]]":
    """The question, and what was filled in or left out."""
    from rowwise.perf.learned import doubts_of
    from rowwise.planner.machines import WANT, machine_named
    from rowwise.planner.problem import PlanRequest

    if (asked.tables is None) == (asked.recipe is None):
        got = "neither is given" if asked.tables is None else "both are given"
        raise SpecError(f"--tables or --recipe: {got}: want one of them")
    if asked.topology is None:
        raise SpecError(f"--topology is not given: {WANT}")
    for name, value in (("batch", asked.batch), ("dim", asked.dim)):
        if value is not None and value < 1:
            raise SpecError(f"--{name} {value}: want at least 1")
    machine = machine_named(asked.topology)
    workloads, batch, wire, notes = _tables(asked, machine.topology.world)
    question = PlanRequest(
        workloads=workloads,
        machine=machine,
        model=_model(asked, machine, wire),
        batch=batch,
        constraints=_constraints(asked, workloads, machine),
        tiers=_tiers(asked.tiers, machine),
    )
    doubts = doubts_of(machine.hardware) if asked.model is None else ()
    return question, (*notes, *doubts)


def _model(asked: PlanArguments, machine: "Machine", wire: Wire) -> "CostModel":
    from rowwise.perf.learned import LearnedModel, model_of
    from rowwise.perf.roofline import Roofline
    from rowwise.perf.torchrec import TorchRecModel

    match asked.model:
        case None:
            return model_of(machine.hardware, machine.topology, wire)
        case "learned":
            if machine.hardware.kernels is None:
                got = f"{machine.hardware.name} was not measured"
                raise SpecError(f"--model learned: {got}: want a profile that `rowwise calibrate` has written")
            return LearnedModel.of(machine.hardware, machine.topology, wire)
        case "roofline":
            return Roofline(machine.hardware, machine.topology, wire)
        case "torchrec":
            if asked.wire:
                raise SpecError(f"--wire {asked.wire[0]}: --model torchrec knows no wires: want another model")
            return TorchRecModel(machine.topology)
        case _:
            raise SpecError(f"--model {asked.model!r}: want {', '.join(MODELS)}")


def _tables(asked: PlanArguments, world: int) -> "tuple[tuple[Workload, ...], int, Wire, tuple[str, ...]]":
    if asked.tables is not None:
        from rowwise.planner.inputs import read_tables

        if asked.changes:
            raise SpecError("--set changes a recipe: want --recipe, not --tables")
        found = read_tables(asked.tables, dim=asked.dim)
        return found.workloads, asked.batch or BATCH, _wire(asked.wire), found.notes
    if asked.dim is not None:
        raise SpecError("--dim is for --tables: change a recipe's tables with --set tables.all.dim=...")
    if asked.wire:
        raise SpecError(f"--wire {asked.wire[0]} is for --tables: change a recipe's with --set wire.{asked.wire[0]}")
    from rowwise.recipes.plan import plan_inputs

    assert asked.recipe is not None
    wanted = plan_inputs(load_recipe(asked.recipe, asked.changes), world)
    return wanted.workloads, asked.batch or wanted.batch, wanted.wire, ()


def _wire(texts: tuple[str, ...]) -> Wire:
    codecs: dict[str, dict[str, Any]] = {"host": {}, "network": {}}
    for text in texts:
        where, _, kind = text.partition("=")
        link, _, way = where.partition(".")
        if link not in codecs or way not in Codecs.__struct_fields__:
            raise SpecError(f"--wire {text!r}: want host or network, forward or backward: --wire network.forward=int8")
        if way in codecs[link]:
            raise SpecError(f"--wire {text!r}: {where} is given twice: want one type")
        codecs[link][way] = kind
    return Wire(host=Codecs(**codecs["host"]), network=Codecs(**codecs["network"]))


def _constraints(asked: PlanArguments, workloads: "tuple[Workload, ...]", machine: "Machine") -> "Constraints":
    """Those of the file; --layouts replaces what it says of tables that it does not name."""
    from msgspec import structs

    from rowwise.planner.constraints import ALL, Constraints

    found = Constraints()
    if asked.constraints is not None:
        try:
            found = Constraints.from_json(read_bytes(asked.constraints))
            found.check([w.table.name for w in workloads], machine.topology)
        except SpecError as error:
            raise SpecError(f"{asked.constraints}: {error}") from None
    if asked.layouts is None:
        return found
    return structs.replace(found, layouts={**found.layouts, ALL: _layouts(asked.layouts)})


def _layouts(text: str) -> tuple[str, ...]:
    from rowwise.planner.layouts import NAMES

    names = tuple(name.strip().replace("-", "_") for name in text.split(",") if name.strip())
    wrong = [name for name in names if name not in NAMES]
    if wrong or not names:
        got = repr(wrong[0]) if wrong else "none"
        raise SpecError(f"--layouts {text!r}: {got}: want some of {', '.join(NAMES)}")
    return names


def _tiers(text: str | None, machine: "Machine") -> "frozenset[Tier]":
    from rowwise.plan import TIERS
    from rowwise.shard.tiers import RUNS

    if text is None:
        return RUNS
    names = {name.strip() for name in text.split(",") if name.strip()}
    found = frozenset(tier for tier in TIERS if tier in names)
    wrong = sorted(names - found)
    if wrong or "device" not in found:
        got = repr(wrong[0]) if wrong else "no device"
        raise SpecError(f"--tiers {text!r}: {got}: want device, and some of {', '.join(TIERS[1:])}")
    for tier, size in zip(TIERS, machine.memory_bytes, strict=True):
        if tier in found and not size:
            got = f"{machine.hardware.name} has no {tier} memory for tables"
            raise SpecError(f"--tiers {text!r}: {got}: want some in --topology, such as :{tier}=1TB")
    return found


def _made(question: "PlanRequest", effort: SearchOptions, old: "Plan | None") -> "tuple[PlanResult, tuple[str, ...]]":
    """The plan, and what is to be said of the way to it."""
    from rowwise.shard.tiers import RUNS

    if effort.measured and not question.tiers <= RUNS:
        raise SpecError("--measure with --tiers: this runtime does not run such plans: want one of them")
    if effort.measured and (old is not None or effort.certify_s):
        raise SpecError("--measure with --replan or --certify: want one of them")
    if effort.method is not None:
        from rowwise.planner.make import plan_by_method

        if effort.measured or old is not None or effort.certify_s or effort.seconds is not None:
            raise SpecError("--method with --measure, --replan, --certify or --seconds: want one of them")
        return plan_by_method(question, effort.method, effort.seed), ()
    if effort.measured:
        return _measured(question, effort)
    if old is None:
        from rowwise.planner.make import make_plan

        seconds = SECONDS if effort.seconds is None else effort.seconds
        return make_plan(question, seconds=seconds, seed=effort.seed, certify_s=effort.certify_s), ()
    from rowwise.cli.plan_show import in_words
    from rowwise.planner.replan import SECONDS as LITTLE
    from rowwise.planner.replan import replan

    if effort.certify_s:
        raise SpecError("--certify with --replan: want one of them, as a plan near another one is not the best")
    found = replan(question, old, seconds=LITTLE if effort.seconds is None else effort.seconds, seed=effort.seed)
    return found.planned, in_words(found)


def _measured(question: "PlanRequest", effort: SearchOptions) -> "tuple[PlanResult, tuple[str, ...]]":
    """The plan that was fastest here, and what each took."""
    from rowwise.calibrate.remeasure import keep_truth
    from rowwise.planner.make import make_plans

    seconds = SECONDS if effort.seconds is None else effort.seconds
    found = keep_truth(make_plans(question, effort.measured, seconds=seconds, seed=effort.seed))
    return found.best, found.lines()


def _explained(planned: "PlanResult") -> "Explanation":
    from rowwise.planner.explain import explain

    return explain(planned)


def _show(planned: "PlanResult", notes: tuple[str, ...], console: Console, old: "Mapping[Path, Plan]") -> None:
    from rowwise.cli.plan_show import not_run, show_differences, show_note, show_plan

    show_plan(planned, console)
    for note in (*notes, *not_run(planned.plan)):
        show_note(note, console)
    for path, plan in old.items():
        show_differences(plan, planned.plan, console, str(path))


def _console(*, to_stderr: bool) -> Console:
    """Where the summary goes; wide enough where it has no width of its own."""
    return terminal(stderr=to_stderr)


@contextmanager
def _showing(effort: SearchOptions) -> Iterator[None]:
    """That the search goes on, on terminals, and if it takes long enough to wonder."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = terminal(stderr=True)
    hidden = effort.expected_s <= LONG_s or not console.is_terminal
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        bar.add_task(f"searching, about {effort.expected_s:.0f} s", total=None)
        yield


def _seconds(text: str) -> float:
    try:
        return float(text.strip().removesuffix("s"))
    except ValueError:
        raise SpecError(f"--certify {text!r}: want a number of seconds, such as 30 or 30s") from None


def _read_plan(path: Path) -> "Plan":
    from rowwise.plan import Plan

    try:
        return Plan.from_json(read_bytes(path))
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def _check_places(files: "Mapping[str, Path | None]") -> None:
    """Before a search whose result could not be written."""
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None or (path == STDOUT and option == "--json"):
            continue
        if path == STDOUT:
            raise SpecError(f"{option} -: want the name of a file")
        if not path.parent.is_dir():
            raise SpecError(f"{option} {path}: there is no folder {path.parent}: make it first")
        if path.is_dir():
            raise SpecError(f"{option} {path}: that is a folder: want the name of a file")
        if path.absolute() in seen:
            raise SpecError(f"{option} {path}: {seen[path.absolute()]} is written there: want another name")
        seen[path.absolute()] = option


def _write(
    planned: "PlanResult", explained: "Explanation | None", files: "Mapping[str, Path | None]", console: Console
) -> None:
    """All files; the texts are made first, so that one that cannot be made leaves the others as they were."""
    texts: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        if option == "--torchrec":
            from rowwise.planner.export import torchrec_json

            tables = [workload.table for workload in planned.problem.question.workloads]
            texts[path] = torchrec_json(planned.plan, tables, planned.problem.topology)
        elif explained is not None and option == "--html":
            from rowwise.report.plan import plan_page

            texts[path] = plan_page(explained.to_json())
        else:
            texts[path] = planned.plan.to_json() + "\n"
    for path, text in texts.items():
        if path == STDOUT:
            print(text, end="")
        else:
            write_whole(path, text)
            console.print(f"wrote   {path}", markup=False, soft_wrap=True)
    if not texts:
        console.print("nothing is written; --json plan.json keeps the plan", markup=False)


def write_whole(path: Path, text: str) -> None:
    """A file that is there when it is whole; what was there before stays until then."""
    if path.exists() and not path.is_file():  # /dev/stdout and the like
        path.write_text(text)
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write_new(part, text.encode())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

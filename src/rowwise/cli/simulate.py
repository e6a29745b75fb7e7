"""`rowwise simulate`: predicts the time and memory of a training step on another machine.

Tables from a file and layers by their widths need no torch; the layers of a recipe need its model and torch.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rowwise.base.errors import SpecError, did_you_mean
from rowwise.cli.code import load_recipe
from rowwise.cli.options import BATCH, AsJson, Changes, Dim, GlobalBatch, HtmlFile
from rowwise.cli.plan import check_outputs, read_plan, write_atomically
from rowwise.cli.progress import fraction_bar
from rowwise.cli.simulate_show import show_check, show_simulation, show_sweep
from rowwise.cli.terminal import make_terminal, print_json, say

if TYPE_CHECKING:
    from rowwise.base.records import Simulation, Sweep
    from rowwise.planning.perf.hardware import Machine
    from rowwise.planning.perf.links import Network
    from rowwise.planning.simulate.published_models import PublishedModel
    from rowwise.planning.simulate.simulation import SimulatedMachine, SimulatedModel

DENSE = "512,256,64:512,256,1"


def simulate(  # noqa: PLR0913 - one for each option
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Name or path of a recipe, instead of --tables and --dense; or a published model: dlrm-a, dlrm-i,"
            " dlrm-f, dlrm-a-moe, dlrm-i-moe, dlrm-a-transformer, dlrm-i-transformer."
        ),
    ] = None,
    changes: Changes = None,
    tables: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tables as CSV or JSON, as for rowwise plan.")
    ] = None,
    dense: Annotated[
        str | None,
        typer.Option(
            metavar="WIDTHS:WIDTHS",
            help=f"With --tables: bottom and top MLP; 826*22 repeats 826 22 times (default: {DENSE}).",
        ),
    ] = None,
    dim: Dim = None,
    topology: Annotated[
        str | None,
        typer.Option(metavar="MACHINE", help="Hosts x devices x preset or profile: 16x8xzionex, 2x8xh100-like."),
    ] = None,
    batch: GlobalBatch = None,
    network: Annotated[
        Path | None,
        typer.Option(metavar="NET", help="Network (from rowwise net probe), instead of the rates of the profile."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Sharding plan (default: the result of a search).")
    ] = None,
    even: Annotated[
        bool, typer.Option("--even", help="Assume perfectly even sharding of all tables (a lower bound).")
    ] = False,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT=A,B,...",
            help="Sweep all combinations: hardware, hosts, devices, memory, network (2x), batch, depth, dense, wire,"
            " task (training,inference), counts (ours,published).",
        ),
    ] = None,
    html: HtmlFile = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write steps as a Chrome trace, for Perfetto.")
    ] = None,
    as_json: AsJson = False,
    check: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Compare a run with its simulation, stage by stage.")
    ] = None,
) -> None:
    """Predict a training step on another machine: time, memory, the bottleneck and possible speedups.

    Presets have rates from data sheets, profiles of rowwise calibrate have measured ones; each result names its source.

    Example: rowwise simulate dlrm-synthetic --topology 2x8xh100-like

    Example: rowwise simulate --tables tables.csv --dense "13,512,256:512,256,1" --topology 16x8xzionex --even

    Example: rowwise simulate dlrm-synthetic --topology 2x8xh100-like --vary hosts=2,4,8 --vary dense=replicated,full

    Example: rowwise simulate dlrm-a --vary dense=replicated,full,tp:8,pp:8 --vary counts=ours,published

    Example: rowwise simulate --check runs/dlrm-synthetic/1
    """
    check_outputs({"--html": html, "--trace": trace})
    if check is not None:
        _check(check, as_json=as_json)
        return
    published = None if recipe is None else _read_published(recipe, changes)
    machine = _read_machine(published.machine if published and topology is None else topology, network)
    if recipe is not None and published is not None:
        model, even = published.simulated(recipe, machine), plan is None
    else:
        model = _read_model(recipe, tuple(changes or ()), tables, dense, dim, machine)
    if batch is not None:
        model = replace(model, batch=batch)
    target = _make_machine(machine, network, plan, even=even)
    console = make_terminal(quiet=as_json)
    if vary:
        swept = _sweep(model, target, vary)
        show_sweep(swept, console)
        _write(swept, html, console, as_json=as_json)
        return
    result = _simulate(model, target, trace)
    if not result.fits:
        raise SpecError(_describe_misfit(result))
    show_simulation(result, console)
    _write(result, html, console, as_json=as_json)


def _read_published(name: str, changes: list[str] | None) -> "PublishedModel | None":
    from rowwise.planning.simulate.published_models import published_names, read_published
    from rowwise.recipes.find import ENDINGS, names

    published = read_published(name)
    if published is None and not name.endswith(ENDINGS) and not Path(name).exists() and name not in names():
        hint = did_you_mean(name, [*names(), *published_names()])
        expected = f"a recipe of `rowwise ls`, a path, or one of {', '.join(published_names())}"
        raise SpecError(f"no recipe or published model {name!r}", expected, hint=hint)
    if published is not None and changes:
        raise SpecError(f"--set with {name}, which is no recipe", "a recipe, or a JSON file of its own")
    return published


def _write(result: "Simulation | Sweep", html: Path | None, console: Console, *, as_json: bool) -> None:
    if as_json:
        print_json(result)
    if html is not None:
        from rowwise.report.simulation import draw_simulation

        write_atomically(html, draw_simulation(result))
        say(console, f"wrote   {html}")


def _simulate(model: "SimulatedModel", target: "SimulatedMachine", trace: Path | None) -> "Simulation":
    from rowwise.planning.simulate.simulation import MissingMemory, make_request, simulate, step_work, table_loads
    from rowwise.planning.simulate.trace import chrome_trace

    result = simulate(model, target)
    if trace is not None and result.step_s is not None:
        loads = table_loads(model, target, make_request(model, target.machine))
        assert not isinstance(loads, MissingMemory)
        write_atomically(trace, chrome_trace(step_work(model, target, loads).stages(model.depth), result.step_s))
    return result


def _sweep(model: "SimulatedModel", target: "SimulatedMachine", vary: list[str]) -> "Sweep":
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

    from rowwise.planning.simulate.sweep import Case, parse_vary, sweep

    varied = parse_vary(vary)
    columns = (TextColumn("simulating{task.description}"), BarColumn(), TimeRemainingColumn())
    with fraction_bar(make_terminal(stderr=True), columns, "") as report:
        return sweep(Case(model, target), varied, partial(report, ""))


def _check(run: Path, *, as_json: bool) -> None:
    from rowwise.recipes.simulated_run import check_run

    result = check_run(run)
    if as_json:
        print_json(result)
    else:
        show_check(result, make_terminal())


def _read_machine(topology: str | None, network: Path | None) -> "Machine":
    from rowwise.planning.perf.links import read_network
    from rowwise.planning.planner.machines import TOPOLOGIES, machine_named

    if topology is None:
        raise SpecError("--topology is not given", TOPOLOGIES)
    machine = machine_named(topology)
    return machine if network is None else _on_network(machine, read_network(network), network)


def _on_network(machine: "Machine", network: "Network", path: Path) -> "Machine":
    """The machine, with its hosts grouped like the first hosts of the network."""
    from msgspec import structs

    hosts, devices = machine.topology.hosts, machine.topology.devices
    if len(network.hosts) < hosts:
        raise SpecError(
            f"{path}: {len(network.hosts)} hosts, but the machine has {hosts}",
            "fewer hosts in --topology, or another network",
        )
    mismatch = next((host for host in network.hosts[:hosts] if host.devices != devices), None)
    if mismatch is not None:
        raise SpecError(
            f"{path}: host {mismatch.name} has {mismatch.devices} devices, but the machine {devices}",
            "the same number of devices in --topology",
        )
    return structs.replace(machine, topology=network.topology(range(hosts)))


def _make_machine(machine: "Machine", network: Path | None, plan: Path | None, *, even: bool) -> "SimulatedMachine":
    from rowwise.planning.perf.links import read_network
    from rowwise.planning.simulate.simulation import SimulatedMachine

    return SimulatedMachine(
        machine=machine,
        network=None if network is None else read_network(network),
        plan=None if plan is None else read_plan(plan),
        even=even,
    )


def _read_model(
    recipe: str | None, changes: tuple[str, ...], tables: Path | None, dense: str | None, dim: int | None,
    machine: "Machine",
) -> "SimulatedModel":  # fmt: skip
    if recipe is not None:
        from rowwise.recipes.simulated import simulated_model

        return simulated_model(load_recipe(recipe, changes), machine)
    from rowwise.planning.perf.dense_layers import parse_layers, side_of_layers
    from rowwise.planning.planner.inputs import read_tables
    from rowwise.planning.simulate.simulation import SimulatedModel

    assert tables is not None
    layers = parse_layers(DENSE if dense is None else dense)
    return SimulatedModel(
        name=tables.name,
        workloads=read_tables(tables, dim=dim).workloads,
        layers=layers,
        side=side_of_layers(layers),
        batch=BATCH,
    )


def _describe_misfit(result: "Simulation") -> str:
    from rowwise.base.quantity import format_bytes
    from rowwise.planning.simulate.simulation import describe_memory

    lacks = f"a rank lacks {format_bytes(result.lacking_bytes)}"
    return f"it does not fit: {lacks} ({describe_memory(result.memory)}): expected more ranks, memory or smaller tables"

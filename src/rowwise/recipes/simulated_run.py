"""Compares a run with its simulation: measured and predicted times of each stage of a step."""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rowwise.base.errors import SpecError
from rowwise.base.quantity import is_finite
from rowwise.base.records import Simulation
from rowwise.base.textfile import decode_json, read_bytes, read_text
from rowwise.base.value import MAX_RANKS
from rowwise.parallel.plan import Plan
from rowwise.planning.perf.hardware import Hardware, Machine
from rowwise.planning.perf.links import Network, read_network
from rowwise.planning.simulate.simulation import SimulatedMachine, simulate
from rowwise.recipes.hosts import ENVIRONMENT, NETWORK, OrderedHosts
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.sharding import load_hardware
from rowwise.recipes.simulated import simulated_model
from rowwise.recipes.text import RECIPE, decode, parse
from rowwise.report.read import StageLine, read_run
from rowwise.tables.spec import Topology, Value

A_RUN = "a run of `rowwise train` with a hardware profile: --hardware, or `hardware` in its recipe"
SHARED = {"gather": "forward"}  # phases of a run that include the time of a simulated stage


class CheckedStage(Value, frozen=True):
    """Seconds of a stage of a step on the slowest rank; the prediction of a stage that is not simulated is 0."""

    stage: str
    predicted_s: float
    measured_s: float


class CheckedRun(Value, frozen=True):
    """Comparison of a run's step with the simulated one."""

    run: str
    predicted_s: float
    measured_s: float
    stages: tuple[CheckedStage, ...]
    notes: tuple[str, ...]


def check_run(folder: Path) -> CheckedRun:
    """Compare a run with the simulation of its recipe, plan and ranks on its hardware profile."""
    recorded = read_run(folder)
    if not recorded.stages:
        raise SpecError(f"{folder}: no stages.csv with complete lines", A_RUN)
    recipe = decode(parse(read_text(folder / RECIPE), str(folder / RECIPE)), str(folder / RECIPE))
    facts = _read_facts(folder / ENVIRONMENT)
    hardware = _read_hardware(recipe, folder, facts.cpu)
    plan = Plan.from_json(read_bytes(folder / "plan.json"))
    hosts = facts.hosts
    network = _read_network(folder, facts.network, hosts) if hosts > 1 else None
    topology = Topology(hosts=hosts, devices=plan.world // hosts) if network is None else network.topology()
    machine = Machine(topology, hardware)
    simulated = SimulatedMachine(machine=machine, network=network, plan=plan)
    simulation = simulate(simulated_model(recipe, machine), simulated)
    if simulation.step_s is None:
        raise SpecError(f"{folder}: the profile {hardware.name} has too little memory for it", A_RUN)
    measured = _median_seconds(recorded.stages, exposed=hardware.copies_inside)
    predicted = _predicted_seconds(simulation)
    names = [name for name, seconds in measured.items() if seconds or predicted.get(name)]
    return CheckedRun(
        run=str(folder),
        predicted_s=simulation.step_s,
        measured_s=_step_seconds(recorded.stages),
        stages=tuple(CheckedStage(name, predicted.get(name, 0.0), measured[name]) for name in names),
        notes=simulation.notes,
    )


class _RunFacts(msgspec.Struct):
    """The part of env.json that a simulation reads."""

    cpu: str = ""
    hosts: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    network: OrderedHosts | None = None


def _read_facts(path: Path) -> _RunFacts:
    try:
        return decode_json(read_bytes(path), _RunFacts)
    except (msgspec.DecodeError, SpecError) as error:
        raise SpecError(f"{path}: {error}", A_RUN) from None


def _read_network(folder: Path, ordered: OrderedHosts | None, hosts: int) -> Network | None:
    """The network of the run in the order of its hosts; None if it had none, or its file is gone."""
    if ordered is None:
        return None
    probed = folder / NETWORK
    try:
        network = read_network(probed if probed.exists() else ordered.source)
        if ordered.order is not None:
            return network.among(ordered.order.hosts)
    except (OSError, KeyError, SpecError):
        return None
    return network if len(network.hosts) == hosts else None


def _read_hardware(recipe: Recipe, folder: Path, cpu: str) -> Hardware:
    """The profile of the run, if the run was on that machine."""
    if recipe.hardware is None:
        raise SpecError(f"{folder}: the run names no hardware", A_RUN)
    hardware = load_hardware(recipe.hardware)
    if hardware.kernels is not None and cpu not in hardware.source:
        raise SpecError(f"{folder}: it ran on {cpu}, but {hardware.name} is {hardware.source}", "a profile of that CPU")
    return hardware


def _lines_after_first(lines: tuple[StageLine, ...] | list[StageLine]) -> list[StageLine]:
    """Drop the first line, which includes start-up, if there are others."""
    steps = sorted({line.step for line in lines})
    return [line for line in lines if line.step > steps[0]] if len(steps) > 1 else list(lines)


def _median_seconds(lines: Any, *, exposed: bool) -> dict[str, float]:
    """Busy seconds of each phase's resource on the slowest rank; `exposed`: of the main thread, which then copies."""
    by_rank: dict[tuple[str, int], list[float]] = defaultdict(list)
    for line in _lines_after_first(lines):
        is_busy = is_finite(line.busy_s) and not exposed
        by_rank[line.phase, line.rank].append(line.busy_s if is_busy else line.measured_s)
    medians: dict[str, float] = {}
    for (phase, _), seconds in by_rank.items():
        medians[phase] = max(medians.get(phase, 0.0), statistics.median(seconds))
    return medians


def _step_seconds(lines: Any) -> float:
    """The median step; phases of the main thread add up to it."""
    totals: dict[tuple[float, int], float] = defaultdict(float)
    for line in _lines_after_first(lines):
        totals[line.step, line.rank] += line.measured_s
    return statistics.median(totals.values())


def _predicted_seconds(simulation: Simulation) -> dict[str, float]:
    """Simulated seconds by phase. The reader is left out, as its time is part of the stages that wait for it."""
    total: dict[str, float] = defaultdict(float)
    for stage in (s for s in simulation.stages if s.resource != "reader"):
        kind = stage.stage.partition(".")[0]
        total[SHARED.get(kind, kind)] += stage.seconds
    return dict(total)

"""Sweeps: a model simulated with several values of several settings, the fastest first.

Tables are planned once for each machine and batch, with the rates and the wire of the first combination on it. A plan
for less memory fits into more, so combinations come in the order of memory, and take the fastest plan so far.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.base.records import Simulation, Sweep, SweptRow
from rowwise.base.textfile import parse_whole
from rowwise.parallel.plan import Plan
from rowwise.planning.perf.hardware import Machine
from rowwise.planning.perf.links import Network
from rowwise.planning.planner.infeasible import InfeasibleError
from rowwise.planning.planner.machines import machine_named, parse_size
from rowwise.planning.planner.pipeline import make_plan
from rowwise.planning.planner.problem import PlanRequest
from rowwise.planning.simulate.loads import EvenPieces
from rowwise.planning.simulate.simulation import (
    SEARCH_s,
    SimulatedMachine,
    SimulatedModel,
    check_model,
    choose_dense,
    faster_links,
    make_request,
    simulate,
)
from rowwise.planning.simulate.step import SIMPLIFICATIONS
from rowwise.tables.spec import Codecs, Topology, Wire, WireType

MAX_COMBINATIONS = 10_000
PlacedOn = tuple[Topology, int, str, tuple[int, ...]]  # a machine with its batch and memory
BASELINE = "full"  # how dense layers are stored where everything is sharded


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a machine."""

    model: SimulatedModel
    place: SimulatedMachine

    def on(self, machine: Machine) -> "Case":
        return replace(self, place=replace(self.place, machine=machine))


def parse_vary(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Values by quantity, from texts such as `batch=64k,128k`."""
    varied: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, listed = text.partition("=")
        values = tuple(value.strip() for value in listed.split(",") if value.strip())
        if name not in QUANTITIES or not equals:
            import difflib  # slow to import, and only errors need it

            near = difflib.get_close_matches(name, QUANTITIES, n=1)
            hint = f"did you mean {near[0]}?" if near else ""
            known = f"one of {', '.join(QUANTITIES)}, = and values: batch=64k,128k"
            raise SpecError(f"--vary {text}", known, hint=hint)
        if not values:
            raise SpecError(f"--vary {text}: no values", f"values such as {name}={EXAMPLES[name]}")
        if name in varied:
            raise SpecError(f"--vary {text}: {name} is varied twice", "all its values in one --vary")
        varied[name] = values
    count = 1
    for values in varied.values():
        count *= len(values)
    if count > MAX_COMBINATIONS:
        raise SpecError(f"--vary: {count:,} combinations", f"at most {MAX_COMBINATIONS:,}")
    return varied


def sweep(case: Case, varied: Mapping[str, Sequence[str]], report: Callable[[float], None] = lambda _: None) -> Sweep:
    """Simulate all combinations; `report` gets the fraction that is done."""
    simulated: list[tuple[SweptRow, Case]] = []
    known: dict[PlacedOn, Plan | EvenPieces | None] = {}
    bases: dict[object, float | None] = {}
    combinations = [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]
    cases = [(settings, _apply_settings(case, settings)) for settings in combinations]
    cases.sort(key=lambda pair: pair[1].place.machine.memory_bytes)
    for number, (settings, changed) in enumerate(cases):
        check_model(changed.model, changed.place.machine.topology)
        options = [(simulate(c.model, c.place, explain=False), c) for c in _with_tables(changed, known)]
        simulation, planned = min(options, key=lambda option: _time_key(option[0]))
        if not simulation.fits and planned is not changed:  # beside these dense layers another plan may
            simulation = simulate(changed.model, changed.place, explain=False)
        base = (*(value for name, value in settings.items() if name not in ("dense", "wire")),)
        if base not in bases:
            bases[base] = _baseline_samples_s(planned)
        baseline = bases[base]
        factor = simulation.samples_s / baseline if baseline and simulation.fits else None
        simulated.append((SweptRow(settings=settings, simulation=simulation, factor=factor), planned))
        report((number + 1) / len(combinations))
    simulated.sort(key=lambda pair: _sort_key(pair[0]))
    rows = _mark_best([row for row, _ in simulated])
    fastest = simulated[0][1]
    explained = simulate(fastest.model, fastest.place) if rows[0].simulation.fits else None
    return Sweep(rows=rows, fastest=explained)


def _sort_key(row: SweptRow) -> tuple[bool, float, int]:
    simulation = row.simulation
    return not simulation.fits, -simulation.samples_s, simulation.lacking_bytes


def _mark_best(rows: Sequence[SweptRow]) -> tuple[SweptRow, ...]:
    marked = list(rows)
    for kind, exact in (("lossless", True), ("lossy", False)):
        for place, row in enumerate(marked):
            simulation = row.simulation
            if simulation.fits and simulation.runs_here and simulation.exact == exact:
                marked[place] = structs.replace(row, best=kind)
                break
    return tuple(marked)


def _time_key(simulation: Simulation) -> tuple[bool, float]:
    return not simulation.fits, simulation.step_s or math.inf


def _with_tables(case: Case, known: dict[PlacedOn, Plan | EvenPieces | None]) -> list[Case]:
    """The case with each placement that was found for its machine and batch, with as much memory or less."""
    machine, place = case.place.machine, case.place
    if place.plan is not None:
        return [case]
    key = machine.topology, case.model.batch, machine.hardware.name, machine.memory_bytes
    if key not in known:
        request = make_request(case.model, machine)
        known[key] = EvenPieces.of(request) if place.even else _search_plan(request)
    placed = known[key]
    if isinstance(placed, EvenPieces):
        return [replace(case, place=replace(place, pieces=placed))]
    plans = [plan for other, plan in known.items() if isinstance(plan, Plan) and _fits_into(other, key)]
    return [replace(case, place=replace(place, plan=plan)) for plan in plans] or [case]


def _fits_into(other: PlacedOn, key: PlacedOn) -> bool:
    """Whether a plan for `other` is one for `key`: the same machine and batch, and no more memory."""
    return other[:3] == key[:3] and all(a <= b for a, b in zip(other[3], key[3], strict=True))


def _search_plan(request: PlanRequest) -> Plan | None:
    try:
        return make_plan(request, seconds=SEARCH_s, prove=False).plan
    except InfeasibleError:
        return None


def _baseline_samples_s(case: Case) -> float | None:
    """Samples a second with dense layers fully sharded, as floats on the wire."""
    full = choose_dense(replace(case.model, wire=Wire()), BASELINE, case.place.machine.topology)
    simulation = simulate(full, case.place, explain=False)
    return simulation.samples_s if simulation.fits else None


def _apply_settings(case: Case, settings: Mapping[str, str]) -> Case:
    """Machines first, as the number of ranks determines how layers can be sharded."""
    for name, change in QUANTITIES.items():
        if name in settings:
            case = change(case, settings[name])
    return case


def _parse_count(text: str, name: str) -> int:
    """A whole number, also as 64k (of 1,024)."""
    number = text.lower()
    count = (parse_whole(number.removesuffix("k")) or 0) * (1024 if number.endswith("k") else 1)
    if not 1 <= count < 1 << 31:
        raise SpecError(f"{name}={text}", f"a whole number of at least 1, such as {EXAMPLES[name].split(',')[0]}")
    return count


def _vary_hardware(case: Case, text: str) -> Case:
    topology = case.place.machine.topology
    return case.on(machine_named(f"{topology.hosts}x{topology.devices}x{text}"))


def _vary_topology(case: Case, text: str, *, name: str) -> Case:
    topology, number = case.place.machine.topology, _parse_count(text, name)
    hosts, devices = (number, topology.devices) if name == "hosts" else (topology.hosts, number)
    return case.on(structs.replace(case.place.machine, topology=Topology(hosts=hosts, devices=devices)))


def _vary_network(case: Case, text: str) -> Case:
    number = text.lower().removesuffix("x")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6:
        raise SpecError(f"network={text}", f"a factor of speed, such as {EXAMPLES['network']}")
    machine = case.place.machine
    network = None if case.place.network is None else _scale_rates(case.place.network, factor)
    faster = Machine(machine.topology, faster_links(machine.hardware, factor))
    return replace(case, place=replace(case.place, machine=faster, network=network))


def _scale_rates(network: Network, factor: float) -> Network:
    link = network.link and structs.replace(network.link, rate_Bps=network.link.rate_Bps * factor)
    rates = tuple(tuple(None if rate is None else rate * factor for rate in row) for row in network.rate_Bps)
    uplinks = tuple(rate * factor for rate in network.uplink_Bps)
    return structs.replace(network, link=link, rate_Bps=rates, uplink_Bps=uplinks)


def _vary_memory(case: Case, text: str) -> Case:
    machine = case.place.machine
    hardware = structs.replace(machine.hardware, device_bytes=parse_size(text, "memory"))
    return case.on(structs.replace(machine, hardware=hardware))


def _vary_batch(case: Case, text: str) -> Case:
    return replace(case, model=replace(case.model, batch=_parse_count(text, "batch")))


def _vary_dense(case: Case, text: str) -> Case:
    return replace(case, model=choose_dense(case.model, text, case.place.machine.topology))


def _vary_wire(case: Case, text: str) -> Case:
    if text not in set(WireType):
        raise SpecError(f"wire={text}", f"one of {', '.join(WireType)}")
    codecs = Codecs(forward=WireType(text), backward=WireType(text))
    # Sharded layers are summed in floats: `train/dense_parallel.py` has no other sums.
    wire = Wire(host=codecs, network=codecs, dense=WireType(text if case.model.side.kind == "replicate" else "fp32"))
    return replace(case, model=replace(case.model, wire=wire))


def _vary_depth(case: Case, text: str) -> Case:
    return replace(case, model=replace(case.model, depth=_parse_count(text, "depth")))


def _vary_choice(case: Case, text: str, *, name: str) -> Case:
    choices = TASKS if name == "task" else COUNTS
    if text not in choices:
        raise SpecError(f"{name}={text}", f"one of {', '.join(choices)}")
    return replace(case, model=replace(case.model, **choices[text]))


TASKS: dict[str, dict[str, Any]] = {"training": {"training": True}, "inference": {"training": False}}
COUNTS: dict[str, dict[str, Any]] = {
    "ours": {"simplified": frozenset()}, "published": {"simplified": frozenset(SIMPLIFICATIONS)},
}  # fmt: skip
Change = Callable[[Case, str], Case]
QUANTITIES: dict[str, Change] = {
    "hardware": _vary_hardware,
    "hosts": partial(_vary_topology, name="hosts"),
    "devices": partial(_vary_topology, name="devices"),
    "memory": _vary_memory,
    "network": _vary_network,
    "batch": _vary_batch,
    "depth": _vary_depth,
    "dense": _vary_dense,
    "wire": _vary_wire,
    "task": partial(_vary_choice, name="task"),
    "counts": partial(_vary_choice, name="counts"),
}
EXAMPLES = {
    "hardware": "zionex,h100-like",
    "hosts": "2,4,8",
    "devices": "4,8",
    "memory": "40GB,80GB",
    "network": "1x,2x",
    "batch": "64k,128k",
    "depth": "1,2",
    "dense": "replicated,full,hybrid,tp:8,pp:4",
    "wire": "fp32,bf16,int8",
    "task": "training,inference",
    "counts": "ours,published",
}

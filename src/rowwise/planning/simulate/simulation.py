"""`simulate`: a step of a model on another machine: its seconds, its memory, its bottleneck and remedies."""

from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.base.quantity import format_bytes
from rowwise.base.records import (
    CountedStep,
    Help,
    PublishedRate,
    ResourceUse,
    SimulatedStage,
    Simulation,
    TierUse,
)
from rowwise.base.textfile import parse_whole
from rowwise.parallel.plan import TIERS, Plan
from rowwise.planning.perf.access import Workload
from rowwise.planning.perf.dense_layers import DenseLayers
from rowwise.planning.perf.dense_parallel import KINDS, DenseSide
from rowwise.planning.perf.hardware import Hardware, Machine
from rowwise.planning.perf.learned import model_of
from rowwise.planning.perf.links import LinkArrays, Network, age_notes
from rowwise.planning.perf.timeline import steady_step
from rowwise.planning.planner.current_placement import placement_of_plan
from rowwise.planning.planner.infeasible import InfeasibleError
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.pipeline import make_plan
from rowwise.planning.planner.problem import PlanRequest
from rowwise.planning.simulate.links import CAUSES, Links
from rowwise.planning.simulate.loads import (
    EvenPieces,
    MissingMemory,
    TableLoads,
    even_loads,
    planned_loads,
    simplified_tables,
)
from rowwise.planning.simulate.step import SIMPLIFICATIONS, UNCUT, LayerCut, Simplification, StepWork
from rowwise.tables.spec import FLOATS, Topology, Wire

SEARCH_s = 0.02
EVEN_NOTES = ("tables are shared evenly between ranks, which is a bound for plans of whole tables",)
CUTS = ("tp", "pp")  # ways to cut dense layers between ranks
FASTER = 2.0  # speed-up that is tried for each resource in turn
MEASURED_HOSTS = 1  # of profiles that `rowwise calibrate` writes
EXTRAPOLATED = 4  # multiple of the measured hosts above which a note says so
WORTH = 0.02  # smaller savings, as shares of a step, are not mentioned


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """The model in training: tables, dense layers and the settings of a step."""

    name: str
    workloads: tuple[Workload, ...]
    layers: DenseLayers
    side: DenseSide
    batch: int  # samples of a step, of all ranks
    wire: Wire = FLOATS
    depth: int = 2  # steps in flight
    elastic: bool = False
    cut: LayerCut = UNCUT
    training: bool = True
    simplified: frozenset[Simplification] = frozenset()
    published: tuple[PublishedRate, ...] = ()  # with any, a simulation is repeated as their description counts it
    columns: int = 0  # of samples that ranks read; 0 if batches are made elsewhere
    workers: bool = False  # workers of a host read for all its ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """The machine, and the placement of tables on it."""

    machine: Machine
    network: Network | None = None
    plan: Plan | None = None  # None searches one
    even: bool = False  # share tables evenly, without a plan
    pieces: EvenPieces | None = None  # of evenly shared tables; None prices them

    def links(self) -> Links:
        return Links(self.machine, None if self.network is None else _first_hosts(self.network, self.machine.topology))


def simulate(model: SimulatedModel, place: SimulatedMachine, *, explain: bool = True) -> Simulation:
    """A step in the middle of a run; with `explain`, also its bottleneck and remedies."""
    check_model(model, place.machine.topology)
    request, setup = make_request(model, place.machine), _describe_setup(model, place)
    loads = _missing_dense(request) or table_loads(model, place, request)
    if isinstance(loads, MissingMemory):
        memory = _tier_uses(request, loads.need_bytes)
        return structs.replace(setup, lacking_bytes=loads.lacking_bytes, memory=memory)
    work = step_work(model, place, loads)
    stages = work.stages(model.depth)
    steady = steady_step(stages)
    resources = [*steady.busy_s, *(steady.exposed_s.keys() - steady.busy_s.keys())]
    remedies = what_would_help(work, model.depth, steady.step_s) if explain else ()
    return structs.replace(
        setup,
        step_s=steady.step_s,
        samples_s=model.batch / steady.step_s,
        memory=_tier_uses(request, loads.memory_bytes),
        uses=tuple(ResourceUse(r, steady.busy_s.get(r, 0.0), steady.exposed_s.get(r, 0.0)) for r in resources),
        stages=tuple(SimulatedStage(s.name, s.resource, float(max(s.seconds_W))) for s in stages),
        help=remedies,
        limits=describe_limit(remedies, steady.step_s) if explain else "",
        published=model.published,
        counted=_count_as_published(model, place, loads) if explain and model.published else (),
    )


def _count_as_published(model: SimulatedModel, place: SimulatedMachine, loads: TableLoads) -> tuple[CountedStep, ...]:
    """The step with one simplification after another, up to that of the published description."""
    counted: list[CountedStep] = []
    simplified: frozenset[Simplification] = frozenset()
    for name, what in SIMPLIFICATIONS.items():
        simplified |= {name}
        work = step_work(replace(model, simplified=simplified), place, loads)
        step_s = steady_step(work.stages(model.depth)).step_s
        counted.append(CountedStep(what, step_s, model.batch / step_s))
    return tuple(counted)


def check_model(model: SimulatedModel, topology: Topology) -> None:
    """Raise for a batch of fewer samples than ranks."""
    if model.batch < topology.world:
        raise SpecError(
            f"batch={model.batch}: fewer samples than the {topology.world:,} ranks",
            f"at least {topology.world:,}, or fewer ranks",
        )


def make_request(model: SimulatedModel, machine: Machine) -> PlanRequest:
    """The plan request, with every tier of memory of the machine."""
    sizes = dict(zip(TIERS, machine.memory_bytes, strict=True))
    return PlanRequest(
        workloads=model.workloads,
        machine=machine,
        model=model_of(machine.hardware, machine.topology, model.wire),
        batch=model.batch,
        tiers=frozenset(tier for tier in TIERS if tier == "device" or sizes[tier]),
        dense=model.side,
    )


def table_loads(model: SimulatedModel, place: SimulatedMachine, request: PlanRequest) -> TableLoads | MissingMemory:
    """Loads of a given or searched plan, or of even shares."""
    links = place.links()
    if place.even:
        return even_loads(request, links, place.pieces)
    if place.plan is not None:
        return _loads_of_plan(request, place.plan, links, elastic=model.elastic)
    try:
        planned = make_plan(request, seconds=SEARCH_s, prove=False)
    except InfeasibleError:
        evenly = even_loads(request, links)
        if isinstance(evenly, MissingMemory):
            return evenly
        raise  # tables would fit if they could be cut evenly; the error names those that cannot
    sums = planned.problem.sums(planned.searched.placement)
    return planned_loads(planned.problem, sums, planned.plan, links, elastic=model.elastic)


def _loads_of_plan(request: PlanRequest, plan: Plan, links: Links, *, elastic: bool) -> TableLoads | MissingMemory:
    """Loads of a given plan; tables that match no layout cost as much as with the nearest one."""
    if plan.world != links.topology.world:
        ranks = f"{plan.world} ranks, and the machine has {links.topology.world}"
        raise SpecError(f"--plan: a plan for {ranks}", "a plan for this machine, or no --plan")
    plan.validate([w.table for w in request.workloads])
    current = placement_of_plan(make_problem(request), plan)
    sums = current.problem.sums(current.start)
    need = tuple(int(size) for size in sums.bytes_NM.max(0))
    if any(size > limit for size, limit in zip(need, request.limits_bytes, strict=True)):
        return MissingMemory(need, request.limits_bytes)
    return planned_loads(current.problem, sums, plan, links, elastic=elastic)


def step_work(model: SimulatedModel, place: SimulatedMachine, loads: TableLoads) -> StepWork:
    links = place.links()
    return StepWork(
        tables=simplified_tables(loads.seconds, model.workloads, model.batch, links, model.simplified),
        layers=model.layers,
        side=model.side,
        links=links,
        samples=model.batch / place.machine.topology.world,
        vectors_bytes=sum(
            w.vectors * model.wire.vectors("host", backward=False).vector_bytes(w.table.dim) for w in model.workloads
        ),
        wire=model.wire,
        cut=model.cut,
        training=model.training,
        simplified=model.simplified,
        batch_s=making_s(model, place.machine),
    )


def making_s(model: SimulatedModel, machine: Machine) -> float:
    """Processor seconds in which a rank makes its part of a batch."""
    times, ranks = machine.hardware.batches, machine.topology.world
    if times is None:
        return 0.0
    values, devices = model.batch * model.columns, machine.topology.devices
    if model.workers:  # those of each host prepare all rows, for its ranks
        return values * (times.read_s + times.encode_s) / devices
    return values * (times.read_s + times.encode_s / ranks)


def what_would_help(work: StepWork, depth: int, step_s: float) -> tuple[Help, ...]:
    """The step with each cause twice as fast in turn, or without latency; the largest gain first."""
    present = {cause for stage in work.works() for cause, seconds in stage.causes.items() if np.any(seconds)}
    remedies: list[Help] = []
    for cause in CAUSES:
        if cause in present:
            factor = float("inf") if cause == "latency" else FASTER
            faster_s = steady_step(work.stages(depth, {cause: factor})).step_s
            remedies.append(Help(cause, faster_s, 1 - faster_s / step_s))
    return tuple(sorted(remedies, key=lambda remedy: remedy.step_s))


def describe_limit(remedies: tuple[Help, ...], step_s: float) -> str:
    """The bottleneck of the step, in a sentence."""
    relevant = [remedy for remedy in remedies if remedy.saved > WORTH]
    if not relevant or not step_s:
        return "No single resource limits the step."
    names = {
        "latency": "Latency limits",
        "links in hosts": "Links in hosts limit",
        "batches": "Making batches limits",
    }
    first = relevant[0]
    lead = names.get(first.what, f"The {first.what} limits")
    how = {"latency": "without any", "batches": "with batches made twice as fast"}.get(first.what, "twice as fast")
    return f"{lead} the step: {how}, a step takes {first.saved:.0%} less."


def choose_dense(model: SimulatedModel, text: str, topology: Topology) -> SimulatedModel:
    """The model with its dense layers replicated, sharded (full, hybrid), or cut between ranks (tp, pp)."""
    kind, _, number = text.partition(":")
    kind = "replicate" if kind == "replicated" else kind
    across = kind in CUTS and number == "hosts"
    ranks = topology.hosts if across else parse_whole(number or str(topology.devices))
    if kind not in (*KINDS, *CUTS) or ranks is None or (number and kind in ("replicate", "full")):
        raise SpecError(f"dense={text!r}", "replicated, full, hybrid:RANKS, tp:RANKS, tp:hosts, pp:RANKS or pp:hosts")
    if across and topology.hosts == 1:
        raise SpecError(f"dense={text} on one host", f"several hosts, or {kind}:RANKS")
    if ranks < 1 or topology.world % ranks:
        raise SpecError(f"dense={text}: {ranks} ranks do not divide {topology.world}", f"a divisor of {topology.world}")
    layers = len(model.layers.all)
    if kind == "pp" and ranks > layers:
        raise SpecError(f"dense={text}: {ranks} parts of {layers} layers", "at most a part for each layer")
    if model.wire.far is not None and kind != "replicate":
        raise SpecError(f"dense={text} with wire.far={model.wire.far}", "dense=replicated, or wire.far=null")
    if kind in CUTS:
        return replace(model, side=_cut_side(model.side, ranks), cut=LayerCut(kind, ranks, across))
    shards = ranks if kind == "hybrid" else None
    return replace(model, side=structs.replace(model.side, kind=kind, shards=shards), cut=UNCUT)


def _cut_side(side: DenseSide, ranks: int) -> DenseSide:
    """Memory of a rank that has a part of the parameters."""
    units = tuple(tuple((-(-shape[0] // ranks), *shape[1:]) for shape in unit) for unit in side.shapes.units)
    return structs.replace(side, kind="replicate", shapes=structs.replace(side.shapes, units=units))


def describe_rates(hardware: Hardware, topology: Topology, network: Network | None) -> tuple[str, ...]:
    """The sources of the rates, in notes of every simulation."""
    measured = hardware.kernels is not None
    notes = [f"measured: {hardware.source}" if measured else f"rates of a data sheet: {hardware.source}"]
    notes += [] if network is None else age_notes(network, "--network")
    if measured and topology.hosts > EXTRAPOLATED * MEASURED_HOSTS and (network is None or network.probed is None):
        notes.append(f"extrapolated: {topology.hosts} hosts, and {MEASURED_HOSTS} was measured")
    return tuple(notes)


def _first_hosts(network: Network, topology: Topology) -> LinkArrays:
    """The links between the first hosts of a network."""
    hosts = len(network.hosts)
    if topology.hosts > hosts:
        raise SpecError(
            f"network: {hosts} hosts, and the machine has {topology.hosts}",
            "a network of as many hosts, or no --network",
        )
    return network.arrays().among(range(topology.hosts))


def _missing_dense(request: PlanRequest) -> MissingMemory | None:
    if request.limits_bytes[0]:
        return None
    assert request.dense is not None
    limit = int(request.machine.memory_bytes[0] * (1 - request.constraints.reserve))
    need = request.dense.memory_bytes(request.machine.topology, request.batch)
    return MissingMemory((need, 0, 0), (limit, 0, 0))


def _tier_uses(request: PlanRequest, used_bytes: tuple[int, ...]) -> tuple[TierUse, ...]:
    dense = 0 if request.dense is None else request.dense.memory_bytes(request.machine.topology, request.batch)
    sizes = [int(size * (1 - request.constraints.reserve)) for size in request.machine.memory_bytes]
    dense_only = request.limits_bytes[0] == 0
    return tuple(
        TierUse(tier, 0 if dense_only else used, dense if tier == "device" else 0, size)
        for tier, used, size in zip(TIERS, used_bytes, sizes, strict=True)
        if used or size
    )


def _describe_setup(model: SimulatedModel, place: SimulatedMachine) -> Simulation:
    """A simulation without a step: the model, the machine and the settings."""
    topology, hardware, kind = place.machine.topology, place.machine.hardware, model.side.kind
    dense = {"replicate": "replicated", "full": "full"}.get(kind, f"{kind}:{model.side.shards_on(topology)}")
    return Simulation(
        model=model.name,
        machine=hardware.name,
        hosts=topology.hosts,
        devices=topology.devices,
        batch=model.batch,
        dense=str(model.cut) if model.cut.ranks > 1 else dense,
        wire=describe_wire(model.wire),
        exact=model.wire.exact,
        runs_here=model.cut.ranks == 1 and model.training and not model.simplified,
        step_s=None,
        notes=(*describe_rates(hardware, topology, place.network), *EVEN_NOTES[: place.even]),
    )


def describe_wire(wire: Wire) -> str:
    """One type if all are alike, else those between hosts, between groups if these differ, and of dense gradients."""
    near, far = wire.codecs("network"), wire.codecs("uplink")
    kinds = [near.forward, near.backward, *((far.forward, far.backward) if far != near else ()), wire.far or wire.dense]
    alike = {wire.host.forward, wire.host.backward, *kinds}
    return str(kinds[-1]) if len(alike) == 1 else "/".join(map(str, kinds))


def describe_memory(memory: tuple[TierUse, ...]) -> str:
    return ", ".join(
        f"{tier.tier} {format_bytes(tier.tables_bytes + tier.dense_bytes)} of {format_bytes(tier.limit_bytes)}"
        for tier in memory
    )  # fmt: skip


def faster_links(hardware: Hardware, factor: float) -> Hardware:
    """The hardware with the rates of its network and uplinks multiplied by `factor`."""
    network, uplink = hardware.network.times(factor), hardware.uplink and hardware.uplink.times(factor)
    return structs.replace(hardware, network=network, uplink=uplink)

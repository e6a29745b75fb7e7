"""Small questions drawn at random, and every placement there is of the smallest."""

import itertools
import math

import numpy as np
from hypothesis import strategies as st
from msgspec import structs

from rowwise.parallel.plan import TIERS
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.hardware import LinkRates, Machine, hardware_named
from rowwise.planning.perf.roofline import Roofline
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.problem import NO_UNIT, Placement, PlacementProblem, PlanRequest
from rowwise.tables.row_optimizers import Adam, RowWiseAdagrad, Sgd
from rowwise.tables.spec import Codecs, Table, Topology, Wire, WireType

TOPOLOGIES = (Topology(devices=2), Topology(devices=3), Topology(hosts=2, devices=2), Topology(hosts=3, groups=(2, 1)))
codecs = st.builds(Codecs, st.sampled_from(WireType), st.sampled_from(WireType))
wires = st.just(Wire()) | st.builds(Wire, host=codecs, network=codecs, uplink=st.none() | codecs)


@st.composite
def questions(draw, tables=4, tiers=False, fill=(0.3, 1.2)):
    """Tables of very different sizes on few ranks, memory from plenty to too little."""
    topology = draw(st.sampled_from(TOPOLOGIES))
    workloads = []
    for number in range(draw(st.integers(1, tables))):
        rows = int(10 ** draw(st.floats(1, 7)))
        table = Table(
            name=f"t{number}", rows=rows, dim=draw(st.sampled_from((4, 8, 12, 64))),
            optimizer=draw(st.sampled_from((Sgd(), RowWiseAdagrad(), Adam()))),
        )  # fmt: skip
        access = Access(pooling=10 ** draw(st.floats(-1, 2)), zipf_a=draw(st.floats(0, 1.5)))
        workloads.append(Workload(table=table, access=access))
    stored = sum(w.table.rows * (w.table.row_bytes + 8 * w.table.dim) for w in workloads)
    share = draw(st.floats(*fill))
    slow = LinkRates(latency_s=1e-6, all_to_all_Bps=5e9, reduce_scatter_Bps=6e9, all_reduce_Bps=9e9)
    hardware = structs.replace(
        hardware_named("zionex"),
        device_bytes=max(int(stored / topology.world / share * (0.3 if tiers else 1)), 1000),
        host_bytes=int(stored * 2) if tiers else 0,
        network=slow,
    )
    return PlanRequest(
        workloads=tuple(workloads),
        machine=Machine(topology=topology, hardware=hardware),
        model=Roofline(hardware, topology, draw(wires)),
        batch=2048,
        constraints=draw(constraints(workloads, topology)),
        buffers=False,
        tiers=frozenset(TIERS if tiers else TIERS[:1]),
    )


@st.composite
def constraints(draw, workloads, topology):
    if draw(st.booleans()):
        return Constraints()
    names = [w.table.name for w in workloads]
    ranks = st.lists(st.integers(0, topology.world - 1), min_size=1, max_size=topology.world, unique=True)
    pin = {draw(st.sampled_from(names)): tuple(draw(ranks))} if draw(st.booleans()) else {}
    together = (tuple(names[:2]),) if len(names) > 1 and not pin and draw(st.booleans()) else ()
    return Constraints(pin=pin, together=together)


def units_of(problem: PlacementProblem, option: int) -> list[int]:
    """The units that an option's pieces may go to."""
    world, last = problem.topology.world, problem.units - 1
    units = {"rank": range(world), "host": range(world, last), "all": [last]}[problem.kind_of(option).unit_kind]
    rule = int(problem.rule_I[problem.item_of_O[option]])
    return [unit for unit in units if rule < 0 or problem.allowed_RU[rule, unit]]


def placements(problem: PlacementProblem):
    """All of them."""
    per_item = []
    for item in range(len(problem.members)):
        ways = []
        for option in problem.options_of(item):
            pieces = len(problem.pieces_of(option))
            ways += [(option, chosen) for chosen in itertools.product(units_of(problem, option), repeat=pieces)]
        per_item.append(ways)
    for ways in itertools.product(*per_item):
        unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, dtype=np.int32)
        for option, chosen in ways:
            unit_N[list(problem.pieces_of(option))] = chosen
        yield Placement(np.array([option for option, _ in ways], dtype=np.int32), unit_N)


def count_placements(problem: PlacementProblem) -> int:
    ways_O = [len(units_of(problem, o)) ** len(problem.pieces_of(o)) for o in range(len(problem.option_kind))]
    return math.prod(sum(ways_O[o] for o in problem.options_of(item)) for item in range(len(problem.members)))


def random_placement(problem: PlacementProblem, rng: np.random.Generator) -> Placement:
    unit_N = np.full(len(problem.pieces.link_N), NO_UNIT, dtype=np.int32)
    choice = []
    for item in range(len(problem.members)):
        option = int(rng.integers(problem.item_begin[item], problem.item_begin[item + 1]))
        choice.append(option)
        unit_N[problem.pieces_of(option)] = rng.choice(units_of(problem, option), len(problem.pieces_of(option)))
    return Placement(np.array(choice, dtype=np.int32), unit_N)

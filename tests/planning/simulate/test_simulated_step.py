"""A simulated step is what its stages say: between its busiest resource and their sum, and in proportion to them."""

from dataclasses import replace
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.parallel.plan import Plan
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.dense_layers import parse_layers, side_of_layers
from rowwise.planning.perf.dense_parallel import FLOAT_bytes
from rowwise.planning.perf.hardware import Machine, MakingTimes, StageOverhead, hardware_named
from rowwise.planning.perf.links import Network, NetworkHost, PairLink, uniform_network
from rowwise.planning.perf.sums import SumCosts
from rowwise.planning.perf.timeline import stage_times, steady_step
from rowwise.planning.planner.layouts import table_wise
from rowwise.planning.planner.machines import machine_named
from rowwise.planning.simulate.links import CAUSES, Links
from rowwise.planning.simulate.loads import even_flows, even_loads
from rowwise.planning.simulate.simulation import (
    SimulatedMachine,
    SimulatedModel,
    choose_dense,
    describe_rates,
    make_request,
    making_s,
    simulate,
    step_work,
    table_loads,
)
from rowwise.planning.simulate.step import StepWork, TableSeconds
from rowwise.planning.simulate.trace import chrome_trace
from rowwise.tables.spec import Codecs, Table, Topology, Wire, WireType

LAYERS = parse_layers("16,32,8:40,32,16,1")
TABLES = tuple(
    Workload(table=Table(name=f"t{k}", rows=100_000 * (k + 1), dim=16), access=Access(pooling=k + 1.0))
    for k in range(6)
)
MODEL = SimulatedModel(name="small", workloads=TABLES, layers=LAYERS, side=side_of_layers(LAYERS), batch=4096)
OF_RANKS = ("lookup_W", "update_W", "fetch_W", "store_W")
EMPTY = TableSeconds(**dict.fromkeys(OF_RANKS, np.zeros(1)), transfers={})
seconds = st.integers(0, 8).map(lambda eighths: eighths / 8)
PARTS = ("route.counts", "route.ids", "exchange.send", "return.send", "update.sums")


def place(name, **options):
    return SimulatedMachine(machine=machine_named(name), **options)


def simulated(hardware, topology, model=MODEL, *, even=True):
    return simulate(model, SimulatedMachine(machine=Machine(topology, hardware), even=even))


def work_of(links, tables=EMPTY, layers=LAYERS, **options):
    options = {"side": side_of_layers(layers), "samples": 1.0} | options
    return StepWork(tables=tables, layers=layers, links=links, **options)


@st.composite
def _works(draw):
    world = draw(st.integers(1, 3))
    by_rank = st.tuples(*[seconds] * world).map(np.array)
    transfers = {name: {"network": draw(seconds), "latency": draw(seconds)} for name in PARTS}
    tables = TableSeconds(**{name: draw(by_rank) for name in OF_RANKS}, transfers=transfers)
    machine = Machine(
        Topology(devices=world), structs.replace(hardware_named("cpu"), flops=draw(st.sampled_from((1e3, 1e6))))
    )
    kind = draw(st.sampled_from(("replicate", "full")))
    return work_of(Links(machine), tables, side=structs.replace(side_of_layers(LAYERS), kind=kind), samples=2.0)


works = _works()


@given(works, st.integers(1, 3))
def test_nothing_begins_before_what_it_waits_for_and_resources_work_one_stage_at_a_time(work, depth):
    stages = work.stages(depth)
    ends, free = {}, {}
    for times in stage_times(stages, 4):
        for ref in times.stage.after:
            if times.step >= ref.steps_back:
                assert (times.begin_W >= ends[ref.name, times.step - ref.steps_back] - 1e-12).all()
        assert (times.begin_W >= free.get(times.stage.resource, 0.0) - 1e-12).all()
        ends[times.stage.name, times.step] = free[times.stage.resource] = times.end_W


@given(works, st.integers(1, 3))
def test_a_step_takes_its_busiest_resource_at_least_and_all_stages_at_most(work, depth):
    stages = work.stages(depth)
    found = steady_step(stages, 24)
    assert found.step_s <= sum(float(np.max(s.seconds_W)) for s in stages) + 1e-9
    if depth > 1:
        assert found.step_s >= found.busy_s["processor"] - 1e-9
    assert found.busy_s["link"] <= found.step_s + 1e-9


@given(works, st.sampled_from((2.0, 4.0)))
def test_all_times_half_is_half_a_step(work, factor):
    slow, fast = work.stages(2), work.stages(2, dict.fromkeys(CAUSES, factor))
    assert steady_step(fast).step_s * factor == pytest.approx(steady_step(slow).step_s)


@given(works, st.sampled_from(CAUSES))
def test_nothing_that_is_faster_makes_a_step_of_equal_ranks_slower(work, cause):
    if work.links.topology.world == 1:
        before = steady_step(work.stages(2), 16).step_s
        assert steady_step(work.stages(2, {cause: 2.0}), 16).step_s <= before + 1e-9


def test_a_step_by_hand():
    """Two layers, one before the vectors and one after; a rank's transfers take whole seconds."""
    layers = parse_layers("1,1:1,1")
    hardware = structs.replace(hardware_named("cpu"), flops=2.0, device_Bps=1e18)
    transfers = {"route.ids": {"network": 1.0}, "exchange.send": {"network": 5.0}, "return.send": {"network": 7.0}}
    tables = replace(EMPTY, lookup_W=np.ones(1), update_W=np.ones(1), transfers=transfers)
    work = work_of(Links(Machine(Topology(), hardware)), tables, layers)
    # ids 1, lookup 1, vectors 5 beside the first forward of 1; then 1 forward, 2 backward, gradients 7 beside the last
    # backward of 2, and the update of 1.
    assert steady_step(work.stages(1)).step_s == pytest.approx(1 + 1 + 5 + 1 + 2 + 7 + 1)
    # The ids of the next step travel while this one computes.
    assert steady_step(work.stages(2)).step_s == pytest.approx(1 + 5 + 1 + 2 + 7 + 1)


@pytest.mark.parametrize("kind", ["replicated", "full", "hybrid"])
def test_dense_transfers_are_the_bytes_of_the_formulas(kind):
    machine = machine_named("2x4xh100-like")
    model = choose_dense(MODEL, kind, machine.topology)
    rates = {name: 1.0 for name in ("all_to_all_Bps", "reduce_scatter_Bps", "all_reduce_Bps")}
    links = {
        name: structs.replace(getattr(machine.hardware, name), latency_s=0.0, **rates) for name in ("host", "network")
    }
    machine = structs.replace(machine, hardware=structs.replace(machine.hardware, **links))
    work = work_of(Links(machine), side=model.side)
    sent = sum(sum(w.causes.values()) for w in work.works() if w.name.startswith(("gather.", "reduce.")))
    padding = 8 * 8 * FLOAT_bytes * 6  # a sharded layer is filled up to a multiple of the ranks
    assert 0 <= model.side.cost(machine.topology).sent_bytes - sent <= (0.1 if kind == "replicated" else padding)


@pytest.mark.parametrize("topology", [Topology(hosts=4, devices=2, groups=(3, 1)), Topology(hosts=3, devices=4)])
@pytest.mark.parametrize("far", ["fp32", "int8", "topk:1%"])
def test_sums_in_two_levels_take_what_the_formulas_say(topology, far):
    """The same as `rowwise train --network` chooses by, on rates of a profile and on a network that is given."""
    hardware, wire = hardware_named("cpu"), Wire(far=far, error_feedback=far != "fp32")
    uniform, hosts = uniform_network(topology, hardware), tuple(NetworkHost(name=str(h)) for h in range(topology.hosts))
    numbers, link = tuple(range(len(topology.groups) or 1)), PairLink(latency_s=3e-5, rate_Bps=2e8)
    slow = Network(hosts=hosts, link=link, groups=uniform.groups, uplink_Bps=(1e8,) * len(numbers))
    machine = Machine(topology, hardware)
    for network in (None, slow):
        work = work_of(Links(machine, None if network is None else network.arrays()), wire=wire)
        sums = [one for one in work.works() if one.name.startswith("reduce.")]
        costs = SumCosts(topology, (network or uniform).arrays(), hardware, (LAYERS.parameters,))
        assert sum(sum(one.causes.values()) for one in sums) == pytest.approx(costs.seconds(wire))
        assert [one.name for one in sums if one.resource == "link"] == ["reduce.0", "reduce.far.0"]


def test_a_plan_of_equal_tables_is_as_fast_as_even_ones():
    tables = tuple(Workload(table=Table(name=f"t{k}", rows=1000, dim=64), access=Access(pooling=2.0)) for k in range(8))
    model = SimulatedModel(name="", workloads=tables, layers=LAYERS, side=side_of_layers(LAYERS), batch=4096)
    plan = Plan(world=8, tiles=tuple(sorted(t for k, w in enumerate(tables) for t in table_wise(w.table, k))))
    planned, even = (simulate(model, place("8xh100-like", **how)) for how in ({"plan": plan}, {"even": True}))
    assert planned.step_s == pytest.approx(even.step_s, rel=1e-6)
    assert planned.memory == even.memory


def test_even_flows_send_what_whole_tables_do():
    topology = Topology(hosts=2, devices=2)
    wire = Wire(network=Codecs(forward=WireType.FP16))
    flows = {flow.stage: flow for flow in even_flows(TABLES, 400, wire, topology)}
    width = sum(w.table.dim for w in TABLES)
    assert flows["exchange.send"].sent["network"].sum() == pytest.approx(400 * width * 2 * 2 / 4)
    assert flows["return.send"].sent["host"].sum() == pytest.approx(400 * width * 4 / 4)


def test_what_would_help_is_sorted_and_the_first_is_what_limits():
    found = simulate(MODEL, place("2x8xh100-like", even=True))
    assert [one.step_s for one in found.help] == sorted(one.step_s for one in found.help)
    assert found.help[0].what in found.limits.lower()
    assert sum(use.exposed_s for use in found.uses) == pytest.approx(found.step_s)
    assert simulate(MODEL, place("2x8xh100-like", even=True), explain=False).step_s == found.step_s


def test_tables_below_device_memory_take_the_host_link():
    small = simulate(MODEL, place("4xzionex:device=8MB", even=True))
    assert {tier.tier: tier.tables_bytes > 0 for tier in small.memory} == {"device": True, "host": True}
    assert small.step_s > simulate(MODEL, place("4xzionex", even=True)).step_s
    assert next(u for u in small.uses if u.resource == "host link").busy_s > 0


@pytest.mark.parametrize("even", [True, False])
def test_tables_that_fit_nowhere_have_no_step(even):
    found = simulate(MODEL, place("4xzionex:device=1MB,host=0GB", even=even))
    assert (found.step_s, found.samples_s, found.fits) == (None, 0.0, False)
    device = found.memory[0]
    assert found.lacking_bytes == pytest.approx(device.tables_bytes + device.dense_bytes - device.limit_bytes, rel=0.01)


def test_dense_layers_that_fit_nowhere_have_no_step():
    layers = parse_layers("8192*4:8192*4")
    model = SimulatedModel(name="", workloads=TABLES, layers=layers, side=side_of_layers(layers), batch=4096)
    found = simulate(model, place("4xzionex:device=1GB"))
    assert not found.fits
    assert found.lacking_bytes > 5e9


def two_hosts(**options):
    return Network(hosts=tuple(NetworkHost(name=f"h{k}", devices=4) for k in range(4)), **options)


def test_a_network_takes_the_place_of_the_profiles_rates():
    machine = structs.replace(machine_named("4x4xcpu"), topology=Topology(hosts=4, devices=4, groups=(2, 2)))
    link = PairLink(latency_s=1e-5, rate_Bps=1e9)
    free = two_hosts(link=link, groups=(0, 0, 1, 1))
    slow = structs.replace(free, uplink_Bps=(2e8, 2e8))
    model = SimulatedModel(name="", workloads=TABLES, layers=LAYERS, side=side_of_layers(LAYERS), batch=1 << 18)
    fast_s, slow_s = (simulate(model, SimulatedMachine(machine=machine, network=n, even=True)) for n in (free, slow))
    assert slow_s.step_s > fast_s.step_s
    assert slow_s.help[0].what == "uplink"
    assert "uplink" not in {one.what for one in fast_s.help if one.saved > 1e-9}
    assert "--network: this network was not measured" in slow_s.notes
    with pytest.raises(SpecError, match="machine has 8"):
        simulate(model, SimulatedMachine(machine=machine_named("8x4xcpu"), network=free, even=True))


def test_rates_are_said_to_be_what_they_are():
    xeon, preset = hardware_named("xeon"), hardware_named("zionex")
    assert describe_rates(preset, Topology(), None)[0].startswith("rates of a data sheet: ")
    assert describe_rates(xeon, Topology(hosts=4), None) == (f"measured: {xeon.source}",)
    assert describe_rates(xeon, Topology(hosts=5), None)[-1] == "extrapolated: 5 hosts, and 1 was measured"


def test_the_published_rate_of_all_reduces_is_bytes_over_time():
    """60 GB/s: so S bytes on 128 ranks take S / 60 GB/s, although each rank sends nearly twice as many."""
    links = Links(machine_named("16x8xzionex"))
    assert links.all_reduce(6e9, 128, inside=False)["network"] == pytest.approx(0.1, rel=1e-3)
    assert links.gather(6e9, 128, inside=False)["network"] == pytest.approx(0.05, rel=1e-3)


def test_sending_takes_the_processor_where_a_profile_says_so():
    hardware = structs.replace(hardware_named("cpu"), cpu_s_per_byte=1e-9)
    slow, fast = (simulated(one, Topology(devices=4)) for one in (hardware, hardware_named("cpu")))
    busy = [next(u for u in one.uses if u.resource == "processor").busy_s for one in (slow, fast)]
    assert busy[0] > busy[1]


def test_copies_between_ranks_of_a_host_take_its_processors():
    shares = structs.replace(hardware_named("cpu"), copies_inside=True, cpu_s_per_byte=1e-9)
    beside = structs.replace(shares, copies_inside=False, cpu_s_per_byte=0.0)
    copied, sent = (simulated(hardware, Topology(devices=2)) for hardware in (shares, beside))
    busy = [{use.resource: use.busy_s for use in one.uses} for one in (copied, sent)]
    assert busy[0]["link"] == 0
    assert busy[0]["processor"] == pytest.approx(busy[1]["processor"] + busy[1]["link"])
    assert copied.step_s == pytest.approx(busy[0]["processor"])  # nothing travels beside computation
    assert {one.what for one in copied.help} == {one.what for one in sent.help}
    # Between hosts there is no shared memory.
    across = [simulated(structs.replace(h, cpu_s_per_byte=0.0), Topology(hosts=2)) for h in (shares, beside)]
    assert across[0].step_s == across[1].step_s


def test_what_a_program_takes_beside_all_else_is_added():
    overheads = (StageOverhead("other", 0.01), StageOverhead("reduce", 0.02))
    bare = structs.replace(hardware_named("cpu"), copies_inside=True)
    for world, more in ((1, 0.01), (2, 0.03)):
        added = structs.replace(bare, overheads=overheads)
        with_them, without = (simulated(hardware, Topology(devices=world)) for hardware in (added, bare))
        assert with_them.step_s == pytest.approx(without.step_s + more)
    with pytest.raises(SpecError, match=r"'other' are -1\.0 s"):
        structs.replace(bare, overheads=(StageOverhead("other", -1.0),))


def test_ranks_that_share_layers_by_tensors_are_said_not_to_run_here():
    topology = Topology(hosts=2, devices=8)
    found = simulate(choose_dense(MODEL, "tp:8", topology), place("2x8xh100-like", even=True))
    assert (found.dense, found.runs_here) == ("tp:8", False)
    for text, why in (
        ("tp:3", "3 ranks do not divide 16"),
        ("hybrid:5", "5 ranks do not divide 16"),
        ("fast", "expected"),
    ):
        with pytest.raises(SpecError, match=why):
            choose_dense(MODEL, text, topology)


def test_a_batch_has_a_sample_for_each_rank():
    with pytest.raises(SpecError, match="batch=4096: fewer samples than the 8,192 ranks"):
        simulate(MODEL, place("1024x8xzionex", even=True))


def test_a_trace_has_a_process_for_each_rank():
    where = place("2xcpu", even=False)
    loads = table_loads(MODEL, where, make_request(MODEL, where.machine))
    text = chrome_trace(step_work(MODEL, where, loads).stages(2), 1.0)
    assert '"process_name"' in text
    assert '"rank 1"' in text
    assert '"forward.top.0"' in text


def test_4096_ranks_that_differ_are_scheduled_in_little_time():
    rng = np.random.default_rng(0)
    world = 4096
    draws = {name: rng.uniform(1, 2, world) * 1e-3 for name in ("lookup_W", "update_W", "fetch_W", "store_W")}
    layers = parse_layers("64*26:64*26")
    machine = machine_named("512x8xzionex")
    work = work_of(Links(machine), TableSeconds(**draws, transfers={}), layers, samples=16.0)
    begin_s = process_time()
    steady_step(work.stages(2))
    assert process_time() - begin_s < 10  # a quarter of a second on a machine that does nothing else


def test_loads_are_even():
    found = even_loads(make_request(MODEL, machine_named("4xzionex")), Links(machine_named("4xzionex")))
    assert found.seconds.lookup_W.shape == (1,)


@given(works, st.integers(1, 3), st.integers(1, 64), seconds)
def test_batches_that_are_made_on_the_same_cores_lengthen_what_ranks_compute(work, depth, cores, made_s):
    """All work of a host's processors, of steps and batches, is there before and after."""
    times = MakingTimes(cores=cores, read_s=0.0, encode_s=0.0)
    machine = Machine(work.links.topology, structs.replace(work.links.machine.hardware, batches=times))
    making = replace(work, batch_s=made_s, links=replace(work.links, machine=machine))
    alone_W, both_W = (
        sum(s.seconds_W for s in one.stages(depth) if s.resource == "processor") for one in (work, making)
    )
    assert both_W == pytest.approx(alone_W + made_s * work.links.topology.devices / cores)
    assert steady_step(making.stages(depth), 24).step_s >= made_s - 1e-9


def test_batches_are_read_by_each_rank_or_by_the_workers_of_all_and_may_limit_a_step():
    times = MakingTimes(cores=2, read_s=1e-6, encode_s=4e-6)
    machine = Machine(Topology(devices=2), structs.replace(hardware_named("cpu"), batches=times))
    model = replace(MODEL, columns=10)
    assert making_s(model, machine) == pytest.approx(4096 * 10 * (1e-6 + 2e-6))
    assert making_s(replace(model, workers=True), machine) == pytest.approx(4096 * 10 * (0.5e-6 + 2e-6))
    four = structs.replace(machine, topology=Topology(hosts=2, devices=2))
    assert making_s(model, four) == pytest.approx(4096 * 10 * (1e-6 + 1e-6))
    assert making_s(replace(model, workers=True), four) == pytest.approx(4096 * 10 * (0.5e-6 + 2e-6))
    assert making_s(MODEL, machine) == 0.0
    found = simulate(model, SimulatedMachine(machine=machine))
    assert found.help[0].what == "batches"
    assert found.limits.startswith("Making batches limits the step: ")
    assert found.step_s > simulate(MODEL, SimulatedMachine(machine=machine)).step_s

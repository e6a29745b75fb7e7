"""Wires of fewer bits: fewer bytes, never more seconds but those of coding, and other plans where that pays."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from planning.perf.asked import request_of
from planning.planner.small_questions import questions, wires

from rowwise import SpecError, Table, Topology
from rowwise.planning.perf.access import Access, Curves, Workload
from rowwise.planning.perf.hardware import CodecRates, Coding, Machine, hardware_named, read_hardware
from rowwise.planning.perf.learned import model_of
from rowwise.planning.perf.roofline import Roofline
from rowwise.planning.perf.wires import link_shares, vector_bytes
from rowwise.planning.planner.kinds import candidate_kinds
from rowwise.planning.planner.layouts import LAYOUTS
from rowwise.planning.planner.options import TableArrays
from rowwise.planning.planner.pipeline import make_plan
from rowwise.tables.spec import Codecs, RowType, Wire, WireType, row_bytes


def coding(rate_Bps):
    one = CodecRates(encode_Bps=rate_Bps, decode_Bps=rate_Bps)
    return Coding(fp16=one, bf16=one, int8=one)


def links(question, wire, rate_Bps=1e30):
    """Seconds on links of all options' pieces."""
    hardware, topology = structs.replace(question.machine.hardware, coding=coding(rate_Bps)), question.machine.topology
    model, curves = Roofline(hardware, topology, wire), Curves.of(question.workloads, question.batch)
    columns = TableArrays.of(question)
    found = []
    for kind in candidate_kinds(question.machine, 4, ("device",)):
        index_T = np.flatnonzero(columns.blocks_T >= kind.column_parts)
        found.append(model.links_s(columns.shards(kind, index_T, question), curves))
    return np.concatenate(found)


@given(st.integers(1, 500), st.sampled_from(WireType))
def test_vectors_have_the_bytes_of_rows_of_their_type(dim, kind):
    assert vector_bytes(kind, np.array([4.0, dim])).tolist() == [
        row_bytes(RowType(kind), 4),
        row_bytes(RowType(kind), dim),
    ]


@given(questions(), wires, st.sampled_from(("host", "network")), st.sampled_from(("forward", "backward")))
def test_a_narrower_wire_never_costs_more_bytes(question, wire, link, way):
    """Of four columns and more: a narrower int8 is mostly its scale, and fp16 less than that up to eight."""
    found = []
    for kind in WireType:
        codecs = structs.replace(getattr(wire, link), **{way: kind})
        found.append(links(question, structs.replace(wire, **{link: codecs})))
    fp32_N, *narrower = found
    for narrow_N in narrower:
        assert (narrow_N <= fp32_N * (1 + 1e-12)).all()
        assert (narrow_N >= 0).all()


@given(questions())
def test_floats_are_coded_by_nobody(question):
    """To the bit, whatever coding would take; dense gradients are no business of tables."""
    assert np.array_equal(links(question, Wire(), 1.0), links(question, Wire(dense=WireType.INT8), 1e30))


def test_seconds_of_coding_are_of_what_leaves_by_direction_and_link():
    """By hand: 1,000 samples on 2 hosts of 2; of a table's vectors a quarter goes to the neighbour, half far away."""
    table, topology = Table(name="t", rows=1000, dim=64), Topology(hosts=2, devices=2)
    question = request_of([Workload(table=table, access=Access())], hardware_named("zionex"), topology)
    wire = Wire(host=Codecs(forward="fp16"), network=Codecs(backward="int8"))
    free, paid = links(question, wire)[0], links(question, wire, 1e9)[0]
    near, far = 64_000 * 4 / 4, 64_000 * 4 / 2
    assert paid - free == pytest.approx((near + far) * 2 / 1e9)
    saved = links(question, Wire())[0] - free
    assert saved == pytest.approx(near / 2 / 200e9 + far * (1 - 72 / 256) / 7e9)


def test_what_leaves_a_rank_is_less_than_it_has():
    for topology in (Topology(), Topology(devices=4), Topology(hosts=3), Topology(hosts=3, devices=4)):
        for layout in LAYOUTS:
            assert 0 <= sum(link_shares(layout.exchange, topology).values()) < 2
    assert link_shares("all_to_all", Topology(devices=4)) == {"host": 0.75, "network": 0.0, "uplink": 0.0}


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 3))
def test_shares_by_link_are_those_of_pairs_of_ranks(groups, devices):
    """By counting: a rank sends each rank an equal part, or each rank of its number on all hosts."""
    topology = Topology(hosts=sum(groups), devices=devices, groups=tuple(groups))
    world = range(topology.world)
    pairs = Counter(topology.link(a, b) for a in world for b in world if a != b)
    same_device = Counter(topology.link(a, b) for a in world for b in world if a != b and (a - b) % devices == 0)
    for link, share in link_shares("all_to_all", topology).items():
        assert share == pytest.approx(pairs[link] / topology.world**2)
    for link, share in link_shares("hierarchical", topology).items():
        far = same_device[link] / topology.world**2
        assert share == pytest.approx((devices - 1) / devices if link == "host" else far)


def test_an_uplink_has_its_own_rates_and_is_as_the_network_without():
    hardware, topology = hardware_named("zionex"), Topology(hosts=2, devices=2, groups=(1, 1))
    slow = structs.replace(hardware, uplink=structs.replace(hardware.network, all_to_all_Bps=1e9, all_reduce_Bps=1e9))
    assert hardware.link("uplink") == hardware.network
    assert read_hardware(slow.to_json()) == slow
    assert slow.slowest_link(topology) == slow.uplink
    assert slow.slowest_link(Topology(hosts=2, devices=2)) == slow.network
    assert slow.slowest_link(Topology(devices=2)) == slow.slowest_link(Topology()) == slow.host
    one = Workload(table=Table(name="t", rows=1000, dim=64), access=Access())
    question = request_of([one], hardware, topology)
    slowed = replace(question, machine=Machine(topology, slow))
    wires = Wire(), Wire(uplink=Codecs(forward="int8"))
    floats, narrow = (links(slowed, wire)[0] for wire in wires)
    assert floats > links(question, Wire())[0]
    assert floats - narrow == pytest.approx(64_000 * 4 / 2 * (1 - 72 / 256) / 1e9)
    with pytest.raises(SpecError, match="more than 0"):
        structs.replace(hardware, uplink=structs.replace(hardware.network, all_reduce_Bps=0.0))


def test_a_narrow_wire_makes_another_plan():
    """Eight small tables: in floats copies move less than vectors; as int8 between hosts vectors do."""
    topology, hardware = Topology(hosts=2, devices=2), hardware_named("h100-like")
    tables = [Table(name=f"t{k}", rows=300, dim=64) for k in range(8)]
    workloads = tuple(Workload(table=table, access=Access(pooling=1)) for table in tables)
    found = {}
    for kind in (WireType.FP32, WireType.INT8):
        wire = Wire(network=Codecs(kind, kind))
        asked = request_of(workloads, hardware, topology, batch=2048, model=model_of(hardware, topology, wire))
        found[kind] = make_plan(asked, seconds=0.1).plan
        assert found[kind].forecast.wire == wire
        assert found[kind].forecast.bound_s <= found[kind].forecast.step_s * (1 + 1e-9)
    copied, spread = (len(found[kind].tiles) for kind in (WireType.FP32, WireType.INT8))
    assert copied == 8 * topology.world
    assert spread == 8
    assert found[WireType.INT8].forecast.step_s < found[WireType.FP32].forecast.step_s


def test_a_profile_without_rates_of_coding_is_read_and_has_usual_ones():
    hardware = hardware_named("cpu")
    assert read_hardware(hardware.to_json()) == hardware
    assert hardware.coding is None
    assert hardware.coding_s(WireType.FP32) == 0
    assert hardware.coding_s(WireType.FP16) == pytest.approx(8 / hardware.device_Bps)
    assert hardware.coding_s(WireType.INT8) == pytest.approx(16 / hardware.device_Bps)
    measured = structs.replace(hardware, coding=coding(2e9))
    assert read_hardware(measured.to_json()) == measured
    assert measured.coding_s(WireType.INT8) == pytest.approx(8 / 2e9)


def test_learned_exchanges_have_the_wire_too():
    """Stages that a run shows beside what it measures: narrow vectors take less of them, floats what they took."""
    hardware, topology = structs.replace(hardware_named("xeon"), coding=coding(1e30)), Topology(devices=2)
    workloads = tuple(Workload(table=Table(name=f"t{k}", rows=10**6, dim=64), access=Access()) for k in range(6))
    stages = {}
    for kind in WireType:
        model = model_of(hardware, topology, Wire(host=Codecs(kind, kind)))
        asked = request_of(workloads, hardware, topology, batch=8192, model=model)
        only = structs.replace(asked.constraints, layouts={"*": ("table_wise",)})
        stages[kind] = make_plan(replace(asked, constraints=only), seconds=0.05).plan.forecast.stages_s
    assert hardware.exchanges is not None
    exchange = {kind: max(found["exchange"]) for kind, found in stages.items()}
    assert exchange["int8"] < exchange["fp16"] == exchange["bf16"] < exchange["fp32"]
    assert all(found["lookup"] == stages["fp32"]["lookup"] for found in stages.values())

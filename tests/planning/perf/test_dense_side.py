"""The dense side in plans: it takes memory from tables, and time on links. The kind that is proposed is the fastest."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from planning.perf.asked import request_of

from rowwise import Table, Topology
from rowwise.planning.perf.access import Workload
from rowwise.planning.perf.dense_parallel import KINDS, ActivationBytes, DenseSide, DenseUnits
from rowwise.planning.perf.hardware import hardware_named
from rowwise.planning.planner.infeasible import InfeasibleError
from rowwise.planning.planner.pipeline import make_plan

SHAPES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=3)
MiB = 1 << 20


def side_of(units, **options):
    return DenseSide(shapes=DenseUnits(tuple(map(tuple, units)), ((8,),)), state_slots=2, **options)


@given(
    st.lists(SHAPES, min_size=1, max_size=4),
    st.sampled_from([(1, 2), (1, 8), (2, 4), (3, 1)]),
    st.floats(0, 2),
    st.integers(0, 5000),
)
def test_the_way_that_is_proposed_fits_and_is_the_fastest(units, hosts_devices, share, kept):
    """And recomputes nothing if anything fits without."""
    topology, hardware, batch = Topology(*hosts_devices), hardware_named("a100-like"), 1000
    side = side_of(units, activations=ActivationBytes(kept, kept // 3))
    room = share * side.memory_bytes(topology, batch)
    best = side.fastest(topology, hardware, batch, room)
    kinds = [structs.replace(side, kind=kind) for kind in KINDS]
    again = [structs.replace(kind, recompute=True) for kind in kinds]
    fitting = [[one for one in ways if one.memory_bytes(topology, batch) <= room] for ways in (kinds, again)]
    chosen = fitting[0] or (fitting[1] if kept else [])
    assert (best is None) == (not chosen)
    if best is not None:
        assert best.memory_bytes(topology, batch) <= room
        assert best.recompute == (not fitting[0])
        assert best.seconds(topology, hardware) == pytest.approx(min(o.seconds(topology, hardware) for o in chosen))


def test_seconds_are_bytes_over_rates():
    """One layer of 1 MiB on two hosts of two devices; groups are hosts."""
    side, topology = side_of([[(512, 512)]]), Topology(2, 2)
    hardware = hardware_named("a100-like")
    own = 8 * 4  # bytes beside the layer
    network, host = hardware.network, hardware.host
    assert side.seconds(topology, hardware) == pytest.approx(1.5 * (MiB + own) / network.all_reduce_Bps)
    full = structs.replace(side, kind="full")
    assert full.seconds(topology, hardware) == pytest.approx(0.75 * (3 * MiB + 2 * own) / network.reduce_scatter_Bps)
    hybrid = structs.replace(side, kind="hybrid")
    inside, across = 0.5 * (3 * MiB + 2 * own) / host.reduce_scatter_Bps, (MiB + own) / 2 / network.all_reduce_Bps
    assert hybrid.seconds(topology, hardware) == pytest.approx(inside + across)


def asked(dense, device_bytes):
    hardware = structs.replace(hardware_named("cpu"), device_bytes=device_bytes)
    tables = [Table(name=f"t{i}", rows=40_000, dim=16) for i in range(4)]
    return request_of(map(Workload, tables), hardware, Topology(devices=4), batch=1024, dense=dense)


def test_tables_and_dense_parameters_share_the_memory_of_a_rank():
    units = [[(512, 512)]] * 4
    whole, part = side_of(units), side_of(units, kind="full")
    topology = Topology(devices=4)
    room = 4 * MiB + part.cost(topology).memory_bytes
    assert whole.cost(topology).memory_bytes > room
    with pytest.raises(InfeasibleError):
        make_plan(asked(whole, room), seconds=0.02)
    made = make_plan(asked(part, room), seconds=0.02)
    alone = make_plan(asked(None, 4 * MiB), seconds=0.02)
    assert made.plan.forecast.limits_bytes == alone.plan.forecast.limits_bytes
    assert made.plan.tiles == alone.plan.tiles


def test_a_step_waits_for_the_dense_side():
    side = side_of([[(512, 512)]])
    request = asked(side, 1 << 30)
    longer = make_plan(request, seconds=0.02).plan.forecast
    shorter = make_plan(replace(request, dense=None), seconds=0.02).plan.forecast
    assert longer.step_s == shorter.step_s  # of the tables
    assert longer.pipelined_s == pytest.approx(shorter.pipelined_s + request.dense_s, rel=0.1)

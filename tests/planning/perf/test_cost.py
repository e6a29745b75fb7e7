"""Cost models: what a sum of loads costs is convex and grows, and loads are what the formulas say."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from msgspec import structs

from rowwise import SpecError
from rowwise.planning.perf.access import Access, Curves, Workload
from rowwise.planning.perf.cost import Phi, Shards
from rowwise.planning.perf.hardware import PRESETS, LinkRates, hardware_named, read_hardware
from rowwise.planning.perf.memory import memory_bytes
from rowwise.planning.perf.roofline import Roofline
from rowwise.tables.row_optimizers import Sgd
from rowwise.tables.spec import Table, Topology
from rowwise.tables.store.sizes import cache_bytes, disk_bytes

LOADS = arrays(float, (2, 6), elements=st.floats(0, 10))
PHIS = (Phi(1.0, (6,), (1.0,)), Phi(0.5, (3, 6), (6.0, 6.0)), Phi(0.0, (2, 3, 6), (2.0, 1.0, 3.5)))


@given(load=LOADS, part=st.floats(0, 1))
@pytest.mark.parametrize("phi", PHIS, ids=str)
def test_phi_is_convex_and_grows_with_every_load(phi, load, part):
    a, b = load
    mixed = float(phi(part * a + (1 - part) * b))
    assert mixed <= part * float(phi(a)) + (1 - part) * float(phi(b)) + 1e-9
    assert float(phi(a + b)) >= float(phi(a)) - 1e-12
    assert float(phi(np.zeros(6))) == phi.constant


@given(load=LOADS)
@pytest.mark.parametrize("phi", PHIS, ids=str)
def test_tangents_of_phi_are_below_it(phi, load):
    a, b = load
    tangent = float(phi(a) + phi.gradient(a) @ (b - a))
    assert tangent <= float(phi(b)) + 1e-9


def shards(table, exchange="all_to_all", row_parts=1, share=1.0, tier="device", cached=0.0):
    one = np.array([1.0])
    return Shards(
        exchange=exchange, table_N=np.array([0]), row_parts=row_parts, rows_N=np.ceil(one * table.rows / row_parts),
        dim_N=one * table.dim, bags_N=one, row_bytes_N=one * table.row_bytes, state_bytes_N=one * 0, share=share,
        tier=tier, cached=cached,
    )  # fmt: skip


def test_a_table_costs_the_bytes_that_it_moves():
    """By hand, of a table so large that no row comes twice: 1,000 samples of 5 ids, rows of 256 bytes."""
    table = Table(name="t", rows=10**12, dim=64, optimizer=Sgd())
    curves = Curves.of([Workload(table=table, access=Access(pooling=5))], 1000)
    model = Roofline(hardware_named("a100-like"), Topology(devices=4))
    want_us = [
        # ids 40,000 + offsets 8,000 + rows 1,280,000 + vectors 256,000 bytes at 1.35 TB/s, then at 4 TB/s
        1_584_000 / 1.35e6,
        1_584_000 / 4e6,
        0.6,  # 6,000 ids and bags, 0.1 ns each
        0.0,
        # what sorts ids, 48 bytes each: 240,000; gradients of vectors 256,000; rows read and written 2,560,000
        3_056_000 / 1.35e6,
        3_840_000 / 4e6,  # rows of gradients 1,280,000 and of weights 2,560,000
        2.0,  # 10,000 ids and rows, 0.2 ns each
        0.0,
    ]
    assert model.loads(shards(table), curves)[0] * 1e6 == pytest.approx(want_us, rel=1e-6)
    # Three quarters of 256,000 bytes leave for the other ranks, and come back, at 25 GB/s.
    assert model.links_s(shards(table), curves)[0] * 1e6 == pytest.approx(15.36, rel=1e-6)
    assert model.phi.constant == 2 * 15e-6


def test_rows_in_lower_tiers_cost_more_the_fewer_are_cached():
    table = Table(name="t", rows=10**6, dim=64)
    curves = Curves.of([Workload(table=table, access=Access(pooling=5, zipf_a=1.0))], 1024)
    model = Roofline(hardware_named("zionex"), Topology(hosts=2, devices=4))
    costs = [
        float(model.phi(model.loads(shards(table, tier=tier, cached=cached), curves))[0])
        for tier, cached in (("device", 0), ("host", 0.5), ("host", 0.1), ("host", 0.0), ("disk", 0.5), ("disk", 0.0))
    ]
    assert costs == sorted(costs)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_and_say_where_they_are_from(name):
    hardware = hardware_named(name)
    assert read_hardware(hardware.to_json()) == hardware
    assert "not measured" in hardware.source or "measured on one thread of" in hardware.source


def test_hardware_that_cannot_be_is_refused():
    with pytest.raises(SpecError, match="one of a100-like"):
        hardware_named("b200")
    with pytest.raises(SpecError, match="not a hardware profile"):
        read_hardware("{}")
    with pytest.raises(SpecError, match="more than 0"):
        msgspec.structs.replace(hardware_named("cpu"), device_Bps=0)
    link = LinkRates(all_to_all_Bps=-1, reduce_scatter_Bps=1, all_reduce_Bps=1)
    with pytest.raises(SpecError, match=r"network\.all_to_all_Bps=-1"):
        msgspec.structs.replace(hardware_named("cpu"), network=link)


def test_a_disk_reads_what_the_cache_misses_and_writes_it_back():
    table = Table(name="t", rows=10**6, dim=64, optimizer=Sgd())  # records of 256 + 16 bytes, 15 in a block of 4 KiB
    curves = Curves.of([Workload(table=table, access=Access(pooling=5, zipf_a=1.0))], 1024)
    hardware = structs.replace(hardware_named("zionex"), disk_reads_s=1e5, disk_write_Bps=2e9)
    pieces = shards(table, tier="disk", cached=0.1)
    for devices in (1, 4):
        model = Roofline(hardware, Topology(devices=devices))
        misses = 5 * 1024 * (1 - curves.hit_rate(np.zeros(1, int), np.array([1e5]))[0])
        load = model.loads(pieces, curves)[0]
        assert load[3] == pytest.approx(devices * misses / 1e5)
        assert load[7] == pytest.approx(devices * misses * 4096 / 15 / 2e9)
    assert 0 < misses < curves.unique_T[0]


@pytest.mark.parametrize(("above", "place"), [("device", 0), ("host", 1)])
def test_a_cache_takes_the_memory_that_holds_it(above, place):
    table = Table(name="t", rows=10**6, dim=64, optimizer=Sgd())
    curves = Curves.of([Workload(table=table)], 1024)
    pieces = replace(shards(table, tier="disk", cached=0.1), cache_tier=above)
    expected = {place: cache_bytes(table, 10**5), 2: disk_bytes(table)}
    assert memory_bytes(pieces, curves, False)[0].tolist() == [expected.get(tier, 0) for tier in range(3)]

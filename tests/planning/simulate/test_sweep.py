"""Sweeps: every combination once, the fastest first, what does not fit last, the same to the bit each time."""

from dataclasses import replace

import pytest
from msgspec import structs
from planning.simulate.test_simulated_step import MODEL

from rowwise.base.errors import SpecError
from rowwise.planning.planner.machines import machine_named
from rowwise.planning.simulate.simulation import SimulatedMachine, choose_dense, faster_links, simulate
from rowwise.planning.simulate.sweep import EXAMPLES, QUANTITIES, Case, parse_vary, sweep
from rowwise.tables.spec import Wire


def case(machine="2x4xzionex", *, even=True):
    return Case(MODEL, SimulatedMachine(machine=machine_named(machine), even=even))


VARIED = {"hosts": ("1", "2"), "batch": ("4k", "8k"), "dense": ("replicated", "full", "tp:2"), "wire": ("fp32", "int8")}


@pytest.mark.few(1)
@pytest.mark.parametrize("even", [True, False])
def test_all_combinations_are_there_the_fastest_first_and_again_the_same(even):
    found = sweep(case(even=even), VARIED)
    assert len({tuple(row.settings.items()) for row in found.rows}) == 24 == len(found.rows)
    rates = [row.simulation.samples_s for row in found.rows]
    assert rates == sorted(rates, reverse=True)
    assert sweep(case(even=even), VARIED) == found
    assert found.fastest.step_s == found.rows[0].simulation.step_s
    assert found.fastest.help


def test_the_best_of_each_kind_are_marked():
    found = sweep(case(), VARIED)
    for kind, wire in (("lossless", "fp32"), ("lossy", "int8")):
        best = found.best(kind)
        runs = [r for r in found.rows if r.settings["wire"] == wire and not r.settings["dense"].startswith("tp")]
        assert best.simulation.samples_s == max(row.simulation.samples_s for row in runs)
    assert all(row.simulation.runs_here != row.settings["dense"].startswith("tp") for row in found.rows)


def test_factors_are_over_everything_sharded_on_the_same_machine():
    found = sweep(case(), VARIED)
    for row in found.rows:
        if (row.settings["dense"], row.settings["wire"]) == ("full", "fp32"):
            assert row.factor == 1.0
    row = found.rows[0]
    machine = machine_named(f"{row.settings['hosts']}x4xzionex")
    full = choose_dense(replace(MODEL, batch=row.simulation.batch, wire=Wire()), "full", machine.topology)
    base = simulate(full, SimulatedMachine(machine=machine, even=True)).samples_s
    assert row.factor == pytest.approx(row.simulation.samples_s / base)


def test_more_memory_is_never_slower():
    memory = ("2GB", "1GB", "3GB", "8GB", "20GB")
    rows = sweep(case("2x4xzionex:host=0GB", even=False), {"memory": memory, "wire": ("fp32", "int8")}).rows
    for wire in ("fp32", "int8"):
        step_s = {row.settings["memory"]: row.simulation.step_s for row in rows if row.settings["wire"] == wire}
        times = [step_s[size] for size in ("1GB", "2GB", "3GB", "8GB", "20GB")]
        assert times == sorted(times, reverse=True)


def test_what_does_not_fit_is_last_with_the_bytes_that_it_lacks():
    found = sweep(case("4xzionex:host=0GB"), {"memory": ("1MB", "20GB", "2MB")})
    assert [row.settings["memory"] for row in found.rows] == ["20GB", "2MB", "1MB"]
    assert [row.simulation.fits for row in found.rows] == [True, False, False]
    assert found.rows[2].simulation.lacking_bytes > found.rows[1].simulation.lacking_bytes > 0
    assert found.rows[2].factor is None


def test_a_faster_network_has_faster_uplinks():
    hardware = machine_named("2x8xzionex").hardware
    slow = structs.replace(hardware, uplink=structs.replace(hardware.network, all_to_all_Bps=1e9, latency_s=5e-5))
    faster = faster_links(slow, 2.0)
    assert (faster.uplink.all_to_all_Bps, faster.uplink.latency_s) == (2e9, 5e-5)
    assert faster.network.all_reduce_Bps == 2 * hardware.network.all_reduce_Bps
    assert faster.host == hardware.host


def test_nothing_fits():
    found = sweep(case("4xzionex:device=1MB,host=0GB"), {"depth": ("1", "2")})
    assert (found.fastest, found.best("lossless")) == (None, None)


@pytest.mark.parametrize("name", QUANTITIES)
def test_each_quantity_can_be_varied(name):
    found = sweep(case("2x8xzionex"), parse_vary([f"{name}={EXAMPLES[name]}"]))
    assert len(found.rows) == len(EXAMPLES[name].split(","))
    assert found.rows[0].simulation != found.rows[-1].simulation


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["hots=2"], "did you mean hosts\\?"),
        (["speed=2"], "expected one of hardware, hosts"),
        (["hosts"], "and values: batch=64k,128k"),
        (["hosts="], "no values: expected values such as hosts=2,4,8"),
        (["hosts=2", "hosts=4"], "varied twice"),
        (["batch=" + ",".join(map(str, range(1, 202))), "hosts=" + ",".join(map(str, range(1, 52)))], "10,251 combin"),
    ],
)
def test_wrong_sweeps_are_refused(texts, why):
    with pytest.raises(SpecError, match=why):
        parse_vary(texts)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("hosts", "0", "hosts=0: expected a whole number of at least 1, such as 2"),
        ("batch", "many", "batch=many: expected a whole number"),
        ("batch", "9" * 5000, "9: expected a whole number"),
        ("batch", "\u0661k", "expected a whole number"),
        ("dense", "tp:" + "9" * 5000, "expected replicated, full"),
        ("network", "-1x", "network=-1x: expected a factor"),
        ("network", "nan", "network=nan: expected a factor"),
        ("wire", "int3", "wire=int3: expected one of fp32"),
        ("dense", "tp:3", "3 ranks do not divide 8"),
        ("hardware", "zionx", "no hardware preset 'zionx'; there are zionex"),
        ("memory", "lots", "memory='lots': expected a size"),
    ],
)
def test_wrong_values_are_refused(name, value, why):
    with pytest.raises(SpecError, match=why):
        sweep(case(), {name: (value,)})

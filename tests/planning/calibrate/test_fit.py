"""Profiles fitted to measurements that were made up by a model that is known."""

import numpy as np
import pytest
from msgspec import structs
from planning.perf.asked import request_of, whole_tables

from rowwise.base.errors import SpecError
from rowwise.planning.calibrate.fit import (
    BOUNDED_NETWORKS,
    FITTED_ROOFLINE,
    MachineDescription,
    estimate_noise,
    fit_profile,
)
from rowwise.planning.calibrate.fit_links import fit_links, list_amounts
from rowwise.planning.calibrate.samples import LinkSample, SetSample
from rowwise.planning.calibrate.set_arrays import stack_sets
from rowwise.planning.calibrate.train_exchange import amounts_of, train_exchanges
from rowwise.planning.calibrate.train_network import NetworkShape, _Batches, _Net, predict_s, train_network
from rowwise.planning.perf.access import Access, Curves, Workload
from rowwise.planning.perf.hardware import hardware_named, read_hardware
from rowwise.planning.perf.roofline import Roofline
from rowwise.planning.planner.pipeline import make_plan
from rowwise.tables.spec import Table, Topology

CPU = structs.replace(hardware_named("cpu"), device_Bps=5e9, launch_s=2e-4, forward_issue_s=2e-8)
ABOUT = MachineDescription(
    name="made up",
    machine="nothing",
    device="cpu",
    world=2,
    threads=1,
    device_bytes=1 << 33,
    cache_bytes=CPU.cache_bytes,
)


def made_up(count, noise=0.02, seed=0):
    """Sets whose seconds are a roofline's, but for noise."""
    rng, model = np.random.default_rng(seed), Roofline(CPU, Topology())
    for number in range(count):
        tables = tuple(
            Workload(
                table=Table(name=f"t{i}", rows=int(10 ** rng.uniform(2, 6)), dim=int(rng.choice((4, 16, 64, 128)))),
                access=Access(pooling=float(np.exp(rng.normal(1.5, 1))), zipf_a=float(rng.uniform(0, 1.3))),
            )
            for i in range(rng.integers(1, 16))
        )
        batch = int(2 ** rng.uniform(8, 13))
        load_K = model.loads(whole_tables(request_of(tables, CPU, batch=batch)), Curves.of(tables, batch)).sum(0)
        lookup_s, update_s = (float(stage.seconds(model.phi, load_K)) for stage in model.stages)
        for again in (False, True)[: 1 + (number % 10 == 0)]:
            off = 1 + noise * rng.standard_normal(2)
            yield SetSample(
                number=number, rank=0, batch=batch, workloads=tables, lookup_s=lookup_s * off[0],
                update_s=update_s * off[1], again=again, took_s=0.1,
            )  # fmt: skip


def exchanges(count, noise=0.02, seed=1):
    """Exchanges that take a start, ids, and bytes, and wait for the last."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        dim_W, ids_W = rng.integers(4, 900, 2), rng.integers(100, 100_000, 2)
        batch, skew_W = int(2 ** rng.uniform(8, 14)), rng.uniform(0, 5e-3, 2) * (number % 2)
        skew_W -= skew_W.min()
        vectors_W = (dim_W + dim_W.mean()) / 2 * batch * 4 / 2 / 2e9
        taken = [2e-4 + ids_W.max() * 5e-9 + np.zeros(2), 2e-4 + vectors_W + skew_W.max() - skew_W, 2e-4 + vectors_W]
        route_W, exchange_W, return_W = (tuple((t * (1 + noise * rng.standard_normal(2))).tolist()) for t in taken)
        yield LinkSample(
            number=number, layout="table_wise", hosts=1, batch=batch, dim_W=tuple(dim_W.tolist()),
            ids_W=tuple(ids_W.tolist()), skew_W=tuple(skew_W.tolist()), route_W=route_W, exchange_W=exchange_W,
            return_W=return_W, took_s=0.1,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds where nothing else runs, minutes where much does
def test_a_profile_predicts_what_it_never_saw():
    samples = [*made_up(900), *exchanges(150)]
    shapes = {BOUNDED_NETWORKS: NetworkShape(steps=700, batch=256)}
    fitted = fit_profile(samples, ABOUT, shapes=shapes)
    quality, hardware = fitted.quality, fitted.hardware
    errors = {one.model: one for one in quality.errors}
    assert errors[BOUNDED_NETWORKS].error < 0.08
    assert errors[BOUNDED_NETWORKS].tau > 0.92
    assert errors[FITTED_ROOFLINE].error < 0.05  # it is what the truth is made of
    assert hardware.device_Bps == pytest.approx(5e9, rel=0.2)
    assert 0.005 < quality.noise < 0.03
    assert quality.held_out == sum(s.number % 7 == 0 and isinstance(s, SetSample) for s in samples)
    assert read_hardware(hardware.to_json()) == hardware
    assert "2 processes of 1 threads on cpu: 990 sets of tables and 150 exchanges" in hardware.source
    request = request_of(next(iter(made_up(1))).workloads, hardware, Topology(devices=2), batch=4096)
    forecast = make_plan(request, seconds=0.05).plan.forecast
    assert set(forecast.stages_s) == {"lookup", "update", "exchange", "wait"}
    assert forecast.bound_s <= forecast.step_s


def test_what_torch_trains_is_what_numpy_evaluates():
    import torch

    measured = stack_sets([s for s in made_up(70) if not s.again])
    for shape in (
        NetworkShape(steps=3),
        NetworkShape(form="published", bounded=False, steps=3),
        NetworkShape(form="published", steps=3),
    ):
        sets = measured.of_stage("update")
        torch.manual_seed(0)
        net = _Net(sets, shape)
        features, work, number, ms = _Batches.tensors(sets)
        with torch.no_grad():
            expected_S = net(features, work, number, len(ms)).numpy() * 1e-3
        np.testing.assert_allclose(predict_s(net.export(), sets), expected_S, rtol=2e-4)


@pytest.mark.slow
def test_a_network_learns_and_is_the_same_again():
    measured = stack_sets([s for s in made_up(80) if not s.again])
    sets = measured.of_stage("lookup")
    first, later = (train_network(sets, NetworkShape(steps=steps)) for steps in (20, 120))
    error = [np.mean(np.abs(predict_s(n, sets) / sets.seconds_S - 1)) for n in (first, later)]
    assert error[1] < error[0] * 0.7
    assert later == train_network(sets, NetworkShape(steps=120))
    assert later.phi.is_convex


@pytest.mark.slow
def test_noise_is_that_of_one_measurement():
    sets = list(made_up(2000, noise=0.05))
    found = estimate_noise(sets, np.zeros(len(sets)))
    one = 0.05 * np.sqrt(2 / np.pi)  # mean distance of a normal deviation; two stages' errors partly cancel
    assert 0.5 * one < found < 1.1 * one
    assert estimate_noise(sets[:1], np.zeros(1)) == 0.0
    slow_S = np.where([s.again for s in sets], 0.3, 0.0)
    slower = [
        structs.replace(s, lookup_s=s.lookup_s * np.exp(d), update_s=s.update_s * np.exp(d))
        for s, d in zip(sets, slow_S, strict=True)
    ]
    assert estimate_noise(slower, slow_S) == pytest.approx(found)
    assert estimate_noise(slower, np.zeros(len(sets))) > 2 * found


def test_rates_of_links_are_found():
    links = fit_links(list(exchanges(200, noise=0.01)), CPU)
    assert links.count == 200
    assert links.error < 0.06
    host = links.hardware.host
    assert host.latency_s == pytest.approx(2e-4, rel=0.15)
    assert host.all_to_all_Bps == pytest.approx(2e9, rel=0.3)
    few = fit_links(list(exchanges(6)), CPU)
    assert few.hardware == CPU
    assert few.error is None


def test_copies_are_no_ids_and_no_vectors():
    sample = structs.replace(next(iter(exchanges(1))), copied=1000)
    assert list_amounts(sample) == [1.0, 0.0, 0.0, 0.0, 4000.0]


@pytest.mark.slow
def test_networks_of_exchanges_know_who_waits():
    made = train_exchanges(list(exchanges(120)), lambda share: None)
    assert made is not None
    assert made.error < 0.08
    sample = next(s for s in exchanges(20, noise=0.0, seed=5) if max(s.skew_W) > 2e-3)
    predicted_W = made.forward(amounts_of(sample, "forward"))
    assert predicted_W == pytest.approx(np.array(sample.exchange_W), rel=0.15)
    assert train_exchanges(list(exchanges(20)), lambda share: None) is None


def test_too_few_sets_are_refused():
    with pytest.raises(SpecError, match="12 sets of tables"):
        fit_profile([s for s in made_up(12) if not s.again], ABOUT)

"""Networks as data: convex where they say so, read back as they were, refused where layers do not fit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from planning.perf.asked import request_of, whole_tables
from planning.perf.networks import WORK, network, profile

from rowwise.base.errors import SpecError
from rowwise.planning.perf.access import Access, Curves, Workload
from rowwise.planning.perf.exchange import ExchangeNetwork
from rowwise.planning.perf.features import nominal_work
from rowwise.planning.perf.hardware import hardware_named, read_hardware
from rowwise.planning.perf.learned import LearnedModel, model_of
from rowwise.planning.perf.network import MAX_DEVIATIONS
from rowwise.planning.perf.roofline import Roofline
from rowwise.tables.spec import RowType, Table, Topology

FEW = settings(max_examples=25, deadline=None)
FORMS = st.sampled_from(("scaled", "published"))


@FEW
@given(seed=st.integers(0, 999), form=FORMS)
def test_with_weights_that_are_not_negative_phi_is_convex_and_grows(seed, form):
    phi, rng = network(np.random.default_rng(seed), form).phi, np.random.default_rng(seed)
    unit = 1e-3 if form == "scaled" else 1.0
    a_NK, b_NK = rng.exponential(size=(2, 50, 5)) * unit
    share_N1 = rng.uniform(size=(50, 1))
    share_N = share_N1[:, 0]
    between_N = phi(share_N1 * a_NK + (1 - share_N1) * b_NK)
    assert (between_N <= (share_N * phi(a_NK) + (1 - share_N) * phi(b_NK)) * (1 + 1e-12)).all()
    assert (phi(a_NK + b_NK) >= phi(a_NK) * (1 - 1e-12)).all()
    assert phi.is_convex
    assert phi(np.zeros(5)) == pytest.approx(phi.constant)


@FEW
@given(seed=st.integers(0, 999), form=FORMS)
def test_the_gradient_is_a_tangent_from_below(seed, form):
    phi, rng = network(np.random.default_rng(seed), form).phi, np.random.default_rng(seed)
    a_NK, b_NK = rng.exponential(size=(2, 50, 5)) * (1e-3 if form == "scaled" else 1.0)
    tangent_N = phi(a_NK) + (phi.gradient(a_NK) * (b_NK - a_NK)).sum(1)
    assert (tangent_N <= phi(b_NK) * (1 + 1e-9) + 1e-15).all()


def test_weights_below_zero_are_told():
    assert not network(np.random.default_rng(3), "published", bounded=False).phi.is_convex


def asked(hardware, tables=12, world=1):
    rng = np.random.default_rng(5)
    workloads = tuple(
        Workload(
            table=Table(name=f"t{i}", rows=int(10 ** rng.uniform(1, 6)), dim=int(rng.choice((4, 12, 64)))),
            access=Access(pooling=float(10 ** rng.uniform(-0.5, 1.5)), zipf_a=float(rng.uniform(0, 1.4))),
        )
        for i in range(tables)
    )
    return request_of(workloads, hardware, Topology(devices=world), batch=2048)


@pytest.mark.parametrize("form", ["scaled", "published"])
def test_a_model_adds_up_its_networks(form):
    hardware = profile(1, form)
    question = asked(hardware)
    model = question.model
    assert isinstance(model, LearnedModel)
    load_K = model.loads(whole_tables(question), Curves.of(question.workloads, 2048)).sum(0)
    stages = [float(stage.seconds(model.phi, load_K)) for stage in model.stages]
    kernels = hardware.kernels
    assert kernels is not None
    begin = 2
    for seconds, one in zip(stages, (kernels.lookup, kernels.update), strict=True):
        assert seconds == pytest.approx(float(one.phi(load_K[begin : begin + one.width])))
        begin += one.width
    assert sum(stages) == pytest.approx(float(model.phi(load_K)))
    assert [stage.name for stage in model.stages] == ["lookup", "update"]


@pytest.mark.parametrize("form", ["scaled", "published"])
def test_what_is_unlike_anything_seen_is_taken_for_the_nearest(form):
    made, rng = network(np.random.default_rng(2), form), np.random.default_rng(3)
    mean_F, scale_F = np.array(made.mean), np.array(made.scale)
    far_NF = mean_F + scale_F * rng.choice([-50.0, 50.0, 0.5], size=(20, len(mean_F)))
    near_NF = mean_F + np.clip((far_NF - mean_F) / scale_F, -MAX_DEVIATIONS, MAX_DEVIATIONS) * scale_F
    work_NK = rng.exponential(size=(20, made.width))
    np.testing.assert_allclose(made.psi(far_NF, work_NK), made.psi(near_NF, work_NK))
    if form == "scaled":
        np.testing.assert_allclose(made.psi(far_NF, 3 * work_NK), 3 * made.psi(far_NF, work_NK))
        factor_NK = made.psi(far_NF, work_NK) / work_NK / np.array(made.gain)
        assert ((factor_NK >= 1 / 20.001) & (factor_NK <= 20.001)).all()


def test_a_profile_is_read_back_as_it_was():
    hardware = profile(2)
    assert read_hardware(hardware.to_json()) == hardware
    assert isinstance(model_of(hardware_named("cpu"), Topology()), Roofline)


def test_layers_that_do_not_fit_are_refused():
    made = network(np.random.default_rng(0))
    with pytest.raises(SpecError, match=r"outer is \(6, 5\)"):
        structs.replace(made, outer=made.outer[1:])
    with pytest.raises(SpecError, match="rows of several lengths"):
        structs.replace(made, inner=(made.inner[0][:3], *made.inner[1:]))
    with pytest.raises(SpecError, match="least 1"):
        structs.replace(made, power=0.5)
    with pytest.raises(SpecError, match="300 hinges"):
        network(np.random.default_rng(0), hinges=300)


def test_networks_that_do_not_fit_a_step_are_refused():
    """They came from a profile of a stranger, and were an error of an array or of an assertion."""
    exchange = ExchangeNetwork(
        start_s=1e-5, byte_s=1e-9, id_s=1e-9, mean=(0.0,) * 10, scale=(1.0,) * 10, inner=((0.1, 0.2),) * 10,
        inner_offset=(0.0, 0.0), outer=(0.1, 0.1), outer_offset=0.0,
    )  # fmt: skip
    for changes in ({"inner": ((0.1,), *exchange.inner[1:])}, {"mean": (0.0,) * 9}, {"outer": (0.1,)}):
        with pytest.raises(SpecError, match=r"network: .* to fit"):
            structs.replace(exchange, **changes)
    kernels = profile(1).kernels
    less = {name: getattr(kernels.lookup, name)[1:] for name in ("mean", "scale", "inner")}
    published = profile(1, "published").kernels.update
    for made in (
        structs.replace(kernels, lookup=structs.replace(kernels.lookup, **less)),
        structs.replace(kernels, lookup=network(np.random.default_rng(0), width=4)),
        structs.replace(kernels, update=published),
    ):
        with pytest.raises(SpecError, match=r"hardware 'random': kernels\.(lookup|update): expected 27 features"):
            model_of(structs.replace(profile(1), kernels=made), Topology())


def test_narrow_rows_are_less_work():
    """Networks are asked about row types by the bytes of a row; vectors are floats whatever rows are."""
    wide = Table(name="t", rows=10_000, dim=64)
    found = []
    for table in (wide, structs.replace(wide, row_type=RowType.INT8)):
        question = replace(asked(profile(4)), workloads=(Workload(table=table, access=Access(pooling=5.0)),))
        (work_K,) = nominal_work("lookup", whole_tables(question), Curves.of(question.workloads, 2048))
        found.append(dict(zip(WORK["lookup"], work_K, strict=True)))
    assert found[1]["gathered"] < found[0]["gathered"]
    assert found[1]["pooled"] == found[0]["pooled"]

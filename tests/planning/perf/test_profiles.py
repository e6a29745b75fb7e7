"""Profiles that come with the package: where they are from, and that plans can be made by them."""

import pytest
from planning.perf.asked import request_of

from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.hardware import PRESETS, PROFILE_FOLDER, hardware_named
from rowwise.planning.perf.learned import LearnedModel, model_of
from rowwise.planning.planner.pipeline import make_plan
from rowwise.tables.spec import Table, Topology

FROM_OPS = ("zen4", "zen5")  # fitted to saved results of a grid; others were measured by rowwise calibrate
PROFILES = sorted(path.stem for path in PROFILE_FOLDER.glob("*.json"))


def test_one_was_measured_and_all_say_where_they_are_from():
    assert PROFILES
    for name in PRESETS:
        hardware = hardware_named(name)
        assert hardware.name == name
        assert ("not measured" in hardware.source) == (name not in PROFILES) or "are not measured" in hardware.source


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("world", [1, 2, 8])
def test_plans_are_made_by_what_was_learned(name, world):
    hardware = hardware_named(name)
    kernels = hardware.kernels
    assert kernels is not None
    assert kernels.sets > (150 if name in FROM_OPS else 1000)
    assert kernels.error < 0.12
    model = model_of(hardware, Topology(devices=world))
    assert isinstance(model, LearnedModel)
    assert model.phi.is_convex
    workloads = tuple(
        Workload(table=Table(name=f"t{i}", rows=1000 * 4**i, dim=64), access=Access(pooling=1.0 + 3 * i, zipf_a=1.0))
        for i in range(6)
    )
    few, many = (
        make_plan(request_of(workloads, hardware, Topology(devices=world), batch=batch), seconds=0.05).plan.forecast
        for batch in (1024, 8192)
    )
    assert few.bound_s <= few.step_s < many.step_s
    assert 1e-4 < few.expected_s < 1
    # Beyond the ranks that were measured, exchanges still cost what bytes cost.
    assert many.expected_s < 20 * few.expected_s

"""Plans that are run for real: what is measured, what is kept, what is refused."""

import pytest
from msgspec import structs
from planning.perf.asked import request_of

from rowwise.base.errors import SpecError
from rowwise.parallel.plan import Plan, Tile
from rowwise.planning.calibrate import steps
from rowwise.planning.calibrate.measure_plans import measure_plan_results
from rowwise.planning.calibrate.steps import StepMeasurement, StepTimes, _check_plans, _merge_ranks, measure_plans
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.hardware import hardware_named
from rowwise.planning.planner.pipeline import make_plans
from rowwise.tables.spec import Pooling, Table, Topology

TABLES = (
    Workload(table=Table(name="a", rows=5000, dim=16), access=Access(pooling=4.0, zipf_a=1.0)),
    Workload(table=Table(name="b", rows=300, dim=8), access=Access(pooling=1.0)),
    Workload(table=Table(name="c", rows=900, dim=32), access=Access(pooling=2.0)),
    Workload(table=Table(name="d", rows=40, dim=8, pooling=Pooling.SEQUENCE), access=Access(pooling=3.0)),
)

TWO = Topology(devices=2)


def asked(topology=TWO, batch=512):
    return request_of(TABLES, hardware_named("cpu"), topology, batch=batch)


@pytest.mark.dist
def test_the_best_few_plans_are_run_and_the_fastest_is_kept():
    planned = make_plans(asked(), 3, seconds=0.05)
    assert len(planned) > 1
    found = measure_plan_results(planned)
    measured = [step.seconds for step in found.steps]
    assert all(0 < seconds < 5 for seconds in measured)
    assert found.best.plan.forecast.measured_s == min(measured)
    index = measured.index(min(measured))
    assert found.best.plan.tiles == planned[index].plan.tiles
    assert sum("kept" in line for line in found.lines()) == 1
    for step in found.steps:
        assert {"route", "lookup", "exchange", "return", "backward", "update"} <= step.stages_s.keys()
        for rank in (0, 1):
            parts = sum(of_ranks[rank] for of_ranks in step.stages_s.values())
            assert parts <= max(step.rounds_s) * 1.05


@pytest.mark.dist
def test_more_work_takes_longer():
    plan = make_plans(asked(), 1, seconds=0.01)[0].plan
    few, many = (measure_plans(StepMeasurement(TABLES, (plan,), batch, rounds=7))[0].seconds for batch in (64, 131072))
    assert many > 3 * few


def test_a_step_is_as_long_as_its_slowest_rank():
    made = _merge_ranks([([1.0, 5.0, 2.0], {"lookup": 1.0}), ([3.0, 1.0, 2.5], {"lookup": 2.0})])
    assert made.rounds_s == (3.0, 5.0, 2.5)
    assert made.seconds == 2.5
    assert made.stages_s == {"lookup": (1.0, 2.0)}
    assert StepTimes(1.0, (1.0, 1.1, 9.0, 9.0), {}).noise == pytest.approx(0.1)


def test_plans_that_do_not_fit_are_refused(monkeypatch):
    plan = make_plans(asked(), 1, seconds=0.01)[0].plan
    with pytest.raises(SpecError, match="3 plans of 4"):
        _check_plans(StepMeasurement(TABLES, (plan,) * 3, 64), 1_000_000)
    other = Plan(world=1, tiles=tuple(Tile(t.table.name, 0, (0, t.table.rows), (0, t.table.dim)) for t in TABLES))
    with pytest.raises(SpecError, match="1 and 2 ranks"):
        _check_plans(StepMeasurement(TABLES, (plan, other), 64), 1 << 40)
    monkeypatch.setattr(steps, "spare_bytes", lambda: 1000)
    with pytest.raises(SpecError, match="fewer plans or rows"):
        measure_plans(StepMeasurement(TABLES, (plan,), 64))


def test_only_one_host_is_measured():
    planned = make_plans(asked(Topology(hosts=2, devices=2)), 1, seconds=0.01)
    with pytest.raises(SpecError, match="2 hosts of 2"):
        measure_plan_results(planned)
    few = make_plans(asked(batch=1), 1, seconds=0.01)
    with pytest.raises(SpecError, match="1 for 2 ranks"):
        measure_plan_results(few)


def test_a_forecast_tells_the_slowest_rank():
    forecast = make_plans(asked(), 1, seconds=0.01)[0].plan.forecast
    ranks = [sum(forecast.stages_s[stage][rank] for stage in forecast.stages_s) for rank in (0, 1)]
    assert forecast.expected_s == max(ranks)
    assert structs.replace(forecast, stages_s={}).expected_s == forecast.step_s

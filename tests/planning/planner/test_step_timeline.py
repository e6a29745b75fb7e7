"""The timeline of a plan has the seconds of its forecast, and says what overlap saves of them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import Plan, Table, Topology
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.hardware import Machine, hardware_named
from rowwise.planning.perf.learned import model_of
from rowwise.planning.perf.torchrec import TorchRecModel
from rowwise.planning.planner.explain import explain
from rowwise.planning.planner.explanation import Explanation
from rowwise.planning.planner.pipeline import make_plan
from rowwise.planning.planner.problem import PlanRequest

tables = st.lists(
    st.tuples(st.integers(10, 10**5), st.sampled_from((4, 64)), st.floats(0.5, 20)), min_size=1, max_size=4
)


def planned(tables, machine="xeon", ranks=2, model=None):
    topology, hardware = Topology(devices=ranks), hardware_named(machine)
    workloads = tuple(
        Workload(table=Table(name=f"t{k}", rows=rows, dim=dim), access=Access(pooling=pooling))
        for k, (rows, dim, pooling) in enumerate(tables)
    )
    model = model or model_of(hardware, topology)
    request = PlanRequest(workloads=workloads, machine=Machine(topology, hardware), model=model, batch=4096)
    return make_plan(request, seconds=0.01, prove=False)


@given(tables, st.sampled_from(("xeon", "cpu")), st.integers(1, 3))
def test_a_timeline_has_the_seconds_of_the_forecast(tables, machine, ranks):
    result = planned(tables, machine, ranks)
    forecast, timeline = result.plan.forecast, explain(result).timeline
    assert timeline.pipelined_s == pytest.approx(forecast.pipelined_s)
    assert sum(stage.exposed_s for stage in timeline.stages) == pytest.approx(timeline.pipelined_s)
    assert timeline.bound_s <= timeline.pipelined_s * (1 + 1e-9)
    busy = {stage.name: stage.busy_s for stage in timeline.stages}
    for name in ("lookup", "update"):
        assert busy.get(name, 0.0) == max(forecast.stages_s[name])
    travel_s = sum(busy.get(name, 0.0) for name in ("route", "exchange", "return"))
    assert travel_s >= max(forecast.stages_s["exchange"]) * (1 - 1e-9)


def test_an_explanation_says_what_overlap_saves():
    explanation = explain(planned([(10**5, 64, 5.0), (10**4, 64, 3.0)]))
    text = explanation.text()
    assert "busy    exposed" in text
    assert "a step with 2 steps in flight" in text
    assert "Dense layers are not known and count 0" in " ".join(text.split())
    assert Explanation.from_json(explanation.to_json()) == explanation


def test_without_stages_there_is_no_timeline():
    result = planned([(10**4, 64, 3.0)], model=TorchRecModel(Topology(devices=2)))
    assert result.plan.forecast.pipelined_s is None
    assert "no overlap is predicted" in explain(result).text()


def test_plans_and_explanations_of_earlier_versions_are_read():
    result = planned([(10**4, 64, 3.0)])
    plan, explanation = json.loads(result.plan.to_json()), json.loads(explain(result).to_json())
    del plan["forecast"]["pipelined_s"], explanation["timeline"]
    assert Plan.from_json(json.dumps(plan)).forecast.pipelined_s is None
    assert Explanation.from_json(json.dumps(explanation)).timeline is None

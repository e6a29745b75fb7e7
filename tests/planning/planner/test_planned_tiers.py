"""Rows are planned in the tiers of memory that a question allows, and in no other."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from planning.planner.asked import question
from planning.planner.small_questions import questions

from rowwise.base.errors import SpecError
from rowwise.parallel.plan import TIERS
from rowwise.planning.planner.infeasible import InfeasibleError, has_plan
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.pipeline import make_plan
from rowwise.planning.planner.problem import PlanRequest
from rowwise.planning.planner.replan import replan
from rowwise.tables.spec import Table, Topology

FEW = settings(max_examples=15, deadline=None, derandomize=True)
DEVICE = frozenset(TIERS[:1])
SETS = [DEVICE, frozenset({"device", "host"}), frozenset({"device", "disk"}), frozenset(TIERS)]


def with_disks(asked: PlanRequest, disk_bytes: int) -> PlanRequest:
    hardware = structs.replace(asked.machine.hardware, disk_bytes=disk_bytes)
    machine = structs.replace(asked.machine, hardware=hardware)
    return replace(asked, machine=machine, model=replace(asked.model, hardware=hardware))


def used(plan):
    return {tile.tier for tile in plan.tiles}


@FEW
@given(asked=questions(tiers=True), disks=st.sampled_from((0, 10**12)), tiers=st.sampled_from(SETS))
def test_no_plan_uses_a_tier_that_is_not_allowed(asked, disks, tiers):
    asked = with_disks(replace(asked, tiers=tiers), disks)
    problem = make_problem(asked)
    assert {tier for kind in problem.kinds for tier in kind.tiers} <= tiers
    for tier, limit in zip(TIERS, problem.limit_M, strict=True):
        if tier not in tiers:
            assert limit == 0
            assert not problem.pieces.bytes_NM[:, TIERS.index(tier)].any()
    assert asked.unused == tuple(t for t in ("host", "disk")[: 1 + bool(disks)] if t not in tiers)
    if has_plan(asked):
        assert used(make_plan(asked, seconds=0.05, prove=False).plan) <= tiers


@FEW
@given(asked=questions(tiers=True))
def test_other_tiers_change_nothing_about_options_on_the_device(asked):
    whole, device = make_problem(asked), make_problem(replace(asked, tiers=DEVICE))
    on_device_O = np.array([whole.kind_of(option).tier == "device" for option in range(len(whole.option_kind))])
    kept_N = on_device_O[whole.option_of_N]
    assert [whole.kind_of(o) for o in np.flatnonzero(on_device_O)] == [
        device.kind_of(o) for o in range(len(device.option_kind))
    ]
    assert np.array_equal(whole.item_of_O[on_device_O], device.item_of_O)
    for name in ("load_NK", "link_N", "bytes_NM"):
        assert np.array_equal(getattr(whole.pieces, name)[kept_N], getattr(device.pieces, name))


@FEW
@given(asked=questions(fill=(0.3, 0.8)))
def test_tiers_that_a_machine_does_not_have_change_no_plan(asked):
    found = []
    for tiers in SETS:
        try:
            found.append(make_plan(replace(asked, tiers=tiers), seconds=0.01, prove=False).plan)
        except InfeasibleError as error:
            found.append(str(error).partition(";")[0])
    assert all(one == found[0] for one in found)


def test_a_plan_in_force_leaves_tiers_that_are_not_allowed():
    tables = [Table(name=f"t{i}", rows=10**5, dim=32) for i in range(4)]
    tight = question(tables, Topology(devices=2), 16e6, host_bytes=10e9)
    old = make_plan(tight, seconds=0.05).plan
    assert used(old) == {"device", "host"}
    roomy = question(tables, Topology(devices=2), 10e9, host_bytes=10e9, tiers=DEVICE)
    assert used(replan(roomy, old, seconds=0.02).planned.plan) == DEVICE
    with pytest.raises(InfeasibleError, match="plan fits without rows"):
        replan(replace(tight, tiers=DEVICE), old, seconds=0.02)


def test_steps_need_the_device():
    asked = question([Table(name="a", rows=10, dim=4)], Topology(), 1e9)
    with pytest.raises(SpecError, match="tiers that include device"):
        replace(asked, tiers=frozenset({"host"}))

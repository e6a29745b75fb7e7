"""Where nothing fits, the error's numbers are right, it names the cause, and each way out that it claims is one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs
from planning.perf.networks import profile
from planning.planner.asked import question, stored

from rowwise.base.errors import SpecError
from rowwise.parallel.plan import TIERS
from rowwise.planning.perf.learned import LearnedModel
from rowwise.planning.perf.roofline import Roofline
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.infeasible import InfeasibleError, min_bytes, useful_fixes
from rowwise.planning.planner.options import make_problem
from rowwise.planning.planner.pipeline import make_plan
from rowwise.planning.planner.search import search
from rowwise.tables.row_optimizers import Adam, Sgd
from rowwise.tables.spec import Table, Topology, Wire

WHOLE = Constraints(layouts={"*": ("table_wise",)})


def table(name: str, rows: int, dim: int = 64, optimizer=None) -> Table:
    return Table(name=name, rows=rows, dim=dim, optimizer=optimizer or Sgd())


def refusal(asked) -> str:
    with pytest.raises(InfeasibleError) as caught:
        make_plan(asked, seconds=0.05)
    assert isinstance(caught.value, SpecError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@st.composite
def crowded(draw):
    """Questions that have, mostly, too little memory."""
    topology = Topology(hosts=draw(st.integers(1, 2)), devices=draw(st.integers(1, 4)))
    tables = [
        table(
            f"t{i}",
            draw(st.integers(10**3, 10**6)),
            draw(st.sampled_from((4, 16, 64))),
            draw(st.sampled_from((Sgd(), Adam()))),
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    names = [t.name for t in tables]
    rules = draw(
        st.sampled_from(
            (
                Constraints(),
                WHOLE,
                Constraints(pin={name: (0,) for name in names[:3]}),
                Constraints(together=(tuple(names),)),
                Constraints(reserve=0.3),
            )
        )
    )
    each = sum(map(stored, tables)) / topology.world / draw(st.floats(0.8, 2.5))
    return question(tables, topology, each, constraints=rules, buffers=draw(st.booleans()), batch=1024)


@pytest.mark.slow
@given(crowded())
@settings(max_examples=15, deadline=None)
def test_each_way_out_that_is_claimed_is_one(asked):
    problem = make_problem(asked)
    assume(search(problem, seconds=0.02).over)
    assert refusal(asked).startswith("no plan fits: ")
    for fix in useful_fixes(problem):
        if fix.enough:
            make_plan(fix.request, seconds=0.05)
            assert "suffice" in fix.words()
        else:
            assert fix.saved_bytes == pytest.approx(min_bytes(problem) - min_bytes(make_problem(fix.request)))
            assert "suffice" not in fix.words()


def test_too_little_in_all():
    tables = [table(f"t{i}", 10**6) for i in range(6)]
    words = refusal(question(tables, Topology(devices=2), 600e6, tiers=TIERS))
    assert "tables take 1.5 GB, 2 devices have 1.2 GB, 336.0 MB too much" in words
    assert "fp16 rows save 768.0 MB and suffice" in words
    assert "3 devices of this kind suffice" in words
    assert "of host memory for tables on each host (:host=1GB) suffices" in words


def test_memory_that_tables_may_not_use_is_named():
    tables = [table(f"t{i}", 10**6) for i in range(6)]
    asked = question(tables, Topology(devices=2), 600e6, host_bytes=10e9, tiers=("device",))
    words = refusal(asked)
    assert words.startswith("no plan fits without rows on the host: tables take 1.5 GB, 2 devices have 1.2 GB, ")
    assert "fp16 rows save 768.0 MB and suffice" in words
    assert "3 devices of this kind suffice" in words
    assert ":host=" not in words
    assert "`rowwise plan --tiers device,host` suffices" in words
    assert words.endswith("`rowwise compress` has ids share rows")
    assert "--tiers" not in refusal(question(tables, Topology(devices=2), 600e6))


def test_the_ways_out_of_memory_are_named_beside_many_others():
    tables = [table(f"t{i}", 10**6, optimizer=Adam()) for i in range(6)]
    rules = Constraints(reserve=0.1)
    asked = question(tables, Topology(devices=2), 2500e6, constraints=rules, host_bytes=100e9, tiers=("device",))
    words = refusal(asked)
    assert words.count(" suffice") == 5
    assert "devices of this kind suffice" in words
    assert "`rowwise plan --tiers device,host` suffices" in words


@pytest.mark.parametrize("learned", [False, True])
def test_more_devices_are_priced_with_their_own_links(learned):
    asked = question([table("a", 10**6), table("b", 10**6)], Topology(), 300e6)
    hardware = asked.machine.hardware
    if learned:
        hardware = structs.replace(hardware, kernels=profile(0).kernels)
    model = LearnedModel.of if learned else Roofline
    machine = structs.replace(asked.machine, hardware=hardware)
    asked = replace(asked, machine=machine, model=model(hardware, Topology(), Wire()))
    (fix,) = (fix for fix in useful_fixes(make_problem(asked)) if "devices of this kind" in fix.change)
    found, topology = fix.request, fix.request.machine.topology
    assert topology.devices > 1
    anew = replace(found, model=model(hardware, topology, Wire()))
    assert found.model.phi.constant == anew.model.phi.constant
    assert np.array_equal(make_problem(found).pieces.link_N, make_problem(anew).pieces.link_N)
    assert make_problem(found).pieces.link_N.any()


def test_state_that_row_wise_optimizers_save():
    tables = [table(f"t{i}", 10**6, optimizer=Adam()) for i in range(4)]  # 768 MB each, 516 with row-wise state
    words = refusal(question(tables, Topology(devices=4), 600e6))
    assert "row-wise optimizer state saves 1.0 GB and suffices" in words


def test_what_does_not_suffice_is_not_claimed():
    words = refusal(question([table(f"t{i}", 10**6) for i in range(8)], Topology(devices=2), 200e6))
    assert "fp16 rows save 1.0 GB;" in words + ";"
    assert "save 1.0 GB and suffice" not in words


def test_a_table_that_fits_nowhere_is_named():
    asked = question([table("a", 10**6), table("b", 10**4)], Topology(devices=4), 200e6, constraints=WHOLE)
    words = refusal(asked)
    assert "table 'a' takes at least 256.0 MB of a device in any layout allowed, which has 200.0 MB" in words
    assert "column-wise for 'a' (64.0 MB on a device, not 256.0 MB) suffices" in words


def test_a_pin_is_named():
    tables = [table("a", 10**6), table("b", 10**6), table("c", 10**4)]
    rules = Constraints(pin={"a": (1,), "b": (1,), "c": (0,)}, layouts=WHOLE.layouts)
    words = refusal(question(tables, Topology(devices=2), 300e6, constraints=rules))
    assert "tables that may only be on rank 1 ('a', 'b') take 512.0 MB, 1 device has 300.0 MB" in words
    assert "no pin for 'a' suffices" in words


def test_tables_that_have_to_stay_together_are_named():
    rules = Constraints(together=(("a", "b"),), layouts=WHOLE.layouts)
    words = refusal(question([table("a", 10**6), table("b", 10**6)], Topology(devices=2), 300e6, constraints=rules))
    assert "table 'a + b' takes at least 512.0 MB" in words
    assert "not keeping 'a' and 'b' together suffices" in words


def test_a_reserve_is_named():
    words = refusal(question([table("a", 10**6)], Topology(), 270e6, constraints=Constraints(reserve=0.1)))
    assert "no reserve (now 10%) suffices" in words


def test_a_packing_that_was_not_found():
    tables = [table(name, 10**6) for name in "abc"]
    words = refusal(question(tables, Topology(devices=2), 400e6, constraints=WHOLE))
    assert (
        "tables would fill 96% of all memory, but the best packing found is 112.0 MB over on the device memory" in words
    )


def test_the_batch_counts_where_buffers_do():
    asked = question([table("a", 1000, 128)], Topology(), 100e6, buffers=True, batch=1 << 17)
    words = refusal(asked)
    assert "tables and what a step needs beside them take" in words or "table 'a' takes at least" in words
    assert "half the batch (65,536 samples a step) saves" in words

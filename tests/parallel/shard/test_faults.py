"""Wrong plans and wrong batches: the guilty are named on all ranks, at once, and the next batch works everywhere."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parallel.shard.equal import SEED, assert_alike, given, look_up, make_sharded, make_steps, place, rows_apart

from rowwise import (
    BatchError,
    Embeddings,
    IdError,
    Lamb,
    Plan,
    Pooling,
    RowType,
    RowWiseAdagrad,
    Sgd,
    SpecError,
    Table,
    Tile,
    Topology,
    UnknownIdWarning,
)
from rowwise.base.errors import PeerError
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.tables.ops.jagged import permute
from rowwise.tables.spec import Codecs, Wire

# A plan that is wrong, and tables of a terabyte.

ROWS, DIM = 10**9, 256
HUGE = Table(name="huge", rows=ROWS, dim=DIM, optimizer=Sgd())
OTHER = Table(name="other", rows=ROWS, dim=DIM, optimizer=Sgd())
HALF = ROWS // 2


def tile(rank, rows=(0, ROWS), cols=(0, DIM), table="huge"):
    return Tile(table=table, rank=rank, rows=rows, cols=cols)


GOOD = (tile(0, (0, HALF)), tile(1, (HALF, ROWS)), tile(1, table="other"))
SIZED = r"table 'huge' \(1000000000 x 256\): rows "
PLANS = {
    "overlap": (
        (tile(0, (0, HALF + 7)), *GOOD[1:]),
        SIZED + r"500000000:500000007 x columns 0:256 are in both huge\[0:500000007, 0:256\] on rank 0 and huge\[5000",
    ),
    "hole": ((tile(0, (0, HALF - 7)), *GOOD[1:]), SIZED + "499999993:500000000 x columns 0:256 are on no rank"),
    "unknown table": ((*GOOD, tile(0, table="small")), r"tile small\[0:1000000000, 0:256\] on rank 0: no such table"),
}


STATUS = Path("/proc/self/status")


def mapped_bytes(line="VmPeak"):
    """Of memory that this process has mapped, used or not: the most ever, or at present (VmSize)."""
    return int(re.search(rf"{line}:\s*(\d+) kB", STATUS.read_text())[1]) * 1024 if STATUS.exists() else 0


def refused_on_all_ranks(plan, match, tables=(HUGE, OTHER), world=2, **settings):
    def rank(comm):
        with pytest.raises(SpecError, match=match) as raised:
            ShardedEmbeddings(tables, plan, comm, **settings)
        return str(raised.value)

    before = mapped_bytes()
    assert len(set(run_threads(world, rank, timeout_s=30))) == 1
    assert mapped_bytes() - before < 1 << 30


@pytest.mark.parametrize("name", PLANS)
def test_a_wrong_plan_is_refused_on_all_ranks_before_any_memory_is_taken(name):
    tiles, match = PLANS[name]
    refused_on_all_ranks(Plan(world=2, tiles=tiles), match)


def test_a_plan_for_another_world_is_refused():
    refused_on_all_ranks(Plan(world=2, tiles=GOOD), "the plan is for 2 ranks, the communicator has 3", world=3)


def test_a_wire_that_rounds_is_refused_where_results_are_to_be_elastic():
    wire = Wire(network=Codecs(backward=RowType.FP16))
    refused_on_all_ranks(Plan(world=2, tiles=GOOD), "elastic results need an exact wire", wire=wire, elastic=True)


@pytest.mark.skipif(not STATUS.exists(), reason="no /proc to read memory from")
def test_a_right_plan_takes_what_it_says():
    """So the tests above would have seen it; nothing of it is touched."""
    table = Table(name="t", rows=1 << 25, dim=64, optimizer=Sgd())
    plan = Plan(world=2, tiles=(Tile(table="t", rank=1, rows=(0, table.rows), cols=(0, 64)),))

    def taken(comm):
        before = mapped_bytes("VmSize")
        sharded = ShardedEmbeddings([table], plan, comm)
        return mapped_bytes("VmSize") - before if sharded.local_tiles() else 0

    assert run_threads(2, taken, timeout_s=30)[1] >= table.rows * table.row_bytes * 0.9


# A batch that is wrong on some ranks.

WORLD = Topology(devices=3)
TABLES = (
    Table(name="a", rows=40, dim=8, features=("a.0", "a.1"), optimizer=RowWiseAdagrad(lr=0.1)),
    Table(name="b", rows=500, dim=16, pooling=Pooling.WEIGHTED, optimizer=Lamb(lr=0.1)),
    Table(name="c", rows=30, dim=12, pooling=Pooling.SEQUENCE),
)
LAYOUTS = {
    "rows": "row-wise",
    "columns": "column-wise",
    "copies": "replicated",
    "one rank": "all on the last rank",
    "mixed": ("replicated", "pinwheel", "rows, ranks reversed"),
}


def without_a_feature(batch):
    return permute(batch, [name for name in batch.features if name != "a.1"])


def with_id(batch, number):
    values_N = batch.values_N.clone()
    values_N[batch.id_ranges()["a.1"][0]] = number
    return replace(batch, values_N=values_N)


def with_length(batch, change):
    lengths_FB = batch.lengths_FB.clone()
    lengths_FB[batch.features.index("c") * batch.batch_size] += change
    return replace(batch, lengths_FB=lengths_FB)


FAULTS = {
    "no feature": (without_a_feature, BatchError, "the batch lacks a.1; it holds "),
    "too large an id": (
        lambda b: with_id(b, 40),
        IdError,
        r"table 'a': feature 'a.1', sample \d+, position 0: id 40 is",
    ),
    "a negative id": (lambda b: with_id(b, -1), IdError, r"table 'a': feature 'a.1', sample \d+, position 0: id -1 is"),
    "a length too large": (
        lambda b: with_length(b, 1),
        BatchError,
        r"lengths add up to \d+: expected \d+, the number of ids",
    ),
    "a negative length": (lambda b: with_length(b, -9), BatchError, "feature 'c', sample 0: length -"),
    "no weights": (lambda b: replace(b, weights_N=None), BatchError, "no weights, which tables b .* need"),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_batch_ends_the_step_on_all_ranks_and_the_next_one_works(layout, fault, elastic):
    spoil, kind, match = FAULTS[fault]
    steps = make_steps(TABLES, [(5, 9, 6)] * 3)
    whole = Embeddings(TABLES, seed=SEED)

    def step(module, step):
        given(look_up(module, step), step).backward()
        module.update()

    for number in (0, 2):
        step(whole, steps[number])

    def meet_faults(sharded, rank):
        step(sharded, steps[0].of(rank))
        for guilty in ((0,), (2,), (0, 1), (0, 1, 2)):
            batch = steps[1].of(rank).batch
            if rank in guilty:
                with pytest.raises(kind, match=match):
                    sharded(spoil(batch))
            else:
                with pytest.raises(PeerError) as raised:
                    sharded(batch)
                for other in range(3):
                    assert (f"rank {other} (ids of a batch): {kind.__name__}: " in str(raised.value)) == (
                        other in guilty
                    )
            assert not sharded.staged
        step(sharded, steps[2].of(rank))

    assert_alike(whole, LAYOUTS[layout], WORLD, meet_faults, elastic=elastic)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_learn_on_some_ranks_only_are_refused_on_all(layout):
    steps = make_steps(TABLES, [(5, 9, 6)])

    def rank(comm):
        sharded = make_sharded(TABLES, place(TABLES, LAYOUTS[layout], WORLD), comm)
        batch = steps[0].of(comm.rank).batch
        learned = replace(batch, weights_N=batch.weights_N.clone().requires_grad_(comm.rank == 1))
        if layout == "copies":  # at home, nobody else has to know
            sharded(learned)
            return
        with pytest.raises(BatchError, match="require gradients on some"):
            sharded(learned)
        sharded(batch)
        # A rank that refuses its batch for another reason comes first.
        refused = replace(learned, weights_N=None) if comm.rank == 0 else learned
        with pytest.raises(BatchError if comm.rank == 0 else PeerError, match="batch has no weights"):
            sharded(refused)

    run_threads(WORLD, rank, timeout_s=60)


@pytest.mark.few(3)
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_without_a_row_can_stand_for_the_last_one(layout, elastic):
    tables = tuple(Table(name=t.name, rows=20, dim=t.dim, pooling=t.pooling, unknown="last_row") for t in TABLES)
    steps = make_steps(tables, [(5, 9, 6)] * 2)
    for step in steps:
        step.batch.values_N[::5] += 1000
        step.batch.values_N[1::7] -= 1000
    whole = Embeddings(tables, seed=SEED)

    def train(module, steps):
        for step in steps:
            given(look_up(module, step), step).backward()
            module.update()

    def rank(comm):
        sharded = make_sharded(tables, place(tables, LAYOUTS[layout], WORLD), comm, elastic=elastic)
        mine = [step.of(comm.rank) for step in steps]
        before = [step.batch.values_N.clone() for step in mine]
        train(sharded, mine)
        assert all(torch.equal(step.batch.values_N, ids) for step, ids in zip(mine, before, strict=True))
        return list(rows_apart(sharded, whole)), sharded.unknown_ids

    with pytest.warns(UnknownIdWarning, match="ids of feature"):
        train(whole, steps)
    with pytest.warns(UnknownIdWarning, match="ids of feature"):
        found = run_threads(WORLD, rank, timeout_s=60)
    assert not [text for texts, _ in found for text in texts]
    for feature, count in whole.unknown_ids.items():
        assert sum(counts.get(feature, 0) for _, counts in found) == count

"""Copies stay alike on all ranks, whichever way their gradients travel; each step takes the way that moves less."""

from dataclasses import replace

import pytest
import torch
from parallel.shard.equal import SEED, make_sharded, make_steps, place, rows_apart, train
from parallel.shard.jobs import table_for_each

from rowwise import Adam, Embeddings, Jagged, RowType, Table, Topology
from rowwise.parallel.comm.thread import run_threads

WORLD = Topology(devices=3)
# Rows of a type, and how far apart they may be: a rounding that falls otherwise is a step of the type, once an update.
KINDS = {"fp32": (RowType.FP32, 1e-5), "fp16": (RowType.FP16, 0.01), "bf16": (RowType.BF16, 0.05)}
KINDS["int8"] = (RowType.INT8, 0.1)


def make_tables(rows, row_type=RowType.FP32):
    return table_for_each(rows, kinds=[(row_type, None, 16)], suffixes=("f", "g"))


def on_all(tables, rank):
    """What `rank(comm, sharded)` gives on each."""
    plan = place(tables, "replicated", WORLD)
    return run_threads(WORLD, lambda comm: rank(comm, make_sharded(tables, plan, comm)), timeout_s=60)


def copies(sharded):
    """Rows and state of everything that a rank holds."""
    return [x.clone() for held in sharded.local_tiles() for x in (held.rows, *held.state.values())]


def alike(of_ranks):
    return all(torch.equal(mine, theirs) for other in of_ranks for mine, theirs in zip(other, of_ranks[0], strict=True))


def ways(comm):
    """How gradients of copies have travelled."""
    return {how for how in ("all_reduce", "all_gather") if comm.sent.total("copies", how)}


@pytest.mark.parametrize("kind", KINDS)
def test_of_small_tables_the_merged_gradients_are_added_up(kind):
    row_type, limit = KINDS[kind]
    tables = make_tables(12, row_type)
    steps = make_steps(tables, [(20, 0, 17), (1, 30, 2), (0, 0, 40)])
    whole = Embeddings(tables, seed=SEED)
    list(train(whole, steps))

    def rank(comm, sharded):
        list(train(sharded, [step.of(comm.rank) for step in steps]))
        assert ways(comm) == {"all_reduce"}
        assert not list(rows_apart(sharded, whole, limit))
        return copies(sharded)

    assert alike(on_all(tables, rank))


@pytest.mark.parametrize(("samples", "way"), [(24, "all_gather"), (25, "all_reduce")])
def test_the_way_that_moves_less_is_taken(samples, way):
    """samples * 4 floats that are gathered, 2 * 10 rows * (4 + 1) floats that go around twice."""
    tables = (Table(name="t", rows=10, dim=4),)
    steps = make_steps(tables, [(samples - 20, 9, 11)])

    def rank(comm, sharded):
        list(train(sharded, [step.of(comm.rank) for step in steps]))
        assert ways(comm) == {way}

    on_all(tables, rank)


def test_rows_that_no_rank_asked_for_stay_as_they_are():
    tables = (Table(name="t", rows=10, dim=4, optimizer=Adam(lr=0.1, weight_decay=0.5)),)
    batches = [Jagged.from_lists({"t": [[rank]] * 20}) for rank in range(3)]

    def rank(comm, sharded):
        (before, *_), held = copies(sharded), sharded.local_tiles()[0]
        sharded(batches[comm.rank]).matrix_BS.sum().backward()
        sharded.update()
        assert ways(comm) == {"all_reduce"}
        assert (held.rows != before).any(1).tolist() == [True] * 3 + [False] * 7

    on_all(tables, rank)


def test_weights_that_no_table_needs_may_be_there_on_some_ranks_only():
    tables = (Table(name="t", rows=10, dim=4), Table(name="u", rows=300, dim=4))

    def rank(comm, sharded):
        for _ in range(2):
            weights = torch.ones(6) if comm.rank == 1 else None
            lists = Jagged.from_lists({"t": [[1, 2], [3]], "u": [[1, 2], [3]]})
            sharded(replace(lists, weights_N=weights)).matrix_BS.sum().backward()
            sharded.update()
        return copies(sharded)

    assert alike(on_all(tables, rank))

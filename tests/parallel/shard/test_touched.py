"""Rows that changed are marked, rows that nobody looked up are not: every layout, optimizer and row type."""

import pytest
import torch
from parallel.shard.equal import SEED, make_sharded, make_steps, place, train
from parallel.shard.jobs import ROWS, table_for_each
from parallel.shard.layout_cases import CASES

from rowwise import Embeddings, Jagged, RowWiseAdagrad, Table, Topology
from rowwise.base.errors import GradientError
from rowwise.parallel.comm.thread import run_threads

CONTIGUOUS = torch.contiguous_format
SIZES = [(6, 0, 3, 4), (1, 5, 0, 2)]  # samples of each rank


def make_tables(rows):
    kinds = [(row_type, group, dims[-1]) for row_type, group, dims in ROWS.values()]
    return table_for_each(rows, kinds=kinds, suffixes=("f", "g"))


def looked_up(tables, steps):
    """The ids of each table."""
    return {
        table.name: {i for step in steps for name in table.feature_names for i in step.batch.ids_of(name).tolist()}
        for table in tables
    }


def bits(held):
    """Rows and state of a piece as bytes [R, ...]."""
    parts = [x.reshape(len(x), -1) for x in (held.rows, *held.state.values()) if x.dim()]
    return torch.cat([torch.empty_like(x, memory_format=CONTIGUOUS).copy_(x).view(torch.uint8) for x in parts], 1)


def numbers(found, tile):
    return set((found.nonzero().flatten() + tile.rows[0]).tolist())


def check(sharded, steps, tables, rank):
    """Train, and compare the marks of each piece with what happened."""
    for arena in sharded.arenas:
        assert int(arena.track().marks_R.min()) == 1  # nothing is known of before
        arena.touched.clear()
    known = looked_up(tables, steps)
    before = [bits(held) for held in sharded.local_tiles()]
    list(train(sharded, [step.of(rank) for step in steps]))
    marked = {}
    for old, held in zip(before, sharded.local_tiles(), strict=True):
        changed, marks = numbers((bits(held) != old).any(1), held.tile), numbers(held.touched, held.tile)
        assert changed <= marks <= known[held.tile.table], held.tile
        assert changed or held.tile.rows[1] - held.tile.rows[0] < 3, held.tile  # else it tests nothing
        marked[held.tile.table] = marks
    return marked


@pytest.mark.few(3)
@pytest.mark.parametrize("layout", CASES)
def test_changed_rows_are_marked_and_rows_not_looked_up_are_not(layout):
    tables, topology = make_tables(120), Topology(hosts=2, devices=2)
    steps = make_steps(tables, [tuple(20 * n for n in sizes) for sizes in SIZES])
    plan = place(tables, layout, topology)

    def rank(comm):
        check(make_sharded(tables, plan, comm), steps, tables, comm.rank)

    run_threads(topology, rank, timeout_s=60)


@pytest.mark.parametrize(("rows", "way"), [(4, "all_reduce"), (300, "all_gather")])
def test_all_ranks_mark_the_same_rows_of_copies(rows, way):
    tables, topology = make_tables(rows), Topology(devices=4)
    steps = make_steps(tables, SIZES)
    plan = place(tables, "replicated", topology)

    def rank(comm):
        marked = check(make_sharded(tables, plan, comm), steps, tables, comm.rank)
        assert comm.sent.total("copies", way)
        return marked

    of_ranks = run_threads(topology, rank, timeout_s=60)
    assert all(marked == of_ranks[0] for marked in of_ranks)


def one_table():
    return Embeddings([Table(name="t", rows=10, dim=4, optimizer=RowWiseAdagrad(lr=0.1))], seed=SEED)


def touch(module, ids, up=1.0):
    (module(Jagged.from_lists({"t": [ids]})).matrix_BS.sum() * up).backward()
    module.update()


def test_nobody_asked_nothing_is_kept():
    module = one_table()
    touch(module, [1, 2])
    assert module.arena.touched is None


def test_rows_that_were_written_by_anything_but_an_update_are_all_marked():
    module = one_table()
    touched = module.arena.track()
    state, slots = module.state_dict(), module.optimizer_state()
    for write in (
        lambda: module.load_state_dict(state),
        lambda: module.load_optimizer_state(slots),
        lambda: module.arena.fill(1),
    ):
        touched.clear()
        touch(module, [3, 3, 7])
        assert touched.table(0).nonzero().flatten().tolist() == [3, 7]
        write()
        assert touched.table(0).all()


def test_rows_beside_one_that_has_no_finite_gradient_are_marked():
    module = one_table()
    module.arena.track().clear()
    loss = (module(Jagged.from_lists({"t": [[1], [2]]})).matrix_BS * torch.tensor([[1.0], [torch.inf]])).sum()
    loss.backward()
    with pytest.raises(GradientError):
        module.update()
    assert {1} <= set(module.arena.touched.table(0).nonzero().flatten().tolist()) <= {1, 2}


def test_a_move_takes_the_marks_along():
    module = one_table()
    module.arena.track().clear()
    touch(module, [5])
    module.to("cpu")
    assert module.arena.track().table(0).nonzero().flatten().tolist() == [5]

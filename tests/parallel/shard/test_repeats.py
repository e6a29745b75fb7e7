"""Ids that sequences repeat travel once, and nothing else changes: to the bit, where batches are whole blocks."""

from functools import partial

import pytest
import torch
from parallel.shard.equal import (
    SEED,
    Job,
    assert_alike,
    given,
    look_up,
    make_sharded,
    make_steps,
    place,
    rows_apart,
    squares,
    train,
    train_in_pieces,
)
from parallel.shard.jobs import OPTIMIZERS
from parallel.shard.layout_cases import CASES

from rowwise import (
    Adam,
    Embeddings,
    GradientError,
    Pooling,
    RowType,
    RowWiseAdagrad,
    RowWiseAdam,
    Sgd,
    Table,
    Topology,
    Uniform,
    Wire,
)
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.distinct import deduplicate_sequences
from rowwise.tables.spec import Codecs

WORLD = Topology(hosts=2, devices=2)
SIZES_SW = ((256, 0, 512, 256), (256, 256, 256, 256), (256, 512, 0, 100))  # only the last may be short
KINDS = (
    (20, 8, "row-wise adagrad, decay, clip", RowType.FP32, None),
    (331, 16, "adam", RowType.FP32, None),
    (100, 12, "lamb", RowType.FP16, None),
    (100, 48, "row-wise adam", RowType.INT8, 16),
    (5000, 20, "adagrad", RowType.BF16, None),  # whose ids hardly repeat
)
TABLES = (
    *(
        Table(
            name=f"t{k}", rows=rows, dim=dim, pooling=Pooling.SEQUENCE, init=Uniform(1.0),
            optimizer=OPTIMIZERS[optimizer], row_type=row_type, column_group=group,
        )
        for k, (rows, dim, optimizer, row_type, group) in enumerate(KINDS)
    ),
    Table(name="two", rows=30, dim=8, features=("one", "other"), pooling=Pooling.SEQUENCE, optimizer=Adam(lr=0.1)),
    Table(name="sum", rows=600, dim=8, optimizer=RowWiseAdagrad(lr=0.1)),
)  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("layout", CASES)
def test_sharded_is_unsharded(layout, elastic):
    job = Job(
        tables=TABLES,
        plan=place(TABLES, layout, WORLD),
        steps=make_steps(TABLES, SIZES_SW),
        elastic=elastic,
        script=partial(train, loss=squares if elastic else given),
    )
    assert not any(run_threads(WORLD, job.whole().differences, timeout_s=60))


def test_where_blocks_do_not_begin_at_multiples_of_256_results_stay_close():
    tables = (TABLES[0], TABLES[1])
    steps = make_steps(tables, [(100, 256, 3, 512)] * 3)
    whole = Embeddings(tables, seed=SEED)
    list(train(whole, steps))

    def as_whole(module, rank):
        list(train(module, [step.of(rank) for step in steps]))

    assert_alike(whole, ["row-wise", "all on the last rank"], WORLD, as_whole, limit=1e-5)


def sent(tables, step, wire=None):
    """The bytes of ids, vectors and gradients on all links."""

    def rank(comm):
        sharded = make_sharded(tables, place(tables, "all on the last rank", WORLD), comm, wire=wire)
        list(train(sharded, [step.of(comm.rank)]))
        return [comm.sent.total(what) for what in ("ids", "rows", "gradients")]

    return [sum(column) for column in zip(*run_threads(WORLD, rank, timeout_s=60), strict=True)]


def test_each_id_of_a_block_is_sent_once_and_its_vector_comes_once():
    (table,) = tables = (Table(name="t", rows=7, dim=16, pooling=Pooling.SEQUENCE, optimizer=Sgd(lr=0.1)),)
    (step,) = make_steps(tables, [(512, 0, 0, 256)])
    vectors = 2 * 7 * table.dim * 4  # two blocks of the first rank; the last keeps its own
    assert sent(tables, step) == [4 * (512 + 2 * 7), vectors, vectors]
    assert sent(tables, step, Wire(network=Codecs(forward=RowType.BF16))) == [4 * (512 + 2 * 7), vectors // 2, vectors]
    # A batch that is not whole blocks, and one of another table that needs weights: as it is.
    (step,) = make_steps(tables, [(300, 0, 0, 256)])
    ids = len(step.of(0).batch.ids_of("t"))
    assert sent(tables, step) == [4 * (300 + ids), ids * table.dim * 4, ids * table.dim * 4]


def test_a_batch_without_its_repeats_has_the_same_ids_in_each_block():
    tables = (Table(name="t", rows=50, dim=4, pooling=Pooling.SEQUENCE), Table(name="u", rows=50, dim=4))
    (step,) = make_steps(tables, [(512,)])
    shorter, repeats = deduplicate_sequences(step.batch, ["t"])
    assert repeats.keys() == {"t"}
    before, after = ({f: bags_of(batch, f) for f in batch.features} for batch in (step.batch, shorter))
    assert all(torch.equal(a, b) for f in before.keys() - {"t"} for a, b in zip(before[f], after[f], strict=True))
    for first in (0, 256):
        bags = after["t"][first : first + 256]
        assert not any(len(bag) for bag in bags[1:])
        assert torch.equal(bags[0], torch.cat(before["t"][first : first + 256]).unique())
    ids = torch.cat(before["t"])
    assert torch.equal(torch.cat(after["t"])[repeats["t"].inverse_N], ids)


def bags_of(batch, feature):
    return batch.ids_of(feature).split(batch.lengths_of(feature).tolist())


@pytest.mark.parametrize("layout", ["row-wise", "column-wise", "all on the last rank"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_row_without_a_finite_gradient_stays_and_all_others_take_their_step(layout, bad):
    """Row 1 is bad; row 2 has a gradient of 0."""
    tables = (
        Table(name="t", rows=9, dim=8, pooling=Pooling.SEQUENCE, optimizer=RowWiseAdam(lr=0.1, weight_decay=0.5)),
    )
    (step,) = make_steps(tables, [(256, 0, 256, 0)])
    where = step.batch.ids_of("t")
    step.ups["t"][where == 1, 3] = bad
    step.ups["t"][where == 2] = 0.0
    whole = Embeddings(tables, seed=SEED)

    def update(module, step):
        given(look_up(module, step), step).backward()
        try:
            module.update()
        except GradientError:
            return True
        return False

    assert update(whole, step)

    def rank(comm):
        sharded = make_sharded(tables, place(tables, [layout], WORLD), comm)
        return update(sharded, step.of(comm.rank)), list(rows_apart(sharded, whole))

    found = run_threads(WORLD, rank, timeout_s=60)
    assert any(raised for raised, _ in found)
    assert not [text for _, differences in found for text in differences]


def test_two_forwards_of_batches_with_and_without_repeats():
    tables = TABLES[:2]
    few, many = make_steps(tables, [(3, 9, 1, 0)])[0], make_steps(tables, [(256, 256, 0, 256)], seed=5)[0]

    def both(module, steps):
        first, second = (look_up(module, step) for step in steps)
        yield 0, first
        yield 1, second
        (given(first, steps[0]) + squares(second, steps[1])).backward()
        module.update()

    plan = place(tables, ["interleaved rows", "all on the last rank"], WORLD)
    job = Job(tables=tables, plan=plan, steps=[few, many], script=both)
    assert not any(run_threads(WORLD, job.whole().differences, timeout_s=60))


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", ["row-wise", "column-wise", "all on the last rank", "replicated"])
def test_a_batch_in_pieces_is_one_batch(layout):
    steps = make_steps(TABLES, [(512, 512, 1024, 700)] * 2)
    whole = Embeddings(TABLES, seed=SEED)
    list(train(whole, steps))

    def in_pieces(module, rank):
        train_in_pieces(module, [step.of(rank) for step in steps], 2, 512 if rank == 2 else 256)

    assert_alike(whole, layout, WORLD, in_pieces, elastic=True)

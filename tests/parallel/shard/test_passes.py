"""Forwards, backwards and updates in other orders than one of each: as on one device, to the bit."""

from itertools import product

import pytest
import torch
from parallel.shard.equal import (
    SEED,
    Job,
    assert_alike,
    given,
    look_up,
    make_steps,
    place,
    squares,
    train,
    train_in_pieces,
)
from parallel.shard.jobs import OPTIMIZERS, table_for_each

from rowwise import Adam, Embeddings, Pooling, RowType, RowWiseAdagrad, RowWiseAdam, Sgd, Table, Topology, Uniform
from rowwise.parallel.comm.thread import run_threads

FP32, FP16, INT8 = RowType.FP32, RowType.FP16, RowType.INT8
TABLES = table_for_each(
    700,
    [OPTIMIZERS[name] for name in ("row-wise adagrad, decay, clip", "adam", "lamb", "row-wise adam", "sgd")],
    kinds=[(FP32, None, 8), (FP32, None, 16), (FP16, None, 32), (FP32, None, 12), (INT8, 16, 48)],
    suffixes=("f", "g"),
)
LAYOUTS = {layout: layout for layout in ("row-wise", "column-wise", "grid", "replicated", "all on the last rank")}
LAYOUTS["mixed"] = ("replicated", "columns, ranks reversed", "table-row-wise", "pinwheel", "two column tiles on a rank")
SIZES_SW = ((9, 0, 30, 12), (1, 20, 3, 17), (0, 0, 40, 0))
TOPOLOGY = Topology(hosts=2, devices=2)


def two_forwards_before_a_backward(module, steps):
    one, two, three = steps
    outs = [look_up(module, step) for step in (one, two)]
    yield from enumerate(outs)
    (given(outs[0], one) + squares(outs[1], two)).backward()
    module.update()
    yield from train_one(module, 2, three)


def several_backwards_before_an_update(module, steps):
    for number, step in enumerate(steps):
        outs = look_up(module, step)
        yield number, outs
        squares(outs, step).backward()
    module.update()
    yield from train_one(module, 0, steps[0])


def one_of_two_forwards_is_used(module, steps):
    used, unused, last = steps
    outs = look_up(module, used)
    look_up(module, unused)
    given(outs, used).backward()
    module.update()
    yield from train_one(module, 2, last)


def backward_twice(module, steps):
    outs = look_up(module, steps[0])
    loss = squares(outs, steps[0])
    loss.backward(retain_graph=True)
    loss.backward()
    module.update()
    yield from train_one(module, 1, steps[1])


def evaluation_in_between(module, steps):
    for number, step in enumerate(steps):
        outs = look_up(module, step)
        with torch.no_grad():
            yield 0, look_up(module, steps[0])
        squares(outs, step).backward()
        staged = len(module.staged)
        with torch.inference_mode():
            yield 1, {name: x.clone() for name, x in look_up(module, steps[1]).items()}
        assert len(module.staged) == staged
        module.update()
        assert not module.staged
        yield number, outs


def discarded(module, steps):
    for step in steps[:2]:
        squares(look_up(module, step), step).backward()
        module.discard()
        module.update()
    yield from train_one(module, 2, steps[2])


def train_one(module, number, step):
    outs = look_up(module, step)
    yield number, outs
    squares(outs, step).backward()
    module.update()


SCRIPTS = (
    two_forwards_before_a_backward,
    several_backwards_before_an_update,
    one_of_two_forwards_is_used,
    backward_twice,
    evaluation_in_between,
    discarded,
)


@pytest.mark.few(4)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_is_unsharded(layout, script):
    plan = place(TABLES, LAYOUTS[layout], TOPOLOGY)
    job = Job(tables=TABLES, plan=plan, steps=make_steps(TABLES, SIZES_SW), elastic=True, script=script)
    assert not any(run_threads(TOPOLOGY, job.whole().differences, timeout_s=60))


@pytest.mark.few(1)
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_in_pieces_is_one_batch(layout, elastic):
    steps = make_steps(TABLES, [(300, 200, 3, 40), (17, 5, 0, 600)])
    whole = Embeddings(TABLES, seed=SEED)
    list(train(whole, steps))

    def in_pieces(module, rank):
        train_in_pieces(module, [step.of(rank) for step in steps], 3)

    assert_alike(whole, LAYOUTS[layout], TOPOLOGY, in_pieces, elastic=elastic)


SMOOTH = (Sgd(lr=0.1), RowWiseAdagrad(lr=0.1, initial=0.1), Adam(lr=0.01, eps=0.1), RowWiseAdam(lr=0.01, eps=0.1))


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", ["row-wise", "table-row-wise", "grid", "interleaved rows", "pinwheel"])
def test_results_that_are_not_elastic_stay_close_over_many_steps(layout):
    """Sums in another order make other gradients, which make other rows, and so on."""
    tables = tuple(
        Table(name=f"t{k}", rows=60, dim=16, optimizer=optimizer, pooling=pooling, init=Uniform(1.0))
        for k, (optimizer, pooling) in enumerate(product(SMOOTH, (Pooling.SUM, Pooling.MEAN, Pooling.WEIGHTED)))
    )
    steps = make_steps(tables, [(20, 5, 30, 9)] * 20)
    whole = Embeddings(tables, seed=SEED)
    list(train(whole, steps, squares))

    def as_whole(module, rank):
        list(train(module, [step.of(rank) for step in steps], squares))

    assert_alike(whole, layout, TOPOLOGY, as_whole, limit=2e-5)

"""`update_in_backward`: the bits of `update()` after each backward, and nothing of a backward that raised."""

import copy
import gc
import io
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from problems import OPTIMIZERS, make_problem
from table_state import everything, same, with_optimizer
from torch import nn
from torch.utils.checkpoint import checkpoint

from rowwise import (
    Embeddings,
    GradientError,
    Jagged,
    ManagedEmbeddings,
    MappedEmbeddings,
    Pooling,
    Sgd,
    SpecError,
    Table,
    make_embeddings,
)
from rowwise.tables.idmaps import QuotientRemainderIds
from rowwise.tables.managed import Managed
from rowwise.train.settings import DenseSgd, Training

TABLES = (
    Table(name="sum", rows=40, dim=8, features=("s1", "s2")),
    Table(name="weighted", rows=50, dim=12, pooling=Pooling.WEIGHTED),
    Table(name="sequence", rows=20, dim=4, pooling=Pooling.SEQUENCE),
)


def batch(seed: int, tables=TABLES) -> Jagged:
    return make_problem(tables, batch=20, most=4, seed=seed).jagged


def loss_of(vectors):
    return sum((x**2).sum() for x in (vectors.matrix_BS, *vectors.sequences.values()))


def pair(tables=TABLES) -> tuple[Embeddings, Embeddings]:
    """One that updates in its backward, and one that does not."""
    return Embeddings(tables, update_in_backward=True), Embeddings(tables)


class Fails(torch.autograd.Function):
    """Raises in the backward, after the nodes above it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *_):
        raise ArithmeticError("a backward")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_backward_is_a_whole_step(optimizer):
    module, explicit = pair(with_optimizer(optimizer, TABLES))
    for seed in range(3):
        loss_of(module(batch(seed))).backward()
        loss_of(explicit(batch(seed))).backward()
        explicit.update()
        assert not module.staged
    same(everything(module), everything(explicit))


def test_two_forwards_before_a_backward_are_one_update():
    module, explicit = pair()
    (loss_of(module(batch(0))) + loss_of(module(batch(1)))).backward()
    (loss_of(explicit(batch(0))) + loss_of(explicit(batch(1)))).backward()
    explicit.update()
    same(everything(module), everything(explicit))


def test_two_forwards_before_two_backwards():
    module, explicit = pair()
    for embeddings in (module, explicit):
        losses = [loss_of(embeddings(batch(seed))) for seed in range(2)]
        for loss in losses:
            loss.backward()
            if embeddings is explicit:
                explicit.update()
    same(everything(module), everything(explicit))


def test_a_graph_that_is_kept():
    module, explicit = pair()
    for embeddings in (module, explicit):
        loss = loss_of(embeddings(batch(0)))
        for keep in (True, False):
            loss.backward(retain_graph=keep)
            if embeddings is explicit:
                explicit.update()
    same(everything(module), everything(explicit))


def test_rows_change_after_the_last_node():
    """A gradient of weights reads the rows."""
    module, explicit = pair()
    jagged = batch(0)
    grads = []
    for embeddings in (module, explicit):
        weights = jagged.weights_N.clone().requires_grad_()
        first = embeddings(replace(jagged, weights_N=weights))
        second = embeddings(replace(jagged, weights_N=weights * 2))
        (loss_of(first) * loss_of(second)).backward()
        grads.append(weights.grad)
    assert torch.equal(*grads)
    explicit.update()
    same(everything(module), everything(explicit))


def test_without_gradients_nothing_changes():
    module, other = pair()
    with torch.no_grad():
        loss_of(module(batch(0)))
    module(batch(1))  # and no backward
    same(everything(module), everything(other))
    loss_of(module(batch(2))).backward()
    loss_of(other(batch(2))).backward()
    other.update()
    same(everything(module), everything(other))


@pytest.mark.parametrize("staged_first", [True, False])
@pytest.mark.parametrize("again", ["forward", "backward"])
def test_a_backward_that_raises_changes_nothing(again, staged_first):
    """Neither then nor later, whether the tables had their gradients already or not."""
    module, explicit = pair()
    before = everything(module)
    kept = loss_of(module(batch(1)))
    vectors = module(batch(0))
    leaf = torch.ones((), requires_grad=True)
    failing = Fails.apply(leaf) if staged_first else Fails.apply(vectors.matrix_BS.sum())
    with pytest.raises(ArithmeticError, match="a backward"):
        (loss_of(vectors) * failing).backward()
    same(everything(module), before)
    if again == "forward":
        kept = loss_of(module(batch(1)))
    kept.backward()
    loss_of(explicit(batch(1))).backward()
    explicit.update()
    same(everything(module), everything(explicit))


def test_a_gradient_that_is_not_finite_changes_no_table_of_any_module():
    modules = [Embeddings([Table(name=name, rows=9, dim=4)], update_in_backward=True) for name in "ab"]
    before = [everything(module) for module in modules]
    bags = [Jagged.from_lists({name: [[1], [2]]}) for name in "ab"]
    for bad in range(2):
        up = [torch.ones(2, 4) for _ in modules]
        up[bad][1, 2] = torch.nan
        total = sum((module(jagged).matrix_BS * x).sum() for module, jagged, x in zip(modules, bags, up, strict=True))
        with pytest.raises(GradientError, match=f"table '{'ab'[bad]}'.*No row was updated"):
            total.backward()
        for module, rows in zip(modules, before, strict=True):
            same(everything(module), rows)
    (modules[0](bags[0]).matrix_BS.sum() + modules[1](bags[1]).matrix_BS.sum()).backward()
    assert all(
        not torch.equal(module.state_dict()[name], rows[name])
        for module, rows, name in zip(modules, before, "ab", strict=True)
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(reentrant):
    module, explicit = pair()
    for embeddings in (module, explicit):
        scale = torch.ones((), requires_grad=True)
        loss = checkpoint(lambda x, e=embeddings: loss_of(e(batch(0))) * x, scale, use_reentrant=reentrant)
        loss.backward()
    explicit.update()
    same(everything(module), everything(explicit))


def test_copies_update_their_own_rows():
    module, explicit = pair()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    copies = [copy.deepcopy(module), torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)]
    before = everything(module)
    loss_of(explicit(batch(0))).backward()
    explicit.update()
    for copied in copies:
        loss_of(copied(batch(0))).backward()
        same(everything(copied), everything(explicit))
    same(everything(module), before)


def test_memory_is_freed_with_the_last_reference():
    """Tables are too large to wait for the collector of cycles."""
    module, _ = pair()
    loss_of(module(batch(0))).backward()
    alive = weakref.ref(module)
    with without_collector():
        del module
        assert alive() is None


@contextmanager
def without_collector():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_id_maps_and_managed_tables():
    mapped = Table(name="m", rows=100, dim=4, id_map=QuotientRemainderIds(rows=20))
    managed = Table(name="m", rows=64, dim=4, managed=Managed())
    jagged = Jagged.from_lists({"m": [[1, 5], [77]]})
    for table, kind in ((mapped, MappedEmbeddings), (managed, ManagedEmbeddings)):
        module, explicit = (make_embeddings([table], update_in_backward=on) for on in (True, False))
        assert type(module) is kind
        for embeddings in (module, explicit):
            loss_of(embeddings(jagged)).backward()
        explicit.stored.update()
        same(everything(module.stored), everything(explicit.stored))


def test_nothing_is_left_to_clip_or_defer():
    module, _ = pair()
    with pytest.raises(SpecError, match=r"table 'sum'.*clip or defer: expected update_in_backward=False"):
        module.take_staged()


def test_a_trainer_of_rowwise_refuses():
    from rowwise.train.breakdown import Breakdown
    from rowwise.train.objective import Clicks
    from rowwise.train.step import StepContext

    model = nn.Sequential(Embeddings([Table(name="t", rows=4, dim=2, optimizer=Sgd())], update_in_backward=True))
    with pytest.raises(SpecError, match=r"table 't'.*expected update_in_backward=False"):
        StepContext.create(model, Clicks(model), Training(optimizer=DenseSgd(lr=0.1)), Breakdown())

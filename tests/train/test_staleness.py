"""Updates that come k steps late: what a lookup sees follows from k alone, not from what is prepared ahead."""

import pytest
import torch
from msgspec import structs
from ranked import TIMEOUT_S, tensor_bits, train
from test_pipeline import Broken, make_run, what_is_left
from torch import nn
from trainings import bits, work_of

from rowwise import Batch, Embeddings, Jagged, Managed, Pooling, Sgd, SpecError, Table
from rowwise.base.errors import AgreedError, GradientError
from rowwise.parallel.comm.thread import run_threads
from rowwise.tables.ids.managed.embeddings import ManagedEmbeddings
from rowwise.train.settings import DenseSgd
from rowwise.train.step import step


@pytest.mark.few(1)
@pytest.mark.parametrize("staleness", [1, 2, 5])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("where", ["on disk", 0, 1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_any_depth_leaves_the_same(tmp_path, staleness, world, depth, where, accumulate):
    how = {"accumulate": accumulate, "dropout": 0.0, "staleness": staleness}
    how |= {"on_disk": ("user", "words"), "cache_rows": 3} if where == "on disk" else {"plan": where}
    late = what_is_left(tmp_path, world, depth, **how)
    assert late == what_is_left(tmp_path, world, 1, **how)


@pytest.mark.slow
def test_none_is_a_run_without_the_key_and_more_is_another(tmp_path):
    how = {"dropout": 0.0, "plan": 1}
    exact = what_is_left(tmp_path / "exact", 2, 2, **how)
    assert what_is_left(tmp_path / "none", 2, 2, staleness=0, **how) == exact
    late = what_is_left(tmp_path / "late", 2, 2, staleness=1, **how)
    assert late[0]["metrics.csv"] != exact[0]["metrics.csv"]


class Plain(nn.Module):
    """One table without dense layers before its sum."""

    def __init__(self, table) -> None:
        super().__init__()
        self.embeddings = Embeddings([table])
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        return self.embeddings(batch.sparse).values().sum(1, keepdim=True) + self.bias


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_lookup_sees_the_updates_before_the_last_k(staleness):
    table = Table(name="a", rows=9, dim=4, pooling=Pooling.SUM, optimizer=Sgd(lr=0.5))
    model = Plain(table)
    versions_RD = [model.embeddings.weights("a").detach().clone()]  # by the number of updates in it
    bias = model.bias.detach().clone()
    work = work_of(model, staleness=staleness, optimizer=DenseSgd(lr=0.5))
    generator = torch.Generator().manual_seed(1)
    for number in range(1, 9):
        ids = torch.randint(9, (6,), generator=generator)
        labels_BK = torch.randint(2, (3, 1), generator=generator).float()
        sparse = Jagged(features=("a",), values_N=ids, lengths_FB=torch.full((3,), 2, dtype=torch.int32))
        step(work, [Batch(dense_BF=torch.empty(3, 0), sparse=sparse, labels_BK=labels_BK)], number)
        seen = versions_RD[max(0, number - 1 - staleness)].clone().requires_grad_()
        dense = bias.clone().requires_grad_()
        logits = seen[ids].view(3, 2, 4).sum((1, 2)).unsqueeze(1) + dense
        nn.functional.binary_cross_entropy_with_logits(logits, labels_BK).backward()
        versions_RD.append(versions_RD[-1] - 0.5 * seen.grad)
        bias -= 0.5 * dense.grad
        applied = max(0, number - 1 - staleness) if staleness else number
        torch.testing.assert_close(model.embeddings.weights("a"), versions_RD[applied])
        torch.testing.assert_close(model.bias.detach(), bias)
    for late in work.late.values():
        late.apply_all()
    torch.testing.assert_close(model.embeddings.weights("a"), versions_RD[-1])


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_a_checkpoint_has_all_updates_and_a_resumed_run_leaves_the_same(tmp_path, depth):
    how = {"dropout": 0.0, "staleness": 3, "depth": depth, "plan": 0}
    whole, parts = make_run(tmp_path / "whole", **how), make_run(tmp_path / "parts", **how)
    train(whole, 2)
    train(parts, 2, prepare=lambda comm, trainer: setattr(trainer, "_on_step", Stop(trainer, 4)))
    train(parts, 2, which="step-4")
    assert tensor_bits(whole.folder) == tensor_bits(parts.folder)


class Stop:
    def __init__(self, trainer, step) -> None:
        self.trainer, self.step = trainer, step

    def __call__(self, shown):
        if shown.progress.step == self.step:
            self.trainer.stop()


@pytest.mark.few(1)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_bad_gradient_ends_the_run_with_all_earlier_updates_applied(tmp_path, depth):
    """The third batch has it: what is left is a run of two steps."""
    how = {"dropout": 0.0, "staleness": 2, "depth": depth}
    good, bad = make_run(tmp_path / "good", **how), make_run(tmp_path / "bad", kind=BadLabels, **how)
    good.settings = structs.replace(good.settings, train=structs.replace(good.settings.train, steps=2))
    trained, net = train(good, 2), bad.net()

    def rank(comm):
        trainer = bad.on(comm, net)
        with pytest.raises((GradientError, AgreedError), match="the loss is nan"):
            trainer.run()
        return [bits(tile.rows) for tile in trainer._context.tables[0].local_tiles()]

    expected = [[bits(tile.rows) for tile in one._context.tables[0].local_tiles()] for one in trained]
    assert run_threads(2, rank, TIMEOUT_S) == expected


class BadLabels(Broken):
    how = "labels"


def test_managed_tables_are_refused():
    table = Table(name="a", rows=8, dim=4, managed=Managed())

    class WithManaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = ManagedEmbeddings([table])

    with pytest.raises(SpecError, match=r"train.staleness=1 with managed"):
        work_of(WithManaged(), staleness=1)

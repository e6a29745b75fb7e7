"""Soft labels of `smc`: those of the same samples, by the parameters before the last update, whatever a run does."""

import copy
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
from msgspec import structs
from ranked import TIMEOUT_S, Ranked, train
from small import check_resumed, sections, trained
from torch import nn
from trainings import clicks, fast, work_of

from rowwise import Batch, Embeddings, Jagged, SpecError, Table
from rowwise.ingest.batcher import Position
from rowwise.parallel.comm.thread import run_threads
from rowwise.recipes.text import decode
from rowwise.tables.row_optimizers import Sgd
from rowwise.train.loss_settings import Smc
from rowwise.train.saved import CheckpointFolder
from rowwise.train.settings import Augment, DenseSgd, Saving, Settings, Training
from rowwise.train.soft_labels import SoftLabels
from rowwise.train.trainer import Trainer, TrainingJob

USERS, LR, SMC = 7, 0.3, Smc(steps=5, alpha=0.9, temperature=1.5)


class Model(nn.Module):
    """Tables of the library, and a layer with statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embeddings = Embeddings([Table(name="user", rows=USERS, dim=3, optimizer=Sgd(lr=LR))])
        self.norm, self.top = nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, batch):
        return self.top(self.norm(torch.cat((batch.dense_BF, self.embeddings(batch.sparse).values()), 1)))


class Plain(nn.Module):
    """The same by torch alone."""

    def __init__(self, model):
        super().__init__()
        self.users = nn.Embedding.from_pretrained(model.state_dict()["embeddings.user"].clone(), freeze=False)
        self.norm, self.top = copy.deepcopy(model.norm), copy.deepcopy(model.top)

    def forward(self, batch):
        users_B = batch.sparse.values_N.long()
        return self.top(self.norm(torch.cat((batch.dense_BF, self.users(users_B)), 1)))


class Ready:
    """Batches in memory, as a `Batcher` has them; each epoch all of them."""

    splits = 1

    def __init__(self, batches):
        self._batches, self._at = batches, Position()

    def __iter__(self):
        for row, batch in enumerate(self._batches):
            self._at = structs.replace(self._at, row=row + 1)
            yield batch
        self._at = Position(epoch=self._at.epoch + 1)

    def state(self):
        return self._at


def make_batches(count):
    draw = torch.Generator().manual_seed(5)
    sizes = [6] * (count - 1) + [4]  # the last batch of an epoch is short
    return [
        Batch(
            dense_BF=torch.randn(size, 2, generator=draw),
            sparse=Jagged.from_lists({"user": torch.randint(USERS, (size, 1), generator=draw).tolist()}),
            labels_BK=torch.randint(2, (size, 1), generator=draw).float(),
        )
        for size in sizes
    ]


def paper(model, batches, epochs):
    """Two channels in torch: the second is one mini-batch ahead, and copies of the parameters say what it has seen."""
    plain = Plain(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    copies = []
    for number, batch in enumerate(islice(cycle(batches), epochs * len(batches))):
        copies.append(copy.deepcopy(plain))
        first = number % len(batches) == 0  # of an epoch, which has no pass of the step before
        before = copies[-1] if first else copies[-2]
        z, soft = plain(batch).double(), before(batch).detach().double()
        alpha = SMC.alpha * (1 - (1 + torch.cos(torch.tensor(torch.pi * min(number / SMC.steps, 1.0)))) / 2)
        p, t, s = (torch.stack((1 - x, x)) for x in (z.sigmoid(), (soft / 1.5).sigmoid(), (z / 1.5).sigmoid()))
        y = torch.stack((1 - batch.labels_BK, batch.labels_BK))
        loss = ((1 - alpha) * -(y * p.log()).sum(0) + alpha * (t * (t.log() - s.log())).sum(0)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return plain


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_run_is_that_of_the_paper_s_two_channels(depth):
    batches, model = make_batches(4), Model()
    want = paper(model, batches, epochs=2)
    training = Training(objective=SMC, optimizer=DenseSgd(lr=LR), epochs=2, pipeline_depth=depth)
    ready = Ready(batches)
    job = TrainingJob(model=model, objective=clicks(model, training), batches=lambda _: ready, tasks=("label",))
    Trainer(job, Settings(train=training)).run()
    torch.testing.assert_close(model.state_dict()["embeddings.user"], want.users.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.top.weight, want.top.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.norm.running_mean, want.norm.running_mean, rtol=1e-5, atol=1e-6)
    assert int(model.norm.num_batches_tracked) == 8  # each batch counts once


def test_each_rank_takes_the_logits_of_its_own_samples():
    """Of ranks that made 2 and 3 of them, one with all of them restored, and one with another batch size."""
    logits_NK = torch.arange(5.0).unsqueeze(1)
    ranks = [SoftLabels() for _ in range(2)]
    for rank, soft in enumerate(ranks):
        soft.begin(1, (2, 3), rank, lambda: torch.zeros(3, 1))
        soft.hold(2, logits_NK.split([2, 3])[rank], (2, 3), rank)
        soft.begin(2, (2, 3), rank, lambda: pytest.fail("made again"))
    assert [soft.take(2, 1).item() for soft in (*ranks, ranks[1], ranks[1])] == [0.0, 2.0, 3.0, 4.0]
    assert ranks[0].take(1, 1) is None
    assert [shard.rows for soft in ranks for shard in soft.shards(2)] == [(0, 2), (2, 5)]
    ranks[0].begin(2, (4, 4), 0, lambda: torch.full((4, 1), 9.0))
    assert ranks[0].take(2, 4).flatten().tolist() == [9.0] * 4
    assert ranks[0].shards(2) == []


@pytest.mark.slow
def test_ranks_that_were_resumed_save_what_they_read(tmp_path):
    """As a step that fails right after a resume does."""
    how = fast(train={"objective": Smc(steps=4)}, save=Saving(every=2))
    world = Ranked(how, tmp_path, valid=False)
    train(replace(world, settings=structs.replace(how, train=structs.replace(how.train, steps=2))), 2)
    net = world.net()

    def save_again(comm):
        trainer = world.resumed(comm, net)
        trainer._state.save_failed(trainer.progress)

    run_threads(2, save_again, TIMEOUT_S)
    saved, again = (CheckpointFolder(tmp_path / "ckpt").open(which) for which in ("last", "failed"))
    assert torch.equal(saved.load("soft/labels"), again.load("soft/labels"))


RUN = {"epochs": 2, "batch": 256, "objective": {"kind": "smc", "steps": 20}}
MODEL = {"kind": "dlrm", "bottom": [8], "top": [8], "dropout": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_with_augmentation_is_resumed_to_the_same_bits(tmp_path, accumulate):
    train = RUN | {"augment": {"drop_features": 0.1, "drop_ids": 0.1, "crop_lists": 0.3}, "accumulate": accumulate}
    check_resumed(tmp_path, 2, train, model=MODEL)


@pytest.mark.slow
def test_ids_of_managed_tables_may_be_new_to_a_soft_label(tmp_path):
    tables = sections(tmp_path)["tables"]["list"]
    managed = {"list": [tables[0] | {"managed": {}}, *tables[1:]]}
    check_resumed(tmp_path, 2, RUN | {"augment": {"drop_ids": 0.1}}, model=MODEL, tables=managed)


@pytest.mark.slow
def test_a_checkpoint_in_an_epoch_has_the_soft_labels_of_its_next_step(tmp_path):
    cut, _ = trained(tmp_path, train=RUN | {"steps": 2}, model=MODEL)
    assert CheckpointFolder(cut.folder.path / "ckpt").open().load("soft/labels").shape == (256, 1)
    whole, result = trained(tmp_path, train=RUN | {"epochs": 1}, model=MODEL)
    assert result.steps > 2
    assert "soft/labels" not in CheckpointFolder(whole.folder.path / "ckpt").open().names()


def test_augmentation_alone_takes_the_place_of_dropout(tmp_path):
    train = RUN | {"augment": {"drop_features": 0.1}}
    recipe = decode({"data": {"dataset": "synthetic"}, "train": train, "model": {"kind": "dlrm"}}, "my.yaml")
    assert recipe.train.augment == Augment(drop_features=0.1)


@pytest.mark.parametrize(
    ("augment", "model", "message"),
    [
        ({"drop_ids": 1.0}, {"kind": "dlrm"}, r"train\.augment\.drop_ids=1\.0: expected at least 0 and less than 1"),
        ({"drop_ids": 0.1}, {"kind": "sasrec"}, r"model\.kind=sasrec: .* expected no train\.augment"),
        ({"drop_features": 0.1}, {"kind": "din", "histories": {"a": "b"}}, "expected drop_ids or crop_lists"),
    ],
)
def test_augmentation_that_a_model_cannot_have_is_refused(augment, model, message):
    with pytest.raises(SpecError, match=message):
        decode({"data": {"dataset": "synthetic"}, "train": {"augment": augment}, "model": model}, "my.yaml")


def test_a_step_without_its_next_makes_soft_labels_itself():
    """As a training loop of one's own that calls `step`."""
    from rowwise.train.step import step

    model, batch = Model(), make_batches(2)[0]
    step(work_of(model, objective=SMC), [batch], 3)
    assert int(model.norm.num_batches_tracked) == 1

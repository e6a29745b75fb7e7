"""A number that is not finite ends the run before it changes anything; it is explained, and can be met again."""

import re
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch import nn
from trainings import USERS, World, bits, every_checkpoint, fast, make_rows, make_tables, state_bits, with_cell, work_of

from rowwise import Batch, Embeddings, GradientError, Jagged, Pooling, Table
from rowwise.train.breakdown import Breakdown
from rowwise.train.diagnose import find_cause
from rowwise.train.objective import Outcome
from rowwise.train.saved import CheckpointFolder
from rowwise.train.settings import Log, Saving, Training
from rowwise.train.step import StepContext, step
from rowwise.train.trainer import Trainer

BAD_ROW = 30  # in the fourth batch of 8
RARE = USERS - 1  # the user of that row only


class Fragile(nn.Module):
    """Breaks at one row in one way."""

    def __init__(self, tables, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embeddings = Embeddings(tables, seed=0)
        self.scale = nn.Parameter(torch.ones(()))
        self.dense = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.2)
        with torch.no_grad():
            self.embeddings.table("user")[RARE] = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        vectors = self.embeddings(batch.sparse)
        scale = 100 if self.how == "loss" else 1
        logits = self.drop(self.dense(batch.dense_BF * scale)) + vectors["user"][:, :2] + vectors["words"][:, :2]
        match self.how:
            case "row":  # the root has no slope at 0
                return logits + (vectors["user"] ** 2).sum(1, keepdim=True).sqrt()
            case "dense":
                return logits + (self.scale * (batch.keys_B != BAD_ROW)).abs().sqrt().unsqueeze(1)
            case "chance":
                return logits / (torch.rand(()) > 0.3)
        return logits


class Broken(World):
    """A world in which row BAD_ROW is special."""

    def __init__(self, folder, how: str, **settings) -> None:
        settings = {"train": {"shuffle": False, "epochs": 9}, "save": Saving(every=1, keep=2)} | settings
        super().__init__(fast(log=Log(every=1), **settings), folder, valid=False, dropout=0.0)
        self.how = how

    def rows(self):
        rows = make_rows(self.count, self.seed)
        rows = rows.set_column(rows.schema.get_field_index("user"), "user", [rows["user"].to_numpy() % RARE])
        rows = with_cell(rows, "user", BAD_ROW, RARE)
        return with_cell(rows, "x", BAD_ROW, 3e38) if self.how in ("loss", "long") else rows

    def start(self, *, tell=None, model=None) -> Trainer:
        return super().start(tell=tell, model=Fragile(self.tables, self.how))


AT = r"step 4 \(epoch 0, from row 8 of split 1 on\): "
SAMPLE = r"batch 0 of the step, sample 6, key 30, whose largest number is 3e\+38 in dense column 0, "
CAUSES = {
    "loss": AT + r"the loss is (inf|nan); it begins in 'dense', " + SAMPLE + "and whose longest vector is .*, of table",
    "dense": AT + r"the gradient of the dense parameters is nan, first in that of 'scale'; look at batch 0 of the "
    r"step, sample \d, key \d+, whose .*; else lower train\.optimizer\.lr, or set train\.clip",
    "long": r"step \d+ .*: the gradient of the dense parameters is inf; the largest number in a dense gradient is "
    r".*e\+3\d, of 'dense.weight'; look at " + SAMPLE,
    "row": AT + r"nan in the gradient of table 'user', feature 'user', sample 6, column 0, ids \[11\]\. No row was",
    "chance": r"step \d+ .*the loss is (inf|nan); it begins in 'the model', batch 0 of the step, sample 0, key ",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("how", CAUSES)
def test_what_is_said_and_what_is_left(tmp_path, how):
    world = Broken(tmp_path, how)
    before = {}

    def tell(_):
        before.update(state_bits(trainer), step=trainer.progress.step)

    trainer = world.start(tell=tell)
    with pytest.raises(GradientError, match=CAUSES[how]) as raised:
        trainer.run()
    message = str(raised.value)
    assert message.endswith(f"; repeat the step: rowwise resume {tmp_path} --from failed")
    failed_at = int(re.match(r"step (\d+)", message)[1])
    assert before.pop("step") == failed_at - 1 == trainer.progress.step
    assert state_bits(trainer) == before, "something has changed"
    assert all(not tables.staged for tables in trainer._context.tables)
    assert CheckpointFolder(tmp_path / "ckpt").steps() == [n for n in (failed_at - 2, failed_at - 1) if n > 0]
    for checkpoint in every_checkpoint(tmp_path).values():
        checkpoint.verify()
    last, failed = CheckpointFolder(tmp_path / "ckpt").open(), CheckpointFolder(tmp_path / "ckpt").open("failed")
    assert {n: bits(failed.load(n)) for n in failed.names()} == {n: bits(last.load(n)) for n in last.names()}
    for which in ("failed", "last"):
        with pytest.raises(GradientError) as again:
            world.resume(which=which).run()
        assert str(again.value) == message


def test_before_anything_was_saved(tmp_path):
    world = Broken(tmp_path, "loss", save=Saving())
    with pytest.raises(GradientError) as first:
        world.start().run()
    assert not CheckpointFolder(tmp_path / "ckpt").steps()
    with pytest.raises(GradientError) as again:
        world.resume(which="failed").run()
    assert str(again.value) == str(first.value)


def test_without_a_folder_nothing_is_kept():
    world = Broken(None, "loss")
    with pytest.raises(GradientError, match=r"table '\w+', feature '\w+'$"):
        world.start().run()


def test_where_the_state_cannot_be_kept(tmp_path):
    world = Broken(tmp_path, "loss")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "failed.part").touch()  # not a folder
    want = r"it begins in 'dense'.*; the state for repeating the step is lost: .*failed was not saved: File exists"
    with pytest.raises(GradientError, match=want):
        world.start().run()


def first_batch(count=8) -> Batch:
    return next(iter(World(fast(train={"batch": count}), None, count=count).batcher()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_that_are_not_finite(accumulate):
    model = Fragile(make_tables(), "loss")
    work = work_of(model)
    batches = [first_batch()] * accumulate
    with torch.no_grad():
        model.dense.weight[0, 0] = float("inf")
    with pytest.raises(GradientError, match=r"the loss is (nan|inf)") as raised:
        step(work, batches, 1)
    said = find_cause(model, batches, str(raised.value))
    assert re.search(r"; the weights of 'dense.weight' are not finite: lower train\.optimizer\.lr, or set", said)


def test_the_second_of_the_batches_is_named():
    model = Fragile(make_tables(), "loss")
    good = first_batch()
    dense_BF = good.dense_BF.clone()
    dense_BF[5, 1] = float("nan")
    bad = replace(good, dense_BF=dense_BF, keys_B=None)
    with pytest.raises(GradientError, match="the loss is nan") as raised:
        step(work_of(model), [good, bad], 1)
    assert "batch 1 of the step, sample 5, whose largest number is nan in dense column 1" in find_cause(
        model, [good, bad], str(raised.value)
    )


def test_a_sum_past_the_range_keeps_the_dense_part():
    """Gradients that are finite one by one come to light when rows are updated; of them, others are by then."""
    table = Table(name="user", rows=2, dim=1)
    model = nn.ModuleDict({"tables": Embeddings([table, structs.replace(table, name="word")]), "top": nn.Linear(1, 1)})
    sparse = {"user": [[0], [0], [1]], "word": [[0], [1], [1]]}

    def loss(_batch, _step):
        vectors = model["tables"](Jagged.from_lists(sparse)).values()
        made = (vectors[:2, 0] * 3e38).sum() + vectors[2, 0] + vectors[:, 1].sum() + model["top"].weight.sum()
        return Outcome(made)

    work = StepContext.create(model, loss, Training(), Breakdown())
    weight, rows = model["top"].weight.clone(), model["tables"].weights("user").clone()
    batch = Batch(dense_BF=torch.zeros(3, 0), sparse=Jagged.from_lists(sparse), labels_BK=torch.zeros(3, 1))
    with pytest.raises(GradientError, match="table 'user', row 0"):
        step(work, [batch], 1)
    assert torch.equal(model["top"].weight, weight)
    assert model["tables"].weights("user")[0] == rows[0]
    assert model["tables"].weights("user")[1] != rows[1]


def test_what_reaches_no_row_is_no_cause():
    """The gradient of an empty bag may be anything."""
    model = Embeddings([Table(name="user", rows=3, dim=2), Table(name="seen", rows=3, dim=2, pooling=Pooling.MEAN)])
    vectors = model(Jagged.from_lists({"user": [[0], []], "seen": [[1], [2]]}))
    grad = torch.ones(2, 4)
    grad[1, :2] = float("nan")
    vectors.values().backward(grad)
    model.check_staged()
    model.update()
    before = {name: model.weights(name).clone() for name in ("user", "seen")}
    grad[1, 3] = float("inf")
    model(Jagged.from_lists({"user": [[0], []], "seen": [[1], [2]]})).values().backward(grad)
    want = r"inf in the gradient of table 'seen', feature 'seen', sample 1, column 1, ids \[2\]\. No row"
    with pytest.raises(GradientError, match=want):
        model.check_staged()
    assert all(torch.equal(model.weights(name), rows) for name, rows in before.items())


def test_of_sequences():
    model = Embeddings([Table(name="seen", rows=3, dim=2, pooling=Pooling.SEQUENCE)])
    rows = model(Jagged.from_lists({"seen": [[1, 2], [0]]}))["seen"]
    grad = torch.ones_like(rows)
    grad[1, 0] = float("-inf")
    rows.backward(grad)
    with pytest.raises(GradientError, match="table 'seen', feature 'seen'"):
        model.check_staged()

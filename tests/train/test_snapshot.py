"""Resumed == uninterrupted, and a warm start takes over what matches."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as log_loss
from trainings import World, fast, make_tables

from rowwise import DLRM, Adam, Batch, CheckpointError, Embeddings, Jagged, Lamb, RowWiseAdagrad, Table
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import write
from rowwise.train.saved import CheckpointFolder
from rowwise.train.snapshot import collect, restore, restore_model, warm_start

TABLES = (
    Table(name="user", rows=50, dim=8, optimizer=Adam()),
    Table(name="item", rows=40, dim=8, features=("clicked", "seen"), optimizer=RowWiseAdagrad(), row_type="fp16"),
    Table(name="word", rows=30, dim=8, optimizer=Lamb(), row_type="int8"),
)


def make(tables=TABLES, seed: int = 0, top=(8, 1)) -> tuple[DLRM, dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    model = DLRM(Embeddings(tables, seed=5), 3, bottom=(8, 8), top=top)
    dense = [p for p in model.parameters() if p.requires_grad]
    return model, {"dense": torch.optim.AdamW(dense, lr=0.01)}


def batch(step: int) -> Batch:
    g = torch.Generator().manual_seed(step)
    rows = {"user": 50, "clicked": 40, "seen": 40, "word": 30}
    values = [torch.randint(0, n, (2 * 16,), generator=g) for n in rows.values()]
    sparse = Jagged(features=tuple(rows), values_N=torch.cat(values), lengths_FB=torch.full((4 * 16,), 2))
    labels = torch.randint(0, 2, (16, 1), generator=g).float()
    return Batch(dense_BF=torch.randn(16, 3, generator=g), sparse=sparse, labels_BK=labels)


def train(model, optimizers, steps) -> None:
    for step in steps:
        one = batch(step)
        logits = model(one) + 0.01 * torch.randn(16, 1)  # random numbers are part of the state
        optimizers["dense"].zero_grad()
        log_loss(logits, one.labels_BK).backward()
        optimizers["dense"].step()
        model.embeddings.update()


def everything(model, optimizers) -> dict[str, torch.Tensor]:
    return {part.name: part.tensor for part in collect(model, optimizers)[0]}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_resumed_is_uninterrupted(tmp_path):
    model, optimizers = make()
    train(model, optimizers, range(6))
    write(tmp_path / "6", *collect(model, optimizers))
    train(model, optimizers, range(6, 12))
    again, others = make(seed=99)
    restore(Checkpoint.open(tmp_path / "6"), again, others)
    train(again, others, range(6, 12))
    assert same(everything(model, optimizers), everything(again, others))


def test_state_that_earlier_checkpoints_lack_stays_as_it_is(tmp_path):
    class Counter(torch.nn.Module):
        optional_state = ("count",)

        def __init__(self, count):
            super().__init__()
            self.register_buffer("count", torch.tensor(count))
            self.register_buffer("other", torch.tensor(count))

    old, new = Counter(3), Counter(5)
    shards, data = collect(torch.nn.Sequential(old), {})
    write(tmp_path / "all", shards, data)
    write(tmp_path / "old", [one for one in shards if not one.name.endswith("count")], data)
    restore(Checkpoint.open(tmp_path / "old"), torch.nn.Sequential(new), {})
    assert (int(new.count), int(new.other)) == (5, 3)
    restore(Checkpoint.open(tmp_path / "all"), torch.nn.Sequential(new), {})
    assert int(new.count) == 3
    write(tmp_path / "less", [one for one in shards if not one.name.endswith("other")], data)
    with pytest.raises(CheckpointError, match="other"):
        restore(Checkpoint.open(tmp_path / "less"), torch.nn.Sequential(new), {})


def test_rates_that_moved_come_back(tmp_path):
    model, optimizers = make()
    optimizers["dense"].param_groups[0]["lr"] = 0.5
    write(tmp_path / "0", *collect(model, optimizers))
    again, others = make()
    restore(Checkpoint.open(tmp_path / "0"), again, others)
    group = others["dense"].param_groups[0]
    assert group["lr"] == 0.5
    assert group["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"tables": (*TABLES[:2], Table(name="word", rows=31, dim=8, row_type="int8"))}, "word: got .*expected .*31"),
        ({"tables": (*TABLES, Table(name="more", rows=3, dim=8))}, "has no tensor 'model/embeddings.more'"),
        ({"top": (8, 2)}, "model/top.layers.1.weight: got .*expected"),
        ({"top": (1,)}, "top.layers"),
    ],
    ids=["rows", "table", "head", "layers"],
)
def test_another_model_is_refused(tmp_path, change, want):
    write(tmp_path / "0", *collect(*make()))
    with pytest.raises(CheckpointError, match=want):
        restore(Checkpoint.open(tmp_path / "0"), *make(**change))


def test_the_model_alone(tmp_path):
    """For use: no optimizer is needed, and torch's random numbers stay as they are."""
    model, optimizers = make()
    train(model, optimizers, range(4))
    write(tmp_path / "4", *collect(model, optimizers))
    again, _ = make(seed=9)
    random = torch.get_rng_state()
    restore_model(Checkpoint.open(tmp_path / "4"), again)
    assert torch.equal(torch.get_rng_state(), random)
    assert same(model.state_dict(), again.state_dict())
    state, initial = again.embeddings.optimizer_state(), make()[0].embeddings.optimizer_state()
    assert all(same(state[name], initial[name]) for name in state)
    other, _ = make(top=(8, 2))
    with pytest.raises(CheckpointError, match="init_from instead"):
        restore_model(Checkpoint.open(tmp_path / "4"), other)


def test_another_kind_of_optimizer_is_refused(tmp_path):
    model, optimizers = make()
    train(model, optimizers, range(2))
    write(tmp_path / "2", *collect(model, optimizers))
    again, _ = make()
    dense = torch.optim.SGD([p for p in again.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(CheckpointError, match="optimizer 'dense' is AdamW"):
        restore(Checkpoint.open(tmp_path / "2"), again, {"dense": dense})


def test_a_run_can_begin_with_what_another_knows(tmp_path):
    """Rows and their state come along; the run itself begins at step 0, with an optimizer that knows nothing."""
    first = World(fast(train={"epochs": 2}), tmp_path / "first")
    first.start().run()
    second = World(fast(), tmp_path / "second", seed=3, tables=make_tables(row_type="bf16"))
    trainer = second.start()
    found = warm_start(CheckpointFolder(tmp_path / "first" / "ckpt").open(), trainer.job.model)
    assert found.rounded == {"model/embeddings.words": "fp32 saved, bf16 in this model"}
    assert "model/embeddings.words" in found.loaded
    assert "model/embeddings.user" in found.loaded
    assert not found.new
    assert set(found.unused) == {n for n in found.unused if n.startswith("recorder/")}
    assert int(trainer.job.model.embeddings.optimizer_state()["user"]["step"]) == 12
    before = first.start().job.model.state_dict()["layers.0.weight"]
    assert not torch.equal(trainer.job.model.state_dict()["layers.0.weight"], before)
    assert trainer.run().step == 6


def test_warm_start(tmp_path):
    model, optimizers = make()
    train(model, optimizers, range(4))
    write(tmp_path / "4", *collect(model, optimizers))
    grown = (
        Table(name="user", rows=80, dim=8, optimizer=Adam()),
        TABLES[1],
        Table(name="city", rows=9, dim=8),
    )
    new, _ = make(tables=grown, seed=1, top=(8, 3))
    fresh = new.embeddings.weights("user").clone()
    found = warm_start(Checkpoint.open(tmp_path / "4"), new)
    assert torch.equal(new.embeddings.weights("user")[:50], model.embeddings.weights("user"))
    assert torch.equal(new.embeddings.weights("user")[50:], fresh[50:])
    assert torch.equal(new.embeddings.weights("item"), model.embeddings.weights("item"))
    state, old = new.embeddings.optimizer_state(), model.embeddings.optimizer_state()
    assert torch.equal(state["user"]["exp_avg"][:50], old["user"]["exp_avg"])
    assert int(state["user"]["step"]) == 4
    assert found.grown["model/embeddings.user"] == "50 of 80 rows, 50 saved"
    assert "model/embeddings.city" in found.new
    assert "model/embeddings.word" in found.unused
    assert "model/top.layers.1.weight" in found.skipped
    text = "\n".join(found.lines())
    assert "grown: model/embeddings.user: 50 of 80 rows" in text
    assert "not taken over: model/top.layers.1.weight: (1, 8) saved, (3, 8) in this model" in text

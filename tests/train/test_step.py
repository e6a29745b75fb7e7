"""One step is what plain torch does; batches that are accumulated are one large batch."""

import itertools
from dataclasses import replace

import pytest
import torch
from clicks import make_clicks, make_tables
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import nn
from torch.nn import functional as F
from trainings import join, work_of

from rowwise import Adagrad, Batch, BatchError, Embeddings, IdError, Pooling, Sgd, SpecError, Table, WideDeep
from rowwise.tables.row_optimizers import Schedule
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseOptimizer, DenseSgd, Training
from rowwise.train.step import StepContext, embeddings_of, step

SCHEDULE = Schedule(warmup_steps=2, decay_steps=2, end=0.1)


class Net(nn.Module):
    """Vectors and numbers, side by side, through one layer."""

    def __init__(self, tables, tasks: int, dtype=torch.float32) -> None:
        super().__init__()
        self.embeddings = Embeddings(tables, seed=1)
        torch.manual_seed(2)
        self.top = nn.Linear(3 + sum(t.dim * len(t.feature_names) for t in tables), tasks)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.top(torch.cat((batch.dense_BF, self.embeddings(batch.sparse).values()), 1))


class Plain(nn.Module):
    """The same in nothing but torch, in 64 bits."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.tables = net.embeddings.tables
        self.bags = nn.ModuleDict()
        for table in self.tables:
            mode = "sum" if table.pooling is Pooling.SUM else "mean"
            bag = nn.EmbeddingBag(table.rows, table.dim, mode=mode)
            self.bags[table.name] = bag
            bag.weight.data = net.embeddings.weights(table.name).double()
        self.top = nn.Linear(net.top.in_features, net.top.out_features).double()
        self.top.load_state_dict(net.top.state_dict())

    def forward(self, batch: Batch) -> torch.Tensor:
        sparse = batch.sparse
        offsets = sparse.offsets()
        parts = [batch.dense_BF.double()]
        for table in self.tables:
            for feature in table.feature_names:
                first = sparse.features.index(feature) * sparse.batch_size
                ends = offsets[first : first + sparse.batch_size + 1]
                ids = sparse.values_N[ends[0] : ends[-1]]
                parts.append(self.bags[table.name](ids, ends[:-1] - ends[0]))
        return self.top(torch.cat(parts, 1))


def torch_optimizer(settings: DenseOptimizer, parameters):
    match settings:
        case DenseSgd(lr=lr, momentum=momentum, weight_decay=decay):
            return torch.optim.SGD(parameters, lr, momentum, weight_decay=decay)
        case DenseAdagrad(lr=lr, eps=eps, weight_decay=decay):
            return torch.optim.Adagrad(parameters, lr, weight_decay=decay, eps=eps)
        case DenseAdam(lr=lr, beta1=b1, beta2=b2, eps=eps, weight_decay=decay):
            return torch.optim.AdamW(parameters, lr, (b1, b2), eps, decay)


def plain_loss(logits_BK, batch: Batch, task_weights) -> torch.Tensor:
    loss_BK = F.binary_cross_entropy_with_logits(logits_BK, batch.labels_BK.double(), reduction="none")
    loss_B = (loss_BK * torch.tensor(task_weights or [1.0] * loss_BK.shape[1]).double()).sum(1)
    return (loss_B if batch.weights_B is None else loss_B * batch.weights_B.double()).mean()


def weighted(batch: Batch) -> Batch:
    weights_B = torch.rand(len(batch.labels_BK), generator=torch.Generator().manual_seed(0)) * 3
    return replace(batch, weights_B=weights_B)


def make(tables, tasks=1, **training) -> StepContext:
    return work_of(Net(tables, tasks), **training)


def with_rows(optimizer) -> list[Table]:
    return [structs.replace(table, optimizer=optimizer) for table in make_tables(4)]


@settings(max_examples=8)
@given(
    dense=st.sampled_from(
        (DenseSgd(lr=0.1), DenseSgd(momentum=0.9, weight_decay=0.1), DenseAdagrad(lr=0.1), DenseAdam(weight_decay=0.1))
    ),
    rows=st.sampled_from((Sgd(lr=0.5), Adagrad(lr=0.5))),
    tasks=st.sampled_from((1, 3)),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    how=st.fixed_dictionaries(
        {"clip": st.sampled_from((None, 1e-3, 1e3)), "schedule": st.sampled_from((None, SCHEDULE))}
    ),
    task_weights=st.booleans(),
    weights=st.booleans(),
)
def test_steps_are_those_of_torch(dense, rows, tasks, sizes, how, task_weights, weights):
    task_weights = tuple(0.5 + k for k in range(tasks)) if task_weights else ()
    work = make(with_rows(rows), tasks, optimizer=dense, task_weights=task_weights, **how)
    training = work.settings
    plain = Plain(work.model)
    ours = torch_optimizer(dense, plain.top.parameters())
    kind = torch.optim.SGD if isinstance(rows, Sgd) else torch.optim.Adagrad
    theirs = kind(plain.bags.parameters(), lr=rows.lr, **({} if isinstance(rows, Sgd) else {"eps": rows.eps}))
    for number in (1, 2, 3):
        batches = [make_clicks(size, seed=10 * number + k, tasks=tasks) for k, size in enumerate(sizes)]
        batches = [weighted(batch) for batch in batches] if weights else batches
        stepped = step(work, batches, number)
        whole = join(batches)
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        loss = plain_loss(plain(whole), whole, task_weights)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.top.parameters(), training.clip or float("inf"))
        rate = dense.lr * (training.schedule.factor(number) if training.schedule else 1.0)
        for group in ours.param_groups:
            group["lr"] = rate
        ours.step()
        theirs.step()
        assert stepped.samples == sum(sizes)
        assert stepped.rate == rate
        assert stepped.loss == pytest.approx(loss.item(), rel=1e-4)
        assert stepped.gradient_norm == pytest.approx(norm.item(), rel=1e-3)
        assert len(stepped.outcomes) == len(batches)
    for name, parameter in plain.top.named_parameters():
        torch.testing.assert_close(work.model.top.get_parameter(name).double(), parameter, rtol=1e-3, atol=1e-5)
    for table in plain.tables:
        found, want = work.model.embeddings.weights(table.name).double(), plain.bags[table.name].weight
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-5)


class Additive(nn.Module):
    """No layers: a sample's logit does not depend on how many others there are, down to the last bit."""

    def __init__(self, tables) -> None:
        super().__init__()
        self.embeddings = Embeddings(tables, seed=1)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.embeddings(batch.sparse).values().sum(1, keepdim=True)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("row_type", ["fp32", "bf16", "int8"])
def test_accumulated_batches_are_one_large_batch_to_the_bit(count, row_type):
    tables = [structs.replace(table, row_type=row_type) for table in make_tables(4)]
    found = []
    for joined in (False, True):
        model = Additive(tables)
        work = work_of(model)
        assert work.optimizer is None
        for number in (1, 2):
            batches = [make_clicks(64, seed=10 * number + k) for k in range(count)]
            stepped = step(work, [join(batches)] if joined else batches, number)
            assert (stepped.rate, stepped.gradient_norm) == (0.0, 0.0)  # there is no dense part
        states = [x for slots in model.embeddings.optimizer_state().values() for x in slots.values()]
        found.append([*(model.embeddings.table(t.name) for t in tables), *states])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_every_module_with_tables_is_updated():
    torch.manual_seed(0)
    model = WideDeep(Embeddings(make_tables(), seed=0), 3, (8, 1))
    assert len(embeddings_of(model)) == 2
    work = work_of(model)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    step(work, [make_clicks(64)], 1)
    assert all(not torch.equal(x, before[name]) for name, x in model.state_dict().items())
    for tables in work.tables:
        assert not tables.staged
        assert all(int(state["step"]) == 1 for state in tables.optimizer_state().values())


def test_a_name_of_a_table_is_there_once():
    table = Table(name="user", rows=4, dim=2)
    model = nn.ModuleDict({"one": Embeddings([table]), "two": Embeddings([table, Table(name="item", rows=3, dim=2)])})
    with pytest.raises(SpecError, match="both 'one' and 'two'"):
        embeddings_of(model)
    shared = model["one"]
    assert embeddings_of(nn.ModuleDict({"one": shared, "again": shared})) == (shared,)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_bf16_is_close(name):
    dense = {"sgd": DenseSgd(lr=0.1), "adagrad": DenseAdagrad(lr=0.1), "adam": DenseAdam(lr=0.01)}[name]
    losses = []
    for precision in ("fp32", "bf16"):
        work = make(make_tables(), optimizer=dense, precision=precision)
        kinds = []
        work.model.top.register_forward_hook(lambda _m, _g, out, kinds=kinds: kinds.append(out.dtype))
        losses.append([step(work, [make_clicks(256, seed=n)], n).loss for n in range(1, 31)])
        assert set(kinds) == {torch.float32 if precision == "fp32" else torch.bfloat16}
        assert all(p.dtype == torch.float32 for p in work.model.parameters())
    assert losses[0] != losses[1]
    assert losses[0][-1] < losses[0][0] - 0.02
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0.02, atol=0.01)


def test_logits_of_another_shape():
    work = make(make_tables(), tasks=2)
    with pytest.raises(BatchError, match=r"gave logits \(8, 2\)"):
        step(work, [make_clicks(8)], 1)


def test_a_step_that_raises_leaves_nothing_to_the_next():
    work = make(make_tables())
    before = {name: x.clone() for name, x in work.model.state_dict().items()}
    good, bad = make_clicks(8), make_clicks(8, seed=1)
    values_N = bad.sparse.values_N.clone()
    values_N[3] = 1000
    bad = replace(bad, sparse=replace(bad.sparse, values_N=values_N))
    with pytest.raises(IdError, match="table 'user': feature 'user'"):
        step(work, [good, bad], 1)
    assert not work.model.embeddings.staged
    assert all(torch.equal(x, before[name]) for name, x in work.model.state_dict().items())
    once = make(make_tables())
    for one in (work, once):
        step(one, [good], 1)
    pairs = zip(work.model.state_dict().values(), once.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_rate_follows_from_the_step():
    work = make(make_tables(), optimizer=DenseSgd(lr=2.0), schedule=SCHEDULE)
    rates = [step(work, [make_clicks(8)], number).rate for number in range(1, 7)]
    assert rates == pytest.approx([1.0, 2.0, 1.1, 0.2, 0.2, 0.2])


def test_what_settings_refuse():
    for given_, want in [
        ({"batch": 0}, r"train\.batch=0: expected at least 1"),
        ({"accumulate": 0}, r"train\.accumulate=0: expected at least 1"),
        ({"steps": 0}, r"train\.steps=0: expected at least 1"),
        ({"clip": 0.0}, r"train\.clip=0\.0: expected a norm above 0, or null for no clipping"),
        ({"clip": float("nan")}, r"train\.clip=nan: expected a norm above 0"),
        ({"task_weights": (1.0, -1.0)}, r"train\.task_weights=\(1\.0, -1\.0\): expected finite numbers that are not"),
    ]:
        with pytest.raises(SpecError, match=want):
            Training(**given_)
    for kind, name in itertools.product((DenseSgd, DenseAdagrad, DenseAdam), ("lr", "weight_decay")):
        with pytest.raises(
            SpecError, match=f"train.optimizer.{name}=-1.0: expected a finite number that is not negative"
        ):
            kind(**{name: -1.0})
    with pytest.raises(SpecError, match="less than 1"):
        DenseAdam(beta1=1.0)

"""Training is what the docstrings of the optimizers say: rows beside dense tensors in float64, over fifty steps.

The oracle is written from the equations, with autograd for the gradients, and shares no code with the kernels or
their reference; where torch has the same optimizer, torch is the oracle.
"""

import functools
import math
from typing import NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem
from table_state import with_optimizer
from torch import nn

from rowwise import (
    Adagrad,
    Adam,
    Constant,
    Embeddings,
    Ftrl,
    Jagged,
    Lamb,
    Pooling,
    RowWiseAdagrad,
    RowWiseAdam,
    Schedule,
    Sgd,
    Table,
    Uniform,
)
from rowwise.tables.row_optimizers import OPTIMIZERS as ROW_OPTIMIZERS
from rowwise.tables.row_optimizers import needs_full_rows

STEPS = 50
# Several features in a table, duplicates in a batch (few rows), rows that many batches leave out, sequences.
TABLES = (
    Table(name="sum", rows=20, dim=8, features=("s1", "s2")),
    Table(name="mean", rows=200, dim=5, pooling=Pooling.MEAN),
    Table(name="weighted", rows=40, dim=20, features=("w1", "w2"), pooling=Pooling.WEIGHTED),
    Table(name="sequence", rows=12, dim=4, features=("q1", "q2"), pooling=Pooling.SEQUENCE),
)
TABLES = tuple(msgspec.structs.replace(t, init=Uniform(bound=0.5)) for t in TABLES)


def rate(schedule: Schedule | None, step: int) -> float:
    """The factor on the learning rate."""
    if schedule is None:
        return 1.0
    if schedule.warmup_steps and step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.decay_steps == 0:
        return 1.0
    start = max(schedule.warmup_steps, schedule.decay_start)
    gone = min(1.0, max(0.0, (step - start) / schedule.decay_steps))
    fall = {"linear": 1 - gone, "cosine": 0.5 + 0.5 * math.cos(math.pi * gone), "quadratic": (1 - gone) ** 2}
    return fall[schedule.shape] + schedule.end * (1 - fall[schedule.shape])


class Rows:
    """A table's rows, dense, in float64, with what their optimizer remembers."""

    def __init__(self, table: Table, rows: torch.Tensor):
        self.w = rows.double().requires_grad_()
        self.optimizer = table.optimizer
        self.steps = 0
        self.state = [torch.zeros_like(self.w, requires_grad=False) for _ in range(2)]
        initial = getattr(table.optimizer, "initial", 0.0)
        self.state[1] += initial  # of a sum of squares, or FTRL's n

    @torch.no_grad()
    def step(self, touched: torch.Tensor) -> None:
        """Change the rows that were looked up, whatever their gradient; all others stay as they are."""
        o = self.optimizer
        self.steps += 1
        w, g = self.w[touched], self.w.grad[touched]
        if o.clip is not None:
            length = g.norm(dim=1, keepdim=True)
            g = torch.where(length > o.clip, g / length * o.clip, g)
        lr = o.lr * rate(getattr(o, "schedule", None), self.steps)
        state = [s[touched] for s in self.state]
        change = getattr(self, type(o).__name__.lower())
        w, state = change(w, g, state, lr)
        self.w[touched] = w
        for kept, new in zip(self.state, state, strict=True):
            kept[touched] = new
        self.w.grad = None

    def sgd(self, w, g, state, lr):
        return w - lr * (g + self.optimizer.weight_decay * w), state

    def adagrad(self, w, g, state, lr):
        g = g + self.optimizer.weight_decay * w
        s = state[1] + g * g
        return w - lr * g / (s.sqrt() + self.optimizer.eps), [state[0], s]

    def rowwiseadagrad(self, w, g, state, lr):
        g = g + self.optimizer.weight_decay * w
        s = state[1] + (g * g).mean(1, keepdim=True)
        return w - lr * g / (s.sqrt() + self.optimizer.eps), [state[0], s]

    def direction(self, g, state, square):
        o = self.optimizer
        m = o.beta1 * state[0] + (1 - o.beta1) * g
        v = o.beta2 * state[1] + (1 - o.beta2) * square
        corrected = m / (1 - o.beta1**self.steps), v / (1 - o.beta2**self.steps)
        return corrected[0] / (corrected[1].sqrt() + o.eps), [m, v]

    def adam(self, w, g, state, lr):
        r, state = self.direction(g, state, g * g)
        return w - lr * (r + self.optimizer.weight_decay * w), state

    def rowwiseadam(self, w, g, state, lr):
        r, state = self.direction(g, state, (g * g).mean(1, keepdim=True))
        return w - lr * (r + self.optimizer.weight_decay * w), state

    def lamb(self, w, g, state, lr):
        r, state = self.direction(g, state, g * g)
        r = r + self.optimizer.weight_decay * w
        lengths = w.norm(dim=1, keepdim=True), r.norm(dim=1, keepdim=True)
        trust = torch.where((lengths[0] == 0) | (lengths[1] == 0), 1.0, lengths[0] / lengths[1])
        return w - lr * trust * r, state

    def ftrl(self, w, g, state, lr):
        o = self.optimizer
        n = state[1] + g * g
        z = state[0] + g - (n.sqrt() - state[1].sqrt()) / lr * w
        w = -(z - z.sign() * o.l1) / ((o.beta + n.sqrt()) / lr + o.l2)
        return torch.where(z.abs() <= o.l1, 0.0, w), [z, n]


class Batch(NamedTuple):
    """A batch, and for each feature its ids, the sample of each and its weight."""

    jagged: Jagged
    parts: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@functools.cache
def batch(step: int, size=24, tables=TABLES) -> Batch:
    jagged = make_problem(tables, batch=size, most=3, seed=step).jagged
    found = {}
    for name, (begin, end) in jagged.id_ranges().items():
        mine, samples = slice(begin, end), torch.arange(size).repeat_interleave(jagged.lengths_of(name))
        found[name] = jagged.values_N[mine], samples, jagged.weights_N[mine].double().unsqueeze(1)
    return Batch(jagged, found)


class Oracle:
    """All tables, looked up with torch's own operations."""

    def __init__(self, embeddings: Embeddings):
        self.tables = embeddings.tables
        self.rows = {t.name: Rows(t, embeddings.weights(t.name).clone()) for t in self.tables}

    def __call__(self, given: Batch) -> dict[str, torch.Tensor]:
        return {f: self.look_up(t, f, given) for t in self.tables for f in t.feature_names}

    def look_up(self, table: Table, feature: str, given: Batch) -> torch.Tensor:
        ids, samples, weights = given.parts[feature]
        found = self.rows[table.name].w.index_select(0, ids)
        if table.pooling is Pooling.SEQUENCE:
            return found
        if table.pooling is Pooling.WEIGHTED:
            found = found * weights
        size = given.jagged.batch_size
        pooled = torch.zeros(size, table.dim, dtype=torch.float64).index_add(0, samples, found)
        if table.pooling is Pooling.MEAN:
            pooled = pooled / samples.bincount(minlength=size).clamp(min=1).unsqueeze(1)
        return pooled

    def step(self, given: Batch) -> None:
        for table in self.tables:
            self.rows[table.name].step(torch.cat([given.parts[f][0] for f in table.feature_names]).unique())


def loss_of(found: dict[str, torch.Tensor]) -> torch.Tensor:
    """Depends on every number differently, and has no minimum around which small differences would grow."""
    return sum(
        ((x.numel() + torch.arange(x.numel())).cos().view(x.shape) * x + 0.05 * x**2).sum() for x in found.values()
    )


def train(embeddings: Embeddings, jagged: Jagged) -> None:
    found = embeddings(jagged)
    loss_of({f: found[f] for t in embeddings.tables for f in t.feature_names}).backward()
    embeddings.update()


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, what: str) -> None:
    """Relative to the row's largest weight: small ones are differences of larger ones."""
    scale = wanted.abs().amax(1, keepdim=True).clamp(min=1e-3)
    error = float(((found.double() - wanted).abs() / scale).max())
    assert error <= tolerance, f"{what}: off by {error:.1e}"


OPTIMIZERS = {
    "sgd": Sgd(lr=0.05),
    "adagrad": Adagrad(lr=0.05, eps=1e-6),
    "adagrad from 0.3": Adagrad(lr=0.05, eps=1e-3, initial=0.3),
    "rowwise adagrad": RowWiseAdagrad(lr=0.05, eps=1e-6),
    "rowwise adagrad from 0.3": RowWiseAdagrad(lr=0.05, eps=1e-3, initial=0.3),
    "adam": Adam(lr=0.01, beta1=0.8, beta2=0.99, eps=1e-4),
    "rowwise adam": RowWiseAdam(lr=0.01, beta1=0.8, beta2=0.99, eps=1e-4),
    "lamb": Lamb(lr=0.01, beta1=0.8, beta2=0.99, eps=1e-4),
    "ftrl": Ftrl(lr=0.1),
    "ftrl l1 l2": Ftrl(lr=0.1, l1=0.05, l2=0.3, beta=0.5, initial=0.2),
}
SCHEDULE = Schedule(warmup_steps=7, decay_start=15, decay_steps=25, shape="cosine", end=0.1)
EXTRAS = {
    "plain": {},
    "weight decay": {"weight_decay": 0.03},
    "clip": {"clip": 0.3},
    "schedule": {"schedule": SCHEDULE},
    "all": {"weight_decay": 0.03, "clip": 0.3, "schedule": SCHEDULE},
}


def variants():
    for name, optimizer in OPTIMIZERS.items():
        for extra, changes in EXTRAS.items():
            if extra == "all" or changes.keys() <= set(optimizer.__struct_fields__):
                known = {field: x for field, x in changes.items() if field in optimizer.__struct_fields__}
                # One thing by itself on one table; nothing and everything on all tables.
                tables = TABLES if extra in ("plain", "all") else TABLES[:1]
                yield pytest.param(msgspec.structs.replace(optimizer, **known), tables, id=f"{name}, {extra}")


@pytest.mark.few(6)
@pytest.mark.parametrize(("optimizer", "tables"), list(variants()))
def test_fifty_steps_are_those_of_the_equations(optimizer, tables):
    embeddings = Embeddings(with_optimizer(optimizer, tables), seed=3)
    oracle = Oracle(embeddings)
    start = {name: rows.w.detach().clone() for name, rows in oracle.rows.items()}
    for step in range(STEPS):
        given = batch(step)
        train(embeddings, given.jagged)
        loss_of(oracle(given)).backward()
        oracle.step(given)
    for name, rows in oracle.rows.items():
        assert_close(embeddings.weights(name), rows.w.detach(), 1e-5, name)
        assert float((rows.w.detach() - start[name]).abs().max()) > 0.01  # something was learned
        assert int(embeddings.optimizer_state()[name]["step"]) == STEPS


def embeddings_of(optimizer) -> Embeddings:
    return Embeddings(with_optimizer(optimizer, TABLES[:1]))


@pytest.mark.parametrize("extra", ["weight decay", "clip", "schedule"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_setting_counts(name, extra):
    """The cases above differ, so that an oracle and a kernel that both ignore a setting would show."""
    optimizer = OPTIMIZERS[name]
    if not EXTRAS[extra].keys() <= set(optimizer.__struct_fields__):
        return
    rows = []
    for changes in ({}, EXTRAS[extra]):
        embeddings = embeddings_of(msgspec.structs.replace(optimizer, **changes))
        for step in range(3):
            train(embeddings, batch(step).jagged)
        rows.append(embeddings.table("sum"))
    assert float((rows[0] - rows[1]).abs().max()) > 1e-5


# Where torch has the same


def all_rows(rows: int) -> Jagged:
    """Every row, some twice."""
    return Jagged.from_lists({"t": [list(range(rows)), [1, 2], [2], []]})


def beside_torch(optimizer, theirs, sparse=False, every_row=True, dim=12) -> float:
    """The largest difference from torch's rows after fifty steps, relative to the largest weight."""
    table = Table(name="t", rows=16, dim=dim, optimizer=optimizer, init=Uniform(bound=0.5))
    embeddings = Embeddings([table], seed=1)
    bag = nn.EmbeddingBag.from_pretrained(embeddings.table("t").clone(), freeze=False, mode="sum", sparse=sparse)
    their_optimizer, scheduler = theirs(bag.parameters())
    for step in range(STEPS):
        jagged = all_rows(16) if every_row else batch(step, tables=(table,)).jagged
        train(embeddings, jagged)
        their_optimizer.zero_grad()
        lengths_B = jagged.lengths_of("t")
        loss_of({"t": bag(jagged.ids_of("t"), lengths_B.cumsum(0) - lengths_B)}).backward()
        their_optimizer.step()
        if scheduler:
            scheduler.step()
    wanted = bag.weight.detach()
    return float(((embeddings.table("t") - wanted).abs() / wanted.abs().amax()).max())


THEIRS = {
    "sgd": (Sgd(lr=0.02), lambda p: (torch.optim.SGD(p, lr=0.02), None)),
    "sgd with decay": (
        Sgd(lr=0.02, weight_decay=0.1),
        lambda p: (torch.optim.SGD(p, lr=0.02, weight_decay=0.1), None),
    ),
    "adagrad": (
        Adagrad(lr=0.05, eps=1e-3, initial=0.1),
        lambda p: (torch.optim.Adagrad(p, lr=0.05, eps=1e-3, initial_accumulator_value=0.1), None),
    ),
    "adagrad with decay": (
        Adagrad(lr=0.05, weight_decay=0.1),
        lambda p: (torch.optim.Adagrad(p, lr=0.05, eps=1e-8, weight_decay=0.1), None),
    ),
    "adam": (Adam(lr=0.01), lambda p: (torch.optim.Adam(p, lr=0.01), None)),
    "adam with another eps": (
        Adam(lr=0.01, beta1=0.7, beta2=0.9, eps=0.1),
        lambda p: (torch.optim.Adam(p, lr=0.01, betas=(0.7, 0.9), eps=0.1), None),
    ),
    "adamw": (Adam(lr=0.01, weight_decay=0.1), lambda p: (torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), None)),
    "adamw, warm-up": (
        Adam(lr=0.01, weight_decay=0.1, schedule=Schedule(warmup_steps=20)),
        lambda p: scheduled(
            torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
            lambda o: torch.optim.lr_scheduler.LinearLR(o, 1 / 20, 1.0, total_iters=19),
        ),
    ),
    "sgd, cosine": (
        Sgd(lr=0.02, schedule=Schedule(decay_start=1, decay_steps=40, shape="cosine", end=0.0)),
        lambda p: scheduled(
            torch.optim.SGD(p, lr=0.02), lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda done: cosine(done, 40))
        ),
    ),
}


def scheduled(optimizer, scheduler):
    return optimizer, scheduler(optimizer)


def cosine(done: int, steps: int) -> float:
    return (1 + math.cos(math.pi * min(1, done / steps))) / 2


@pytest.mark.few(3)
@pytest.mark.parametrize("name", THEIRS)
def test_training_is_torchs_where_every_row_is_touched(name):
    assert beside_torch(*THEIRS[name]) < 1e-5


def test_adam_is_torchs_sparse_adam_where_rows_are_left_out():
    """A row that a step does not touch keeps its means; the correction counts all steps."""
    ours, theirs = Adam(lr=0.01, eps=1e-8), lambda p: (torch.optim.SparseAdam(list(p), lr=0.01, eps=1e-8), None)
    assert beside_torch(ours, theirs, sparse=True, every_row=False) < 1e-5


@pytest.mark.parametrize("dim", [1, 12])
def test_rowwise_optimizers_of_one_column_are_those_of_each_weight(dim):
    """The mean over one column is the column."""
    pairs = [
        (RowWiseAdagrad(lr=0.05), Adagrad(lr=0.05)),
        (RowWiseAdam(lr=0.01, weight_decay=0.1), Adam(lr=0.01, weight_decay=0.1)),
    ]
    for pair in pairs:
        found = []
        for optimizer in pair:
            table = Table(name="t", rows=16, dim=dim, optimizer=optimizer, init=Uniform(bound=0.5))
            embeddings = Embeddings([table])
            for step in range(10):
                train(embeddings, batch(step, tables=(msgspec.structs.replace(table, optimizer=Sgd()),)).jagged)
            found.append(embeddings.table("t").clone())
        assert torch.allclose(*found, rtol=1e-5, atol=1e-7) == (dim == 1)


# Single steps, spelled out


def one_step(optimizer, w: list[float], g: list[float]) -> Embeddings:
    """A table of one row that steps once."""
    embeddings = Embeddings([Table(name="t", rows=1, dim=len(w), optimizer=optimizer)])
    embeddings.table("t")[0] = torch.tensor(w)
    embeddings(Jagged.from_lists({"t": [[0]]})).values().backward(torch.tensor([g]))
    embeddings.update()
    return embeddings


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), RowWiseAdam(lr=0.1), Lamb(lr=0.1)], ids=lambda o: type(o).__name__)
def test_the_first_step_of_adam_is_the_learning_rate(optimizer):
    """The correction makes the first step a sign, however small the gradient; LAMB's is as long as the row."""
    w, g = [3.0, 4.0, 0.0, 0.0], [1e-3, -1e-3, 1e-3, 1e-3]
    step = 0.1 * (5.0 / 2.0 if isinstance(optimizer, Lamb) else 1.0)
    wanted = torch.tensor(w) - step * torch.tensor(g).sign()
    torch.testing.assert_close(one_step(optimizer, w, g).table("t")[0], wanted, rtol=1e-4, atol=1e-4)


def test_lamb_of_a_row_of_zeros_steps_like_adam():
    rows = [one_step(kind(lr=0.1), [0.0] * 4, [1.0, -2.0, 3.0, 0.5]).table("t") for kind in (Lamb, Adam)]
    assert torch.equal(*rows)
    assert rows[0].count_nonzero() == 4


def test_lamb_without_a_gradient_stays():
    found = one_step(Lamb(lr=0.1), [1.0, 2.0, 3.0, 4.0], [0.0] * 4)
    assert found.table("t").tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_ftrl_sets_weights_to_nothing_at_small_z():
    """|z| <= l1 is 0 exactly, which is what makes models sparse."""
    found = one_step(Ftrl(lr=0.1, l1=0.5), [0.0] * 4, [0.1, -0.5, 0.6, -3.0])
    row = found.table("t")[0].tolist()
    assert row[:2] == [0.0, 0.0]
    assert not any(str(x).startswith("-0") for x in row[:2])
    for weight, gradient in zip(row[2:], (0.6, -3.0), strict=True):
        wanted = -(abs(gradient) - 0.5) * math.copysign(1, gradient) / ((1.0 + abs(gradient)) / 0.1)
        assert weight == pytest.approx(wanted, rel=1e-5)
    state = found.optimizer_state()["t"]
    torch.testing.assert_close(state["z"][0], torch.tensor([0.1, -0.5, 0.6, -3.0]))
    torch.testing.assert_close(state["n"][0], torch.tensor([0.1, -0.5, 0.6, -3.0]).square())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_is_clipped_to_a_length_and_not_to_a_box(name):
    """One longer than the bound counts as one of its length; a shorter one as itself."""
    clipped = msgspec.structs.replace(OPTIMIZERS[name], clip=0.5)
    w, long = [0.5, -0.4, 0.3, 0.2], [3.0, 0.0, -4.0, 0.0]
    found, wanted = one_step(clipped, w, long), one_step(OPTIMIZERS[name], w, [0.3, 0.0, -0.4, 0.0])
    torch.testing.assert_close(found.table("t"), wanted.table("t"), rtol=1e-6, atol=1e-7)
    short = [0.3, 0.0, -0.39, 0.0]
    assert torch.equal(one_step(clipped, w, short).table("t"), one_step(OPTIMIZERS[name], w, short).table("t"))


def test_the_decay_is_not_clipped():
    """The bound is of the gradient that came, before the decay is added."""
    found = one_step(Sgd(lr=1.0, weight_decay=0.5, clip=1.0), [8.0, 0.0], [0.0, 2.0])
    assert found.table("t").tolist() == [[4.0, -1.0]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_that_are_not_looked_up_stay(name):
    """Also with decay and momentum, and with their state."""
    optimizer = OPTIMIZERS[name]
    if "weight_decay" in optimizer.__struct_fields__:
        optimizer = msgspec.structs.replace(optimizer, weight_decay=0.5)
    embeddings = Embeddings([Table(name="t", rows=9, dim=4, optimizer=optimizer)])

    def step(*ids: int) -> dict[str, torch.Tensor]:
        embeddings(Jagged.from_lists({"t": [list(ids)]})).values().sum().backward()
        embeddings.update()
        state = embeddings.optimizer_state()["t"]
        return {"rows": embeddings.table("t").clone()} | {k: v.clone() for k, v in state.items() if k != "step"}

    before = step(*range(9))
    after = step(2, 5, 2)
    others = [0, 1, 3, 4, 6, 7, 8]
    for name_, x in before.items():
        assert torch.equal(x[others], after[name_][others])
        assert not torch.equal(x[2], after[name_][2])


# Schedules

schedules = st.builds(
    Schedule,
    warmup_steps=st.integers(0, 1000),
    decay_start=st.integers(0, 1000),
    decay_steps=st.integers(0, 1000),
    shape=st.sampled_from(["linear", "cosine", "quadratic"]),
    end=st.floats(0, 1),
)
steps = st.integers(1, 4000)


@given(schedules, steps)
def test_a_factor_lies_between_the_ends(schedule, step):
    factor = schedule.factor(step)
    assert 0 <= factor <= 1
    assert factor == pytest.approx(rate(schedule, step), abs=1e-12)
    if step >= schedule.warmup_steps:
        assert factor >= schedule.end - 1e-12


@given(schedules, steps)
def test_a_factor_rises_and_then_falls(schedule, step):
    now, then = schedule.factor(step), schedule.factor(step + 1)
    if step < schedule.warmup_steps and step + 1 < max(schedule.warmup_steps, 1):
        assert then > now
    elif step >= schedule.warmup_steps:
        assert then <= now + 1e-12


@given(schedules)
def test_the_warm_up_is_linear_and_reaches_the_full_rate(schedule):
    warm = schedule.warmup_steps
    for step in {1, warm // 3, warm // 2, warm - 1} - {0, -1}:
        if step < warm:
            assert schedule.factor(step) == pytest.approx(step / warm)
    if warm:
        assert schedule.factor(warm) == 1
    if warm > 1:
        assert 0 < schedule.factor(1) < 1


@given(schedules.filter(lambda s: s.decay_steps))
def test_the_decay_starts_at_the_full_rate_and_ends_at_the_end(schedule):
    start = max(schedule.warmup_steps, schedule.decay_start)
    after = start + schedule.decay_steps
    if start:
        assert schedule.factor(start) == 1
    for step in (after, after + 1, after + 12345):
        assert schedule.factor(max(1, step)) == pytest.approx(schedule.end, abs=1e-12)


def test_shapes_of_the_decay():
    found = {
        shape: [Schedule(decay_start=10, decay_steps=4, shape=shape, end=0.2).factor(10 + k) for k in range(6)]
        for shape in ("linear", "cosine", "quadratic")
    }
    half = math.sqrt(0.5)
    assert found == {
        "linear": pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        "cosine": pytest.approx([1.0, 0.6 + 0.4 * half, 0.6, 0.6 - 0.4 * half, 0.2, 0.2]),
        "quadratic": pytest.approx([1.0, 0.2 + 0.8 * 9 / 16, 0.4, 0.25, 0.2, 0.2]),
    }


@given(st.integers(1, 100_000))
def test_without_numbers_a_schedule_is_none(step):
    assert Schedule().factor(step) == 1.0


def test_tables_have_their_own_rates():
    """One model, one gradient, and each table steps as its own numbers say, at its own step."""
    optimizers = {
        "slow": Sgd(lr=0.25),
        "fast": Sgd(lr=1.0),
        "rising": Sgd(lr=1.0, schedule=Schedule(warmup_steps=4)),
        "falling": Sgd(lr=1.0, schedule=Schedule(decay_start=1, decay_steps=2, end=0.5)),
        "history": Sgd(lr=1.0, schedule=Schedule(warmup_steps=2)),
    }
    tables = [
        Table(
            name=name,
            rows=3,
            dim=4,
            optimizer=o,
            init=Uniform(bound=0.0),
            pooling=Pooling.SEQUENCE if name == "history" else Pooling.SUM,
        )
        for name, o in optimizers.items()
    ]
    embeddings = Embeddings(tables)
    seen = {name: [] for name in optimizers}
    for step in range(4):
        found = embeddings(Jagged.from_lists({name: [[1]] for name in optimizers}))
        loss = found.values().sum()
        if step % 2:  # sequences join every other step only
            loss = loss + found["history"].sum()
        loss.backward()
        before = {name: float(embeddings.table(name)[1, 0]) for name in optimizers}
        embeddings.update()
        for name in optimizers:
            seen[name].append(before[name] - float(embeddings.table(name)[1, 0]))
    assert seen == {
        "slow": [0.25] * 4,
        "fast": [1.0] * 4,
        "rising": [0.25, 0.5, 0.75, 1.0],
        "falling": [1.0, 0.75, 0.5, 0.5],
        "history": [0.0, 0.5, 0.0, 1.0],
    }


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", ROW_OPTIMIZERS.values())
def test_columns_are_coupled_where_the_gradient_of_one_changes_another(kind, clip):
    optimizer = kind(lr=0.1, clip=clip)
    seen = []
    for others in (1.0, 3.0):
        embeddings = Embeddings([Table(name="t", rows=1, dim=8, optimizer=optimizer, init=Constant(value=1.0))])
        for factor in (1.0, others):  # a first step of Adam is the same for any length of the gradient
            row = embeddings(Jagged.from_lists({"t": [[0]]})).values()
            (row * torch.tensor([1.0] * 4 + [factor] * 4)).sum().backward()
            embeddings.update()
        seen.append(embeddings.table("t")[0, :4].tolist())
    assert needs_full_rows(optimizer) == (seen[0] != seen[1])


@pytest.mark.parametrize(
    "optimizer", [Sgd(lr=0.5), RowWiseAdagrad(lr=0.5), Adam(lr=0.5)], ids=lambda o: type(o).__name__
)
def test_learning_rates_may_change_between_updates(optimizer):
    """As if the tables' optimizers had them; None is those of the optimizers."""
    batch = Jagged.from_lists({"a": [[1, 2], [2]], "b": [[0], [3]]})
    rates = {"a": 0.25, "b": 0.125}
    changed = Embeddings([Table(name=name, rows=4, dim=8, optimizer=optimizer) for name in rates], seed=1)
    fixed = Embeddings(
        [Table(name=n, rows=4, dim=8, optimizer=msgspec.structs.replace(optimizer, lr=r)) for n, r in rates.items()],
        seed=1,
    )
    changed.arena.learning_rates_T = torch.tensor(list(rates.values()))
    for _ in range(2):
        for embeddings in (changed, fixed):
            embeddings(batch).matrix_BS.square().sum().backward()
            embeddings.update()
    assert torch.equal(changed.arena.rows, fixed.arena.rows)

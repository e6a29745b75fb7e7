"""The same bits on any number of threads: training of every optimizer and row type, several runs each.

Ids are drawn as in a log (few ids very often), so that threads meet at the same rows. Some tables have so many ids that
threads share them; the others go to one thread each.
"""

import math

import pytest
import torch
from table_state import everything, outputs

from rowwise import (
    Adagrad,
    Adam,
    Embeddings,
    Ftrl,
    Jagged,
    Lamb,
    Pooling,
    RowType,
    RowWiseAdagrad,
    RowWiseAdam,
    Schedule,
    Sgd,
    Table,
)

BATCH, STEPS, THREADS, RUNS = 1024, 50, (1, 2, 4), 3
SHARED = 1 << 16  # ids a step from which a table is shared by threads
OPTIMIZERS = {
    "sgd": Sgd(lr=1e-4),
    "adagrad": Adagrad(lr=0.05),
    "rowwise adagrad": RowWiseAdagrad(lr=0.05, weight_decay=1e-3),
    "adam": Adam(lr=0.01, schedule=Schedule(warmup_steps=10)),
    "rowwise adam": RowWiseAdam(lr=0.01, clip=1.0),
    "lamb": Lamb(lr=0.01),
    "ftrl": Ftrl(lr=0.05, l1=1e-3),
}
ROWS = {
    "fp32": (RowType.FP32, None),
    "fp16": (RowType.FP16, None),
    "bf16": (RowType.BF16, None),
    "int8": (RowType.INT8, None),
    "int8 groups": (RowType.INT8, 16),
}
SHAPES = (  # rows, columns, features
    (Pooling.SUM, 50_000, 16, 2),
    (Pooling.MEAN, 3_000, 20, 1),
    (Pooling.SEQUENCE, 1_000, 4, 1),
)


def make_table(pooling: Pooling, optimizer: str, rows: str) -> Table:
    _, count, dim, features = next(s for s in SHAPES if s[0] is pooling)
    name = f"{pooling} {optimizer} {rows}"
    row_type, group = ROWS[rows]
    return Table(
        name=name,
        rows=count,
        dim=dim,
        features=tuple(f"{name} {k}" for k in range(features)),
        pooling=pooling,
        optimizer=OPTIMIZERS[optimizer],
        row_type=row_type,
        column_group=group,
    )


def few() -> list[Table]:
    """Every optimizer, every row type and every pooling, but not with one another."""
    found = []
    for k, optimizer in enumerate(OPTIMIZERS):
        for at, (pooling, *_) in enumerate(SHAPES):
            found.append(make_table(pooling, optimizer, list(ROWS)[(k + 2 * at) % len(ROWS)]))
    return found


def zipf(rows: int, count: int, g: torch.Generator) -> torch.Tensor:
    """Ids whose frequency falls with their rank, scattered over the table."""
    rank = torch.rand(count, generator=g).mul(math.log(rows)).exp().long().clamp(max=rows) - 1
    return rank * 7919 % rows


def batches(model: list[Table], shared: set[str], steps: int) -> list[Jagged]:
    """Every step another batch."""
    g = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        lengths, values = [], []
        for table in model:
            features = len(table.feature_names)
            most = 2 * SHARED // BATCH // features + 10 if table.name in shared else 4
            for _ in range(features):
                lengths.append(torch.randint(0, most + 1, (BATCH,), generator=g))
                values.append(zipf(table.rows, int(lengths[-1].sum()), g))
            assert table.name not in shared or sum(len(x) for x in values[-features:]) > SHARED
        names = tuple(f for t in model for f in t.feature_names)
        found.append(Jagged(features=names, values_N=torch.cat(values).int(), lengths_FB=torch.cat(lengths)))
    return found


def train(model: list[Table], data: list[Jagged]) -> dict[str, torch.Tensor]:
    """Gradients depend on the rows, so a bit that differs once goes on to differ."""
    embeddings = Embeddings(model, seed=1)
    for jagged in data:
        outs = outputs(embeddings, jagged)
        torch.autograd.backward(outs, [x.detach() - 0.01 for x in outs])
        embeddings.update()
    assert all(embeddings.weights(t.name).isfinite().all() for t in model)
    return everything(embeddings)


def check(model: list[Table], data: list[Jagged], runs: int, threads) -> None:
    first = start = None
    for count in THREADS:
        threads(count)
        start = start or Embeddings(model, seed=1).state_dict()
        for run in range(runs):
            found = train(model, data)
            first = first or found
            for name, x in found.items():
                assert torch.equal(x, first[name]), f"{name}: run {run} with {count} threads differs"
    assert not any(torch.equal(first[name], start[name]) for name in start)


@pytest.mark.slow
def test_same_bits_on_any_number_of_threads(threads):
    model = few()
    assert {t.optimizer for t in model} == set(OPTIMIZERS.values())
    assert {(t.row_type, t.column_group) for t in model} == set(ROWS.values())
    shared = {model[0].name, model[10].name, model[17].name}  # one of each pooling
    assert len({t.pooling for t in model if t.name in shared}) == 3
    check(model, batches(model, shared, STEPS // 2), RUNS - 1, threads)


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rows", ROWS)
def test_same_bits_of_a_table_that_threads_share(rows, optimizer, threads):
    """Every optimizer with every row type, for a few steps."""
    model = [make_table(Pooling.SUM, optimizer, rows)]
    check(model, batches(model, {model[0].name}, 2), 1, threads)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
def test_same_bits_of_every_table_and_pooling(rows, threads):
    model = [make_table(pooling, optimizer, rows) for optimizer in OPTIMIZERS for pooling, *_ in SHAPES]
    names = list(OPTIMIZERS)
    # One of each pooling is shared, of another optimizer for each row type.
    shared = {
        make_table(pooling, names[(list(ROWS).index(rows) + 2 * k) % len(names)], rows).name
        for k, (pooling, *_) in enumerate(SHAPES)
    }
    check(model, batches(model, shared, STEPS), RUNS, threads)

"""The same bits on any number of threads: fifty steps of training, every kind of table, three runs each.

Ids are drawn as in a log (few ids very often), so that threads meet at the same rows. One table of each
pooling and one of each optimizer has so many ids that threads share it; the others go to one thread each.
"""

import math

import torch

from rowwise import Adagrad, Embeddings, Jagged, Pooling, RowWiseAdagrad, Sgd, Table

BATCH, STEPS, THREADS, RUNS = 1024, 50, (1, 2, 4), 3
SHARED = 1 << 16  # ids a step from which a table is shared by threads
OPTIMIZERS = {"sgd": Sgd(lr=1e-4), "adagrad": Adagrad(lr=0.05), "rowwise": RowWiseAdagrad(lr=0.05)}
LARGE = {"sum rowwise", "mean sgd", "sequence adagrad"}


def tables() -> list[Table]:
    model = []
    for name, optimizer in OPTIMIZERS.items():
        two = (f"{name} 1", f"{name} 2")
        model += [
            Table(name=f"sum {name}", rows=50_000, dim=16, features=two, optimizer=optimizer),
            Table(name=f"mean {name}", rows=3_000, dim=20, pooling=Pooling.MEAN, optimizer=optimizer),
            Table(name=f"sequence {name}", rows=1_000, dim=4, pooling=Pooling.SEQUENCE, optimizer=optimizer),
        ]
    return model


def zipf(rows: int, count: int, g: torch.Generator) -> torch.Tensor:
    """Ids whose frequency falls with their rank, scattered over the table."""
    rank = torch.rand(count, generator=g).mul(math.log(rows)).exp().long().clamp(max=rows) - 1
    return rank * 7919 % rows


def batches(model: list[Table]) -> list[Jagged]:
    """Every step another batch."""
    g = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        lengths, values = [], []
        for table in model:
            features = len(table.feature_names)
            most = 2 * SHARED // BATCH // features + 10 if table.name in LARGE else 4
            for _ in range(features):
                lengths.append(torch.randint(0, most + 1, (BATCH,), generator=g))
                values.append(zipf(table.rows, int(lengths[-1].sum()), g))
            assert table.name not in LARGE or sum(len(x) for x in values[-features:]) > SHARED
        names = tuple(f for t in model for f in t.feature_names)
        found.append(Jagged(features=names, values_N=torch.cat(values).int(), lengths_FB=torch.cat(lengths)))
    return found


def train(model: list[Table], data: list[Jagged]) -> dict[str, torch.Tensor]:
    """Gradients depend on the rows, so a bit that differs once goes on to differ."""
    embeddings = Embeddings(model, seed=1)
    for jagged in data:
        found = embeddings(jagged)
        outs = [found.values(), *found.sequences.values()]
        torch.autograd.backward(outs, [x.detach() - 0.01 for x in outs])
        embeddings.update()
    state = {f"{t} {n}": x for t, s in embeddings.optimizer_state().items() for n, x in s.items()}
    return dict(embeddings.state_dict()) | state


def test_same_bits_on_any_number_of_threads(threads):
    model = tables()
    data = batches(model)
    first = start = None
    for count in THREADS:
        threads(count)
        start = start or Embeddings(model, seed=1).state_dict()
        for run in range(RUNS):
            found = train(model, data)
            first = first or found
            for name, x in found.items():
                assert x.isfinite().all(), name
                assert torch.equal(x, first[name]), f"{name}: run {run} with {count} threads differs"
    assert not any(torch.equal(first[name], start[name]) for name in start)

"""What does a fixed number of rows cost where ids never stop coming?

    python benchmarks/managed.py [--quick | --smoke] [--save]

AUC, memory and time of a table of items that is managed, beside one with a row for every item and one whose ids are
hashed to as many rows. Items are Zipf-distributed, and the head of the distribution moves: new items come, old ones
are not seen again. Each sample is scored before it is trained on; AUC is that of the second half. Last, a managed
table is trained on four ranks, saved, and continued on three. The last printed line is one JSON object.

Takes: 15 minutes; --quick 2 minutes
Needs: 3 GB of memory
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from parts.batches import bags_of
from parts.report import at_least, at_most, exactly, finish, options, parsed, show
from rich.progress import Progress
from torch import nn

from rowwise import (
    Embeddings,
    Managed,
    ManagedEmbeddings,
    Plan,
    RowWiseAdagrad,
    Table,
    Uniform,
    make_embeddings,
)
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import write
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard import shard
from rowwise.planning.planner import row_wise
from rowwise.tables.idmaps import HashIds
from rowwise.train.recorder import memory_bytes
from rowwise.train.snapshot import collect, restore

BATCH, DIM, DENSE = 8192, 8, 4
ODD = 0x9E3779B97F4A7C15  # times an item's number is its id: any 64 bits, no two alike
UNBOUNDED = "a row for every id"
POLICIES = {
    "managed, lru": Managed(),
    "managed, lru, admitted the second time": Managed(admit=2),
    "managed, lfu, ids expire": Managed(evict="lfu", ttl_steps=300),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Samples whose items are Zipf-distributed over a window that moves on by `moves` items in all."""

    batches: int
    window: int
    moves: int

    @property
    def items(self) -> int:
        return self.window + self.moves

    def draw(self) -> Iterator[tuple[NDArray[np.int64], torch.Tensor, torch.Tensor]]:
        """Numbers of items, dense numbers and labels, batch by batch."""
        draws = np.random.default_rng(0)
        bias = np.random.default_rng(1).normal(0, 1.2, self.items).astype(np.float32)
        weights = np.random.default_rng(2).normal(0, 0.5, DENSE).astype(np.float32)
        for batch in range(self.batches):
            # Uniform in the logarithm is Zipf with exponent 1. The newest items are the most frequent.
            rank = np.minimum(np.exp(draws.random(BATCH) * np.log(self.window)).astype(np.int64) - 1, self.window - 1)
            first = self.moves * batch // max(1, self.batches - 1)
            number = first + self.window - 1 - rank
            dense = draws.normal(size=(BATCH, DENSE)).astype(np.float32)
            logits = bias[number] + dense @ weights - 0.5
            labels = draws.random(BATCH) < 1 / (1 + np.exp(-logits))
            yield number, torch.from_numpy(dense), torch.from_numpy(labels.astype(np.float32))

    def distinct(self) -> int:
        seen = np.zeros(self.items, np.bool_)
        for number, *_ in self.draw():
            seen[number] = True
        return int(seen.sum())


class ClickModel(nn.Module):
    """The item's vector and dense numbers, by a small perceptron and a weight an item."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = make_embeddings([table], seed=3)
        self.layers = nn.Sequential(nn.Linear(DIM + DENSE, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids_N: torch.Tensor, dense_BF: torch.Tensor) -> torch.Tensor:
        vectors = self.embeddings(bags_of(["item"], ids_N)).matrix_BS
        return self.layers(torch.cat([vectors, dense_BF], 1))[:, 0] + vectors[:, 0]

    @property
    def rows(self) -> Embeddings:
        return self.embeddings if isinstance(self.embeddings, Embeddings) else self.embeddings.stored


def ids_of(number: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy((number.astype(np.uint64) * np.uint64(ODD)).view(np.int64))


def train(table: Table, stream: Stream, progress: Progress, name: str) -> dict:
    """The AUC of the second half, seconds a step, and memory at a quarter and at the end."""
    model = ClickModel(table)
    managed = model.embeddings if isinstance(model.embeddings, ManagedEmbeddings) else None
    optimizer = torch.optim.Adam(model.layers.parameters(), lr=0.002)
    memory, spent_s, half = [], 0.0, stream.batches // 2
    scored_2N = torch.ones(2, (stream.batches - half) * BATCH)  # takes its memory now
    for number, dense, clicks in progress.track(stream.draw(), total=stream.batches, description=name):
        ids_N = torch.from_numpy(number) if managed is None else ids_of(number)
        begin_s = time.perf_counter()
        logits = model(ids_N, dense)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks)
        loss.backward()
        optimizer.step()
        model.rows.update()
        spent_s += time.perf_counter() - begin_s
        place = (len(memory) - half) * BATCH
        if place >= 0:
            scored_2N[:, place : place + BATCH] = torch.stack([logits.detach(), clicks])
        memory.append(memory_bytes())
    quarter = memory[stream.batches // 4]
    counters = {} if managed is None else managed.counters["item"]
    return {
        "table": name,
        "rows": table.rows if managed or table.id_map is None else table.id_map.rows,
        "auc": auc_of(*scored_2N),
        "step_ms": 1e3 * spent_s / stream.batches,
        "memory_quarter_bytes": quarter,
        "memory_growth_bytes": memory[-1] - quarter,
        **({} if managed is None else {key: getattr(counters, key) for key in counters.__slots__ if key != "rows"}),
    }


def auc_of(scores_N: torch.Tensor, labels_N: torch.Tensor) -> float:
    """The share of pairs of a click and no click that are in order."""
    order = scores_N.double().argsort()
    ranks = torch.empty(len(order), dtype=torch.float64)
    ranks[order] = torch.arange(1, len(order) + 1, dtype=torch.float64)
    clicks = labels_N.double()
    count = float(clicks.sum())
    return float((ranks @ clicks - count * (count + 1) / 2) / (count * (len(clicks) - count)))


def table_of(rows: int, managed: Managed | None = None, id_map: HashIds | None = None) -> Table:
    how = RowWiseAdagrad(lr=1.0, eps=1e-6)
    return Table(
        name="item", rows=rows, dim=DIM, optimizer=how, init=Uniform(bound=0.01), managed=managed, id_map=id_map
    )


def reshard(rows: int, batches: int) -> dict:
    """Trains on one rank, and on four and then three: the tensors that differ at the end."""
    table = table_of(rows, Managed(admit=2))
    stream = Stream(batches=batches, window=4 * rows, moves=8 * rows)
    parts = list(stream.draw())
    half = batches // 2

    def steps(net: nn.Module, comm: Comm | None, some: list) -> None:
        rank, world = (0, 1) if comm is None else (comm.rank, len(comm.ranks))
        for number, *_ in some:
            mine = ids_of(number[BATCH * rank // world : BATCH * (rank + 1) // world])
            (net.embeddings(bags_of(["item"], mine)).matrix_BS ** 2).sum().backward()
            net.embeddings.stored.update()

    def sharded(comm: Comm) -> nn.Module:
        world = len(comm.ranks)
        plan = Plan(world=world, tiles=row_wise(table, range(world)))
        net = nn.Module()
        net.embeddings = make_embeddings([table], seed=3)
        return shard(net, plan, comm, elastic=True)

    def begin(comm: Comm) -> None:
        net = sharded(comm)
        steps(net, comm, parts[:half])
        write(folder / "four", *collect(net, {}, comm), comm)

    def go_on(comm: Comm) -> None:
        net = sharded(comm)
        restore(Checkpoint.open(folder / "four"), net, {}, comm)
        steps(net, comm, parts[half:])
        write(folder / "three", *collect(net, {}, comm), comm)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_threads(4, begin)
        run_threads(3, go_on)
        alone = nn.Module()
        alone.embeddings = make_embeddings([table], seed=3)
        steps(alone, None, parts)
        write(folder / "one", *collect(alone, {}))
        one, three = Checkpoint.open(folder / "one"), Checkpoint.open(folder / "three")
        names = [name for name in one.names() if name.startswith(("model/", "rows/"))]
        differ = sum(not torch.equal(one.load(name), three.load(name)) for name in names)
    counters = alone.embeddings.counters["item"]
    return {"table": "four ranks, then three", "tensors": len(names), "differ": differ, "evicted": counters.evicted}


def main() -> None:
    args = parsed(options("managed", __doc__))
    scale = 1 if args.smoke else 10 if args.quick else 100
    budget = 10_000 * scale
    stream = Stream(batches=(30 if args.smoke else 40 * scale), window=5 * budget, moves=14 * budget)
    rows: list[dict] = []
    with Progress() as progress:
        for name, policy in list(POLICIES.items())[: 1 if args.smoke else None]:
            rows.append(train(table_of(budget, policy), stream, progress, name))
        rows.append(train(table_of(stream.items, id_map=HashIds(rows=budget)), stream, progress, "hashed"))
        rows.append(train(table_of(stream.items), stream, progress, UNBOUNDED))
        rows.append(reshard(1000 * min(scale, 10), 10))
    distinct = stream.distinct()
    for row in rows:
        show(row)
    floors = floors_of(rows, distinct, budget, smoke=args.smoke)
    finish("managed", rows, floors, args, distinct=distinct)


def floors_of(rows: list[dict], distinct: int, budget: int, *, smoke: bool) -> list[dict]:
    by_name = {row["table"]: row for row in rows}
    first, full, moved = by_name[next(iter(POLICIES))], by_name[UNBOUNDED], rows[-1]
    floors = [
        exactly("tensors that differ after four ranks, then three", moved["differ"], 0),
        at_least("ids evicted on the way", moved["evicted"], 1),
        exactly(
            "ids admitted less evicted and expired",
            first["admitted"] - first["evicted"] - first["expired"],
            first["in_use"],
        ),
        at_least("distinct ids for a row", distinct / budget, 1.5 if smoke else 10),
    ]
    if smoke:
        return floors
    growth = first["memory_growth_bytes"] / first["memory_quarter_bytes"]
    return [
        *floors,
        at_most("AUC lost to a row for every id", full["auc"] - first["auc"], 0.003),
        at_least("AUC above ids hashed to as many rows", first["auc"] - by_name["hashed"]["auc"], 0),
        at_most("growth of memory from a quarter of the samples on", growth, 0.05),
        at_most("time of a step over that of a plain table", first["step_ms"] / full["step_ms"], None),
    ]


if __name__ == "__main__":
    main()

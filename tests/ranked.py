"""The small run of `trainings` on several ranks: each has its part of the batches and some tiles of the tables."""

import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msgspec import structs
from torch import nn
from trainings import Net, World, bits, with_cell

from rowwise import Adam, Plan, RowWiseAdagrad, Table
from rowwise.ingest import Batcher, BatchShard
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.plan import Tile
from rowwise.parallel.shard import shard
from rowwise.planning.planner import column_wise, replicated, row_wise, table_wise
from rowwise.tables.spec import Wire
from rowwise.tables.store.row_store import OpenStore
from rowwise.train.evaluate import ClickEvaluator
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import CheckpointFolder
from rowwise.train.trainer import Trainer

TIMEOUT_S = 60
ELASTIC = {"determinism": "elastic", "virtual_shards": 4, "batch": 1024}
ELASTIC_ROWS = {"count": 2500, "split_rows": 700, "unit": 256}  # the last batch of an epoch is short
STATEFUL = (
    Table(name="user", rows=12, dim=8, optimizer=Adam(lr=0.05)),
    Table(name="words", rows=17, dim=4, pooling="mean", optimizer=RowWiseAdagrad(lr=0.1)),
)


@dataclass
class Ranked(World):
    """What a run on several ranks is made of."""

    unit: int = 2  # samples that stay together
    plan: int = 0  # which of several
    bad_row: int | None = None  # whose label rank 1 cannot read
    on_disk: tuple[str, ...] = ()  # tables, of those whose tiles have whole rows
    cache_rows: int = 0
    open_store: OpenStore | None = None  # of those tables; None: a file

    def net(self) -> nn.Module:
        """Made once, before there are ranks: threads share the random numbers that it is filled with."""
        return Net(self.tables, dropout=self.dropout, seed=self.seed, statistics=False)

    def tiles(self, world: int) -> Plan:
        user, words, *_ = self.tables
        ranks = list(range(world))
        ways = (
            (row_wise(user, ranks), table_wise(words, world - 1)),
            (table_wise(user, 0), row_wise(words, ranks[::-1])),
            (column_wise(user, ranks), replicated(words, ranks)),
        )
        return Plan(world=world, tiles=tuple(self.lowered(tile) for tiles in ways[self.plan] for tile in tiles))

    def lowered(self, tile: Tile) -> Tile:
        """The tile on disk, if its table is."""
        if tile.table not in self.on_disk:
            return tile
        return structs.replace(tile, tier="disk", cache_rows=min(self.cache_rows, tile.rows[1] - tile.rows[0]))

    def deal(self, comm: Comm) -> BatchShard:
        return BatchShard(rank=comm.rank, world=len(comm.ranks), unit=self.unit)

    def batches_of(self, comm: Comm, position=None) -> Batcher:
        bad = self.bad_row if comm.rank == 1 else None
        rows = self.rows() if bad is None else with_cell(self.rows(), "click", bad, 7)
        return self.batcher(position, self.deal(comm), rows)

    def evaluator_of(self, comm: Comm, model: nn.Module) -> ClickEvaluator:
        return self.evaluator(model, self.deal(comm), comm)

    def sharded(self, comm: Comm, net: nn.Module) -> nn.Module:
        model, elastic = copy.deepcopy(net), self.settings.train.determinism == "elastic"
        disk = (self.open_store or self.folder / "disk") if self.on_disk else None
        return shard(model, self.tiles(len(comm.ranks)), comm, elastic=elastic, disk=disk)

    def on(self, comm: Comm, net: nn.Module, *, tell=None, wire: Wire | None = None) -> Trainer:
        model = self.sharded(comm, net)
        evaluate = self.evaluator_of(comm, model) if self.valid else None
        job = replace(self.job(model), batches=partial(self.batches_of, comm), evaluate=evaluate)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        folder = None if self.folder is None else RunFolder(self.folder)
        return Trainer(job, self.settings, folder, tell, comm, wire or Wire())

    def resumed(self, comm: Comm, net: nn.Module, *, which: str = "last", tell=None, wire=None) -> Trainer:
        """From what is on the disk alone."""
        trainer = self.on(comm, net, tell=tell, wire=wire)
        for parameter in trainer._context.dense:
            parameter.data.zero_()
        trainer.resume(CheckpointFolder(self.folder / "ckpt").open(which))
        return trainer


def train(world: Ranked, ranks: int, *, which: str | None = None, prepare=None) -> list[Trainer]:
    """A whole run, or the rest of one, on ranks that are threads; `prepare(comm, trainer)` may meddle before."""
    net = world.net()

    def rank(comm: Comm) -> Trainer:
        trainer = world.on(comm, net) if which is None else world.resumed(comm, net, which=which)
        if prepare is not None:
            prepare(comm, trainer)
        trainer.run()
        return trainer

    return run_threads(ranks, rank, TIMEOUT_S)


def tensors(folder: Path, which: str = "last") -> dict[str, object]:
    """Weights and the state of optimizers, whole, as a checkpoint has them."""
    checkpoint = CheckpointFolder(folder / "ckpt").open(which)
    names = [n for n in checkpoint.names() if n.startswith(("model/", "rows/", "optimizer/"))]
    return {name: checkpoint.load(name) for name in names}


def tensor_bits(folder: Path, which: str = "last") -> dict[str, object]:
    """The same, to compare to the bit."""
    return {name: bits(tensor) for name, tensor in tensors(folder, which).items()}

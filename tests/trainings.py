"""A small run: made-up rows, a model with all that has a state, and what a run leaves, to compare."""

import csv
import itertools
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from rowwise import Adam, Batch, Embeddings, Pooling, RowWiseAdagrad, Table
from rowwise.checkpoint.read import Checkpoint
from rowwise.ingest import Batcher, Batching, BatchShard, Columns, Dense, FrameReader, Sparse
from rowwise.parallel.comm.interface import Comm
from rowwise.tables.ops.jagged import concatenate
from rowwise.tables.row_optimizers import RowOptimizer
from rowwise.train.breakdown import Breakdown
from rowwise.train.evaluate import ClickEvaluator, Slicing
from rowwise.train.objective import Clicks
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import CheckpointFolder
from rowwise.train.settings import Evaluation, Settings, Training
from rowwise.train.step import StepContext
from rowwise.train.trainer import Trainer, TrainingJob

COLUMNS = Columns(
    labels=("click", "buy"),
    dense=(Dense(column="x"), Dense(column="y")),
    sparse=(Sparse(column="user", ids="direct"), Sparse(column="words")),
    weight="weight",
    key="row",
)
USERS, WORDS = 12, 17
ALL = BatchShard()


class Killed(BaseException):
    """What a kill is to a process: nothing gets to tidy up."""


def make_rows(count: int, seed: int = 0) -> pa.Table:
    g = np.random.default_rng(seed)
    user = g.integers(0, USERS, count)
    x = g.normal(size=count)
    click = (g.random(count) < 1 / (1 + np.exp(-x - (user % 3) + 1))).astype(np.int8)
    return pa.table(
        {
            "row": np.arange(count),
            "click": click,
            "buy": click * g.integers(0, 2, count).astype(np.int8),
            "x": x.astype(np.float32),
            "y": g.normal(size=count).astype(np.float32),
            "user": user,
            "words": pa.array([g.integers(0, 100, n).tolist() for n in g.integers(0, 4, count)], pa.list_(pa.int64())),
            "weight": g.choice([0.5, 1.0, 2.0], count),
        }
    )


def with_cell(rows: pa.Table, column: str, row: int, value: float) -> pa.Table:
    """The rows with another value in one place."""
    values = rows[column].to_numpy().copy()
    values[row] = value
    return rows.set_column(rows.schema.get_field_index(column), column, [values])


class Net(nn.Module):
    """Tables, layers, dropout and running statistics; it can be told to break."""

    def __init__(self, tables, tasks: int = 2, dropout: float = 0.2, seed: int = 0, statistics: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embeddings = Embeddings(tables, seed=seed)
        width = 2 + sum(t.dim * len(t.feature_names) for t in tables)
        norm = nn.BatchNorm1d(8) if statistics else nn.Identity()  # of the samples of one rank, where there are several
        self.layers = nn.Sequential(nn.Linear(width, 8), norm, nn.ReLU(), nn.Dropout(dropout))
        self.top = nn.Linear(8, tasks)

    def forward(self, batch: Batch) -> torch.Tensor:
        vectors = self.embeddings(batch.sparse).values()
        return self.top(self.layers(torch.cat((batch.dense_BF, vectors), 1)))


def make_tables(
    user: RowOptimizer | None = None, word: RowOptimizer | None = None, row_type="fp32"
) -> tuple[Table, ...]:
    return (
        Table(name="user", rows=USERS, dim=4, optimizer=user or RowWiseAdagrad(lr=0.1)),
        Table(
            name="words", rows=WORDS, dim=3, pooling=Pooling.MEAN, optimizer=word or Adam(lr=0.05), row_type=row_type
        ),
    )


def clicks(model: nn.Module, how: Training) -> Clicks:
    return Clicks(model, how.task_weights, how.label_smoothing, how.objective)


def work_of(model: nn.Module, comm: Comm | None = None, **training) -> StepContext:
    """The machinery of the steps of a model of labels."""
    how = Training(**training)
    return StepContext.create(model, clicks(model, how), how, Breakdown(), comm)


@dataclass
class World:
    """What a run is made of; `start` makes it anew, as another process would."""

    settings: Settings
    folder: Path | None
    count: int = 45
    seed: int = 0
    keep_last: bool = True
    split_rows: int = 16
    tables: tuple[Table, ...] = field(default_factory=make_tables)
    slices: tuple[str, ...] = ("user", "words")
    dropout: float = 0.2
    valid: bool = True
    valid_rows: int = 40

    def rows(self) -> pa.Table:
        """What is trained on."""
        return make_rows(self.count, self.seed)

    def batcher(self, position=None, shard=ALL, rows=None) -> Batcher:
        how = self.settings.train
        batching = Batching(
            size=how.batch,
            seed=self.seed,
            shuffle=how.shuffle,
            keep_last=self.keep_last,
            ahead=how.ahead,
            shard=shard,
        )
        reader = FrameReader(self.rows() if rows is None else rows, split_rows=self.split_rows, name="rows")
        return Batcher(reader, COLUMNS, self.tables, batching, position)

    def held_out(self, shard=ALL):
        reader, batching = FrameReader(make_rows(self.valid_rows, 99)), Batching(size=16, shuffle=False, shard=shard)
        return Batcher(reader, COLUMNS, self.tables, batching)

    def evaluator(self, model: nn.Module, shard=ALL, comm=None) -> ClickEvaluator:
        held_out, slicing = partial(self.held_out, shard), Slicing(self.slices, 3)
        return ClickEvaluator(model, held_out, COLUMNS.labels, self.settings.train, slicing, comm)

    def job(self, model: nn.Module) -> TrainingJob:
        return TrainingJob(
            model=model,
            objective=clicks(model, self.settings.train),
            batches=self.batcher,
            tasks=COLUMNS.labels,
            evaluate=self.evaluator(model) if self.valid else None,
        )

    def start(self, *, tell=None, model: nn.Module | None = None) -> Trainer:
        model = model or Net(self.tables, dropout=self.dropout, seed=self.seed)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        return Trainer(self.job(model), self.settings, None if self.folder is None else RunFolder(self.folder), tell)

    def resume(self, *, which: str = "last", tell=None) -> Trainer:
        """From what is on the disk alone: the new model has no weights, and torch other random numbers."""
        model = Net(self.tables, dropout=self.dropout, seed=self.seed)
        for tensor in model.state_dict().values():
            tensor.zero_()
        torch.manual_seed(1000)
        trainer = self.start(tell=tell, model=model)
        saved = CheckpointFolder(self.folder / "ckpt")
        saved.clean()
        trainer.resume(saved.open(which))
        return trainer


def fast(**sections) -> Settings:
    """Settings of a run that ends soon; sections as of a recipe."""
    train = Training(**({"batch": 8, "ahead": 0} | sections.pop("train", {})))
    evaluate = Evaluation(**({"metric": "auc"} | sections.pop("evaluate", {})))
    return Settings(train=train, evaluate=evaluate, **sections)


def left(folder: Path, *, times: bool = False) -> dict[str, object]:
    """Everything that a run leaves, but for what its clock says and how often it was stopped."""
    checkpoint = CheckpointFolder(folder / "ckpt").open()
    data = checkpoint.manifest.data
    data["progress"].pop("time_s")
    found: dict[str, object] = {"data": data, "steps": CheckpointFolder(folder / "ckpt").steps()}
    found |= {name: bits(checkpoint.load(name)) for name in checkpoint.names()}
    for name in ("metrics.csv", "tables.csv", "slices.csv"):
        found[name] = lines(folder / name)
    return found


def lines(path: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k != "time_s"} for row in read_csv(path)]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state_bits(trainer: Trainer) -> dict[str, object]:
    """The model and its optimizers, bit by bit; without what a forward counts by itself."""
    tensors = {part.name: part.tensor for part in trainer._state.collect(trainer.progress)[0]}
    kept = ("model/", "rows/", "optimizer/")
    counted = ("running_mean", "running_var", "num_batches_tracked")
    return {n: bits(x) for n, x in tensors.items() if n.startswith(kept) and not n.endswith(counted)}


def join(batches: list[Batch]) -> Batch:
    """The samples of all as one batch."""
    weights = [b.weights_B for b in batches]
    return Batch(
        dense_BF=torch.cat([b.dense_BF for b in batches]),
        sparse=concatenate([b.sparse for b in batches]),
        labels_BK=torch.cat([b.labels_BK for b in batches]),
        weights_B=None if weights[0] is None else torch.cat(weights),
    )


def every_checkpoint(folder: Path) -> dict[str, Checkpoint]:
    found = itertools.chain(folder.glob("ckpt/step-*"), folder.glob("ckpt/failed"))
    return {path.name: Checkpoint.open(path) for path in found}

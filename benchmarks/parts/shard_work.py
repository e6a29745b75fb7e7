"""The work that all sides of `shard_step.py` do: models, batches, and how a group of ranks takes times together.

Apart because a side should not know what it is measured with, nor the measuring how a side works.
"""

import time
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from parts.batches import names_of, tables_of
from parts.dlrm import DENSE, DIM, FEATURES
from parts.ops_work import Work, ids_for, rows_for
from rowwise import DLRM, Embeddings, Jagged, RowWiseAdagrad

NAMES = names_of(FEATURES)
EPS = 1e-8  # of the rows
SLOW_LR = 1e-6
ONE_AT_A_TIME = Lock()
Pieces = list[tuple[slice, slice, Tensor]]  # rows, columns, and a view of the weights there
Meet = Callable[[float], float]  # all ranks wait for each other; gives the largest of what they have


class Shape(NamedTuple):
    """A DLRM, which learns nearly nothing where it is timed.

    Steps go through a few batches many times. The gradients of a model that knows them by heart are denormal numbers,
    with which matrix products take several times as long.
    """

    rows: tuple[int, ...]
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    lr: float = SLOW_LR  # of the rows
    dense_lr: float = SLOW_LR

    @classmethod
    def of(cls, least: int, most: int, *, small: bool = False) -> "Shape":
        """Tables of log-uniform sizes; `small`: with next to no dense products."""
        bottom, top = ((DIM,), (16, 1)) if small else ((512, 256, DIM), (512, 512, 256, 1))
        return cls(tuple(rows_for(FEATURES, least, most)), bottom, top)


class Load(NamedTuple):
    """What a step gets, all ranks together."""

    batch: int
    pooling: int


class Parts(NamedTuple):
    """A rank's samples: dense numbers, ids feature by feature, how many in each bag, labels."""

    dense_BF: Tensor
    ids_N: Tensor
    lengths_FB: Tensor
    labels_BK: Tensor

    def jagged(self) -> Jagged:
        return Jagged(features=NAMES, values_N=self.ids_N, lengths_FB=self.lengths_FB)


class Side(Protocol):
    """A sharded model with its optimizers, on one rank."""

    def logits(self, parts: Parts) -> Tensor:
        """The forward of the model."""
        ...

    def step(self, parts: Parts) -> float:
        """One training step; the loss of this rank's samples before it."""
        ...

    def pooled(self, parts: Parts) -> Tensor:
        """The forward of the tables alone [B, features * dim]."""
        ...

    def embed(self, parts: Parts, grad_BS: Tensor) -> None:
        """Forward, backward and update of the tables alone."""
        ...

    def tables(self) -> dict[str, Pieces]:
        """What this rank holds of each table."""
        ...


def whole_model(shape: Shape) -> DLRM:
    """On one device; the same weights wherever it is made."""
    tables = tables_of(shape.rows, DIM, optimizer=RowWiseAdagrad(lr=shape.lr, eps=EPS))
    with ONE_AT_A_TIME:  # ranks may be threads, and torch has one generator for all of them
        torch.manual_seed(0)
        return DLRM(Embeddings(tables), DENSE, shape.bottom, shape.top)


def parts_of(shape: Shape, load: Load, seed: int, rank: int, world: int) -> Parts:
    """A rank's slice of a batch; labels that the dense numbers say something about."""
    generator = torch.Generator().manual_seed(seed)
    dense_GF = torch.randn(load.batch, DENSE, generator=generator)
    labels_GK = (dense_GF[:, :1] + torch.randn(load.batch, 1, generator=generator) > 0).float()
    ids = ids_for(list(shape.rows), Work(DIM, load.batch, load.pooling, "zipf", 1, ""), seed)
    mine = slice(rank * load.batch // world, (rank + 1) * load.batch // world)
    ids_FBL = ids.view(FEATURES, load.batch, load.pooling)[:, mine]
    lengths_FB = torch.full((FEATURES * ids_FBL.shape[1],), load.pooling, dtype=torch.int32)
    return Parts(dense_GF[mine].clone(), ids_FBL.flatten(), lengths_FB, labels_GK[mine].clone())


class Turn(NamedTuple):
    """What a side does when it is its turn: a step with the k-th batch; before and after are not timed."""

    run: Callable[[int], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None

    def block(self, meet: Meet, first: int, steps: int) -> float:
        """Seconds a step; the slowest rank's."""
        self.before()
        meet(0.0)
        begin = time.perf_counter()
        for k in range(first, first + steps):
            self.run(k)
        spent = time.perf_counter() - begin
        self.after()
        return meet(spent / steps)


def interleave(turns: dict[Any, Turn], meet: Meet, seconds: float) -> dict[Any, list[float]]:
    """Seconds a step of each side, in blocks of steps that take turns (A B A B)."""
    for _ in range(2):  # the first time warms up
        spent = {name: turn.block(meet, 0, 2) for name, turn in turns.items()}
    steps = max(2, min(8, int(0.4 / max(spent.values()))))
    blocks = max(4, int(seconds / (steps * sum(spent.values()))))
    times: dict[str, list[float]] = {name: [] for name in turns}
    for block in range(blocks):
        for name, turn in turns.items():
            times[name].append(turn.block(meet, block * steps, steps))
    return times

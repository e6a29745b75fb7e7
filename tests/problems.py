"""Made-up tables and batches of every shape the operators must take, for Hypothesis and for loops."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from rowwise import (
    Adagrad,
    Adam,
    Ftrl,
    Jagged,
    Lamb,
    Pooling,
    RowType,
    RowWiseAdagrad,
    RowWiseAdam,
    Sgd,
    Table,
)
from rowwise.tables.ops.arena import Arena
from rowwise.tables.ops.layout import TableGroup, make_group

DIMS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 24, 32, 48, 64, 100, 128, 200, 260)
OPTIMIZERS = (
    Sgd(lr=0.1),
    Sgd(lr=0.1, weight_decay=0.01),
    Adagrad(lr=0.1, eps=1e-4),
    RowWiseAdagrad(lr=0.1, weight_decay=0.02),
    RowWiseAdagrad(lr=0.1, eps=1e-4, initial=0.1),
    RowWiseAdagrad(lr=0.1, clip=0.5),
    Adam(lr=0.1),
    Adam(lr=0.1, weight_decay=0.02, clip=0.1),
    RowWiseAdam(lr=0.1, weight_decay=0.02),
    Lamb(lr=0.1, weight_decay=0.02),
    Ftrl(lr=0.1, l1=0.05, l2=0.1),
)
# The type of rows, and how many columns of an int8 row share a scale.
ROW_TYPES = (
    (RowType.FP32, None),
    (RowType.FP16, None),
    (RowType.BF16, None),
    (RowType.INT8, None),
    (RowType.INT8, 16),
    (RowType.INT8, 48),
)


def tables_of_row_types(optimizer, rows: int, dims) -> tuple[Table, ...]:
    """A table of each of `ROW_TYPES`."""
    return tuple(
        Table(name=f"t{k}", rows=rows, dim=dim, optimizer=optimizer, row_type=row_type, column_group=group)
        for k, (dim, (row_type, group)) in enumerate(zip(dims, ROW_TYPES, strict=True))
    )


class Keyed:
    """The interface of torchrec.KeyedJaggedTensor, as far as it is used; nothing of it is checked."""

    def __init__(self, keys, values, weights=None, lengths=None):
        self._keys, self._values, self._weights, self._lengths = keys, values, weights, lengths

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def weights_or_none(self):
        return self._weights


@dataclass(frozen=True)
class Problem:
    tables: tuple[Table, ...]
    jagged: Jagged
    seed: int

    def arena(self) -> Arena:
        arena = Arena.allocate(self.tables, torch.device("cpu"))
        arena.fill(self.seed)
        return arena

    def group(self, arena: Arena) -> TableGroup:
        return make_group(arena.pieces, arena.offsets)

    def sources(self, group: TableGroup) -> torch.Tensor:
        return group.for_sources(self.jagged.features)


def make_problem(tables, batch: int, most: int, seed: int, ids=torch.int64, lengths=torch.int64, hot=False) -> Problem:
    """A batch for the tables, with its features in shuffled order and one feature more than they need."""
    g = torch.Generator().manual_seed(seed)
    rows = {f: t.rows for t in tables for f in t.feature_names} | {"not used": 10}
    names = list(rows)
    names = tuple(names[i] for i in torch.randperm(len(names), generator=g))
    values, counts = [], []
    for name in names:
        count = torch.randint(0, most + 1, (batch,), generator=g)
        count[torch.rand(batch, generator=g) < 0.2] = 0
        n = int(count.sum())
        top = min(rows[name], 3) if hot else rows[name]
        values.append(torch.randint(0, top, (n,), generator=g))
        counts.append(count)
    v = torch.cat(values).to(ids)
    return Problem(
        tables,
        Jagged(
            features=names,
            values_N=v,
            lengths_FB=torch.cat(counts).to(lengths),
            weights_N=torch.randn(len(v), generator=g),
        ),
        seed,
    )


@st.composite
def problems(draw, poolings=(Pooling.SUM, Pooling.MEAN, Pooling.WEIGHTED), max_batch=600) -> Problem:
    tables = []
    for index in range(draw(st.integers(1, 4))):
        features = tuple(f"f{index}.{k}" for k in range(draw(st.integers(1, 3))))
        row_type, column_group = draw(st.sampled_from(ROW_TYPES))
        tables.append(
            Table(
                name=f"t{index}",
                rows=draw(st.sampled_from((1, 2, 17, 300, 5000))),
                dim=draw(st.sampled_from(DIMS)),
                features=features,
                pooling=draw(st.sampled_from(poolings)),
                optimizer=draw(st.sampled_from(OPTIMIZERS)),
                row_type=row_type,
                column_group=column_group,
            )
        )
    return make_problem(
        tuple(tables),
        batch=draw(st.sampled_from((1, 2, 7, 40, 300, max_batch))),
        most=draw(st.sampled_from((0, 1, 3, 20))),
        seed=draw(st.integers(0, 1000)),
        ids=draw(st.sampled_from((torch.int32, torch.int64))),
        lengths=draw(st.sampled_from((torch.int32, torch.int64))),
        hot=draw(st.booleans()),
    )

"""Synthetic clicks with a known best AUC: power-law ids, and labels drawn from the logit of a hidden teacher.

Every value is a hash of (seed, column, row), so any range of rows is generated in constant memory, and the teacher's
vectors are hashes of (seed, column, id), so tables may have any number of rows. The logit is a column, too (`logit`):
its AUC against `label` is the expected upper bound of any model.
"""

import math
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.ingest.columns import Columns, Dense, Sparse
from rowwise.ingest.datasets.dataset import Dataset
from rowwise.ingest.generator import GeneratorReader
from rowwise.ingest.mix import Words, mix, unit
from rowwise.tables.row_optimizers import RowWiseAdagrad
from rowwise.tables.spec import Normal, Pooling, Table, Value

Doubles = NDArray[np.float64]
TEACHER_DIM = 4
LONGEST_BAG = 6
KEPT_IDS, KEPT_COLUMNS = 1 << 15, 64  # limits for caching the teacher's vectors: ids of a column, and columns


class SyntheticColumns(Value, frozen=True):
    """The columns of synthetic rows: `ids` have one id per row, `bags` 0 to 6; each with its number of distinct ids."""

    seed: int = 0
    dense: int = 13
    ids: tuple[tuple[str, int], ...] = (
        ("user", 20_000),
        ("item", 10_000),
        ("shop", 2_000),
        ("city", 1_000),
        ("brand", 500),
        ("kind", 100),
    )
    bags: tuple[tuple[str, int], ...] = (("seen", 10_000), ("words", 2_000))
    split_rows: int = 1 << 16

    def __post_init__(self) -> None:
        if self.seed < 0 or self.dense < 0 or not self.ids + self.bags or any(n < 1 for _, n in self.ids + self.bags):
            raise SpecError(self, "at least one column of ids, at least one id in each, and nothing negative")

    def rows(self, first: int, count: int) -> pa.Table:
        """Rows `first` up to `first + count`: label, logit, row, dense numbers and ids."""
        row_R = np.arange(first, first + count, dtype=np.uint64)
        mixed_R = mix(row_R)
        columns: dict[str, pa.Array] = {}
        logit_R, together_RD, squares_R = np.full(count, -1.0), np.zeros((count, TEACHER_DIM)), np.zeros(count)
        for index in range(self.dense):
            x_R = self._normal(mixed_R, f"d{index}")
            logit_R += x_R * self._normal(mix(np.zeros(1, np.uint64)), f"d{index} counts") / math.sqrt(self.dense)
            columns[f"d{index}"] = pa.array(x_R, pa.float32())
        for name, ids in self.ids + self.bags:
            id_N, offsets_R1 = self._ids(row_R, mixed_R, name, ids)
            columns[name] = pa.array(id_N) if offsets_R1 is None else _lists(id_N, offsets_R1)
            vector_RD = self._vectors(name, id_N, offsets_R1)
            logit_R += 0.4 * vector_RD[:, 0]
            together_RD += vector_RD
            squares_R += _squared(vector_RD)
        # Sum of the dot products of all pairs (as in factorisation machines): (|sum|^2 - sum of squares) / 2.
        logit_R += 0.05 * (_squared(together_RD) - squares_R) / 2
        label_R = self._uniform(mixed_R, "label") < 1 / (1 + np.exp(-logit_R))
        row_columns = {
            "label": pa.array(label_R.astype(np.int8)),
            "logit": pa.array(logit_R),
            "row": pa.array(row_R, pa.int64()),
        }
        return pa.table(row_columns | columns)

    def reader(self, rows: int, first_row: int = 0) -> GeneratorReader:
        """Rows `first_row` up to `first_row + rows`; disjoint ranges serve as test data."""
        return GeneratorReader(
            self.rows, rows, first_row=first_row, split_rows=self.split_rows, name=f"synthetic (seed {self.seed})"
        )

    def columns(self) -> Columns:
        sparse = tuple(Sparse(column=name, ids="direct") for name, _ in self.ids + self.bags)
        dense = tuple(Dense(column=f"d{index}") for index in range(self.dense))
        return Columns(labels=("label",), dense=dense, sparse=sparse, key="row")

    def tables(self, dim: int = 16) -> tuple[Table, ...]:
        """A table for each column; a bag's vector is the mean of its rows, as in the teacher."""
        settings = {"pooling": Pooling.MEAN, "optimizer": RowWiseAdagrad(lr=0.1), "init": Normal(std=0.05)}
        return tuple(Table(name=name, rows=ids, dim=dim, **settings) for name, ids in self.ids + self.bags)

    def _ids(
        self, row_R: Words, mixed_R: Words, name: str, ids: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        offsets_R1 = None
        if (name, ids) in self.bags:
            lengths_R = (self._uniform(mixed_R, f"{name} length") * (LONGEST_BAG + 1)).astype(np.int64)
            offsets_R1 = np.concatenate([[0], lengths_R.cumsum()])
            # An independent draw for each position in a bag.
            position_N = np.arange(offsets_R1[-1]) - np.repeat(offsets_R1[:-1], lengths_R)
            mixed_R = mix(np.repeat(row_R, lengths_R) * np.uint64(LONGEST_BAG) + position_N.astype(np.uint64))
        # Inverse transform sampling: the frequency of id k is about proportional to 1 / (k + 1).
        id_N = ((ids + 1) ** self._uniform(mixed_R, name) - 1).astype(np.int64)
        return np.minimum(id_N, ids - 1), offsets_R1

    def _vectors(self, name: str, id_N: NDArray[np.int64], offsets_R1: NDArray[np.int64] | None) -> Doubles:
        """The teacher's vector of each row: that of its id, or the mean over its bag."""
        ids = dict(self.ids + self.bags)[name]
        if ids <= KEPT_IDS and len(self.ids + self.bags) <= KEPT_COLUMNS:
            vector_ND = _all_vectors(self, name, ids)[id_N]
        else:  # compute each distinct id once, as popular ids repeat
            distinct_U, at_N = np.unique(id_N, return_inverse=True)
            vector_ND = self.drawn_vectors(name, distinct_U)[at_N]
        if offsets_R1 is None:
            return vector_ND
        lengths_R = np.diff(offsets_R1)
        rows, row_N = len(lengths_R), np.repeat(np.arange(len(lengths_R)), lengths_R)
        # Summed row by row: differences of a cumulative sum would depend on earlier rows.
        sums = [np.bincount(row_N, vector_ND[:, d], rows) for d in range(TEACHER_DIM)]
        return np.stack(sums, 1) / np.maximum(lengths_R, 1)[:, None]

    def drawn_vectors(self, name: str, id_N: NDArray[np.int64]) -> Doubles:
        """The teacher's vectors of these ids."""
        mixed_N = mix(id_N.astype(np.uint64))
        drawn = [self._normal(mixed_N, f"{name} vector {d}") for d in range(TEACHER_DIM)]
        return np.stack(drawn, 1)

    def _uniform(self, mixed_N: Words, what: str) -> Doubles:
        """A uniform number in [0, 1) for each mixed word, independent for each purpose."""
        purpose = np.frombuffer(what.encode().ljust(32, b"\0"), "<u8")
        state = mix(np.array([self.seed], np.uint64))
        for word in purpose:
            state = mix(state ^ word)
        return unit(mix(mixed_N ^ state))

    def _normal(self, mixed_N: Words, what: str) -> Doubles:
        """A standard normal number for each mixed word. Source: Box and Muller 1958."""
        radius_N = np.sqrt(-2 * np.log1p(-self._uniform(mixed_N, f"{what} radius")))
        return radius_N * np.cos(2 * math.pi * self._uniform(mixed_N, f"{what} angle"))


def synthetic(rows: int = 1_000_000, test_rows: int = 100_000, world: SyntheticColumns | None = None) -> Dataset:
    """Training rows, and the rows after them as test rows."""
    world = world or SyntheticColumns()
    return Dataset(
        train=world.reader(rows),
        test=world.reader(test_rows, rows),
        columns=world.columns(),
        tables=world.tables(),
        ceiling="logit",
    )


@lru_cache(maxsize=KEPT_COLUMNS)
def _all_vectors(world: SyntheticColumns, name: str, ids: int) -> Doubles:
    return world.drawn_vectors(name, np.arange(ids))


def _squared(vector_RD: Doubles) -> Doubles:
    """The sum of squares of each row."""
    return sum((vector_RD[:, d] ** 2 for d in range(TEACHER_DIM)), np.zeros(len(vector_RD)))


def _lists(id_N: NDArray[np.int64], offsets_R1: NDArray[np.int64]) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets_R1, pa.int32()), pa.array(id_N))

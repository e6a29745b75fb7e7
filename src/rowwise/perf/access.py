"""How a table's rows are asked for: how many ids a sample brings, and how unevenly they fall on rows.

Rows are ranked by how often they are asked for, and the r-th (from 1) is asked for in proportion to (r + q) ** -a
(Zipf-Mandelbrot); a = 0 is no preference at all.

Known limits: what features have to do with each other. Ids of a batch are drawn independently.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import SpecError
from rowwise.spec import Table, Value

Floats = NDArray[np.float64]
CELLS = 128  # into which ranks are grouped, evenly on a logarithmic scale, to count distinct rows
STEEPEST = 6.0  # largest `a` that is fitted


class Access(Value, frozen=True):
    """Access statistics of one table."""

    pooling: float = 1.0  # mean ids of a sample, over all features of the table
    zipf_a: float = 0.0
    zipf_q: float = 0.0
    active: int | None = None  # rows that are ever asked for; None: all
    unique_ratio: float | None = None  # distinct rows over lookups in a batch, as measured; replaces what a and q say

    def __post_init__(self) -> None:
        for name in ("pooling", "zipf_a", "zipf_q"):
            value = getattr(self, name)
            if not 0 <= value < 1e12:
                raise SpecError(f"{name}={value}: want a finite number that is not negative")
        if self.active is not None and self.active < 1:
            raise SpecError(f"active={self.active}: want at least one row that is asked for")
        if self.unique_ratio is not None and not 0 < self.unique_ratio <= 1:
            raise SpecError(f"unique_ratio={self.unique_ratio}: want more than 0 and at most 1")

    @classmethod
    def from_cdf(cls, rows: int, points: Sequence[tuple[float, float]], pooling: float = 1.0) -> "Access":
        """Fitted to a measured curve: points (share of rows, hottest first; share of lookups that they take)."""
        if not points or any(not (0 <= x <= 1 and 0 <= y <= 1) for x, y in points):
            raise SpecError(f"cdf={list(points)[:3]}...: want pairs of shares between 0 and 1, such as (0.01, 0.4)")
        x_P, y_P = np.array(points, dtype=float).T
        a_C = np.repeat(np.linspace(0, 2.5, 126), 24)
        q_C = np.tile(np.concatenate([[0.0], np.geomspace(1e-6, 0.1, 23) * rows]), 126)
        found_CP = head_share(a_C[:, None], q_C[:, None], np.array(float(rows)), x_P[None] * rows)
        best = int(np.argmin(((found_CP - y_P) ** 2).sum(1)))
        return cls(pooling=pooling, zipf_a=float(a_C[best]), zipf_q=float(q_C[best]))


class Workload(Value, frozen=True):
    """A table, and how it is asked for."""

    table: Table
    access: Access = Access()


@dataclass(frozen=True)
class Curves:
    """The access statistics of many tables, as arrays; `batch` samples are looked up in a step, of all ranks."""

    batch: int
    pooling_T: Floats
    a_T: Floats
    q_T: Floats
    active_T: Floats

    @classmethod
    def of(cls, workloads: Sequence[Workload], batch: int) -> "Curves":
        access = [w.access for w in workloads]
        active = [min(w.access.active or w.table.rows, w.table.rows) for w in workloads]
        made = cls(
            batch=batch,
            pooling_T=np.array([x.pooling for x in access], dtype=float),
            a_T=np.array([x.zipf_a for x in access], dtype=float),
            q_T=np.array([x.zipf_q for x in access], dtype=float),
            active_T=np.array(active, dtype=float),
        )
        known = np.array([x.unique_ratio is not None for x in access])
        return made._fitted(known, np.array([x.unique_ratio or 1.0 for x in access])) if known.any() else made

    def _fitted(self, known_T: NDArray[np.bool_], ratio_T: Floats) -> "Curves":
        """With `a` such that distinct rows are as measured; the steepest that is tried if that cannot be."""
        index = np.flatnonzero(known_T)
        ids = self.pooling_T[index] * self.batch
        low, high = np.zeros(len(index)), np.full(len(index), STEEPEST)
        for _ in range(24):
            a = (low + high) / 2
            found = distinct(a, self.q_T[index], self.active_T[index], ids)
            too_many = found > ratio_T[index] * ids
            low, high = np.where(too_many, a, low), np.where(too_many, high, a)
        a_T = self.a_T.copy()
        a_T[index] = (low + high) / 2
        return Curves(self.batch, self.pooling_T, a_T, self.q_T, self.active_T)

    @functools.cached_property
    def unique_T(self) -> Floats:
        """Distinct rows of a batch."""
        return distinct(self.a_T, self.q_T, self.active_T, self.pooling_T * self.batch)

    @functools.cached_property
    def kept(self) -> dict[float, Floats]:
        """What `reuse` has made of them, by share of the batch."""
        return {}

    def unique_of(self, share: float) -> Floats:
        """Distinct rows in a part of a batch."""
        return distinct(self.a_T, self.q_T, self.active_T, self.pooling_T * self.batch * share)

    def head(self, table_N: NDArray[np.int64], rows_N: Floats) -> Floats:
        """The share of lookups that goes to the hottest rows of a table."""
        return head_share(self.a_T[table_N], self.q_T[table_N], self.active_T[table_N], rows_N)


def _mass(a: Floats, q: Floats, rank: Floats) -> Floats:
    """Weights of ranks 1 to `rank`, by their integral from 1/2 to rank + 1/2."""
    power = np.where(np.abs(1 - a) < 1e-6, 1e-6, 1 - a)  # the logarithm of a = 1 is as near as doubles come to it
    first = 0.5 + q
    return (np.power((rank + first) / first, power) - 1) / power


def head_share(a: Floats, q: Floats, active: Floats, rows: Floats) -> Floats:
    """The share of lookups that the hottest `rows` of `active` ones take."""
    return _mass(a, q, np.minimum(rows, active)) / _mass(a, q, active)


def cells(a_T: Floats, q_T: Floats, active_T: Floats) -> tuple[Floats, Floats]:
    """Ranks in groups, evenly on a logarithmic scale: how many rows each has, and what share of the lookups."""
    steps_C = np.linspace(0, 1, CELLS + 1)
    edge_TC = np.power(active_T[:, None] + 1.0, steps_C[None]) - 1.0
    share_TC = np.diff(_mass(a_T[:, None], q_T[:, None], edge_TC), axis=1)
    share_TC /= np.maximum(share_TC.sum(1, keepdims=True), 1e-300)
    return np.diff(edge_TC, axis=1), share_TC


def distinct(a_T: Floats, q_T: Floats, active_T: Floats, ids_T: Floats) -> Floats:
    """The expected number of distinct rows among as many independent lookups."""
    rows_TC, share_TC = cells(a_T, q_T, active_T)
    each_TC = ids_T[:, None] * share_TC / rows_TC
    return np.minimum((rows_TC * -np.expm1(-each_TC)).sum(1), ids_T)

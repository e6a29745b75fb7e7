"""Access statistics of a table: how many ids a sample has, and how unevenly they fall on rows.

Cost models derive from them lookups, distinct rows, and the share of lookups that the k hottest rows take. Rows are
ranked by frequency, and the r-th (from 1) is looked up in proportion to (r + q) ** -a (Zipf-Mandelbrot); a = 0 is
uniform. Ids of a batch are taken as independent draws: correlations between features are ignored.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.tables.spec import Pooling, Table, Value
from rowwise.tables.store.hit_rate import hit_rate
from rowwise.tables.store.policy import DEFAULT_POLICY, Policy

Floats = NDArray[np.float64]
CELLS = 128  # groups of ranks, even on a logarithmic scale, for counting distinct rows
MAX_ZIPF_A = 6.0  # largest `a` that is fitted


class Access(Value, frozen=True):
    """Access statistics of one table."""

    pooling: float = 1.0  # mean ids of a sample, over all features of the table
    zipf_a: float = 0.0
    zipf_q: float = 0.0
    active: int | None = None  # rows that are ever looked up; None counts all
    unique_ratio: float | None = None  # measured distinct rows over lookups of a batch; overrides zipf_a

    def __post_init__(self) -> None:
        for name in ("pooling", "zipf_a", "zipf_q"):
            value = getattr(self, name)
            if not 0 <= value < 1e12:
                raise SpecError(f"{name}={value}", "a finite number that is not negative")
        if self.active is not None and self.active < 1:
            raise SpecError(f"active={self.active}", "at least one active row")
        if self.unique_ratio is not None and not 0 < self.unique_ratio <= 1:
            raise SpecError(f"unique_ratio={self.unique_ratio}", "more than 0 and at most 1")

    @classmethod
    def from_cdf(cls, rows: int, points: Sequence[tuple[float, float]], pooling: float = 1.0) -> "Access":
        """Fits a and q to a measured curve: points (share of rows, hottest first; share of lookups that they take)."""
        if not points or any(not (0 <= x <= 1 and 0 <= y <= 1) for x, y in points):
            raise SpecError(f"cdf={list(points)[:3]}...", "pairs of shares between 0 and 1, such as (0.01, 0.4)")
        x_P, y_P = np.array(points, dtype=float).T
        a_C = np.repeat(np.linspace(0, 2.5, 126), 24)
        q_C = np.tile(np.concatenate([[0.0], np.geomspace(1e-6, 0.1, 23) * rows]), 126)
        share_CP = head_share(a_C[:, None], q_C[:, None], np.array(float(rows)), x_P[None] * rows)
        best = int(np.argmin(((share_CP - y_P) ** 2).sum(1)))
        return cls(pooling=pooling, zipf_a=float(a_C[best]), zipf_q=float(q_C[best]))


class Workload(Value, frozen=True):
    """A table with its access statistics."""

    table: Table
    access: Access = Access()

    @property
    def vectors(self) -> float:
        """Vectors of a sample: one for each feature, or for each id of a sequence."""
        return self.access.pooling if self.table.pooling is Pooling.SEQUENCE else len(self.table.feature_names)


@dataclass(frozen=True)
class Curves:
    """Access statistics of many tables as arrays, and distinct rows for a global batch of `batch` samples."""

    batch: int
    pooling_T: Floats
    a_T: Floats
    q_T: Floats
    active_T: Floats

    @classmethod
    def of(cls, workloads: Sequence[Workload], batch: int) -> "Curves":
        access = [w.access for w in workloads]
        active = [min(w.access.active or w.table.rows, w.table.rows) for w in workloads]
        curves = cls(
            batch=batch,
            pooling_T=np.array([x.pooling for x in access], dtype=float),
            a_T=np.array([x.zipf_a for x in access], dtype=float),
            q_T=np.array([x.zipf_q for x in access], dtype=float),
            active_T=np.array(active, dtype=float),
        )
        known = np.array([x.unique_ratio is not None for x in access])
        return (
            curves._fit_unique_ratio(known, np.array([x.unique_ratio or 1.0 for x in access]))
            if known.any()
            else curves
        )

    def _fit_unique_ratio(self, known_T: NDArray[np.bool_], ratio_T: Floats) -> "Curves":
        """Chooses `a` so that distinct rows are as measured, up to `MAX_ZIPF_A`."""
        index = np.flatnonzero(known_T)
        ids = self.pooling_T[index] * self.batch
        low, high = np.zeros(len(index)), np.full(len(index), MAX_ZIPF_A)
        for _ in range(24):
            a = (low + high) / 2
            unique = expected_distinct(a, self.q_T[index], self.active_T[index], ids)
            too_many = unique > ratio_T[index] * ids
            low, high = np.where(too_many, a, low), np.where(too_many, high, a)
        a_T = self.a_T.copy()
        a_T[index] = (low + high) / 2
        return Curves(self.batch, self.pooling_T, a_T, self.q_T, self.active_T)

    @functools.cached_property
    def unique_T(self) -> Floats:
        """Expected distinct rows of a batch."""
        return expected_distinct(self.a_T, self.q_T, self.active_T, self.pooling_T * self.batch)

    @functools.cached_property
    def reuse_cache(self) -> dict[float, Floats]:
        """Results of `reuse_bins`, by share of the batch."""
        return {}

    def unique_of(self, share: float) -> Floats:
        """Expected distinct rows of a share of a batch."""
        return expected_distinct(self.a_T, self.q_T, self.active_T, self.pooling_T * self.batch * share)

    @functools.cached_property
    def cells(self) -> tuple[Floats, Floats]:
        """Rows and shares of lookups of `rank_cells`, for each table."""
        return rank_cells(self.a_T, self.q_T, self.active_T)

    def hit_rate(self, table_N: NDArray[np.int64], slots_N: Floats, policy: Policy = DEFAULT_POLICY) -> Floats:
        """The share of lookups of each table that a cache of `slots_N` of its rows serves."""
        rows_TC, share_TC = self.cells
        return hit_rate(policy, rows_TC[table_N], share_TC[table_N], slots_N)

    def head(self, table_N: NDArray[np.int64], rows_N: Floats) -> Floats:
        """The share of lookups that the hottest `rows_N` rows of each table take."""
        return head_share(self.a_T[table_N], self.q_T[table_N], self.active_T[table_N], rows_N)


def _cumulative_weight(a: Floats, q: Floats, rank: Floats) -> Floats:
    """Weight of ranks 1 to `rank`, by the integral from 1/2 to rank + 1/2."""
    power, first = _power(a), 0.5 + q
    return (np.power((rank + first) / first, power) - 1) / power


def _power(a: Floats) -> Floats:
    """1 - a, but 1e-6 near a = 1: the integral is then a logarithm, to which this is as near as doubles allow."""
    return np.where(np.abs(1 - a) < 1e-6, 1e-6, 1 - a)


def head_share(a: Floats, q: Floats, active: Floats, rows: Floats) -> Floats:
    """The share of lookups that the hottest `rows` of `active` ones take."""
    return _cumulative_weight(a, q, np.minimum(rows, active)) / _cumulative_weight(a, q, active)


class RankCells:
    """Ranks in groups, even on a logarithmic scale, for curves that differ in `a` alone."""

    def __init__(self, q_T: Floats, active_T: Floats) -> None:
        active_U, curve_T = np.unique(active_T, return_inverse=True)
        edge_UC = np.power(active_U[:, None] + 1.0, np.linspace(0, 1, CELLS + 1)[None]) - 1.0
        self.rows_TC: Floats = np.diff(edge_UC, axis=1)[curve_T]  # rows of each group
        self._log_TC: Floats = np.log1p(edge_UC[curve_T] / (0.5 + q_T)[:, None])

    def shares(self, a_T: Floats) -> Floats:
        """The share of the lookups that each group takes, by the integral of `_cumulative_weight`."""
        weight_TC = np.abs(np.diff(np.exp(_power(a_T)[:, None] * self._log_TC), axis=1))
        return weight_TC / np.maximum(weight_TC.sum(1, keepdims=True), 1e-300)

    def distinct(self, share_TC: Floats, ids_T: Floats) -> Floats:
        """Expected number of distinct rows among `ids_T` independent lookups."""
        missed_TC = np.expm1(-ids_T[:, None] * share_TC / self.rows_TC)  # minus the chance that a row is looked up
        return np.minimum(-np.einsum("tc,tc->t", self.rows_TC, missed_TC), ids_T)


def rank_cells(a_T: Floats, q_T: Floats, active_T: Floats) -> tuple[Floats, Floats]:
    """Rows and shares of lookups of `RankCells`."""
    cells = RankCells(q_T, active_T)
    return cells.rows_TC, cells.shares(a_T)


def expected_distinct(a_T: Floats, q_T: Floats, active_T: Floats, ids_T: Floats) -> Floats:
    """Expected number of distinct rows among `ids_T` independent lookups."""
    cells = RankCells(q_T, active_T)
    return cells.distinct(cells.shares(a_T), ids_T)

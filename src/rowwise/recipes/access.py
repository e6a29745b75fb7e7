"""Table access statistics that a run has counted, as input of the planner: `rowwise plan --tables access.json`.

The curve of distinct ids over batch size is fitted, so that a plan may have another batch size. Known limit: curves
without the form of `Access` are fitted with errors of some percent.
"""

from collections.abc import Sequence
from typing import final

import msgspec
import numpy as np
from msgspec import structs

from rowwise.planning.perf.access import MAX_ZIPF_A, Access, Floats, RankCells, Workload
from rowwise.tables.spec import Table
from rowwise.train.repeats import IdSample
from rowwise.train.traffic import TableTraffic

ACCESS = "access.json"  # in the folder of a run
SIZES = 8  # number of batch sizes, up to all counted ids, that a curve is fitted to
SMALLEST = 256.0  # the smallest size is the batch divided by this
ZIPF_Q = np.concatenate([[0.0], np.geomspace(1e-6, 0.1, 8)])  # candidates for `zipf_q`, as fractions of the active rows
ACTIVES = 6  # candidates for the number of active rows, besides an estimate from ids seen once and twice
ANCHORS = np.array([1.0, 8.0, 64.0])  # each candidate is exact for one batch size: the largest divided by one of these
HALVINGS, SECANTS = 8, 4  # steps of a bisection, and of the false position after it


@final
class AccessFile:
    """Access statistics of the tables so far; `text` is the content of access.json.

    During a run a table is fitted again only after its number of counted ids has
    doubled, so the file of a killed run covers at least half of them.
    """

    def __init__(self, tables: Sequence[Table], batch: int) -> None:
        """`batch` is the global batch, at which the curves fit best."""
        self._tables, self._batch = tuple(tables), batch
        self._fits: dict[str, tuple[int, Access]] = {}  # by table: number of ids when fitted, and the fit

    def workloads(self, traffic: TableTraffic, *, ended: bool) -> tuple[Workload, ...]:
        """The tables with their statistics; with `ended` all are fitted to all counted ids."""
        return tuple(Workload(table=table, access=self._access(table, traffic, ended)) for table in self._tables)

    def text(self, traffic: TableTraffic, *, ended: bool) -> str:
        return access_json(self.workloads(traffic, ended=ended))

    def _access(self, table: Table, traffic: TableTraffic, ended: bool) -> Access:
        pooling = traffic.pooling(table.name)
        if pooling is None:  # nothing was counted: one id per feature
            return Access(pooling=float(len(table.feature_names)))
        repeats = traffic.repeats(table.name)
        counted, fit = self._fits.get(table.name, (0, None))
        if fit is None or repeats.looked_at >= (counted + 1 if ended else 2 * counted):
            fit = fit_access(repeats, table.rows, pooling, self._batch)
            self._fits[table.name] = repeats.looked_at, fit
        return structs.replace(fit, pooling=pooling)


def access_json(workloads: Sequence[Workload]) -> str:
    """The content of a tables file for `rowwise plan`."""
    return msgspec.json.format(msgspec.json.encode(workloads), indent=1).decode() + "\n"


def fit_access(repeats: IdSample, rows: int, pooling: float, batch: int) -> Access:
    """The curve whose distinct ids match the counts at all batch sizes best.

    For each candidate of `zipf_q`, active rows and batch size, `zipf_a` is solved for that size; the candidate with the
    least error over all sizes wins.
    """
    if not repeats.looked_at:
        return Access(pooling=pooling)
    counted = float(repeats.looked_at)
    batch_ids = min(max(pooling * batch, 1.0), counted)
    sizes_P = np.unique(np.geomspace(max(batch_ids / SMALLEST, 1.0), counted, SIZES).round())
    distinct_P = repeats.expected_distinct(sizes_P)
    candidates = np.meshgrid(_guess_active_rows(repeats, rows), ZIPF_Q, np.maximum(batch_ids / ANCHORS, 1.0))
    active_G, fraction_G, anchor_G = (x.ravel() for x in candidates)
    q_G = fraction_G * active_G
    cells = RankCells(q_G, active_G)
    a_G = _solve_zipf_a(cells, anchor_G, repeats.expected_distinct(anchor_G))
    share_GC = cells.shares(a_G)
    expected_PG = np.stack([cells.distinct(share_GC, np.full(len(a_G), size)) for size in sizes_P])
    # Relative errors, weighted by the counts, as small counts have larger relative errors.
    error_G = (distinct_P[:, None] * np.log(expected_PG / np.maximum(distinct_P, 1e-9)[:, None]) ** 2).sum(0)
    best = int(np.argmin(error_G))
    active = int(active_G[best])
    return Access(
        pooling=pooling,
        zipf_a=round(float(a_G[best]), 6),
        zipf_q=float(f"{q_G[best]:.6g}"),
        active=None if active == rows else active,
    )


def _guess_active_rows(repeats: IdSample, rows: int) -> Floats:
    """Candidates from all rows down to the distinct ids seen, and an estimate for uniform access."""
    seen = float(repeats.expected_distinct(np.array([float(repeats.looked_at)]))[0])
    once, twice = (float((repeats.counts_D == times).sum()) * 2**repeats.level for times in (1, 2))
    estimate = seen + once**2 / max(2 * twice, 1.0)  # Chao's estimator
    min_active = min(max(seen, 1.0), float(rows))
    return np.append(np.geomspace(rows, min_active, ACTIVES), min(max(estimate, min_active), rows)).round()


def _solve_zipf_a(cells: RankCells, ids_G: Floats, distinct_G: Floats) -> Floats:
    """For each candidate the `zipf_a` at which `ids_G` lookups have `distinct_G` distinct ids, or its nearest bound."""

    def excess(a_G: Floats) -> Floats:
        return cells.distinct(cells.shares(a_G), ids_G) - distinct_G

    low_G, high_G = np.zeros(len(ids_G)), np.full(len(ids_G), MAX_ZIPF_A)
    # Distinct ids fall as `zipf_a` grows: the root stays in [low_G, high_G], whose ends have excess over_G and under_G.
    a_G, over_G, under_G = low_G, excess(low_G), excess(high_G)
    for step in range(HALVINGS + SECANTS):
        part_G = np.full(len(ids_G), 0.5)  # bisection first, then false position
        if step >= HALVINGS:
            part_G = np.clip(over_G / np.maximum(over_G - under_G, 1e-300), 0.0, 1.0)
        a_G = low_G + part_G * (high_G - low_G)
        excess_G = excess(a_G)
        too_many_G = excess_G > 0
        low_G, high_G = np.where(too_many_G, a_G, low_G), np.where(too_many_G, high_G, a_G)
        over_G, under_G = np.where(too_many_G, excess_G, over_G), np.where(too_many_G, under_G, excess_G)
    return a_G

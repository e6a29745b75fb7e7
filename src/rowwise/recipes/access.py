"""What a run has counted of its tables, as the statistics that a planner reads: `rowwise plan --tables access.json`.

A curve is fitted rather than a ratio written, as it holds for batches of any size. Known limits: curves that are not
of the form that `Access` has; the nearest one is then some percent off.
"""

from collections.abc import Sequence
from typing import final

import msgspec
import numpy as np
from msgspec import structs

from rowwise.perf.access import STEEPEST, Access, Floats, Workload, distinct
from rowwise.spec import Table
from rowwise.train.repeats import IdSample
from rowwise.train.traffic import TableTraffic

ACCESS = "access.json"  # in the folder of a run
SIZES = 8  # of batches, up to all that was looked at, that a curve is fitted to
SMALLEST = 256.0  # of them, as a part of the batch
FLAT = np.concatenate([[0.0], np.geomspace(1e-6, 0.1, 8)])  # what `zipf_q` may be, over the rows that are asked for
ACTIVES = 6  # how many rows may be asked for: so many guesses, and one by how many were seen once and twice
ANCHORS = np.array([1.0, 8.0, 64.0])  # batches that a guess has to be right for: so much smaller than the largest
HALVINGS = 20


@final
class AccessFile:
    """The tables as they were asked for so far: `text` is what the file of a run holds.

    A fit takes a twentieth of a second a table, so that in the middle of a run a former one stands until twice as many
    ids were looked at: a file of a run that was killed is of at least half of them.
    """

    def __init__(self, tables: Sequence[Table], batch: int) -> None:
        """`batch`: samples of a step, of all ranks, for which the curves fit best."""
        self._tables, self._batch = tuple(tables), batch
        self._fits: dict[str, tuple[int, Access]] = {}  # by table: of so many ids

    def workloads(self, traffic: TableTraffic, *, ended: bool) -> tuple[Workload, ...]:
        """The tables; once a run has ended, of all that was looked at."""
        return tuple(Workload(table=table, access=self._access(table, traffic, ended)) for table in self._tables)

    def text(self, traffic: TableTraffic, *, ended: bool) -> str:
        return access_json(self.workloads(traffic, ended=ended))

    def _access(self, table: Table, traffic: TableTraffic, ended: bool) -> Access:
        pooling = traffic.pooling(table.name)
        if pooling is None:  # no batch was looked at: as before there was a run
            return Access(pooling=float(len(table.feature_names)))
        repeats = traffic.repeats(table.name)
        counted, fit = self._fits.get(table.name, (0, None))
        if fit is None or repeats.looked_at >= (counted + 1 if ended else 2 * counted):
            fit = fit_access(repeats, table.rows, pooling, self._batch)
            self._fits[table.name] = repeats.looked_at, fit
        return structs.replace(fit, pooling=pooling)


def access_json(workloads: Sequence[Workload]) -> str:
    return msgspec.json.format(msgspec.json.encode(workloads), indent=1).decode() + "\n"


def fit_access(repeats: IdSample, rows: int, pooling: float, batch: int) -> Access:
    """The curve that has as many different ids as were counted, in a batch and in smaller ones.

    For each guess of `zipf_q`, of the rows that are asked for at all, and of a size of batches, `zipf_a` is what gives
    that size its different ids; the best of those for all sizes is taken.
    """
    if not repeats.looked_at:
        return Access(pooling=pooling)
    most = float(repeats.looked_at)
    drawn = min(max(pooling * batch, 1.0), most)
    sizes_P = np.unique(np.geomspace(max(drawn / SMALLEST, 1.0), most, SIZES).round())
    want_P = repeats.different(sizes_P)
    guesses = np.meshgrid(_actives(repeats, rows), FLAT, np.maximum(drawn / ANCHORS, 1.0))
    active_G, flat_G, anchor_G = (x.ravel() for x in guesses)
    q_G = flat_G * active_G
    a_G = _steepness(q_G, active_G, anchor_G, repeats.different(anchor_G))
    found_PG = np.stack([distinct(a_G, q_G, active_G, np.full(len(a_G), size)) for size in sizes_P])
    # What is counted of few ids is off by more.
    error_G = (want_P[:, None] * np.log(found_PG / np.maximum(want_P, 1e-9)[:, None]) ** 2).sum(0)
    best = int(np.argmin(error_G))
    active = int(active_G[best])
    return Access(
        pooling=pooling,
        zipf_a=round(float(a_G[best]), 6),
        zipf_q=float(f"{q_G[best]:.6g}"),
        active=None if active == rows else active,
    )


def _actives(repeats: IdSample, rows: int) -> Floats:
    """From all rows down to those that were seen, and those that are there if all are asked for alike."""
    seen = float(repeats.different(np.array([float(repeats.looked_at)]))[0])
    once, twice = (float((repeats.counts_D == times).sum()) * 2**repeats.level for times in (1, 2))
    alike = seen + once**2 / max(2 * twice, 1.0)  # what Chao's estimator says
    least = min(max(seen, 1.0), float(rows))
    return np.append(np.geomspace(rows, least, ACTIVES), min(max(alike, least), rows)).round()


def _steepness(q_G: Floats, active_G: Floats, drawn_G: Floats, want_G: Floats) -> Floats:
    """The `zipf_a` of each guess that has so many different ids among those drawn; the nearest, where none has."""
    low_G, high_G = np.zeros(len(q_G)), np.full(len(q_G), STEEPEST)
    for _ in range(HALVINGS):
        a_G = (low_G + high_G) / 2
        too_many_G = distinct(a_G, q_G, active_G, drawn_G) > want_G
        low_G, high_G = np.where(too_many_G, a_G, low_G), np.where(too_many_G, high_G, a_G)
    return (low_G + high_G) / 2

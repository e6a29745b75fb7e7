"""Draws sets of tables to measure: the n-th set of a rank is a function of the seed alone.

So an interrupted calibration continues where it stopped, and a set can be measured twice. A set is 1 to 15 tables
with the dims of NeuroShard's benchmark, or pieces as sharding cuts them. The seconds of sets are spread evenly on a
logarithmic scale. Every table pools by sum: sequences and per-id weights are not drawn.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.planning.perf.access import Access, Curves, Floats, Workload
from rowwise.tables.row_optimizers import Adagrad, Adam, RowOptimizer, RowWiseAdagrad, Sgd
from rowwise.tables.spec import Pooling, RowType, Table, Value, row_bytes, state_width

T = TypeVar("T")
Ints = NDArray[np.int64]
DIMS = (4, 8, 16, 32, 64, 128)  # of NeuroShard's benchmark
WIDE = 256
NARROW = (4, 8, 12, 24, 48)  # columns of pieces of cut tables
MAX_TABLES = 15
SYNTHETIC_FRACTION = 0.25  # of the sets, with tables from a file
BATCHES = (256, 16384)
TRIES, SAME_COUNT_TRIES = 300, 60  # draws of a set; after the first 60 it may have fewer tables, as small sets must
FLOAT_bytes, LINE_bytes = 4, 64
ROW_TYPES = ((RowType.FP32, 0.7), (RowType.BF16, 0.12), (RowType.FP16, 0.08), (RowType.INT8, 0.1))
OPTIMIZERS: tuple[tuple[RowOptimizer, float], ...] = (
    (RowWiseAdagrad(), 0.6),
    (Sgd(), 0.15),
    (Adagrad(), 0.15),
    (Adam(), 0.1),
)
# Rough seconds of a step on one core, to spread sets: of a call, an id, a byte of a row, a float of a vector, and the
# extra seconds of an id whose row is not fp32.
CALL_s, ID_s, BYTE_s, VECTOR_s, PACKED_s = 300e-6, 40e-9, 0.12e-9, 2.2e-9, 20e-9


class SetLimits(Value, frozen=True, kw_only=True):
    """Bounds of the memory and the time of a set."""

    pool_bytes: int  # of rows and optimizer state
    vector_floats: int = 16 << 20  # of all pooled vectors of a batch
    min_s: float = 400e-6  # rough seconds of a lookup and its update
    max_s: float = 80e-3
    speed: float = 1.0  # of the device, as a multiple of one core


@dataclass(frozen=True, slots=True)
class DrawnSet:
    """Tables that are looked up together."""

    number: int
    batch: int
    workloads: tuple[Workload, ...]


class StorageFormat(NamedTuple):
    """Row type and optimizer of a set."""

    row_type: RowType
    optimizer: RowOptimizer
    keep_own: bool  # tables of a file keep theirs

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "StorageFormat":
        return cls(_draw_weighted(ROW_TYPES, rng), _draw_weighted(OPTIMIZERS, rng), bool(rng.random() < 0.5))


class DrawnTables(NamedTuple):
    """Drawn tables as arrays."""

    rows_T: Ints
    dim_T: Ints
    pooling_T: Floats
    a_T: Floats
    q_T: Floats
    active_T: Ints
    row_types: Sequence[RowType]
    optimizers: Sequence[RowOptimizer]

    def total_bytes(self) -> int:
        sizes = (_table_bytes(*x) for x in zip(self.rows_T, self.dim_T, self.row_types, self.optimizers, strict=True))
        return sum(sizes)

    def sample_s(self) -> float:
        """Rough seconds of a sample on one core."""
        bytes_T = [row_bytes(kind, int(dim)) for kind, dim in zip(self.row_types, self.dim_T, strict=True)]
        packed_T = [kind is not RowType.FP32 for kind in self.row_types]
        ids_s = (self.pooling_T * (ID_s + BYTE_s * np.array(bytes_T) + PACKED_s * np.array(packed_T))).sum()
        return float(ids_s + VECTOR_s * self.dim_T.sum())


class Population:
    """The tables to draw from: those of a file, or synthetic ones like those of large models.

    Some sets are synthetic even with tables of a file, as plans cut tables into pieces unlike any of them.
    """

    def __init__(self, workloads: Sequence[Workload] = (), pool_bytes: int | None = None) -> None:
        """`pool_bytes`: leave out tables that are larger even with the fewest columns."""
        least = [_table_bytes(w.table.rows, DIMS[0], RowType.FP32, RowWiseAdagrad()) for w in workloads]
        fit = [w for w, size in zip(workloads, least, strict=True) if pool_bytes is None or size <= pool_bytes]
        if workloads and not fit:
            index = least.index(min(least))
            name, size = workloads[index].table.name, least[index]
            raise SpecError(
                f"no table fits {(pool_bytes or 0) / 1e6:.1f} MB of memory for rows: table {name!r}, the "
                f"smallest, takes {size / 1e6:.1f} MB with {DIMS[0]} columns",
                "smaller tables",
            )
        self._workloads = tuple(_fit_zipf_curve(w) for w in fit)

    def draw(self, rng: np.random.Generator, count: int, stored: StorageFormat) -> DrawnTables:
        row_types, optimizers = [stored.row_type] * count, [stored.optimizer] * count
        if not self._workloads or rng.random() < SYNTHETIC_FRACTION:
            return _cut_tables(_draw_synthetic(rng, count, row_types, optimizers), rng)
        chosen = [self._workloads[i] for i in rng.integers(len(self._workloads), size=count)]
        if stored.keep_own:
            row_types, optimizers = [w.table.row_type for w in chosen], [w.table.optimizer for w in chosen]
        drawn = _as_arrays(chosen, row_types, optimizers)
        return _cut_tables(_vary_tables(drawn, rng), rng)


def draw_set(population: Population, limits: SetLimits, seed: int, number: int, rank: int) -> DrawnSet:
    """The n-th set of a rank; always the same."""
    rng = np.random.default_rng((seed, number, rank))
    target_s = math.exp(rng.uniform(math.log(limits.min_s), math.log(limits.max_s)))
    nearest: tuple[float, int, DrawnTables] | None = None
    count, stored = int(rng.integers(1, MAX_TABLES + 1)), StorageFormat.draw(rng)
    for attempt in range(TRIES):
        if attempt >= SAME_COUNT_TRIES:
            count = int(rng.integers(1, count + 1))
        drawn = population.draw(rng, count, stored)
        if drawn.total_bytes() + count * 2 * LINE_bytes > limits.pool_bytes:
            continue
        target_batch = max(1e-9, (target_s - CALL_s) * limits.speed) / drawn.sample_s()
        max_batch = min(BATCHES[1], limits.vector_floats // int(drawn.dim_T.sum()))
        batch = min(round(max(target_batch, BATCHES[0])), max_batch)
        error = abs(math.log(batch / target_batch))
        if nearest is None or error < nearest[0]:
            nearest = error, batch, drawn
        if error < 0.05:
            break
    if nearest is None:
        raise SpecError(
            f"no set of tables fits {limits.pool_bytes / 1e6:.1f} MB of memory", "more memory, or smaller tables"
        )
    _, batch, drawn = nearest
    return DrawnSet(number, batch, _make_workloads(drawn))


def _draw_synthetic(
    rng: np.random.Generator, count: int, row_types: Sequence[RowType], optimizers: Sequence[RowOptimizer]
) -> DrawnTables:
    """Tables like those of large models: mostly millions of rows, some with hardly any."""
    middle = rng.uniform(math.log(1e5), math.log(4e6))
    rows_T = np.exp(rng.normal(middle, 1.5, count))
    rows_T = np.where(rng.random(count) < 0.15, np.exp(rng.uniform(math.log(4), math.log(1e4), count)), rows_T)
    rows_T = np.clip(rows_T, 4, 1e8).astype(np.int64)
    pooling_T = np.clip(np.exp(rng.normal(rng.uniform(math.log(2), math.log(20)), 0.8, count)), 0.2, 200)
    q_T = np.where(rng.random(count) < 0.5, 0.0, np.exp(rng.uniform(0, math.log(1000), count)))
    active_T = np.where(rng.random(count) < 0.3, rows_T * rng.uniform(0.05, 1, count), rows_T).astype(np.int64)
    return DrawnTables(
        rows_T=rows_T,
        dim_T=_draw_dims(rng, count),
        pooling_T=np.where(rng.random(count) < 0.25, 1.0, pooling_T),
        a_T=rng.uniform(0, 1.6, count),
        q_T=np.minimum(q_T, rows_T / 10),
        active_T=np.maximum(active_T, 1),
        row_types=row_types,
        optimizers=optimizers,
    )


def _as_arrays(
    chosen: Sequence[Workload], row_types: Sequence[RowType], optimizers: Sequence[RowOptimizer]
) -> DrawnTables:
    access = [w.access for w in chosen]
    return DrawnTables(
        rows_T=np.array([w.table.rows for w in chosen]),
        dim_T=np.array([w.table.dim for w in chosen]),
        pooling_T=np.array([x.pooling for x in access], dtype=float),
        a_T=np.array([x.zipf_a for x in access], dtype=float),
        q_T=np.array([x.zipf_q for x in access], dtype=float),
        active_T=np.array([x.active or w.table.rows for w, x in zip(chosen, access, strict=True)]),
        row_types=row_types,
        optimizers=optimizers,
    )


def _vary_tables(drawn: DrawnTables, rng: np.random.Generator) -> DrawnTables:
    """Tables of a file, half of them with other dims, and more or fewer rows and ids, as pieces of a plan have."""
    count = len(drawn.rows_T)
    dim_T = np.where(rng.random(count) < 0.5, _draw_dims(rng, count), drawn.dim_T)
    scale_T = np.where(rng.random(count) < 0.5, np.exp(rng.uniform(-math.log(16), math.log(2), count)), 1.0)
    pooling_T = np.where(rng.random(count) < 0.3, np.exp(rng.uniform(-math.log(3), math.log(3), count)), 1.0)
    return drawn._replace(
        dim_T=dim_T,
        rows_T=np.maximum(1, drawn.rows_T * scale_T).astype(np.int64),
        active_T=np.maximum(1, drawn.active_T * scale_T).astype(np.int64),
        pooling_T=np.clip(drawn.pooling_T * pooling_T, 0.01, 500),
        a_T=np.clip(drawn.a_T + np.where(rng.random(count) < 0.3, rng.uniform(-0.2, 0.2, count), 0.0), 0.0, None),
    )


def _cut_tables(drawn: DrawnTables, rng: np.random.Generator) -> DrawnTables:
    """Turns one set in five into pieces: some of the columns, or of the rows, of each table."""
    if rng.random() >= 0.2:
        return drawn
    count = len(drawn.rows_T)
    parts_T = np.minimum(np.where(rng.random(count) < 0.5, 2 ** rng.integers(1, 4, count), 1), drawn.rows_T)
    narrow_T = np.where(rng.random(count) < 0.7, np.array(NARROW)[rng.integers(len(NARROW), size=count)], drawn.dim_T)
    return drawn._replace(
        rows_T=drawn.rows_T // parts_T,
        active_T=np.maximum(1, drawn.active_T // parts_T),
        pooling_T=drawn.pooling_T / parts_T,
        dim_T=np.minimum(narrow_T, drawn.dim_T),
    )


def _make_workloads(drawn: DrawnTables) -> tuple[Workload, ...]:
    workloads: list[Workload] = []
    for index, rows in enumerate(drawn.rows_T.tolist()):
        table = Table(
            name=f"t{index}",
            rows=rows,
            dim=int(drawn.dim_T[index]),
            row_type=drawn.row_types[index],
            optimizer=drawn.optimizers[index],
        )
        access = Access(
            pooling=round(float(drawn.pooling_T[index]), 4),
            zipf_a=round(float(drawn.a_T[index]), 4),
            zipf_q=round(float(drawn.q_T[index]), 3),
            active=min(int(drawn.active_T[index]), rows),
        )
        workloads.append(Workload(table=table, access=access))
    return tuple(workloads)


def _fit_zipf_curve(workload: Workload) -> Workload:
    """Replaces a ratio of distinct rows, which holds for one batch size, by a Zipf curve."""
    access, table = workload.access, workload.table
    if access.unique_ratio is not None:
        a = float(Curves.of([workload], BATCHES[1]).a_T[0])
        access = structs.replace(access, zipf_a=a, unique_ratio=None)
    return Workload(table=structs.replace(table, pooling=Pooling.SUM, column_group=None), access=access)


def _draw_dims(rng: np.random.Generator, count: int) -> Ints:
    drawn_T = np.array(DIMS)[rng.integers(len(DIMS), size=count)]
    return np.where(rng.random(count) < 0.06, WIDE, drawn_T)


def _draw_weighted(choices: Sequence[tuple[T, float]], rng: np.random.Generator) -> T:
    at = np.searchsorted(np.cumsum([weight for _, weight in choices]), rng.random())
    return choices[min(int(at), len(choices) - 1)][0]


def _table_bytes(rows: int, dim: int, row_type: RowType, optimizer: RowOptimizer) -> int:
    return int(rows) * (row_bytes(row_type, int(dim)) + FLOAT_bytes * _state_floats(int(dim), optimizer))


@functools.cache
def _state_floats(dim: int, optimizer: RowOptimizer) -> int:
    return state_width(Table(name="any", rows=1, dim=dim, optimizer=optimizer))

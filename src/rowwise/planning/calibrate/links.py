"""Measures exchanges between ranks: ids to the ranks of their rows, vectors to their samples, gradients back.

All ranks run the runtime of training, with synthetic tables of few rows that are distributed more or less evenly, and a
clock around each phase of a step. Ranks meet before each phase, so that none is charged for lookups of others. Some
begin their exchange with a delay, as ranks with more lookups do. If the transport counts how long a rank waited for
others to begin, that is subtracted, except for the delay. The result is a median over repeats.

Not measured: computation on all cores during an exchange, and several exchanges at a time.
"""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import numpy as np
import torch

from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.plan import Plan, Tile
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.planning.calibrate.draw import DIMS, FLOAT_bytes
from rowwise.planning.calibrate.ids import draw_batch
from rowwise.planning.calibrate.kernels import flush_bytes
from rowwise.planning.calibrate.samples import LinkSample
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.planner.layouts import (
    COLUMN_WISE,
    REPLICATED,
    ROW_WISE,
    TABLE_WISE,
    Layout,
    column_wise,
    layout_named,
    replicated,
    row_wise,
    table_wise,
)
from rowwise.tables.batch import Jagged
from rowwise.tables.row_optimizers import Sgd
from rowwise.tables.spec import Table

CutTable = Callable[[Table, Sequence[int]], tuple[Tile, ...]]  # tiles of a table on these ranks
LAYOUT_CUTS: dict[str, tuple[float, CutTable]] = {  # by layout: probability, tiles
    TABLE_WISE.name: (0.5, lambda table, ranks: table_wise(table, ranks[0])),
    COLUMN_WISE.name: (0.2, column_wise),
    ROW_WISE.name: (0.15, row_wise),
    REPLICATED.name: (0.15, replicated),
}
LINK_SEED = 1 << 20  # so that exchanges and sets of the same number differ
MAX_TABLES = 60
BATCHES = (256, 16384)  # samples of all ranks
ROWS = (16, 1024)
POOLING = (1.0, 20.0)  # ids of a sample and table
MAX_FLOATS, MAX_IDS = 8 << 20, 1 << 20  # of all ranks
MAX_SKEW_s = 5e-3
REPEATS = 5
PHASES = ("route", "exchange", "return")


class ExchangeSetup(NamedTuple):
    """Tables, plan and delays of an exchange; the same on all ranks."""

    number: int
    layout: Layout
    batch: int  # samples of all ranks
    workloads: tuple[Workload, ...]
    plan: Plan
    skew_W: tuple[float, ...]


def draw_exchange(seed: int, number: int, world: int) -> ExchangeSetup:
    """The n-th exchange; always the same."""
    rng = np.random.default_rng((seed, LINK_SEED, number))
    shares = np.cumsum([share for share, _ in LAYOUT_CUTS.values()])
    layout = layout_named(list(LAYOUT_CUTS)[min(int(np.searchsorted(shares, rng.random())), len(LAYOUT_CUTS) - 1)])
    while True:
        count = round(_draw_log_uniform(rng, (1, MAX_TABLES)))
        batch = -(-round(_draw_log_uniform(rng, BATCHES)) // world) * world
        # Copies send gradients whatever the ids are, so there should be few ids.
        pooling = 1.0 if layout.is_replicated else _draw_log_uniform(rng, POOLING)
        dim_T = np.array(DIMS)[rng.integers(len(DIMS), size=count)]
        if batch * dim_T.sum() <= MAX_FLOATS and batch * pooling * count <= MAX_IDS:
            break
    tables = [
        Table(name=f"t{k}", rows=round(_draw_log_uniform(rng, ROWS)), dim=int(dim), optimizer=Sgd())
        for k, dim in enumerate(dim_T)
    ]
    skew_W = rng.uniform(0, MAX_SKEW_s, world) if rng.random() < 0.5 else np.zeros(world)
    return ExchangeSetup(
        number=number,
        layout=layout,
        batch=batch,
        workloads=tuple(Workload(table=t, access=Access(pooling=round(pooling, 3))) for t in tables),
        plan=Plan(world=world, tiles=_place_tables(tables, layout, world, rng)),
        skew_W=tuple((skew_W - skew_W.min()).tolist()),
    )


def _place_tables(tables: Sequence[Table], layout: Layout, world: int, rng: np.random.Generator) -> tuple[Tile, ...]:
    """Puts each table on the ranks with the fewest columns, or on random ones, so that exchanges differ in balance."""
    _, cut = LAYOUT_CUTS[layout.name]
    if layout.is_replicated:
        return tuple(tile for table in tables for tile in cut(table, range(world)))
    columns_W, misplaced = np.zeros(world), rng.random()
    tiles: list[Tile] = []
    for table in tables:
        pieces = 1 if layout.is_whole else int(rng.integers(2, world + 1))
        by_columns = rng.permutation(world) if rng.random() < misplaced else np.argsort(columns_W, kind="stable")
        ranks = [int(rank) for rank in by_columns[:pieces]]
        table_tiles = cut(table, ranks)
        tiles += table_tiles
        for tile in table_tiles:
            columns_W[tile.rank] += tile.cols[1] - tile.cols[0]
    return tuple(tiles)


@final
class PhaseClock:
    """Times each phase of a step, after ranks have met and waited their delay.

    Before that, it reads other memory, as the rest of a model evicts caches between the phases of a step.
    """

    def __init__(self, comm: Comm, skew_s: float) -> None:
        """`skew_s`: the delay after which this rank begins its exchange."""
        self._comm, self._skew_s = comm, skew_s
        self._barrier, self._cache_filler = torch.zeros(1), torch.ones(flush_bytes(torch.device("cpu")) // FLOAT_bytes)
        self.taken_s: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times one phase; phases without communication are not timed."""
        if phase not in PHASES and phase != "update":
            yield
            return
        self._cache_filler.sum()
        self._comm.all_reduce(self._barrier, "meeting").wait()
        begin = time.perf_counter()
        if phase == "exchange" and self._skew_s:
            spin_until(begin + self._skew_s)
            begin = time.perf_counter()
        waited_s = self._comm.waited.seconds
        yield
        self.taken_s[phase].append(time.perf_counter() - begin - (self._comm.waited.seconds - waited_s))


def spin_until(end_s: float) -> None:
    """Busy-waits, as a rank that still looks up ids would be busy; a sleep may last longer."""
    while time.perf_counter() < end_s:
        pass


def measure_exchange(comm: Comm, seed: int, number: int, repeats: int = REPEATS) -> LinkSample:
    """Measures the n-th exchange; all ranks call it and get all results, with their own `took_s`."""
    begin = time.perf_counter()
    world, rank = len(comm.ranks), comm.rank
    setup = draw_exchange(seed, number, world)
    module = ShardedEmbeddings([w.table for w in setup.workloads], setup.plan, comm)
    rng = np.random.default_rng((seed, LINK_SEED, number, rank))
    batch = draw_batch(setup.workloads, setup.batch // world, rng)
    clock = PhaseClock(comm, setup.skew_W[rank])
    copied = setup.layout.is_replicated
    module.phase = clock
    ids = exchange_step(module, batch, clock, copied=copied)
    clock.taken_s.clear()  # drop the warm-up
    for _ in range(repeats):
        exchange_step(module, batch, clock, copied=copied)
    taken_s = [statistics.median(clock.taken_s[phase]) for phase in PHASES]
    if comm.waited.seconds:  # the transport counts waits, so delays were subtracted: add them again
        taken_s[1] += max(setup.skew_W) - setup.skew_W[rank]
    # Gradients of copies are all-reduced in the update.
    taken_s[-1] += statistics.median(clock.taken_s["update"]) if copied else 0.0
    measured_WX = _gather_floats(comm, [*taken_s, float(ids)])
    route_W, exchange_W, return_W, ids_W = (tuple(column) for column in zip(*measured_WX, strict=True))
    return LinkSample(
        number=number,
        layout=setup.layout.name,
        hosts=comm.topology.hosts,
        batch=setup.batch,
        dim_W=_columns_by_rank(setup.plan),
        ids_W=tuple(map(int, ids_W)),
        copied=sum(w.table.rows * w.table.dim for w in setup.workloads) if copied else 0,
        skew_W=setup.skew_W,
        route_W=route_W,
        exchange_W=exchange_W,
        return_W=return_W,
        took_s=time.perf_counter() - begin,
    )


def exchange_step(module: ShardedEmbeddings, batch: Jagged, clock: PhaseClock, *, copied: bool) -> int:
    """Runs forward, backward, and the update of copies; returns the number of ids that this rank received."""
    matrix_BS = module(batch).matrix_BS
    matrix_BS.backward(torch.full_like(matrix_BS, 0.01))
    ids = max((len(staged.call.jagged.values_N) for staged in module.staged), default=0)
    if copied:
        with clock("update"):
            module.update()
    module.discard()
    return ids


def _columns_by_rank(plan: Plan) -> tuple[int, ...]:
    """Columns of pooled vectors that each rank looks up."""
    return tuple(sum(tile.cols[1] - tile.cols[0] for tile in plan.tiles_on(rank)) for rank in range(plan.world))


def _gather_floats(comm: Comm, values: Sequence[float]) -> list[list[float]]:
    world = len(comm.ranks)
    sent = torch.tensor(values, dtype=torch.float64)
    return comm.all_gather(sent, [len(values)] * world, "measured").wait().view(world, len(values)).tolist()


def _draw_log_uniform(rng: np.random.Generator, bounds: tuple[float, float]) -> float:
    return math.exp(rng.uniform(math.log(bounds[0]), math.log(bounds[1])))

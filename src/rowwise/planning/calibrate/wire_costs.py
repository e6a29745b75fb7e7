"""Measures what narrow wires add to an exchange of floats: coding at both ends, minus the bytes saved.

The same ranks exchange the same vectors by turns in floats and in each narrow type, so that drift slows both alike. The
result is a fraction of the exchange in floats. Coding alone in a loop would be several times as fast as within a step.
Cut tables, and wires that differ by direction, are not measured.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from rowwise.base.quantity import round_digits
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.spawn import run_processes
from rowwise.parallel.plan import Plan
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.planning.calibrate.ids import draw_batch
from rowwise.planning.calibrate.links import PhaseClock, exchange_step
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.exchange import Amounts, Exchanges, NarrowWires, WireCost
from rowwise.planning.planner.layouts import table_wise
from rowwise.tables.row_optimizers import Sgd
from rowwise.tables.spec import Codecs, Table, Topology, Wire, WireType

SHAPES = tuple((batch, *tables) for batch in (512, 2048, 8192) for tables in ((4, 16), (16, 16), (2, 64), (8, 64)))
ROWS, ROUNDS, SEED = 1024, 8, 5
KINDS = tuple(WireType(name) for name in NarrowWires.__struct_fields__)


class WireShares(NamedTuple):
    """The size of an exchange, and the added seconds of each wire type, as a fraction of those in floats."""

    batch: int  # samples of all ranks
    tables: int  # of each rank
    dim: int
    added: dict[WireType, float]


def measure_wire_costs(world: int, threads: int, *, shared_memory: bool) -> tuple[WireShares, ...]:
    shares_W = run_processes(Topology(devices=world), _measure_shapes, shared_memory=shared_memory, threads=threads)
    return tuple(
        shares[0]._replace(added={kind: statistics.mean(shape.added[kind] for shape in shares) for kind in KINDS})
        for shares in zip(*shares_W, strict=True)
    )


def _measure_shapes(comm: Comm) -> list[WireShares]:
    return [_measure_shape(comm, *shape) for shape in SHAPES]


def _measure_shape(comm: Comm, batch: int, tables: int, dim: int) -> WireShares:
    world = len(comm.ranks)
    table_list = [Table(name=f"t{k}", rows=ROWS, dim=dim, optimizer=Sgd()) for k in range(tables * world)]
    plan = Plan(world=world, tiles=tuple(tile for k, t in enumerate(table_list) for tile in table_wise(t, k % world)))
    ids = draw_batch(
        [Workload(table=t, access=Access()) for t in table_list], batch // world, np.random.default_rng(SEED)
    )
    clocks = {kind: PhaseClock(comm, 0.0) for kind in (WireType.FP32, *KINDS)}
    modules = {kind: ShardedEmbeddings(table_list, plan, comm, wire=Wire(host=Codecs(kind, kind))) for kind in clocks}
    for number in range(-1, ROUNDS):
        for kind, module in modules.items():
            module.phase = clocks[kind]
            exchange_step(module, ids, clocks[kind], copied=False)
            if number < 0:  # warm-up
                clocks[kind].taken_s.clear()
    taken_s = {kind: np.add(clock.taken_s["exchange"], clock.taken_s["return"]) for kind, clock in clocks.items()}
    floats_s = taken_s[WireType.FP32]
    shares = {kind: float(np.median(taken_s[kind] - floats_s) / np.median(floats_s)) for kind in KINDS}
    return WireShares(batch, tables, dim, shares)


def fit_wire_costs(exchanges: Exchanges, shares: Sequence[WireShares], world: int) -> Exchanges:
    """Exchange networks with costs of narrow wires fitted to the measured shares."""
    from scipy.optimize import lsq_linear

    amount_SK, nominal_S = np.zeros((len(shares), 3)), np.zeros(len(shares))
    for index, (batch, tables, dim, _) in enumerate(shares):
        even_W = np.ones(world)
        amounts = Amounts(even_W * tables * dim, even_W * tables * batch, batch, even_W * 0)
        nominal_S[index] = (exchanges.forward.transfer_s(amounts) + exchanges.backward.transfer_s(amounts)).mean()
        vectors = tables * batch * (world - 1) / world
        amount_SK[index] = 2 * (world - 1), 2 * vectors, 2 * vectors * dim  # there and back
    scaled_SK = amount_SK / nominal_S[:, None]
    unit_K, min_K = np.abs(scaled_SK).max(0), [0.0, 0.0, -np.inf]  # saved bytes may be worth more than coding
    costs: dict[str, WireCost] = {}
    for kind in KINDS:
        share_S = np.array([shape.added[kind] for shape in shares])
        price_K = lsq_linear(scaled_SK / unit_K, share_S, (min_K, np.inf)).x / unit_K
        costs[kind] = WireCost(**dict(zip(WireCost.__struct_fields__, map(round_digits, price_K), strict=True)))
    return structs.replace(exchanges, narrow=NarrowWires(**costs))

"""The tasks that planners are compared on: tables, devices and memory, drawn by a seed.

Pools are `tables/dlrm856_like_tables.csv` (856 made-up tables whose totals and reuse are fitted to published statistics
of production tables; not those tables) and `tables/public_table_lists.csv` (published lists of rows, dims and pooling).
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.cost import CostModel
from rowwise.planning.perf.hardware import GiB, Hardware, LinkRates, Machine, hardware_named
from rowwise.planning.perf.roofline import Roofline
from rowwise.planning.planner.constraints import Constraints
from rowwise.planning.planner.problem import PlanRequest
from rowwise.tables.row_optimizers import Sgd
from rowwise.tables.spec import RowType, Table, Topology

DATA = Path(__file__).parents[1] / "tables"
BATCH = 65536
DIMS = (4, 8, 16, 32, 64, 128)
COLUMNS = ("table_wise", "column_wise")
MEAN_ROWS = 4.1e6  # assumed: what tables allocate, beyond the rows that are asked for


def pool() -> list[tuple[int, Access]]:
    """Rows and access statistics of 856 tables; rows are drawn, correlated with those in use."""
    rng = np.random.default_rng(856)
    with (DATA / "dlrm856_like_tables.csv").open() as file:
        lines = list(csv.DictReader(file))
    active = np.array([float(line["num_rows"]) for line in lines])
    z = (np.log(active) - np.log(active).mean()) / np.log(active).std()
    sigma = 1.6
    drawn = 0.6 * z + 0.8 * rng.standard_normal(len(z))
    rows = np.maximum(np.exp(np.log(MEAN_ROWS) - sigma**2 / 2 + sigma * drawn), active).astype(int)
    found = []
    for line, count in zip(lines, rows, strict=True):
        access = Access(
            pooling=float(line["pooling"]), zipf_a=float(line["zipf_a"]), zipf_q=float(line["zipf_q"]),
            active=int(line["num_rows"]),
        )  # fmt: skip
        found.append((int(count), access))
    return found


def workload(name: str, rows: int, dim: int, access: Access) -> Workload:
    return Workload(table=Table(name=name, rows=rows, dim=dim, optimizer=Sgd()), access=access)


def size_bytes(workloads: list[Workload]) -> int:
    return sum(w.table.rows * w.table.row_bytes for w in workloads)


def machine(devices: int, device_bytes: float, link_Bps: float = 25e9, hosts: int = 1) -> Machine:
    """Devices like an A100, with this memory and these links."""
    link = LinkRates(all_to_all_Bps=link_Bps, reduce_scatter_Bps=link_Bps, all_reduce_Bps=link_Bps)
    base = hardware_named("a100-like")
    hardware = msgspec.structs.replace(base, device_bytes=int(device_bytes), host=link, network=link, host_bytes=0)
    return Machine(topology=Topology(hosts=hosts, devices=devices // hosts), hardware=hardware)


def question(
    workloads: list[Workload],
    where: Machine,
    layouts: tuple[str, ...] = COLUMNS,
    model: Callable[[Hardware, Topology], CostModel] = Roofline,
    batch: int = BATCH,
) -> PlanRequest:
    return PlanRequest(
        workloads=tuple(workloads),
        machine=where,
        model=model(where.hardware, where.topology),
        batch=batch,
        constraints=Constraints(layouts={"*": layouts}),
        buffers=False,
    )


def ns_tables(seed: int, low: int, high: int, most_bytes: float) -> list[Workload]:
    """NeuroShard's protocol: tables drawn with replacement, dims at random, until they are not too large."""
    rng, known = np.random.default_rng(seed), pool()
    while True:
        chosen = rng.integers(0, len(known), rng.integers(low, high))
        dims = rng.choice(DIMS, len(chosen))
        made = [
            workload(f"t{i}", known[c][0], int(d), known[c][1])
            for i, (c, d) in enumerate(zip(chosen, dims, strict=True))
        ]
        if size_bytes(made) <= most_bytes:
            return made


def ns4(seed: int) -> PlanRequest:
    return question(ns_tables(seed, 10, 60, 15 * GiB), machine(4, 4 * GiB))


def ns8(seed: int) -> PlanRequest:
    return question(ns_tables(seed, 20, 120, 31 * GiB), machine(8, 4 * GiB))


def pool_tables(seed: int = 0) -> list[Workload]:
    """All 856 tables, dims at random."""
    rng = np.random.default_rng(seed)
    dims = rng.choice(DIMS, 856)
    return [
        workload(f"t{i}", rows, int(d), access) for i, ((rows, access), d) in enumerate(zip(pool(), dims, strict=True))
    ]


def pool_task(devices: int, fill: float, seed: int = 0, hosts: int = 1) -> PlanRequest:
    made = pool_tables(seed)
    return question(made, machine(devices, size_bytes(made) / devices / fill, hosts=hosts))


@dataclass(frozen=True)
class Listed:
    """A published list of tables."""

    name: str
    devices: int
    hosts: int = 1


LISTS = (
    Listed("mlperf_dlrm_v2", 8),
    Listed("embark_T180", 16, 2), Listed("embark_T200", 16, 2), Listed("embark_T510", 16, 2),
    Listed("nv_tiny", 8), Listed("nv_small", 8), Listed("nv_medium", 16, 2), Listed("nv_large", 32, 4),
    Listed("nv_jumbo", 64, 8), Listed("nv_colossal", 128, 16),
)  # fmt: skip


def listed_tables(name: str) -> list[Workload]:
    with (DATA / "public_table_lists.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["model"] == name]
    made = []
    for number, line in enumerate(lines):
        access = Access(pooling=float(line["pooling"]), zipf_a=float(line["zipf_alpha"] or 1.05))
        made.append(workload(f"t{number}", int(line["num_rows"]), int(line["dim"] or 128), access))
    return made


def listed(one: Listed, fill: float = 0.7) -> PlanRequest:
    """All layouts, on devices that it fills to a share."""
    made = listed_tables(one.name)
    where = machine(one.devices, max(size_bytes(made) / one.devices / fill, 1 * GiB), hosts=one.hosts)
    hardware = msgspec.structs.replace(where.hardware, host=hardware_named("zionex").host)
    return question(made, msgspec.structs.replace(where, hardware=hardware), (
        "table_wise", "column_wise", "row_wise", "table_row_wise", "grid", "replicated",
    ))  # fmt: skip


def model_f(tables: int = 600, seed: int = 12) -> list[Workload]:
    """12 T parameters in 16 bits, 256 columns and 20 ids a sample on average: the published totals, tables made up."""
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.normal(0, 1.8, tables))
    rows = np.maximum((rows / rows.sum() * 12e12 / 256).astype(int), 1000)
    pooling = np.exp(rng.normal(0, 1.0, tables))
    pooling *= 20 / pooling.mean()
    return [
        Workload(
            table=Table(name=f"t{i}", rows=int(r), dim=256, row_type=RowType.FP16),
            access=Access(pooling=float(p), zipf_a=float(a), zipf_q=10.0),
        )
        for i, (r, p, a) in enumerate(zip(rows, pooling, rng.uniform(0.8, 1.3, tables), strict=True))
    ]

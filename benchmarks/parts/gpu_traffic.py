"""Bytes that the kernels move, counted in the interpreter, beside the least that the work needs. Runs by itself:

    TRITON_INTERPRET=1 python -m parts.gpu_traffic [--smoke]

prints a JSON list. 8 KB of cache for each program, its share of a multiprocessor's.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from parts.gpu_trace import Seen, watch
from rowwise import Jagged, RowWiseAdagrad, Table
from rowwise.tables.ops.arena import Arena
from rowwise.tables.ops.layout import make_group
from rowwise.tables.ops.operators import gpu_operators
from rowwise.tables.ops.update import next_step
from rowwise.tables.spec import RowType

OF_ROWS = ("pool", "sum_units", "apply")
STATE_BYTES = 64  # a sector read and one written


@dataclass(frozen=True)
class Case:
    name: str
    table: Table
    batch: int
    ids: int  # of a bag
    hot: bool = False
    smoke: bool = False


def case(name: str, rows: int, dim: int, batch: int, ids: int, *, kind: RowType = RowType.FP32, **more: bool) -> Case:
    table = Table(name="t", rows=rows, dim=dim, row_type=kind, optimizer=RowWiseAdagrad())
    return Case(name, table, batch, ids, **more)


CASES = (
    case("dim 128, 20 ids", 6000, 128, 24, 20, smoke=True),
    case("dim 64, 20 ids", 6000, 64, 24, 20),
    case("dim 64, 1 id", 6000, 64, 480, 1, smoke=True),
    case("dim 128, 1 id", 6000, 128, 256, 1),
    case("fp16 dim 128, 20 ids", 6000, 128, 24, 20, kind=RowType.FP16),
    case("bf16 dim 128, 20 ids", 6000, 128, 24, 20, kind=RowType.BF16),
    case("dim 64, 1 id, hot rows", 1000, 64, 2048, 1, hot=True),
)


def batch_of(case: Case) -> Jagged:
    """Distinct ids, or ids of a Zipf distribution."""
    g = torch.Generator().manual_seed(1)
    n = case.batch * case.ids
    if case.hot:
        u = torch.rand(n, generator=g, dtype=torch.float64)
        # The inverse of the Zipf distribution's integral, exponent 1.2.
        ids = ((case.table.rows**-0.2 - 1) * u + 1) ** -5.0 - 1
        ids = ids.long().clamp(0, case.table.rows - 1)
    else:
        ids = torch.randperm(case.table.rows, generator=g)[:n]
    return Jagged(features=("t",), values_N=ids, lengths_FB=torch.full((case.batch,), case.ids))


def moved(seen: Seen) -> int:
    """By the kernels that read or write rows; a route is made beside other work."""
    return sum(launch.moved_bytes for launch in seen.launches if launch.name in OF_ROWS)


def measure(case: Case) -> Iterator[dict]:
    arena, kernels = Arena.allocate([case.table], torch.device("cpu")), gpu_operators()
    group, jagged = make_group(arena.pieces, arena.offsets), batch_of(case)
    features, offsets = group.for_sources(jagged.features), jagged.offsets()
    ids, distinct, dim = len(jagged.values_N), len(jagged.values_N.unique()), case.table.dim
    with watch(shuffle=3) as seen:
        kernels["pool"](arena.rows, features, jagged.values_N, offsets, None, case.batch, dim)
    rows, pooled = ids * case.table.row_bytes, case.batch * dim * 4
    yield _row("lookup", case, seen, rows + pooled + (ids + len(offsets)) * 8)
    grad = torch.randn(case.batch, dim)
    with watch(shuffle=5) as seen:
        kernels["update"](
            arena.rows, arena.state, group.tables_TC, *next_step(arena, group), features, jagged.values_N, offsets,
            None, grad, case.batch, False, None,
        )  # fmt: skip
    yield _row("update", case, seen, ids * dim * 4 + distinct * (2 * case.table.row_bytes + STATE_BYTES))


def _row(operator: str, case: Case, seen: Seen, least: int) -> dict:
    return {
        "section": "traffic",
        "operator": operator,
        "case": case.name,
        "moved_bytes": moved(seen),
        "least_bytes": least,
        "ratio": moved(seen) / least,
        "atomics": sum(launch.atomics for launch in seen.launches),
        "races": sorted(set().union(*(launch.races for launch in seen.launches))),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    smoke = "--smoke" in sys.argv
    print(json.dumps([row for one in CASES if one.smoke or not smoke for row in measure(one)]))

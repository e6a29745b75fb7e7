"""How fast an id map is made: ten million ids into a million rows."""

import multiprocessing as mp
import time

import numpy as np

from parts.report import show
from rowwise import Table
from rowwise.tables.ids.methods import IdHistory, make_map, table_bytes
from rowwise.train.recorder import peak_memory_bytes

DIM, PROBE = 16, 4
Row = dict


def scale(ids: int, rows: int) -> Row:
    """A learned map of so many ids, in a process of its own, whose memory is what it takes."""
    with mp.get_context("spawn").Pool(1) as pool:
        row = pool.apply(_make, (ids, rows))
    show(row)
    return row


def _make(ids: int, rows: int) -> Row:
    generator = np.random.default_rng(0)
    places = np.arange(ids, dtype=np.float64)
    counts_N = np.maximum(1, (ids / (places + 1) ** 0.8)).astype(np.int64)
    generator.shuffle(counts_N)
    centres = generator.normal(size=(1000, PROBE)).astype(np.float32)
    vectors_ND = centres[generator.integers(0, len(centres), ids)]
    for begin in range(0, ids, 1 << 20):
        part = vectors_ND[begin : begin + (1 << 20)]
        part += 0.3 * generator.standard_normal(part.shape, np.float32)
    table = Table(name="t", rows=ids, dim=DIM)
    # So many bytes that about so many rows are left once each id has its entry.
    budget_bytes = rows * table.row_bytes + ids * 24 // 8
    before_bytes = peak_memory_bytes()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    made = make_map("learned_many", table, budget_bytes, IdHistory(counts_N=counts_N, vectors_ND=vectors_ND))
    took_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    assert made is not None
    return {
        "ids": ids,
        "rows": made.shape.rows,
        "wall_s": round(took_s, 1),
        "cpu_s": round(cpu_s, 1),
        "peak_gb": round(peak_memory_bytes() / 1e9, 2),
        "before_gb": round(before_bytes / 1e9, 2),
        "bytes": table_bytes(table, made),
        "budget_bytes": budget_bytes,
        "map_bytes": made.map_bytes,
    }

"""How fast id maps are made and looked up: ten million ids into a million rows, ids a second, and a whole step."""

import multiprocessing as mp
import resource
import time

import numpy as np
import torch

from parts.report import show
from parts.timer import least_s
from rowwise import Embeddings, Jagged, RowWiseAdagrad, Table
from rowwise.tables.ids.arrays import entry_map, ranked_map
from rowwise.tables.ids.embeddings import MappedEmbeddings
from rowwise.tables.ids.methods import IdHistory, make_map, table_bytes
from rowwise.tables.ids.rules import double_hash_map, hash_map, quotient_remainder_map

DIM, PROBE = 16, 4
TIMES = 5
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
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    made = make_map("learned_many", table, budget_bytes, IdHistory(counts_N=counts_N, vectors_ND=vectors_ND))
    took_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    assert made is not None
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "ids": ids,
        "rows": made.shape.rows,
        "wall_s": round(took_s, 1),
        "cpu_s": round(cpu_s, 1),
        "peak_gb": round(peak_kb / 1e6, 2),
        "before_gb": round(before_kb / 1e6, 2),
        "bytes": table_bytes(table, made),
        "budget_bytes": budget_bytes,
        "map_bytes": made.map_bytes,
    }


def speed(ids: int, asked: int) -> list[Row]:
    """Millions of ids a second of each kind of map, on one thread, and what a map adds to a step of the tables."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    rows_N = generator.integers(0, 64, ids)
    head_C = np.sort(generator.permutation(ids)[: ids // 10])
    some_N = np.where(generator.random(ids) < 0.35, rows_N, -1)
    maps = {
        "hash": hash_map(ids, ids // 10),
        "double_hash": double_hash_map(ids, ids // 10),
        "quotient_remainder": quotient_remainder_map(ids, ids // 10),
        "frequency": ranked_map(ids, [head_C], ids // 10),
        "every id has an entry": entry_map(ids, rows_N, 64),
        "a third has an entry": entry_map(ids, some_N, 64),
    }
    batch = Jagged(
        features=("t",),
        values_N=torch.from_numpy(generator.integers(0, ids, asked)),
        lengths_FB=torch.ones(asked, dtype=torch.int64),
    )
    table = Table(name="t", rows=ids, dim=DIM, optimizer=RowWiseAdagrad(lr=0.1))
    plain = Embeddings([table])
    rows = [{"map": "none", "step_ms": 1e3 * least_s(lambda: _step(plain, plain, batch), TIMES)}]
    for name, one in maps.items():
        module = MappedEmbeddings([table], {"t": one})
        found_s = least_s(lambda module=module: module.mapped["t"].look_up_rows(batch.values_N), TIMES)
        step_s = least_s(lambda module=module: _step(module, module.stored, batch), TIMES)
        rows.append({"map": name, "million_ids_s": asked / found_s / 1e6, "step_ms": 1e3 * step_s})
    for row in rows:
        show(row)
    return rows


def _step(module: torch.nn.Module, tables: Embeddings, batch: Jagged) -> None:
    module(batch).matrix_BS.sum().backward()
    tables.update()

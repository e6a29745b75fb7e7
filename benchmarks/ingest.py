"""From files to batches on one core: Criteo-like rows (13 numbers, 26 ids) beside only decoding the same file.

    python benchmarks/ingest.py [--quick] [--save benchmarks/results/ingest.json] [--batch 4096]

Each way of reading runs in turn with the decoding of its file, in one process; a rate is the best of the repeats.
Rows are shuffled, ids hashed, numbers filled and logarithms taken, unless the name says otherwise. The last
printed line is one JSON object.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # Arrow's threads too: all rates are of one core
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import msgspec
import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet as pq
from report import environment, finish

from rowwise import Table
from rowwise.ingest import Batcher, Batching, Columns, CsvReader, Dense, Dialect, ParquetReader, Reader, Sparse

DENSE = tuple(f"I{i}" for i in range(13))
IDS = tuple(f"C{i}" for i in range(26))
TABLES = tuple(Table(name=name, rows=1_000_003, dim=16) for name in IDS)
GROUP_ROWS = 1 << 16
FLOORS = {"parquet": 0.35, "tsv": 0.45}
COLUMNS = Columns(
    labels=("label",),
    dense=tuple(Dense(column=name, log1p=True) for name in DENSE),
    sparse=tuple(Sparse(column=name) for name in IDS),
)


def criteo_like(rows: int) -> pa.Table:
    draw = np.random.default_rng(0)
    columns: dict[str, pa.Array] = {"label": pa.array(draw.integers(0, 2, rows, np.int8))}
    for name in DENSE:
        columns[name] = pa.array(draw.exponential(20, rows).astype(np.float32), mask=draw.random(rows) < 0.1)
    for name in IDS:
        columns[name] = pa.array((1_000_000 ** draw.random(rows)).astype(np.int64) * 7919)
    return pa.table(columns)


def write_lines(table: pa.Table, path: Path) -> None:
    """As Criteo writes them: whole numbers, eight hexadecimal digits, nothing where a value is missing."""
    columns = [[str(y) for y in table["label"].to_pylist()]]
    columns += [["" if x is None else str(int(x)) for x in table[name].to_pylist()] for name in DENSE]
    columns += [[f"{i & 0xFFFFFFFF:08x}" for i in table[name].to_pylist()] for name in IDS]
    path.write_text("".join("\t".join(row) + "\n" for row in zip(*columns, strict=True)))


def decode(reader: Reader) -> int:
    return sum(reader.read(split, COLUMNS.names).num_rows for split in reader.splits())


def batches(reader: Reader, columns: Columns, batching: Batching) -> int:
    return sum(len(batch.labels_BK) for batch in Batcher(reader, columns, TABLES, batching))


def best_rate(ways: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    rates = dict.fromkeys(ways, 0.0)
    for _ in range(repeats):
        for name, way in ways.items():
            begin = time.process_time()
            rows = way()
            rates[name] = max(rates[name], rows / (time.process_time() - begin))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a coarser answer in under a minute")
    parser.add_argument("--save", type=Path, help="where to write the JSON")
    parser.add_argument("--batch", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    groups = 4 if args.quick else 16
    repeats = 3 if args.quick else 7
    table = criteo_like(groups * GROUP_ROWS)
    how = Batching(size=args.batch)
    direct = msgspec.structs.replace(
        COLUMNS,
        dense=tuple(Dense(column=name) for name in DENSE),
        sparse=tuple(Sparse(column=name, ids="direct") for name in IDS),
    )
    wide = tuple(msgspec.structs.replace(t, rows=1 << 36) for t in TABLES)
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(table, f"{folder}/a.parquet", row_group_size=GROUP_ROWS)
        write_lines(table.slice(0, 2 * GROUP_ROWS), Path(folder, "a.tsv"))
        parquet = ParquetReader(f"{folder}/a.parquet")
        names = ("label", *DENSE, *IDS)
        types = dict.fromkeys(DENSE, "int64") | dict.fromkeys(IDS, "string")
        lines = CsvReader(f"{folder}/a.tsv", Dialect(delimiter="\t", names=names, quotes=False), types)
        rates = best_rate(
            {
                "parquet, decode only": lambda: decode(parquet),
                "parquet": lambda: batches(parquet, COLUMNS, how),
                "parquet, not shuffled": lambda: batches(parquet, COLUMNS, Batching(size=args.batch, shuffle=False)),
                "parquet, ids as they are": lambda: sum(len(b.labels_BK) for b in Batcher(parquet, direct, wide, how)),
                "tsv, decode only": lambda: decode(lines),
                "tsv": lambda: batches(lines, COLUMNS, how),
            },
            repeats,
        )
    rows = [{"way": name, "rows_s": round(rate)} for name, rate in rates.items()]
    shares = {kind: rates[kind] / rates[f"{kind}, decode only"] for kind in ("parquet", "tsv")}
    floors = [
        {
            "name": f"{kind}: share of decoding",
            "value": round(shares[kind], 3),
            "floor": least,
            "ok": shares[kind] >= least,
        }
        for kind, least in FLOORS.items()
    ]
    result = {"benchmark": "ingest", "environment": environment(), "batch": args.batch, "rows": rows, "floors": floors}
    for row in rows:
        print(f"{row['way']:28} {row['rows_s'] / 1e6:6.2f} million rows/s of one core")
    finish(result, args.save)


if __name__ == "__main__":
    main()

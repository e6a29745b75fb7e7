"""How much memory converting takes, and reading what was converted: of files ten times as large as the limit.

Every step is a process of its own, `python -m parts.ingest_memory WHAT ...`, whose peak the system tells. Apart from
`ingest.py`, as it is a program.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from parts import BENCHMARKS
from rowwise.ingest.columns import Columns, Sparse
from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.prepare import Preparation, PreparationTask
from rowwise.ingest.warehouse.convert import convert
from rowwise.ingest.warehouse.layout import MIN_MEMORY, WarehouseLayout

TIMES_AS_LARGE = 10
QUICK_TIMES = 0.25
SHAPES = {"wide": (200, 1 << 15), "clustered": (40, 1 << 16)}  # columns, rows of a group
TEMPLATES = 3


def a_group(shape: str, seed: int) -> pa.Table:
    """Ids, a list of them, and whose row it is."""
    columns, rows = SHAPES[shape]
    draw = np.random.default_rng(seed)
    offsets = np.concatenate([[0], draw.poisson(20, rows).cumsum()])
    made: dict[str, pa.Array] = {
        "label": pa.array(draw.integers(0, 2, rows, np.int8)),
        "user": pa.array(draw.integers(0, 1_000_000, rows)),
        "list": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(draw.integers(0, 10**6, offsets[-1]))),
    }
    for at in range(columns):
        made[f"c{at}"] = pa.array(draw.integers(0, 10 ** (2 + at % 4), rows))
    return pa.table(made)


def make(shape: str, path: Path, size_bytes: int) -> None:
    """A file of about this size, as it is in memory."""
    tables = [a_group(shape, seed) for seed in range(TEMPLATES)]
    how = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(path, tables[0].schema, **how) as writer:
        for number in range(-(-size_bytes // tables[0].nbytes)):
            writer.write_table(tables[number % TEMPLATES], row_group_size=SHAPES[shape][1])


def convert_file(shape: str, path: Path, dest: Path) -> None:
    cluster = "user" if shape == "clustered" else None
    convert(ParquetReader(path), dest, WarehouseLayout(memory_bytes=MIN_MEMORY, cluster_by=cluster))


def read_folder(shape: str, dest: Path) -> None:
    """As a worker does."""
    names = ["list", *(f"c{at}" for at in range(SHAPES[shape][0]))]
    columns = Columns(labels=("label",), sparse=tuple(Sparse(column=name) for name in names))
    reader = ParquetReader(dest)
    task = PreparationTask(
        reader=reader,
        splits=reader.splits(),
        preparation=Preparation(columns=columns, table_rows=dict.fromkeys(names, 1000), shuffle=True),
    )
    for index in task.order(0):
        task.open(index, 0).encode()


def peak_bytes() -> int:
    """Of this program, and not of the process that started it, which `getrusage` may count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(folder: Path, times: float, tell: Callable[[str], None]) -> Iterator[dict]:
    """Make a file, convert it, read it, and leave nothing behind."""
    size = int(MIN_MEMORY * times)
    for shape in SHAPES if times == TIMES_AS_LARGE else list(SHAPES)[-1:]:
        path, dest = folder / f"{shape}.parquet", folder / shape
        for step, places in (("make", [path, size]), ("convert", [path, dest]), ("read", [dest])):
            begin_s = time.perf_counter()
            command = [sys.executable, "-m", "parts.ingest_memory", step, shape, *map(str, places)]
            done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{step} of {shape}: {done.stderr[-2000:]}")
            peak = int(done.stdout.split()[-1])
            seconds = time.perf_counter() - begin_s
            tell(f"{step} {shape}: {path.stat().st_size / 1e9:.1f} GB, peak {peak / 1e6:.0f} MB, {seconds:.0f} s")
            if step != "make":
                row = {"shape": shape, "step": step, "peak_mb": peak / 1e6, "limit_mb": MIN_MEMORY / 1e6}
                yield row | {"source_gb": path.stat().st_size / 1e9, "seconds": seconds}
        path.unlink()
        shutil.rmtree(dest)


def main() -> None:
    """One step."""
    step, shape, *rest = sys.argv[1:]
    places = [Path(word) for word in rest]
    pa.set_cpu_count(1)
    if step == "make":
        make(shape, places[0], int(rest[1]))
    elif step == "convert":
        convert_file(shape, *places)
    else:
        read_folder(shape, *places)
    print(peak_bytes())


if __name__ == "__main__":
    main()

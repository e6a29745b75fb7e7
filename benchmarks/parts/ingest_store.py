"""Reading a tenth of 500 features: what laying a map out as columns costs and brings, in seconds of processor and disk.

The disk is a model, as the machine's own answers from memory: every read seeks for 8 ms and then brings 150 MB a
second, a hard disk. The reads are those that the reader counts. Apart from `ingest.py`, as it makes files of its own.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.warehouse.convert import convert
from rowwise.ingest.warehouse.layout import WarehouseLayout
from rowwise.ingest.warehouse.ranges import ReadCounters
from rowwise.ingest.warehouse.source import split_by_key

SEEK_S, BYTES_S = 8e-3, 150e6
FEATURES, USED, JOBS = 500, 50, 20
PRESENT, LENGTH = 0.5, 6  # in how many rows a feature is, and with how many ids
SMALL = 4  # groups of files with small groups for one of a file with large ones
STEPS = ("map", "flattened", "coalesced", "reordered", "large groups")


def a_group(seed: int, rows: int) -> pa.Table:
    """Rows with a map of features: each some ids."""
    draw = np.random.default_rng(seed)
    there_RF = draw.random((rows, FEATURES)) < PRESENT
    keys_E = np.nonzero(there_RF)[1]
    offsets_R1 = np.concatenate([[0], there_RF.sum(1).cumsum()])
    offsets_E1 = np.concatenate([[0], draw.integers(1, 2 * LENGTH, len(keys_E)).cumsum()])
    ids_N = (1e6 ** draw.random(offsets_E1[-1], np.float32)).astype(np.int64)
    items = pa.ListArray.from_arrays(pa.array(offsets_E1, pa.int32()), pa.array(ids_N))
    return pa.table({"f": pa.MapArray.from_arrays(pa.array(offsets_R1, pa.int32()), pa.array(keys_E), items)})


def jobs() -> tuple[list[int], dict[str, float]]:
    """The features of one job, and how many of the jobs before it used each: few are used by many."""
    draw = np.random.default_rng(1)
    weights = 1 / np.arange(1, FEATURES + 1)
    order = draw.permutation(FEATURES)  # popular ones are anywhere

    def job() -> list[int]:
        return order[draw.choice(FEATURES, USED, replace=False, p=weights / weights.sum())].tolist()

    before: dict[str, float] = {}
    for _ in range(JOBS):
        for key in job():
            before[f"f.{key}"] = before.get(f"f.{key}", 0.0) + 1
    return job(), before


def measure(folder: Path, rows: int, repeats: int) -> dict:
    """All steps on the same rows: seconds of processor, and of the disk that is pretended."""
    used, popularity = jobs()
    with pq.ParquetWriter(folder / "map.parquet", a_group(0, 1).schema, compression="zstd") as writer:
        for number in range(SMALL):
            writer.write_table(a_group(number, rows), row_group_size=rows)
    source = ParquetReader(folder / "map.parquet")
    keys = {"f": tuple(range(FEATURES))}
    layouts = {
        "plain": WarehouseLayout(keys=keys, group_rows=rows, group_bytes=1 << 40, popularity={}),
        "popular": WarehouseLayout(keys=keys, group_rows=rows, group_bytes=1 << 40, popularity=popularity),
        "large": WarehouseLayout(
            keys=keys, group_rows=SMALL * rows, group_bytes=1 << 40, memory_bytes=1 << 40, popularity=popularity
        ),
    }
    for name, how in layouts.items():
        convert(source, folder / name, how)
    names = [f"f.{key}" for key in used]
    places = {"flattened": "plain", "coalesced": "plain", "reordered": "popular", "large groups": "large"}
    readers = {
        step: ParquetReader(folder / place, gap_bytes=0 if step == "flattened" else 1 << 20)
        for step, place in places.items()
    }
    ways: dict[str, Callable[[], object]] = {
        "map": lambda: read(source, ["f"]),
        "map, features picked": lambda: [split_by_key(t["f"].combine_chunks(), used) for t in read(source, ["f"])],
        **{step: lambda reader=reader: read(reader, names) for step, reader in readers.items()},
    }
    cpu_s = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for step, way in ways.items():
            begin_s = time.process_time()
            way()
            cpu_s[step] = min(cpu_s[step], time.process_time() - begin_s)
    disks = {step: counted(readers.get(step, source), names if step in readers else ["f"]) for step in STEPS}
    sizes = {name: sum(p.stat().st_size for p in folder.glob(f"{name}*/**/*.parquet")) for name in layouts}
    sizes["map"] = (folder / "map.parquet").stat().st_size
    for name in layouts:
        shutil.rmtree(folder / name)
    disk_s = {step: one.reads * SEEK_S + one.bytes_read / BYTES_S for step, one in disks.items()}
    return {
        "rows": SMALL * rows,
        "cpu_s": cpu_s,
        "cpu_factor": cpu_s["map"] / cpu_s["coalesced"],
        "disk": [
            {
                "step": step,
                "reads": disks[step].reads,
                "mb": disks[step].bytes_read / 1e6,
                "over_read": disks[step].over_read,
                "seconds": disk_s[step],
                "speed": disk_s["map"] / disk_s[step],
            }
            for step in STEPS
        ],
        "file_mb": {name: size / 1e6 for name, size in sizes.items()},
    }


def read(reader: ParquetReader, names: list[str]) -> list[pa.Table]:
    return [reader.read(split, names) for split in reader.splits()]


def counted(reader: ParquetReader, names: list[str]) -> ReadCounters:
    """What one pass over the rows reads."""
    before = reader.counters
    read(reader, names)
    return reader.counters - before

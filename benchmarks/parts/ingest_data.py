"""The data and the work of `ingest.py`: rows of 13 numbers, 26 ids, 4 lists and a label, and what is made of them.

Every number is filled, clamped and its logarithm taken, every id hashed to the rows of a table, and of every list the
first 20 ids are used. Apart from the ways of doing it, so that all of them do the same to the same files.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet as pq

from rowwise.ingest import transform
from rowwise.ingest.columns import Columns, Dense, Sparse
from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.prepare import Preparation, PreparationTask

DENSE = tuple(f"I{i}" for i in range(13))
IDS = tuple(f"C{i}" for i in range(26))
MEANS = {"L0": 5, "L1": 10, "L2": 20, "L3": 30}  # ids of a row
LISTS = tuple(MEANS)
NAMES = ("label", *DENSE, *IDS, *LISTS)
FIRST = 20
ROWS = 1_000_003  # of each table
GROUP_ROWS = 1 << 16
COLUMNS = Columns(
    labels=("label",),
    dense=tuple(Dense(column=name, log1p=True) for name in DENSE),
    sparse=(*(Sparse(column=name) for name in IDS), *(Sparse(column=name, first=FIRST) for name in LISTS)),
)
AS_THEY_ARE = Columns(
    labels=("label",),
    dense=tuple(Dense(column=name) for name in DENSE),
    sparse=tuple(Sparse(column=name, ids="direct") for name in (*IDS, *LISTS)),
)


def written_out() -> transform.LoadedTransforms:
    """The same work as transforms of a recipe: fill, clamp, log1p; first_x, sigrid_hash."""
    return transform.load([
        *(transform.Fill(column=name, value=0.0) for name in DENSE),
        *(transform.Clamp(column=name, low=0.0) for name in DENSE),
        *(transform.Log1p(column=name) for name in DENSE),
        *(transform.FirstX(column=name, count=FIRST) for name in LISTS),
        *(transform.SigridHash(column=name, rows=ROWS) for name in (*IDS, *LISTS)),
    ])  # fmt: skip


def tasks(path: Path, *, shuffle: bool = False, verify: bool = False, as_transforms: bool = False) -> PreparationTask:
    """What a worker is told."""
    reader = ParquetReader(path, verify=verify)
    how = Preparation(
        columns=AS_THEY_ARE if as_transforms else COLUMNS,
        table_rows=dict.fromkeys((*IDS, *LISTS), ROWS),
        shuffle=shuffle,
        transforms=transform.to_json(written_out()) if as_transforms else b"",
    )
    return PreparationTask(reader=reader, splits=reader.splits(), preparation=how)


def ids(draw: np.random.Generator, count: int, most: int) -> NDArray[np.int64]:
    """Few of them often."""
    return (most ** draw.random(count)).astype(np.int64) * 7919


def group(seed: int, rows: int = GROUP_ROWS) -> pa.Table:
    """One row group."""
    draw = np.random.default_rng(seed)
    columns: dict[str, pa.Array] = {"label": pa.array(draw.integers(0, 2, rows, np.int8))}
    for name in DENSE:
        columns[name] = pa.array(draw.exponential(20, rows).astype(np.float32), mask=draw.random(rows) < 0.1)
    for at, name in enumerate(IDS):
        columns[name] = pa.array(ids(draw, rows, 10 ** (3 + at % 5)))
    for name, mean in MEANS.items():
        offsets = np.concatenate([[0], draw.poisson(mean, rows).cumsum()])
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(ids(draw, offsets[-1], 10**6)))
    return pa.table(columns)


def write(folder: Path, groups: int, group_rows: int = GROUP_ROWS) -> dict[str, Path]:
    """The same rows in two compressions, and once more with checksums."""
    paths = {name: folder / f"{name}.parquet" for name in ("zstd", "snappy", "checksums")}
    schema = group(0, 1).schema
    writers = {
        name: pq.ParquetWriter(
            path,
            schema,
            compression="snappy" if name == "snappy" else "zstd",
            write_page_checksum=name == "checksums",
        )
        for name, path in paths.items()
    }
    for number in range(groups):
        table = group(number, group_rows)
        for writer in writers.values():
            writer.write_table(table, row_group_size=group_rows)
    for writer in writers.values():
        writer.close()
    return paths


def decoded(path: Path) -> Iterator[pa.Table]:
    """All columns of one row group after another: what no way of reading can do faster."""
    with pq.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number, columns=list(NAMES), use_threads=False)

"""Default rows: the mean row of each table, in place of a row that a server does not wait for.

The mean is weighted by the access counts of training, as far as an export has counted them. A table without counts has
the mean of all rows.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rowwise.base.errors import CheckpointError
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.windows import windows
from rowwise.ingest.unpacked import check_types, read_arrow_file, write_arrow_file
from rowwise.serve.contents import reading_export
from rowwise.tables.ops.rowtype import pack, unpack
from rowwise.tables.spec import Table
from rowwise.tables.store.policy import Ints
from rowwise.tables.store.shared_cache import Bytes

MEANS = "mean_rows.arrow"
MEANS_schema = pa.schema({"table": pa.string(), "row": pa.list_(pa.float32())})
CHUNK_rows = 1 << 16  # rows per summation block


class DefaultRow(StrEnum):
    """Kinds of default rows."""

    ZERO = "zero"
    MEAN = "mean"


def mean_rows(version: Checkpoint, counts: Mapping[str, tuple[Ints, Ints]]) -> dict[str, Tensor]:
    """The mean row of each table, by tensor; `counts` has rows and their access counts."""
    means: dict[str, Tensor] = {}
    for name, entry in version.manifest.tensors.items():
        if entry.row_type is None:
            continue
        rows_M, counts_M = counts.get(name, (np.empty(0, np.int64),) * 2)
        total = float(counts_M.sum())
        order = rows_M.argsort()
        weighted = (rows_M[order], counts_M[order]) if total else None
        total_D = torch.zeros(entry.columns, dtype=torch.float64)
        for weights_R, values_RD in _weighted_rows(version, name, weighted):
            total_D += (values_RD.double() * torch.from_numpy(weights_R).unsqueeze(1)).sum(0)
        means[name] = (total_D / (total or entry.rows)).float()
    return means


def _weighted_rows(
    version: Checkpoint, name: str, weighted: tuple[Ints, Ints] | None
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Weights and float32 values of blocks of rows; skips windows of weight 0.

    `weighted`: ascending rows and their access counts, or None for equal weights.
    """
    entry = version.entry(name)
    assert entry.row_type is not None
    for first, end in windows(entry):
        weights_R = np.ones(end - first)
        if weighted is not None:
            inside = slice(*np.searchsorted(weighted[0], (first, end)))
            weights_R = np.bincount(weighted[0][inside] - first, weighted[1][inside], end - first)
        if not weights_R.any():
            continue
        stored = version.load(name, (first, end))
        for begin in range(0, end - first, CHUNK_rows):
            part = stored[begin : begin + CHUNK_rows]
            yield weights_R[begin : begin + CHUNK_rows], unpack(part, entry.columns, entry.row_type, entry.column_group)


def write_mean_rows(version: Path, means: Mapping[str, Tensor]) -> None:
    """Write the mean rows of an unpublished version."""
    rows = [row_D.numpy() for row_D in means.values()]
    table = pa.table({"table": list(means), "row": rows}, schema=MEANS_schema)
    write_arrow_file(version / MEANS, table)


def read_mean_rows(version: Path) -> dict[str, Tensor]:
    """The mean rows of a version, by tensor."""
    path = version / MEANS
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", hint="export the version again, or use --default-row zero")
    with reading_export(path):
        table = read_arrow_file(path)
        check_types(table, MEANS_schema)
        rows = [row.values.to_numpy(zero_copy_only=False).copy() for row in table["row"]]
        if not all(np.isfinite(row_D).all() for row_D in rows):
            raise pa.ArrowInvalid("its rows have numbers that are not finite")
        return dict(zip(table["table"].to_pylist(), map(torch.from_numpy, rows), strict=True))


def stored_default(means: Mapping[str, Tensor] | None, name: str, table: Table) -> Bytes:
    """The default row of a table in its row type; zero if `means` is None."""
    if means is None:
        return np.zeros(table.row_bytes, np.uint8)
    mean_D = means.get(name)
    if mean_D is None or mean_D.shape != (table.dim,):
        raise CheckpointError(f"{MEANS} of the version has no row of {table.dim} numbers for {name}: export it again")
    return pack(mean_D.unsqueeze(0), table.row_type, table.column_group).view(torch.uint8).flatten().numpy()

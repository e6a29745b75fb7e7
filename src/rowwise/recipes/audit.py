"""Recorded answers, computed again by the versions that gave them, and compared bit by bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import parquet as pq

from rowwise.errors import DataError
from rowwise.recipes.served import CLOSE, open_version
from rowwise.serve.forward import arrays_of
from rowwise.serve.package import LOGIT
from rowwise.serve.record import REQUEST, VERSION
from rowwise.serve.version import ServedVersion

ROWS = 4096  # that are computed together


class AuditedFile(NamedTuple):
    """Rows of a version in a file of recorded requests."""

    file: Path
    version: int
    rows: int
    wrong: int  # rows with other logits
    first: str  # the first of them


def audit(folder: Path, records: Path) -> Iterator[AuditedFile]:
    """Compute the rows of all files again.

    Args:
        folder: the versions, by `rowwise export`.
        records: what `rowwise serve --record` has written.
    """
    files = sorted(records.glob("*.parquet"))
    if not files:
        raise DataError(f"{records} has no recorded requests: want a folder that `rowwise serve --record` wrote")
    opened: ServedVersion | None = None
    for file in files:
        table = _read(file)
        for number in pc.call_function("unique", [table[VERSION]]).to_pylist():
            if opened is None or opened.number != number:
                opened = open_version(folder, number=number)
            yield _compare(file, opened, table.filter(pc.field(VERSION) == number))


def _read(file: Path) -> pa.Table:
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read: {str(error)[:200]}: want a file of recorded requests") from None
    missing = {REQUEST, VERSION} - set(table.column_names)
    if missing:
        raise DataError(f"{file} has no column {min(missing)!r}: want a file of recorded requests")
    return table


def _compare(file: Path, version: ServedVersion, table: pa.Table) -> AuditedFile:
    wanted = (*version.schema.names, *(LOGIT + task for task in version.tasks))
    missing = [name for name in wanted if name not in table.column_names]
    if missing:
        got = f"{file} has no column {missing[0]!r}, which version {version.number} has"
        raise DataError(f"{got}: want records of this folder")
    logits_RK = version.forward(arrays_of(table.select(version.schema.names)), len(table), ROWS).numpy()
    recorded_RK = np.stack([table[LOGIT + task].to_numpy() for task in version.tasks], 1)
    if version.identity == "exact":
        differ_R = (logits_RK.view(np.int32) != recorded_RK.view(np.int32)).any(1)
    else:  # another kind of processor
        differ_R = ~(np.abs(logits_RK - recorded_RK) <= CLOSE).all(1)
    first = ""
    if differ_R.any():
        row = int(differ_R.argmax())
        first = f"request {table[REQUEST][row]}: answered {recorded_RK[row].tolist()}, not {logits_RK[row].tolist()}"
    return AuditedFile(file, version.number, len(table), int(differ_R.sum()), first)

"""Recomputes recorded answers with the versions that gave them, and compares them bitwise.

Columns of the requests are compared with their statistics in training: a column with more nulls, or with other means of
numbers or list lengths, was prepared differently than for training.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import types

from rowwise.base.errors import DataError
from rowwise.base.records import AuditedFile, ColumnMeans, ColumnSkew
from rowwise.ingest.kinds import is_list
from rowwise.ingest.unpacked import read_parquet
from rowwise.recipes.served import open_version, tolerance_of
from rowwise.serve.forward import arrays_of
from rowwise.serve.package import LOGIT, ColumnStats
from rowwise.serve.record import AMONG, EXACT, ITEMS, REQUEST, SCORES, VERSION, WITHOUT, K
from rowwise.serve.retrieval import RetrieveBody
from rowwise.serve.version import ServedVersion

ROWS = 4096  # per forward


def audit(folder: Path, records: Path) -> Iterator[AuditedFile]:
    """Recompute the rows of all files.

    Args:
        folder: versions that `rowwise export` wrote.
        records: folder that `rowwise serve --record` wrote.
    """
    files = sorted(records.glob("*.parquet"))
    if not files:
        raise DataError(f"{records} has no recorded requests", "a folder that `rowwise serve --record` wrote")
    opened: ServedVersion | None = None
    for file in files:
        table = _read(file)
        for number in pc.call_function("unique", [table[VERSION]]).to_pylist():
            if opened is None or opened.number != number:
                opened = open_version(folder, number=number)
            compare = _compare_items if ITEMS in table.column_names else _compare
            with _naming_file(file):
                compared = compare(file, opened, table.filter(pc.field(VERSION) == number))
            yield compared


def _read(file: Path) -> pa.Table:
    try:
        table = read_parquet(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read: {str(error)[:200]}", "a file of recorded requests") from None
    with _naming_file(file):
        _cast(table, {}, {REQUEST: pa.int64(), VERSION: pa.int64()})
    return table


@contextmanager
def _naming_file(file: Path) -> Iterator[None]:
    """Add the file to errors about its content."""
    try:
        yield
    except (pa.ArrowException, DataError) as error:
        raise DataError(f"{file}: {str(error)[:300]}", "records of this folder") from None


def _cast(table: pa.Table, columns: Mapping[str, pa.DataType], required: Mapping[str, pa.DataType]) -> pa.Table:
    """Cast columns to their types; raises for missing columns, other types, and nulls in `required` columns."""
    fields = {**columns, **required}
    missing = [name for name in fields if name not in table.column_names]
    if missing:
        raise DataError(f"no column {missing[0]!r}", f"the columns {', '.join(fields)}")
    typed = table.select(list(fields)).cast(pa.schema(fields))
    nulls = [name for name in required if typed[name].null_count]
    if nulls:
        raise DataError(f"column {nulls[0]!r} has nulls", "a value in each row")
    return typed


def _compare(file: Path, version: ServedVersion, table: pa.Table) -> AuditedFile:
    logits = {LOGIT + task: pa.float32() for task in version.tasks}
    columns = {field.name: field.type for field in version.schema}
    table = _cast(table, columns, {REQUEST: pa.int64(), **logits})
    logits_RK = version.forward(arrays_of(table.select(version.schema.names)), len(table), ROWS).numpy()
    recorded_RK = np.stack([table[LOGIT + task].to_numpy() for task in version.tasks], 1)
    differ_R = differing_rows(logits_RK, recorded_RK, exact=version.identity == "exact")
    first = ""
    if differ_R.any():
        row = int(differ_R.argmax())
        first = f"request {table[REQUEST][row]}: answered {recorded_RK[row].tolist()}, not {logits_RK[row].tolist()}"
    return _make_result(file, version, table, int(differ_R.sum()), first)


def differing_rows(
    logits_RK: NDArray[np.float32], recorded_RK: NDArray[np.float32], *, exact: bool
) -> NDArray[np.bool_]:
    """Rows with a differing logit: bitwise if `exact`, else by more than rounding, for another kind of processor."""
    if exact:
        same_RK = logits_RK.view(np.int32) == recorded_RK.view(np.int32)
    else:
        same_RK = np.abs(logits_RK - recorded_RK) <= tolerance_of(recorded_RK)  # false for NaN
    return np.logical_not(same_RK.all(1))


def _compare_items(file: Path, version: ServedVersion, table: pa.Table) -> AuditedFile:
    retriever = version.retriever
    if retriever is None:
        raise DataError(f"{file} has items, but version {version.number} has none", "records of this folder")
    keys = pa.list_(retriever.items.keys.type)
    columns = {field.name: field.type for field in retriever.schema} | {AMONG: keys, WITHOUT: keys}
    required = {REQUEST: pa.int64(), K: pa.int64(), EXACT: pa.bool_(), ITEMS: keys, SCORES: pa.list_(pa.float32())}
    table = _cast(table, columns, required)
    wrong, first = 0, ""
    for number in range(len(table)):
        row = table.slice(number, 1).combine_chunks()
        request = {name: row[name][0].as_py() for name in (K, EXACT, AMONG, WITHOUT, ITEMS, SCORES, REQUEST)}
        without = request[WITHOUT] or []
        query = retriever.read(RetrieveBody({}, request[K], request[AMONG], without, request[EXACT]), arrays_of(row))
        answer = retriever.answer(query)
        scores, recorded = np.array(answer.scores, np.float64), np.array(request[SCORES], np.float64)
        if version.identity == "exact":
            same = answer.items == request[ITEMS] and answer.scores == request[SCORES]
        else:  # another kind of processor
            same = len(scores) == len(recorded) and bool((np.abs(scores - recorded) <= tolerance_of(recorded)).all())
        if not same and not wrong:
            answered = list(zip(request[ITEMS], request[SCORES], strict=False))[:2]  # a file may have fewer scores
            first = f"request {request[REQUEST]}: answered {answered}"
            first += f", not {list(zip(answer.items, answer.scores, strict=True))[:2]}"
        wrong += not same
    return _make_result(file, version, table, wrong, first)


def _make_result(file: Path, version: ServedVersion, table: pa.Table, wrong: int, first: str) -> AuditedFile:
    names = [name for name in version.stats if name in version.schema.names and name in table.column_names]
    kinds = {name: version.schema.field(name).type for name in names}
    trained = {name: _means(version.stats[name], kind) for name, kind in kinds.items()}
    recorded = {
        name: _means(ColumnStats.of(table[name]), kind, _deviation(table[name])) for name, kind in kinds.items()
    }
    return AuditedFile(file, version.number, len(table), wrong, first, trained, recorded)


def _means(stats: ColumnStats, kind: pa.DataType, deviation: float | None = None) -> ColumnMeans:
    """Means of a column; leaves out the mean of integers, which may be ids."""
    return ColumnMeans(stats.null_share, stats.mean if types.is_floating(kind) else None, stats.mean_length, deviation)


def _deviation(column: pa.ChunkedArray) -> float | None:
    if is_list(column.type):
        column = pc.call_function("list_value_length", [column])
    elif not types.is_floating(column.type):
        return None
    return pc.call_function("stddev", [column]).as_py()


def skew_of(files: Sequence[AuditedFile]) -> list[ColumnSkew]:
    """The skew of all columns, over the rows of all files."""
    skews: list[ColumnSkew] = []
    for name in dict.fromkeys(name for file in files for name in file.trained):
        with_column = [file for file in files if name in file.trained and file.rows]
        rows = [file.rows for file in with_column]
        if rows:
            trained = _mean_over_files([file.trained[name] for file in with_column], rows)
            recorded = _mean_over_files([file.recorded[name] for file in with_column], rows)
            skews.append(ColumnSkew(name, sum(rows), trained, recorded))
    return skews


def _mean_over_files(means: Sequence[ColumnMeans], rows: Sequence[int]) -> ColumnMeans:
    """Means over the rows of several files; approximate for deviations."""

    def mean(values: Sequence[float | None]) -> float | None:
        pairs = [(value, count) for value, count in zip(values, rows, strict=True) if value is not None]
        total = sum(count for _, count in pairs)
        return sum(value * count for value, count in pairs) / total if pairs else None

    nulls = mean([m.null_share for m in means])
    assert nulls is not None
    return ColumnMeans(nulls, *(mean([m[field] for m in means]) for field in (1, 2, 3)))

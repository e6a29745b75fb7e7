"""Names rows of tables by raw ids: from a vocabulary, or from raw rows of the data that look the row up."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import types

from rowwise.base.errors import SpecError
from rowwise.ingest.bags import combine_chunks
from rowwise.ingest.batcher import table_rows_for_ids
from rowwise.ingest.block import RaggedColumn
from rowwise.ingest.columns import Columns
from rowwise.ingest.encode import encode
from rowwise.ingest.kinds import is_list
from rowwise.ingest.reader import Split
from rowwise.ingest.transform import (
    LoadedTransforms,
    MapId,
    PositiveModulus,
    RowPosition,
    SigridHash,
    apply,
    serving,
    sources,
)
from rowwise.ingest.transform.mapping import read_mapping
from rowwise.recipes.rows import RowSelection, good_rows
from rowwise.tables.spec import Table

RARE_IDS = "rare and new ids"  # name of the row for ids outside of a vocabulary
MAX_ROWS = 1 << 20  # raw rows that are read for names
MAX_IDS = 3  # in the name of a row that several ids share
MAX_CHARS = 60  # characters of an id
HIDING = (MapId, SigridHash, PositiveModulus)  # transforms that replace raw ids by numbers

Names = dict[str, dict[int, str]]  # by feature, by row


def name_ids(
    rows: RowSelection,
    columns: Columns,
    tables: Sequence[Table],
    transforms: LoadedTransforms,
    shown: Mapping[str, Collection[int]],
) -> Names:
    """The names of encoded ids, by feature; ids that no row of the data names are "row N of table".

    Args:
        rows: data that names ids outside of vocabularies.
        columns: columns of the recipe.
        tables: tables of the recipe.
        transforms: transforms of the recipe.
        shown: ids to name, by feature.
    """
    sparse = {column.feature_name: column for column in columns.sparse}
    unknown = [feature for feature in shown if feature not in sparse]
    if unknown:
        raise SpecError(f"slices {', '.join(unknown)}: no such feature", f"some of {', '.join(sparse)}")
    names: Names = {feature: _vocabulary_names(transforms, sparse[feature].column) for feature in shown}
    wanted = {feature: set(ids) - names[feature].keys() for feature, ids in shown.items()}
    wanted = {feature: ids for feature, ids in wanted.items() if ids}
    for feature, ids in wanted.items():
        names[feature] |= {row: f"row {row:,} of table {sparse[feature].table_name}" for row in ids}
    for feature, raw_of in _read_ids(rows, columns, tables, transforms, wanted).items():
        names[feature] |= {row: _join(raw) for row, raw in raw_of.items()}
    return {feature: {row: names[feature][row] for row in ids} for feature, ids in shown.items()}


def _vocabulary_names(transforms: LoadedTransforms, column: str) -> dict[int, str]:
    """The names of rows by the vocabulary of a column, if it has one."""
    steps = [step.transform for step in transforms.steps if column in step.transform.makes]
    last = steps[-1] if steps else None
    if not isinstance(last, MapId):
        return {}
    mapping = last.mapping or read_mapping(last)
    rare = {last.unknown: RARE_IDS} if isinstance(last.unknown, int) else {}
    return {row: str(key) for key, row in mapping.items()} | rare


def _read_ids(
    rows: RowSelection,
    columns: Columns,
    tables: Sequence[Table],
    transforms: LoadedTransforms,
    wanted: Mapping[str, Collection[int]],
) -> dict[str, dict[int, list[str]]]:
    """The raw ids of each wanted row, from splits read until each row has one."""
    raw_ids: dict[str, dict[int, list[str]]] = {feature: {} for feature in wanted}
    if not wanted:
        return raw_ids
    columns = Columns(labels=(), sparse=tuple(sparse for sparse in columns.sparse if sparse.feature_name in wanted))
    transforms, table_rows, read = serving(transforms), table_rows_for_ids(columns, tables), 0
    inputs = [_before_hiding(transforms, sparse.column) for sparse in columns.sparse]
    for selected in good_rows(rows, columns, tables, transforms):
        if read >= MAX_ROWS or all(raw_ids[feature].keys() >= set(ids) for feature, ids in wanted.items()):
            break
        raw = selected.read()
        read += raw.num_rows
        bags = encode(_apply(raw, transforms, columns.names, selected.split), columns, table_rows, selected.split).bags
        for sparse, bag, (before, column) in zip(columns.sparse, bags, inputs, strict=True):
            values = combine_chunks(_apply(raw, before, (column,), selected.split)[column])
            ids_of = raw_ids[sparse.feature_name]
            for row, name in _pair_rows(values, bag, wanted[sparse.feature_name]):
                names = ids_of.setdefault(row, [])
                names += [] if name in names else [name]
    return raw_ids


def _apply(raw: pa.Table, transforms: LoadedTransforms, wanted: Sequence[str], split: Split) -> pa.Table:
    return apply(raw.select(sources(transforms, wanted)), transforms, wanted, RowPosition(split=split))[0]


def _before_hiding(loaded: LoadedTransforms, column: str) -> tuple[LoadedTransforms, str]:
    """The transforms without those that hide the ids of a column, and the column that then has raw ids."""
    steps = []
    for step in reversed(loaded.steps):
        if column in step.transform.makes and isinstance(step.transform, HIDING):
            column = step.transform.column
        else:
            steps.append(step)
    return LoadedTransforms(steps=tuple(reversed(steps))), column


def _pair_rows(raw: pa.Array, bag: RaggedColumn, wanted: Collection[int]) -> Iterator[tuple[int, str]]:
    """Wanted rows of a table with their raw ids, the most common first.

    Skips rows of the data in which a transform has changed the number of ids.
    """
    raw = raw.dictionary_decode() if types.is_dictionary(raw.type) else raw
    lengths_R = np.ones(len(raw), np.int64) if bag.offsets_R1 is None else np.diff(bag.offsets_R1)
    single = raw.is_valid().cast(pa.int64())
    counts = pc.call_function("list_value_length", [raw]) if is_list(raw.type) else single
    same_R = counts.fill_null(0).to_numpy() == lengths_R
    aligned = raw.filter(pa.array(same_R))
    rows_M = bag.values_N[np.repeat(same_R, lengths_R)]
    table = pa.table({"row": rows_M, "id": aligned.flatten() if is_list(raw.type) else aligned.drop_null()})
    table = table.filter(pa.array(np.isin(rows_M, np.fromiter(wanted, np.int64))))
    pairs = table.group_by(["row", "id"]).aggregate([([], "count_all")])
    for pair in pairs.sort_by([("count_all", "descending"), ("id", "ascending")]).to_pylist():
        yield pair["row"], _text(pair["id"])


def _text(value: object) -> str:
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}\u2026"


def _join(names: Sequence[str]) -> str:
    """Ids that share a row, as one name."""
    more = f" and {len(names) - MAX_IDS} more" if len(names) > MAX_IDS else ""
    return ", ".join(names[:MAX_IDS]) + more

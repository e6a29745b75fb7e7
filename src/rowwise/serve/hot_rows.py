"""The most accessed rows in training, with which a server warms its cache before the first request."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import numpy as np
import pyarrow as pa
from torch import Tensor

from rowwise.ingest.unpacked import check_types, read_arrow_file, write_arrow_file
from rowwise.serve.contents import reading_export
from rowwise.serve.shared_rows import TableInArena
from rowwise.tables.ops.layout import FeatureDescriptor
from rowwise.tables.ops.newer import RowPlaces
from rowwise.tables.store.policy import Ints

HOT = "hot.arrow"
HOT_schema = pa.schema({"table": pa.dictionary(pa.int32(), pa.string()), "row": pa.int64(), "count": pa.int64()})
MAX_ROWS = 1 << 20  # in total


@final
class RowCounter:
    """Counts the rows of lookups, as a decorator of the row positions of an arena.

    Args:
        tables: of the arena.
        places: the decorated positions, or None if ids are row numbers.
    """

    def __init__(self, tables: Sequence[TableInArena], places: RowPlaces | None = None) -> None:
        self._places, self._tables = places, {table.base: table for table in tables}
        self._counted: dict[str, list[tuple[Ints, Ints]]] = {table.name: [] for table in tables}

    def find(self, features_FC: Tensor, values_N: Tensor, offsets: Tensor, batch: int) -> Tensor:
        bounds = offsets[::batch].tolist() if batch else []
        for feature in FeatureDescriptor.read(features_FC) if bounds else ():
            table = self._tables[feature.base]
            ids_N = values_N[bounds[feature.source] : bounds[feature.source + 1]].numpy()
            known_N = ids_N[(ids_N >= 0) & (ids_N < table.table.rows)].astype(np.int64)
            self._counted[table.name].append(np.unique(known_N, return_counts=True))
        return values_N if self._places is None else self._places.find(features_FC, values_N, offsets, batch)

    def counts(self) -> dict[str, tuple[Ints, Ints]]:
        """Rows and their counts, by table."""
        counts: dict[str, tuple[Ints, Ints]] = {}
        for name, parts in self._counted.items():
            rows_N, counts_N = (np.concatenate([part[k] for part in parts] or [np.empty(0, np.int64)]) for k in (0, 1))
            # Sum the counts of equal rows over all lookups.
            rows_U, index_N = np.unique(rows_N, return_inverse=True)
            counts[name] = rows_U, np.bincount(index_N, counts_N, len(rows_U)).astype(np.int64)
        return counts


def write_hot_rows(version: Path, counts: Mapping[str, tuple[Ints, Ints]]) -> None:
    """Write the rows with the highest counts, in descending order."""
    names = list(counts)
    empty, counted = np.empty(0, np.int64), counts.values()
    table_N = np.concatenate([empty, *(np.full(len(rows), k) for k, (rows, _) in enumerate(counted))]).astype(np.int32)
    rows_N, counts_N = (np.concatenate([empty, *(pair[k] for pair in counted)]) for k in (0, 1))
    order = np.argsort(-counts_N, kind="stable")[:MAX_ROWS]
    table = pa.table(
        {
            "table": pa.DictionaryArray.from_arrays(pa.array(table_N[order]), pa.array(names, pa.string())),
            "row": rows_N[order],
            "count": counts_N[order],
        }
    )
    write_arrow_file(version / HOT, table)


def read_hot_rows(version: Path) -> dict[str, tuple[Ints, Ints]]:
    """Rows and their counts, by table; empty for a version without the file."""
    path = version / HOT
    if not path.is_file():
        return {}
    with reading_export(path):
        table = read_arrow_file(path)
        check_types(table, HOT_schema)
        table = table.unify_dictionaries().combine_chunks()
        names, rows, counts = (table[name].combine_chunks() for name in HOT_schema.names)
        known, number_N = names.dictionary.to_pylist(), names.indices.to_numpy()
        rows_N, counts_N = rows.to_numpy(), counts.to_numpy()
    return {name: (rows_N[number_N == k], counts_N[number_N == k]) for k, name in enumerate(known)}

"""The rows that training asked for most often, with which a server fills its cache before the first request."""

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
MAX_ROWS = 1 << 20  # of all tables


@final
class RowCounter:
    """Counts the rows that lookups ask for. It stands in for the places of rows in an arena, and changes none.

    Args:
        tables: of the arena.
        places: what it stands in for; None: rows are where their ids say.
    """

    def __init__(self, tables: Sequence[TableInArena], places: RowPlaces | None = None) -> None:
        self._places, self._tables = places, {one.base: one for one in tables}
        self._found: dict[str, list[tuple[Ints, Ints]]] = {one.name: [] for one in tables}

    def find(self, features_FC: Tensor, values_N: Tensor, offsets: Tensor, batch: int) -> Tensor:
        bounds = offsets[::batch].tolist() if batch else []
        for feature in FeatureDescriptor.read(features_FC) if bounds else ():
            one = self._tables[feature.base]
            ids_N = values_N[bounds[feature.source] : bounds[feature.source + 1]].numpy()
            known_N = ids_N[(ids_N >= 0) & (ids_N < one.table.rows)].astype(np.int64)
            self._found[one.name].append(np.unique(known_N, return_counts=True))
        return values_N if self._places is None else self._places.find(features_FC, values_N, offsets, batch)

    def counts(self) -> dict[str, tuple[Ints, Ints]]:
        """Rows and their counts, by table."""
        found: dict[str, tuple[Ints, Ints]] = {}
        for name, parts in self._found.items():
            rows_N, counts_N = (np.concatenate([part[k] for part in parts] or [np.empty(0, np.int64)]) for k in (0, 1))
            rows_U, place_N = np.unique(rows_N, return_inverse=True)
            found[name] = rows_U, np.bincount(place_N, counts_N, len(rows_U)).astype(np.int64)
        return found


def write_hot_rows(version: Path, counts: Mapping[str, tuple[Ints, Ints]]) -> None:
    """Write the rows with the highest counts, the highest first."""
    names = list(counts)
    none, found = np.empty(0, np.int64), counts.values()
    table_N = np.concatenate([none, *(np.full(len(rows), k) for k, (rows, _) in enumerate(found))]).astype(np.int32)
    rows_N, counts_N = (np.concatenate([none, *(one[k] for one in found)]) for k in (0, 1))
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
    """Rows and their counts, by table; none of a version that was written without."""
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

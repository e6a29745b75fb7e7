"""Vocabularies: the ids of a column with a row of their own in its table, counted while the data are inspected.

A vocabulary file has one id a line, a tab, and its row, as `map_id` reads it. Rows begin at 1 with the most frequent
id, so hot rows are neighbours in memory. Row 0 is shared by all other ids: ids of fewer than `MIN_ROWS` rows train it,
so it is a useful default for unseen ids. Known limits: ids with control characters or line breaks, bytes that are not
UTF-8, and unsigned numbers of 2**63 or more have to be hashed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import types

from rowwise.base.errors import SpecError
from rowwise.ingest.bags import decoded
from rowwise.ingest.transform.mapping import MapId, read_mapping

MAX_IDS = 1 << 18  # a column with more is hashed
MIN_ROWS = 2
MERGE_AT = 1 << 16  # pending ids that trigger a merge
NO_ROWS: dict[str | int, int] = {}
UNLISTABLE = r"[\x00-\x1f\x7f\x{85}\x{2028}\x{2029}]"


@final
class IdCounter:
    """Counts the ids of a column exactly, up to `most` distinct ids."""

    def __init__(self, most: int = MAX_IDS) -> None:
        self._most = most
        self._pending: list[pa.Table] | None = []  # None: too many ids, or ids that a vocabulary file cannot hold
        self._merge_at = MERGE_AT

    def add(self, ids: pa.Array) -> None:
        """Count more ids, none of them null."""
        if self._pending is None:
            return
        ids = decoded(ids)
        if types.is_string(ids.type) or types.is_large_string(ids.type):
            ids = ids.cast(pa.large_string())
        elif not types.is_integer(ids.type) or (types.is_uint64(ids.type) and _most(ids) >= 1 << 63):
            self._pending = None
            return
        counts = ids.value_counts()
        self._pending.append(pa.table({"id": counts.field("values"), "rows": counts.field("counts")}))
        if sum(table.num_rows for table in self._pending) > self._merge_at:
            self._merge()

    def ids(self, least: int = MIN_ROWS) -> list[str] | None:
        """The ids of at least `least` rows, most frequent first; None if the column has to be hashed."""
        if not self._pending:
            return None
        self._merge()
        if not self._pending:
            return None
        table = self._pending[0].sort_by([("rows", "descending"), ("id", "ascending")])
        ids = table.filter(pc.field("rows") >= least)["id"].combine_chunks()
        if types.is_integer(ids.type):
            return ids.cast(pa.large_string()).to_pylist()
        unlistable = pc.call_function("match_substring_regex", [ids], pc.MatchSubstringOptions(UNLISTABLE))
        return None if pc.call_function("any", [unlistable]).as_py() else ids.to_pylist()

    def _merge(self) -> None:
        assert self._pending is not None
        merged = pa.concat_tables(self._pending).group_by("id").aggregate([("rows", "sum")])
        merged = merged.rename_columns({"rows_sum": "rows"})
        self._pending = [merged] if merged.num_rows <= self._most else None
        self._merge_at = max(MERGE_AT, 2 * merged.num_rows)


def write_vocabularies(ids: Mapping[str, Sequence[str]], files: Mapping[str, Path], grow: Path | None = None) -> None:
    """Write the vocabulary of each column.

    Args:
        ids: by column; new ids get rows in this order.
        files: by column.
        grow: folder of earlier vocabularies with the same file names, whose ids keep their rows.
    """
    for column, file in files.items():
        rows = read_vocabulary(grow / file.name) if grow is not None and (grow / file.name).exists() else NO_ROWS
        last = max(rows.values(), default=0)
        new_ids = (key for key in ids[column] if key not in rows)
        rows = rows | {key: row for row, key in enumerate(new_ids, last + 1)}
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{key}\t{row}\n" for key, row in rows.items()), "utf-8", newline="\n")


def read_vocabulary(file: Path) -> dict[str | int, int]:
    """The row of each id."""
    return read_mapping(MapId(column="", file=str(file)))


def check_grown(column: str, before: Mapping[str | int, int], now: Mapping[str | int, int], run: str) -> None:
    """Raise if a warm start would give an id the row that another id has trained."""
    for key, row in before.items():
        if now.get(key) != row:
            change = "has none now" if key not in now else f"has row {now[key]} now"
            raise SpecError(
                f"init_from={run}: id {key!r} of column {column!r} had row {row}, and {change}",
                "the vocabularies of that run, or larger ones by rowwise data inspect --grow FOLDER",
            )


def _most(ids: pa.Array) -> int:
    return pc.call_function("max", [ids]).as_py() or 0

"""Reads tables and their access statistics from a file: CSV with a header, JSON, or `rowwise data inspect --json`.

These files are written by other programs and by hand, so every error has its line and column. Known limit: a file is
read into memory as a whole.
"""

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rowwise.base.errors import SpecError, did_you_mean
from rowwise.base.textfile import decode_json, parse_whole, read_bytes
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.dense_parallel import DenseSide
from rowwise.tables.row_optimizers import OPTIMIZERS, RowOptimizer
from rowwise.tables.spec import TRAINED_TYPES, Pooling, RowType, Table, Wire

COLUMN_NAMES: dict[str, tuple[str, ...]] = {  # by field: names that its column may have, best first
    "name": ("name", "table_id", "table"),
    "rows": ("rows", "num_rows"),
    "dim": ("dim",),
    "pooling": ("pooling",),
    "zipf_a": ("zipf_a", "zipf_alpha"),
    "zipf_q": ("zipf_q",),
    "unique_ratio": ("unique_ratio",),
    "active": ("active",),
    "row_type": ("row_type",),
    "optimizer": ("optimizer",),
    "features": ("features",),
    "pooling_mode": ("pooling_mode",),
}
NEEDED = ("name", "rows", "pooling")
ROW_TYPES = {str(kind): kind for kind in TRAINED_TYPES}
POOLINGS = {str(kind): kind for kind in Pooling}
MAX_NUMBER = 1 << 62
MAX_SHOWN = 40  # characters of a wrong value
SEPARATOR = re.compile(r"[;|\s]+")  # between features in a cell
BYTE = re.compile(r"\(byte (\d+)\)")
HOT = 0.01  # `top_share` of `rowwise data inspect` is that of the most frequent hundredth of values


class PlanInputs(NamedTuple):
    """Tables, global batch, wire and dense side to plan for."""

    workloads: tuple[Workload, ...]
    batch: int  # global number of samples of a step
    wire: Wire
    dense: DenseSide | None = None  # None if unknown


@dataclass(frozen=True, slots=True)
class TablesFile:
    """Tables of a file, with notes on ignored keys and defaults."""

    workloads: tuple[Workload, ...]
    notes: tuple[str, ...]


class TableEntry(NamedTuple):
    """One table of the file: a line of CSV, or a JSON object."""

    place: str  # file and line
    values: Mapping[str, object]  # by field; empty cells are left out
    titles: Mapping[str, str]  # name of the column by field

    def error(self, field: str, expected: str) -> SpecError:
        value, title = self.values.get(field), self.titles.get(field, field)
        got = "is empty" if value is None else repr(value)
        shown = got if len(got) <= MAX_SHOWN else f"{got[: MAX_SHOWN - 3]}..."
        return SpecError(f"{self.place}, column {title!r}: {shown}", expected)

    def number(self, field: str, default: float | None = None) -> float:
        """A finite number that is not negative."""
        number = _parse_number(self.values.get(field, default))
        if not 0 <= number < MAX_NUMBER:
            raise self.error(field, "a finite number that is not negative")
        return float(number)

    def positive_int(self, field: str, default: int | None = None) -> int:
        """A whole number of at least 1; 100.0 counts as one."""
        value = self.values.get(field, default)
        number = _parse_number(value)
        if not 1 <= number < MAX_NUMBER or number != int(number):
            out = ", or --dim for all tables" if field == "dim" and value is None else ""
            raise self.error(field, f"a whole number of at least 1{out}")
        return int(number)

    def choice(self, field: str, known: Mapping[str, Any], default: Any) -> Any:
        value = self.values.get(field)
        if value is None:
            return default
        member = known.get(value) if isinstance(value, str) else None
        if member is None:
            guess = did_you_mean(str(value).lower(), known)
            raise self.error(field, f"one of {', '.join(known)}{f'; {guess}' if guess else ''}")
        return member


def _parse_number(value: object) -> float:
    """A number, also from a string; NaN if it is neither."""
    if isinstance(value, str):
        whole = parse_whole(value)  # large whole numbers are not exact as floats
        plain = value.isascii() and "_" not in value  # float() takes digits of every script, and 1_0
        try:
            return float(value if plain else "nan") if whole is None else whole
        except ValueError:
            return math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return math.nan


def read_tables(path: str | Path, *, dim: int | None = None) -> TablesFile:
    """Reads the tables of a file; `dim` is the default for those without one.

    A CSV file has a header with the columns name (or table_id), rows (or num_rows), dim and pooling; it may have
    zipf_a, zipf_q, unique_ratio, active, row_type, optimizer, features (separated by ;) and pooling_mode. A JSON
    file is a list of objects with these keys, or of workloads as msgspec writes them.
    """
    text = _read_text(Path(path))
    if not text.strip():
        raise SpecError(f"{path}: the file is empty", "a header, and a line for each table")
    if Path(path).suffix == ".json" or text.lstrip()[0] in "[{":
        entries, notes = _json_entries(str(path), text)
    else:
        entries, notes = _csv_entries(str(path), text)
    read: dict[str, tuple[Workload, str]] = {}
    for entry in entries:
        workload = _workload(entry, dim)
        name = workload.table.name
        if name in read:
            where = read[name][1].removeprefix(f"{path}, ")
            raise SpecError(f"{entry.place}: table {name!r} is also in {where}", "each table once")
        read[name] = workload, entry.place
    if dim is not None and not _count_without_dim(entries):
        raise SpecError(f"{path}: all tables give their dim", f"no --dim (got {dim})")
    workloads = tuple(workload for workload, _ in read.values())
    return TablesFile(workloads, (*notes, *_default_notes(entries, dim)))


def _read_text(path: Path) -> str:
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(
            f"{path}, line {line}: byte {data[error.start]:#04x} is not UTF-8", "a CSV or JSON file in UTF-8"
        ) from None


def _columns_by_field(place: str, titles: Sequence[str]) -> dict[str, str]:
    """The column of each field; raises if a needed field has none."""
    columns = {field: next((name for name in names if name in titles), None) for field, names in COLUMN_NAMES.items()}
    for field in NEEDED:
        if columns[field] is None:
            raise _missing_column_error(place, COLUMN_NAMES[field], titles)
    return {field: name for field, name in columns.items() if name is not None}


def _missing_column_error(place: str, names: Sequence[str], titles: Sequence[str]) -> SpecError:
    near = next(filter(None, (_similar_column(name, titles) for name in names)), "")
    listed = ", ".join(titles[:12]) + (" ..." if len(titles) > 12 else "")
    expected = " or ".join(repr(name) for name in names[:2])
    return SpecError(f"{place}: no column {expected}{near}; there are {listed}")


def _similar_column(name: str, titles: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, titles, n=1)
    return f", but {near[0]!r}" if near else ""


def _unused_columns_note(titles: Iterable[str], used: Iterable[str]) -> tuple[str, ...]:
    taken = set(used)
    names = [title for title in dict.fromkeys(titles) if title not in taken]
    what = "column" if len(names) == 1 else "columns"
    return (f"{what} {', '.join(names)}: not used",) if names else ()


def _csv_entries(path: str, text: str) -> tuple[list[TableEntry], tuple[str, ...]]:
    lines = _csv_lines(path, text)
    first, header = next(lines)
    place = f"{path}, line {first}"
    titles = [title.strip() for title in header]
    columns = _columns_by_field(place, titles)
    duplicates = [title for title in columns.values() if titles.count(title) > 1]
    if duplicates:
        raise SpecError(f"{place}: column {duplicates[0]!r} appears twice", "each column once")
    index = {field: titles.index(title) for field, title in columns.items()}
    entries = []
    for number, cells in lines:
        place = f"{path}, line {number}"
        if len(cells) != len(titles):
            raise SpecError(f"{place}: {len(cells)} cells", f"{len(titles)}, as the header has")
        values = {field: cells[at].strip() for field, at in index.items()}
        entries.append(TableEntry(place, {field: value for field, value in values.items() if value}, columns))
    if not entries:
        raise SpecError(f"{path}: a header without tables", "a line for each table")
    return entries, _unused_columns_note(titles, columns.values())


def _csv_lines(path: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """Lines that are not blank, with the line numbers at which they end."""
    head = text.lstrip().split("\n", 1)[0]
    delimiter = "\t" if "\t" in head and "," not in head else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, cells
    except csv.Error as error:
        raise SpecError(f"{path}, line {reader.line_num}: not CSV: {error}") from None


def _json_entries(path: str, text: str) -> tuple[list[TableEntry], tuple[str, ...]]:
    try:
        document = decode_json(text, object)
    except msgspec.DecodeError as error:
        at = BYTE.search(str(error))
        line = text.encode()[: int(at[1]) if at else None].count(b"\n") + 1
        raise SpecError(f"{path}, line {line}: not JSON: {error}") from None
    if isinstance(document, dict) and isinstance(document.get("columns"), list):
        return _card_entries(path, document["columns"])
    if not isinstance(document, list) or not document:
        got = "an empty list" if document == [] else f"{type(document).__name__}"
        raise SpecError(f"{path}: {got}", "a list of objects, one for each table")
    entries: list[TableEntry] = []
    titles: list[str] = []
    used: set[str] = set()
    for number, table in enumerate(document, start=1):
        place = f"{path}, entry {number}"
        if not isinstance(table, dict):
            raise SpecError(f"{place}: {table!r}", "an object, such as {'name': 'user', 'rows': 1000, ...}")
        if isinstance(table.get("table"), dict):
            entries.append(TableEntry(place, {"workload": table}, {}))
            continue
        columns = _columns_by_field(place, list(table))
        titles += table
        used |= set(columns.values())
        entries.append(TableEntry(place, {f: table[t] for f, t in columns.items() if table[t] is not None}, columns))
    return entries, _unused_columns_note(titles, used)


def _card_entries(path: str, columns: Sequence[Any]) -> tuple[list[TableEntry], tuple[str, ...]]:
    """Tables for the id columns of `rowwise data inspect --json`."""
    entries = []
    for column in columns:
        if not isinstance(column, dict) or column.get("role") != "sparse":
            continue
        rows, distinct = column.get("table_rows"), column.get("distinct")
        pooling = column.get("mean_length")
        values: dict[str, object] = {
            "name": re.sub(r"[./\\\0]", "_", str(column.get("name"))),
            "rows": rows, "active": distinct, "dim": column.get("table_dim"),
            "pooling": 1.0 if pooling is None else pooling, "top_share": column.get("top_share"),
        }  # fmt: skip
        known = {field: value for field, value in values.items() if value is not None}
        entries.append(TableEntry(f"{path}, column {column.get('name')!r}", known, {}))
    if not entries:
        raise SpecError(f"{path}: no column of ids", "a list of tables, or what rowwise data inspect --json prints")
    note = "tables as rowwise data inspect suggests them; how ids repeat is fitted to the most frequent hundredth"
    return entries, (note,)


def _workload(entry: TableEntry, dim: int | None) -> Workload:
    try:
        if "workload" in entry.values:
            return msgspec.convert(entry.values["workload"], Workload)
        return Workload(table=_table(entry, dim), access=_access(entry))
    except msgspec.ValidationError as error:
        raise SpecError(f"{entry.place}: {error}") from None
    except SpecError as error:
        if str(error).startswith(entry.place):
            raise
        raise SpecError(f"{entry.place}: {error}") from None


def _table(entry: TableEntry, dim: int | None) -> Table:
    arguments: dict[str, Any] = {}
    if isinstance(entry.values.get("optimizer"), dict):
        arguments["optimizer"] = msgspec.convert(entry.values["optimizer"], RowOptimizer)
    elif "optimizer" in entry.values:
        arguments["optimizer"] = entry.choice("optimizer", OPTIMIZERS, None)()
    return Table(
        name=_name(entry),
        rows=entry.positive_int("rows"),
        dim=entry.positive_int("dim", dim),
        features=_features(entry),
        pooling=entry.choice("pooling_mode", POOLINGS, Pooling.SUM),
        row_type=entry.choice("row_type", ROW_TYPES, RowType.FP32),
        **arguments,
    )


def _name(entry: TableEntry) -> str:
    name = entry.values.get("name")
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise entry.error("name", "a name")
    return f"t{name}" if _is_number(name) else str(name)


def _is_number(name: object) -> bool:
    """Whether a name is a number, which cannot name an attribute of a module."""
    return isinstance(name, int) or (isinstance(name, str) and name.isdecimal())


def _features(entry: TableEntry) -> tuple[str, ...]:
    value = entry.values.get("features")
    if value is None:
        return ()
    names: Any = SEPARATOR.split(value) if isinstance(value, str) else value
    try:
        return msgspec.convert(names, tuple[str, ...])
    except msgspec.ValidationError:
        raise entry.error("features", "names of features, with ; between them") from None


def _access(entry: TableEntry) -> Access:
    values, pooling = entry.values, entry.number("pooling")
    active = entry.positive_int("active") if "active" in values else None
    if "top_share" in values:
        points = [(HOT, min(entry.number("top_share"), 1.0))]
        return msgspec.structs.replace(
            Access.from_cdf(active or entry.positive_int("rows"), points, pooling), active=active
        )
    # A Zipf curve holds for batches of any size, a ratio only for the batch size that it was measured with.
    ratio = entry.number("unique_ratio") if "unique_ratio" in values and "zipf_a" not in values else None
    a, q = entry.number("zipf_a", 0.0), entry.number("zipf_q", 0.0)
    return Access(pooling=pooling, zipf_a=a, zipf_q=q, active=active, unique_ratio=ratio)


def _count_without_dim(entries: Sequence[TableEntry]) -> int:
    """The number of tables without a dim."""
    return sum("dim" not in entry.values and "workload" not in entry.values for entry in entries)


def _default_notes(entries: Sequence[TableEntry], dim: int | None) -> Iterator[str]:
    if dim is not None:
        yield f"{_count_without_dim(entries)} of {len(entries)} tables give no dim: {dim} is used"
    numbered = [str(entry.values["name"]) for entry in entries if _is_number(entry.values.get("name"))]
    if numbered:
        yield f"tables named by a number get the prefix t: {numbered[0]} is t{numbered[0]}"
    if any({"zipf_a", "unique_ratio"} <= entry.values.keys() for entry in entries):
        yield "unique_ratio: ignored where zipf_a is given, which holds for batches of any size"

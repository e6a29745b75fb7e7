"""Rows that cannot be used are put aside with their reasons, once each, and all others are trained on."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from ingest.test_batcher import keys
from pyarrow import parquet as pq
from test_service import served

from rowwise import DataError, Table
from rowwise.ingest import Batcher, Batching, Columns, Dense, ParquetReader, Sparse
from rowwise.ingest.encode import MAX_REASONS, RefusalReason, RefusedRows
from rowwise.ingest.quarantine import QuarantinedRows, count_quarantined, quarantine_rows, quarantine_split
from rowwise.ingest.reader import Split
from rowwise.ingest.service.local import Service, Workers
from rowwise.ingest.where import parse

COLUMNS = Columns(labels=("label",), dense=(Dense(column="x"),), sparse=(Sparse(column="id", ids="direct"),), key="row")
TABLES = (Table(name="id", rows=100, dim=4),)
ROWS, GROUP = 600, 100


def make(rows=ROWS, **changes):
    found = {"row": list(range(rows)), "label": [r % 2 for r in range(rows)], "x": [float(r) for r in range(rows)]}
    found["id"] = [r % 100 for r in range(rows)]
    for name, cells in changes.items():
        for row, cell in cells.items():
            found[name][row] = cell
    return pa.table(found)


def write(table, path, checksums=True):
    pq.write_table(table, path, row_group_size=GROUP, write_page_checksum=checksums, compression="none")


def batches(path, aside=None, size=64, **how):
    return Batcher(ParquetReader(path, verify=True), COLUMNS, TABLES, Batching(size=size, quarantine=aside, **how))


def served_keys(made):
    with Service(made.task, Workers(count=2, ahead=1)) as service:
        return keys(served(made, service.client()))


def found(folder):
    tables = [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]
    return {row["row"]: row for table in tables for row in table.to_pylist()}


BAD = {
    "label": {3: 7, 5: None, 250: 2},
    "x": {7: float("inf"), 5: float("-inf")},
    "id": {9: 100, 10: -1},
    "row": {400: None},
}


@pytest.mark.slow
def test_bad_rows_are_put_aside_and_the_rest_is_used(tmp_path):
    write(make(**BAD), tmp_path / "a.parquet")
    bad, unlabelled = {3, 7, 9, 10, 250, 400}, {5}
    folder = tmp_path / "bad"
    made = batches(tmp_path / "a.parquet", str(folder))
    used = [keys(made), keys(made)]  # two epochs
    assert all(sorted(one) == [r for r in range(ROWS) if r not in bad | unlabelled] for one in used)
    assert served_keys(batches(tmp_path / "a.parquet", str(folder))) == used[0]
    assert keys(batches(tmp_path / "a.parquet", "")) == used[0]  # only left out
    rows = found(folder)
    assert rows.keys() == (bad - {400}) | {None}
    assert rows[3]["_place"] == f"{tmp_path / 'a.parquet'}: row 3"
    assert rows[3]["_reason"] == "column 'label': 7: expected a label of 0 or 1"
    assert rows[9]["_reason"].startswith("column 'id': id 100: expected 0 to 99, the rows of table 'id'")
    assert rows[None]["_reason"] == "column 'row': None: expected a key in every row"
    assert count_quarantined(folder) == QuarantinedRows(len(bad), ())
    assert len(list(folder.iterdir())) == 3  # and nothing half written


def flip(path):
    """A bit of a page that has a checksum."""
    at = pq.read_metadata(path).row_group(2).column(2)
    data = bytearray(path.read_bytes())
    begin = at.dictionary_page_offset if at.has_dictionary_page else at.data_page_offset
    data[begin + at.total_compressed_size - 5] ^= 1
    path.write_bytes(data)


def gone(path):
    path.unlink()


def other_rows(path):
    write(make(250), path)


def other_types(path):
    table = make()
    write(table.set_column(3, "id", pa.array([[r] for r in range(ROWS)])), path)


def without_column(path):
    write(make().drop_columns(["x"]), path)


def no_parquet(path):
    path.write_bytes(b"something else")


CHANGES = [
    (flip, 1, "cannot be read as Parquet: row group 2, column 'x': .*on_bad_rows=quarantine"),
    (gone, 6, "the file is gone"),
    (other_rows, 4, "the file has changed"),
    (other_types, 6, "row group [0-9], column 'id' holds list<.*>, but int64 in .*: expected files with one type"),
    (without_column, 6, "no column 'x'"),
    (no_parquet, 6, "b.parquet: cannot be read as Parquet"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "splits", "message"), CHANGES, ids=[change.__name__ for change, *_ in CHANGES])
def test_splits_that_cannot_be_read(tmp_path, change, splits, message):
    for name in "abc":
        write(make(), tmp_path / f"{name}.parquet")
    folder = tmp_path / "bad"
    makers = [batches(tmp_path / "*.parquet", str(folder), seed=1) for _ in range(2)]
    strict = batches(tmp_path / "*.parquet")
    change(tmp_path / "b.parquet")
    used = keys(makers[0])
    assert len(used) == 3 * ROWS - splits * GROUP
    assert served_keys(makers[1]) == used
    rows, unread = count_quarantined(folder)
    assert (rows, len(unread)) == (0, splits)
    assert {one.source for one in unread} == {str(tmp_path / "b.parquet")}
    assert sum(one.rows for one in unread) == splits * GROUP
    with pytest.raises(DataError, match=message):
        keys(strict)


def test_rows_that_nobody_wants_are_not_bad(tmp_path):
    write(make(label={3: 7, 500: None, 501: 9}), tmp_path / "a.parquet")
    how = {"where": parse(["label is not null", "row >= 100"])}
    used = keys(batches(tmp_path / "a.parquet", str(tmp_path / "bad"), **how))
    assert sorted(used) == [r for r in range(100, ROWS) if r not in (500, 501)]
    rows = found(tmp_path / "bad")
    assert rows.keys() == {501}
    assert rows[501]["_place"].endswith("row 501")
    assert "9: expected a label" in rows[501]["_reason"]


SPLIT = Split(source="a/rows.v2.parquet", start=0, stop=1, first_row=10, rows=4)


def test_reasons_and_names(tmp_path):
    wrong = tuple(RefusalReason(row=row, column="label", reason="7: no") for row in range(MAX_REASONS))
    bad = RefusedRows(np.ones(MAX_REASONS + 2, np.bool_), (*wrong, RefusalReason(row=0, column="x", reason="inf: no")))
    table = pa.table({"label": [7] * (MAX_REASONS + 2)})
    others = [
        SPLIT,
        Split(source="b/rows.v2.parquet", start=0, stop=1),
        Split(source="a/rows.v1.parquet", start=0, stop=1),
        Split(source="a/rows.v2.parquet", start=0, stop=2),
        Split(source="a/" + 250 * "x" + ".csv", start=0, stop=9),
        Split(source="s3://shop/.rows*?.csv", start=0, stop=9),
    ]
    for split in [*others, *others]:
        quarantine_rows(table, split, bad, str(tmp_path))
    assert count_quarantined(tmp_path).rows == len(others) * (MAX_REASONS + 2)
    one = pq.read_table(next(path for path in tmp_path.iterdir() if path.name.startswith("rows.v2-0-")))
    assert one["_reason"][0].as_py() == "column 'label': 7: no; column 'x': inf: no"
    assert one["_reason"][MAX_REASONS].as_py() == "column 'label': as in rows before it"


def test_all_write_at_once(tmp_path):
    table = pa.table({"label": [7, 8]})
    bad = RefusedRows(np.array([True, True]), (RefusalReason(row=0, column="label", reason="7"),) * 5)

    def write_often(_):
        for _ in range(30):
            quarantine_rows(table, SPLIT, bad, str(tmp_path))
            quarantine_split(SPLIT, "gone", str(tmp_path))
            found = count_quarantined(tmp_path)
            assert found.rows == 2
            assert [one.rows for one in found.unread] == [4]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write_often, range(4)))
    assert len(list(tmp_path.iterdir())) == 2

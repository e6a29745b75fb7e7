"""Columns of recorded requests beside those of training: what was made otherwise is named, and nothing else."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq
from report.markup_check import Reader

from rowwise.ingest.raw_columns import RawColumns
from rowwise.recipes.audit import audit, differing_rows, skew_of
from rowwise.recipes.served import open_version
from rowwise.serve.forward import arrays_of
from rowwise.serve.package import LOGIT
from rowwise.serve.record import REQUEST, VERSION, Recording, RequestRecorder
from rowwise.serve.request import RequestRows


@pytest.fixture
def record(increments, tmp_path):
    """Writes requests, with the logits of a version, as a server does."""

    def write(number, name, **columns):
        version = open_version(increments.models, number=number)
        table = increments.table.select(version.schema.names)
        for column, values in columns.items():
            at = table.column_names.index(column)
            table = table.set_column(
                at, table.schema.field(column), [pa.array(values, table.schema.field(column).type)]
            )
        logits = version.forward(arrays_of(table), len(table), 256).flatten().numpy()
        both = {REQUEST: np.arange(len(table)), VERSION: np.full(len(table), number)}
        for more, values in (both | {LOGIT + "label": logits}).items():
            table = table.append_column(more, pa.array(values))
        (tmp_path / "records").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "records" / f"{name}.parquet")
        return tmp_path / "records"

    return write


def test_requests_like_training_differ_in_nothing(increments, record):
    record(1, "a")
    found = list(audit(increments.models, record(3, "b")))
    assert [one.wrong for one in found] == [0, 0]
    skew = {one.column: one for one in skew_of(found)}
    assert skew.keys() == {"user", "item", "seen", "d0", "d1"}
    assert not any(one.is_large for one in skew.values())
    assert skew["user"].recorded.mean is None
    assert skew["seen"].recorded.mean_length == pytest.approx(skew["seen"].trained.mean_length, rel=0.25)


@pytest.mark.parametrize(("exact", "wrong"), [(True, [0, 1, 1, 1]), (False, [0, 0, 1, 1])])
def test_one_wrong_label_of_several_is_a_wrong_row(exact, wrong):
    recorded = np.array([[0.5, 1.0], [0.25, 2.0], [0.125, 3.0], [np.nan, 4.0]], np.float32)
    logits = recorded.copy()
    logits[1, 0] += 1e-7
    logits[2, 1] = 3.5
    logits[3, 0] = 0.0
    assert differing_rows(logits, recorded, exact=exact).tolist() == wrong


def test_what_requests_make_otherwise_is_named(increments, record, command):
    rows, table = increments.table.num_rows, increments.table
    d0 = [None if k % 2 else x for k, x in enumerate(table["d0"].to_pylist())]
    d1 = [x + 3 for x in table["d1"].to_pylist()]
    records = record(2, "a", d0=d0, d1=d1, seen=[[]] * rows)
    code, out, err = command("audit", str(increments.models), str(records))
    assert code == 0, err
    lines = [line for line in out.splitlines() if line.startswith("column ")]
    assert [line.split("'")[1] for line in lines] == ["d0", "d1", "seen"]
    assert "null in 50.0% of rows, not 0.0%" in lines[0]
    assert "length 0, not " in lines[2]
    page = records.parent / "audit.html"
    code, out, _ = command("audit", str(increments.models), str(records), "--json", "--html", str(page))
    reader = Reader()
    reader.feed(page.read_text())
    reader.close()
    assert reader.open == []
    lines = re.findall(r"<tr>.*?</tr>", page.read_text())
    assert ["unlike training" in line for line in lines[1:6]] == [True] * 3 + [False] * 2
    assert "50.0" in next(line for line in lines if "<td>d0</td>" in line)
    columns = json.loads(out)["columns"]
    assert {name for name, one in columns.items() if one["differs"]} == {"seen", "d0", "d1"}
    assert columns["d1"]["recorded"]["mean"] == pytest.approx(np.mean(d1), rel=1e-5)


def test_a_folder_that_cannot_be_written_loses_requests_and_nothing_else(tmp_path, capfd):
    (tmp_path / "file").touch()
    left_out = []
    recorder = RequestRecorder(Recording(folder=str(tmp_path / "file/records"), share=1.0), 0, left_out.append)
    version = SimpleNamespace(number=1, tasks=("label",))
    recorder.add(version, RequestRows(RawColumns.of({"a": pa.array([7])}), 1, 0), torch.zeros(1, 2))
    recorder.close()
    assert left_out == [1]
    assert "1 requests were not recorded" in capfd.readouterr().err


def test_versions_with_other_columns_are_recorded_in_files_of_their_own(tmp_path):
    left_out = []
    recorder = RequestRecorder(Recording(folder=str(tmp_path), share=1.0), 0, left_out.append)
    for number, columns in ((1, ["a"]), (2, ["a", "b"]), (1, ["a"])):
        version = SimpleNamespace(number=number, tasks=("label",))
        recorder.add(
            version, RequestRows(RawColumns.of({name: pa.array([7]) for name in columns}), 1, 0), torch.zeros(1, 2)
        )
    recorder.close()
    tables = sorted((pq.read_table(file) for file in tmp_path.glob("*.parquet")), key=lambda one: one.num_columns)
    assert [one[VERSION].to_pylist() for one in tables] == [[1, 1], [2]]
    assert not left_out

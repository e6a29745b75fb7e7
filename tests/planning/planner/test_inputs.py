"""Tables from files: what is written is what is read, and what is wrong is named with its line and column."""

import csv
import io
import json
import re
import string
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import Adam, Pooling, RowWiseAdagrad, Sgd, SpecError, Table
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.planner.inputs import read_tables
from rowwise.tables.spec import TRAINED_TYPES

MADE_UP = Path(__file__).parents[3] / "benchmarks" / "tables" / "dlrm856_like_tables.csv"
HEAD = "name,rows,dim,pooling\n"
OPTIMIZERS = {"sgd": Sgd(), "adam": Adam(), "rowwise_adagrad": RowWiseAdagrad()}
numbers = st.floats(0, 1e6)


@st.composite
def workload_lists(draw) -> list[tuple[Workload, str]]:
    names = draw(
        st.lists(st.text(string.ascii_letters + "_", min_size=1, max_size=8), unique=True, min_size=1, max_size=6)
    )
    found = []
    for name in names:
        kind = draw(st.sampled_from(sorted(OPTIMIZERS)))
        table = Table(
            name=name,
            rows=draw(st.integers(1, 2**39)),
            dim=draw(st.integers(1, 512)),
            features=tuple(f"{name}{i}" for i in range(draw(st.integers(0, 2)))),
            pooling=draw(st.sampled_from(Pooling)),
            optimizer=OPTIMIZERS[kind],
            row_type=draw(st.sampled_from(TRAINED_TYPES)),
        )
        access = Access(
            pooling=draw(numbers),
            zipf_a=draw(numbers),
            zipf_q=draw(numbers),
            active=draw(st.none() | st.integers(1, 10**9)),
        )
        found.append((Workload(table=table, access=access), kind))
    return found


def flat(workload, kind):
    """A table as people write it."""
    table, access = workload.table, workload.access
    made = {"table_id": table.name, "num_rows": table.rows, "dim": table.dim, "pooling": access.pooling}
    made |= {"zipf_a": access.zipf_a, "zipf_q": access.zipf_q, "active": access.active, "row_type": str(table.row_type)}
    return made | {"optimizer": kind, "features": list(table.features), "pooling_mode": str(table.pooling)}


@pytest.fixture
def put(tmp_path):
    """A file with a text, or bytes."""

    def write(text, name="tables.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@given(listed=workload_lists(), layout=st.sampled_from(["csv", "tsv", "json", "workloads"]))
def test_what_is_written_is_read(listed, layout, tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs") / f"tables.{layout}"
    if layout in ("csv", "tsv"):
        lines = [flat(*one) for one in listed]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(lines[0]), delimiter="," if layout == "csv" else "\t")
        writer.writeheader()
        writer.writerows(line | {"features": ";".join(line["features"])} for line in lines)
        path.write_text(text.getvalue())
    elif layout == "json":
        path.write_text(json.dumps([flat(*one) for one in listed]))
    else:
        path.write_bytes(msgspec.json.encode([workload for workload, _ in listed]))
    found = read_tables(path)
    assert found.workloads == tuple(workload for workload, _ in listed)
    assert found.notes == ()


def test_other_names_of_columns_and_defaults(put):
    found = read_tables(
        put("pooling,table_id,num_rows,zipf_alpha,bin_0,bin_1\n 3 ,17,100.0,1.5,0,0\n\n2,b,2e3,,0,0\n"), dim=8
    )
    first, second = found.workloads
    assert first == Workload(table=Table(name="t17", rows=100, dim=8), access=Access(pooling=3.0, zipf_a=1.5))
    assert second == Workload(table=Table(name="b", rows=2000, dim=8), access=Access(pooling=2.0))
    assert found.notes == (
        "columns bin_0, bin_1: not used",
        "2 of 2 tables give no dim: 8 is used",
        "tables named by a number get the prefix t: 17 is t17",
    )


def test_a_dim_in_the_file_counts(put):
    path = put("name,rows,dim,pooling\na,10,4,1\nb,10,,1\n")
    assert [w.table.dim for w in read_tables(path, dim=64).workloads] == [4, 64]


def test_a_ratio_counts_where_there_is_no_curve(put):
    path = put("name,rows,dim,pooling,zipf_a,unique_ratio\na,10,4,1,1.2,0.5\nb,10,4,1,,0.25\n")
    found = read_tables(path)
    assert [(w.access.zipf_a, w.access.unique_ratio) for w in found.workloads] == [(1.2, None), (0.0, 0.25)]
    assert found.notes == ("unique_ratio: ignored where zipf_a is given, which holds for batches of any size",)


def test_an_optimizer_may_be_an_object(put):
    text = '[{"name": "a", "rows": 10, "dim": 4, "pooling": 1, "optimizer": {"kind": "adam", "lr": 0.5}}]'
    assert read_tables(put(text, "a.json")).workloads[0].table.optimizer == Adam(lr=0.5)


def test_what_inspect_says_is_read(put):
    column = {
        "name": "user.id",
        "role": "sparse",
        "table_rows": 125,
        "distinct": 100,
        "table_dim": 16,
        "top_share": 0.3,
    }
    card = {"source": "x", "columns": [{"name": "label", "role": "label"}, column | {"mean_length": 2.5}]}
    workload = read_tables(put(json.dumps(card), "card.json")).workloads[0]
    assert workload.table == Table(name="user_id", rows=125, dim=16)
    assert (workload.access.pooling, workload.access.active) == (2.5, 100)
    assert workload.access.zipf_a > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tables.csv: the file is empty"),
        ("\n \n", "tables.csv: the file is empty"),
        (HEAD, "tables.csv: a header without tables"),
        (
            "name,dim,pooling\na,1,1\n",
            "tables.csv, line 1: no column 'rows' or 'num_rows'; there are name, dim, pooling",
        ),
        ("name,num_row,dim,pooling\na,1,1,1\n", "no column 'rows' or 'num_rows', but 'num_row'; there are name,"),
        ("name,rows,dim,poolling\na,1,1,1\n", "no column 'pooling', but 'poolling'; there are"),
        ("name,rows,rows,dim,pooling\na,1,1,1,1\n", "tables.csv, line 1: column 'rows' appears twice"),
        (HEAD + "a,ten,4,1\n", "tables.csv, line 2, column 'rows': 'ten': expected a whole number of at least 1"),
        (
            HEAD + "a,1,4,1\nb,-3,4,1\n",
            "tables.csv, line 3, column 'rows': '-3': expected a whole number of at least 1",
        ),
        (HEAD + "a,0,4,1\n", "line 2, column 'rows': '0': expected a whole number of at least 1"),
        (HEAD + "a,1.5,4,1\n", "line 2, column 'rows': '1.5': expected a whole number"),
        (HEAD + "a,1_0,4,1\n", "line 2, column 'rows': '1_0': expected a whole number"),
        (HEAD + "a,\u0661,4,1\n", "line 2, column 'rows': '\u0661': expected a whole number"),
        (HEAD + "a,nan,4,1\n", "line 2, column 'rows': 'nan': expected a whole number"),
        (HEAD + "a,1e400,4,1\n", "line 2, column 'rows': '1e400': expected a whole number"),
        (HEAD + f"a,{10**30},4,1\n", "line 2, column 'rows': '1000"),
        (HEAD + f"a,{2**41},4,1\n", "tables.csv, line 2: table 'a' has 2199023255552 rows: expected fewer than 2**40"),
        (
            HEAD + "a,1,,1\n",
            "line 2, column 'dim': is empty: expected a whole number of at least 1, or --dim for all tables",
        ),
        (HEAD + "a,1,4,\n", "line 2, column 'pooling': is empty: expected a finite number that is not negative"),
        (HEAD + "a,1,4,-1\n", "line 2, column 'pooling': '-1': expected a finite number that is not negative"),
        (HEAD + "a,1,4,inf\n", "line 2, column 'pooling': 'inf': expected a finite number"),
        (HEAD + "a,1,4,1\n\nb,1,4,1\na,2,4,1\n", "tables.csv, line 5: table 'a' is also in line 2: expected each"),
        (HEAD + "t1,1,4,1\n1,1,4,1\n", "tables.csv, line 3: table 't1' is also in"),
        (
            HEAD + "a.b,1,4,1\n",
            "tables.csv, line 2: table name 'a.b': it has a dot: expected a name without dots and slashes",
        ),
        (HEAD + ",1,4,1\n", "line 2, column 'name': is empty: expected a name"),
        (HEAD + "a,1,4,1,9\n", "tables.csv, line 2: 5 cells: expected 4, as the header has"),
        (HEAD + "a,1,4\n", "tables.csv, line 2: 3 cells: expected 4"),
        (HEAD + 'a,1,4,"1\n', "tables.csv, line 2: not CSV: unexpected end of data"),
        (HEAD.encode() + b"\xff,1,4,1\n", "tables.csv, line 2: byte 0xff is not UTF-8"),
        (
            "name,rows,dim,pooling,row_type\na,1,4,1,fp23\n",
            "'fp23': expected one of fp32, fp16, bf16, int8; did you mean 'fp32'?",
        ),
        ("name,rows,dim,pooling,optimizer\na,1,4,1,adm\n", "column 'optimizer': 'adm': expected one of sgd, adagrad"),
        (
            "name,rows,dim,pooling,unique_ratio\na,1,4,1,2\n",
            "line 2: unique_ratio=2.0: expected more than 0 and at most 1",
        ),
        (
            "name,rows,dim,pooling,active\na,1,4,1,0\n",
            "line 2, column 'active': '0': expected a whole number of at least 1",
        ),
        ("name,rows,dim,pooling,features\na,1,4,1,x;x\n", "line 2: table 'a' names a feature twice: x, x"),
        ('[{"name": "a"', "tables.csv, line 1: not JSON: Input data was truncated"),
        ('[\n{"name": "a",\n "rows": NaN}]', "tables.csv, line 3: not JSON: "),
        ("[]", "tables.csv: an empty list: expected a list of objects"),
        ("{}", "tables.csv: dict: expected a list of objects"),
        ("[3]", "tables.csv, entry 1: 3: expected an object"),
        ('[{"name": "a", "rows": 1, "dim": 4}]', "tables.csv, entry 1: no column 'pooling'; there are name, rows, dim"),
        (
            '[{"name": "a", "rows": true, "dim": 4, "pooling": 1}]',
            "entry 1, column 'rows': True: expected a whole number",
        ),
        ('[{"name": ["a"], "rows": 1, "dim": 4, "pooling": 1}]', "entry 1, column 'name': ['a']: expected a name"),
        ('[{"name": "a", "rows": 1, "dim": 4, "pooling": null}]', "entry 1, column 'pooling': is empty"),
        (
            '[{"name": "a", "rows": 1, "dim": 4, "pooling": 1, "features": 3}]',
            "column 'features': 3: expected names of features",
        ),
        (
            '[{"name": "a", "rows": 1, "dim": 4, "pooling": 1, "optimizer": {"kind": "x"}}]',
            "entry 1: Invalid value 'x'",
        ),
        ('[{"table": {"name": "a", "rows": 1}}]', "tables.csv, entry 1: Object missing required field `dim`"),
        ('{"columns": []}', "tables.csv: no column of ids"),
    ],
)
def test_what_is_wrong_is_named(put, text, message):
    with pytest.raises(SpecError, match=re.escape(message)) as found:
        read_tables(put(text))
    assert "\n" not in str(found.value)


def test_no_file_is_an_error_of_the_file(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        read_tables(tmp_path / "none.csv")


def test_many_tables_are_read_with_little():
    first = read_tables(MADE_UP, dim=64)
    assert len(first.workloads) == 856
    assert len(first.notes) == 4
    code = f"""
import sys
from rowwise.planning.planner.inputs import read_tables
read_tables({str(MADE_UP)!r}, dim=8)
print([name for name in ("torch", "scipy", "pyarrow", "pandas") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.slow
def test_many_tables_are_read_quickly():
    """In processor time; some runs may be disturbed."""
    taken_s = []
    for _ in range(5):
        begin_s = time.process_time()
        read_tables(MADE_UP, dim=64)
        taken_s.append(time.process_time() - begin_s)
    assert min(taken_s) < 0.5

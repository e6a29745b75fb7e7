"""Text files as their owners write them, beside what pandas reads of them."""

import bz2
import gzip
import io
import lzma
import math
import pickle
import zipfile

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from rowwise import DataError
from rowwise.base.storage.read_cache import CacheFolder
from rowwise.ingest import CsvReader, Dialect, ParquetReader
from rowwise.ingest.datasets.files import open_files, read_settled
from rowwise.ingest.dialect import find_encoding, find_heading, find_layout
from rowwise.ingest.lines import parse_lines
from rowwise.ingest.plain_copy import plain_copy
from rowwise.ingest.union import widest


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def rows_of(reader):
    reader, table = read_settled(reader, read_all)
    return reader, table.to_pylist()


def read_all(reader):
    names = reader.schema.names
    return pa.concat_tables([reader.read(split, names) for split in reader.splits()])


def opened(tmp_path, text, name="a.csv", dialect=None):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return rows_of(open_files(tmp_path / name, dialect))


def as_pandas(content, **how):
    frame = pd.read_csv(io.BytesIO(content if isinstance(content, bytes) else content.encode()), **how)
    return [{k: None if pd.isna(v) else v for k, v in row.items()} for row in frame.to_dict("records")]


TEXT = "label,user,price\n1,u1,2.5\n0,ü,3\n\n1,u3,4.5\n"
ZIPPED = io.BytesIO()
with zipfile.ZipFile(ZIPPED, "w") as archive:
    archive.writestr("inside.csv", TEXT)


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        TEXT.replace("\n", "\r\n").encode() + b"\r\n\r\n",
        TEXT.replace("\n", "\r").encode(),
        ("\n\n" + TEXT).encode("utf-8-sig"),
        TEXT.encode("utf-16"),
        TEXT.encode("utf-16-be"),
        TEXT.encode("cp1252"),
        gzip.compress(TEXT.encode()),
        gzip.compress(TEXT[:20].encode()) + gzip.compress(TEXT[20:].encode()),
        pa.compress(TEXT.encode(), "zstd", asbytes=True),
        bz2.compress(TEXT.encode("utf-16")),
        lzma.compress(TEXT.encode()),
        ZIPPED.getvalue(),
    ],
    ids=["plain", "crlf", "cr", "bom", "utf-16", "be", "cp1252", "gz", "two gz", "zst", "bz2", "xz", "zip"],
)
def test_packed_and_encoded(tmp_path, content):
    reader, rows = opened(tmp_path, content)
    assert rows == as_pandas(TEXT)
    assert read_all(pickle.loads(pickle.dumps(reader))).to_pylist() == rows
    again = CsvReader(tmp_path / "a.csv", reader.dialect)  # as a recipe has it
    assert (again.dialect, read_all(again).to_pylist()) == (reader.dialect, rows)


LARGE = "1844674407370955161"
GERMAN = "Tag;Umsatz;Preis;Menge;Anteil\n1;1.234,50 €;2,5;1.000;3 %\n2;12,00 €;3,75;20;4,5 %\n"


@pytest.mark.parametrize(
    ("text", "columns", "want"),
    [
        (GERMAN, ["Umsatz", "Preis", "Menge", "Anteil"], [[1234.5, 12.0], [2.5, 3.75], [1000, 20], [3.0, 4.5]]),
        ('a,b\n"$1,234.50",12%\n-$3.00,3%\n', ["a", "b"], [[1234.5, -3.0], [12, 3]]),
        ("a,b\n1'234.50,x\n12,y\n", ["a"], [[1234.5, 12.0]]),
        ("a;b\nEUR 1 234,5;x\n2,0;y\n", ["a"], [[1234.5, 2.0]]),
        ("a,b\nAB1,1\nAB2,2\n", ["a"], [["AB1", "AB2"]]),
        (
            "id,y\n18446744073709551615,1\n18446744073709551614,0\n",
            ["id"],
            [["18446744073709551615", "18446744073709551614"]],
        ),
    ],
    ids=["german", "dollars", "swiss", "spaces", "names", "large"],
)
def test_numbers(tmp_path, text, columns, want):
    reader, rows = opened(tmp_path, text)
    assert [[row[name] for row in rows] for name in columns] == want
    assert read_all(CsvReader(tmp_path / "a.csv", reader.dialect)).to_pylist() == rows


def test_words_for_missing_numbers(tmp_path):
    reader, rows = opened(
        tmp_path, "y,x,t,land\n1,NA,2024-01-01,NA\n0,2,NA,DE\n1,null,2024-01-03,NA\n0,-,2024-01-04,\n"
    )
    assert [row["x"] for row in rows] == [None, 2, None, None]
    assert [row["land"] for row in rows] == ["NA", "DE", "NA", None]  # Namibia
    assert rows[1]["t"] is None
    assert set(reader.dialect.missing) == {"", "NA", "null", "-"}


def test_spaces_around_values_are_left_out(tmp_path):
    text = "y,dm,x\nckd,no,1\nckd\t,\tno,\t?\n notckd, yes ,3 \nckd, ,4\n"
    reader, rows = opened(tmp_path, text)
    assert [tuple(row.values()) for row in rows] == [
        ("ckd", "no", 1), ("ckd", "no", None), ("notckd", "yes", 3), ("ckd", None, 4),
    ]  # fmt: skip
    assert reader.dialect.trim


@pytest.mark.parametrize(
    ("text", "names", "first"),
    [
        ("1,0.5,a\n0,0.7,b\n", ["c0", "c1", "c2"], {"c0": 1, "c1": 0.5, "c2": "a"}),
        ("p,x\ne,x\np,b\ne,b\n", ["c0", "c1"], {"c0": "p", "c1": "x"}),
        (
            "39, State, ?, <=50K\n50, Self, 7, >50K\n",
            ["c0", "c1", "c2", "c3"],
            {"c0": 39, "c1": "State", "c2": None, "c3": "<=50K"},
        ),
        (",label,user\n0,1,a\n1,0,b\n", ["label", "user"], {"label": 1, "user": "a"}),
        ("Unnamed: 0,label\n7,1\n5,0\n", ["label"], {"label": 1}),
        ('"label" "user"\n"1" 1 "a"\n"2" 0 "b"\n', ["label", "user"], {"label": 1, "user": "a"}),
        ("label,,user\n1,x,a\n0,y,b\n", ["label", "c1", "user"], {"label": 1, "c1": "x", "user": "a"}),
        ("label,user,\n1,a,\n0,b,\n", ["label", "user"], {"label": 1, "user": "a"}),
        ("label,user\n1,a,\n0,b,\n", ["label", "user"], {"label": 1, "user": "a"}),
        ("x,y,x\n1,2,3\n4,5,6\n", ["x", "y", "x_2"], {"x": 1, "y": 2, "x_2": 3}),
        ("Age (years) , user name\n1,b\n2,c\n", ["Age (years)", "user name"], {"Age (years)": 1, "user name": "b"}),
        ("a\x01b\n1\x01x,y\n2\x01z\n", ["a", "b"], {"a": 1, "b": "x,y"}),
        ("word\nhello\nworld\n", ["word"], {"word": "hello"}),
        ('a,b\n1,5" pipe\n2,"x"\n', ["a", "b"], {"a": 1, "b": '5" pipe'}),
        ('a,b\n1,"say \\"hi\\", ok"\n2,"x"\n', ["a", "b"], {"a": 1, "b": 'say "hi", ok'}),
    ],
    ids=repr,
)
def test_headings(tmp_path, text, names, first):
    reader, rows = opened(tmp_path, text, "a.txt")
    assert reader.schema.names == names
    assert rows[0] == first
    assert len(rows) == len(text.splitlines()) - bool(reader.dialect.header)


def test_short_lines_and_long_ones(tmp_path):
    _, rows = opened(tmp_path, "a,b,c\n1,x,2\n0,y\n3\n")
    assert rows == as_pandas("a,b,c\n1,x,2\n0,y\n3\n")
    with pytest.raises(DataError, match=r"a.csv: line 4: 4"):
        opened(tmp_path, "a,b,c\n1,x,2\n\n0,y,1,2\n")
    with pytest.raises(DataError, match=r"a.csv: line 3"):
        opened(tmp_path, 'a,b\nx,1\n"y,2\nz,3\n')


@pytest.mark.parametrize("step", [1, 7, 50, 1 << 20])
def test_splits_of_quoted_line_breaks_begin_at_rows(tmp_path, step):
    frame = pd.DataFrame({"a": range(60), "text": [f'one\n"{k}", two\r\n' if k % 3 else f"{k}" for k in range(60)]})
    frame.to_csv(tmp_path / "a.csv", index=False)
    reader = CsvReader(tmp_path / "a.csv", Dialect(split_bytes=step))
    assert reader.dialect.line_breaks
    assert read_all(reader)["text"].to_pylist() == frame["text"].tolist()
    assert (len(reader.splits()) > 1) == (step < 1 << 20)


CELLS = st.text(st.sampled_from('ab1,;\n" é'), max_size=4)


@settings(deadline=None)
@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=12), st.sampled_from(",;\t|"), st.integers(1, 40))
def test_what_pandas_writes_is_read(tmp_path_factory, cells, delimiter, step):
    path = tmp_path_factory.mktemp("made") / "a.csv"
    frame = pd.DataFrame({"n": range(len(cells)), "p": [a for a, _ in cells], "q": [b for _, b in cells]})
    frame.to_csv(path, index=False, sep=delimiter)
    types = {"n": "int64", "p": "string", "q": "string"}
    how = Dialect(delimiter=delimiter, split_bytes=step, types=types, trim=False, escape=False, header=True)
    got = read_all(CsvReader(path, how)).to_pylist()
    assert got == [{"n": k, "p": a or None, "q": b or None} for k, (a, b) in enumerate(cells)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.floats(-1e6, 1e6)), min_size=2, max_size=9), st.sampled_from(",;\t|"))
def test_how_numbers_are_written_is_found(tmp_path_factory, rows, delimiter):
    path, decimal = tmp_path_factory.mktemp("made") / "a.csv", "." if delimiter == "," else ","
    pd.DataFrame(rows, columns=["label", "x"]).round(2).to_csv(path, index=False, sep=delimiter, decimal=decimal)
    reader, found = rows_of(CsvReader(path))
    assert reader.dialect.delimiter == delimiter
    assert all(math.isclose(row["x"], round(x, 2), abs_tol=1e-9) for row, (_, x) in zip(found, rows, strict=True))


@pytest.mark.parametrize(
    ("first", "last", "kind", "value"),
    [
        ("1", "1.5", "double", 1.5),
        ("1", "x", "string", "x"),
        ("1", "NA", "int64", None),
        ("1", '"1,234"', "int64", 1234),
        ("", "7", "int64", 7),
        ("x", "é", "string", "é"),
        ("x", '"q\nr"', "string", "q\nr"),
    ],
)
@pytest.mark.usefixtures("short_head")
def test_what_comes_after_the_first_megabyte(tmp_path, first, last, kind, value):
    text = "a,b\n" + f"{first},1\n" * 400 + f"{last},2\n"
    reader, table = read_settled(CsvReader(_written(tmp_path, text.encode("cp1252"))), read_all)
    assert (str(table.schema.field("a").type), table.num_rows, table["a"][-1].as_py()) == (kind, 401, value)
    assert kind == "int64" or first == "x" or any("'a'" in note for note in reader.notes)
    assert read_all(CsvReader(tmp_path / "a.csv", reader.dialect)).equals(table)


def _written(tmp_path, content):
    (tmp_path / "a.csv").write_bytes(content)
    return tmp_path / "a.csv"


def test_copies_are_made_once_and_bounded(tmp_path):
    place = CacheFolder(tmp_path / "copies", 3_000_000)
    for name in "abc":
        (tmp_path / name).write_bytes(gzip.compress(name.encode() * 999_999 + b"\n"))
    made = [plain_copy(str(tmp_path / name), "utf-8", place) for name in "abc"]
    assert [copy.exists() for copy in made] == [True, True, True]
    assert plain_copy(str(tmp_path / "a"), "utf-8", place) == made[0]
    (tmp_path / "d").write_bytes(gzip.compress(b"d" * 1_500_000))
    plain_copy(str(tmp_path / "d"), "utf-8", place)
    assert made[0].exists()  # it was used after b and c
    assert not made[1].exists()
    (tmp_path / "e").write_bytes(gzip.compress(b"e" * 3_100_000))
    with pytest.raises(DataError, match=r"3,000,000 bytes .*unpacked_gb"):
        plain_copy(str(tmp_path / "e"), "utf-8", place)
    assert sum(path.stat().st_size for path in place.folder.iterdir()) <= 3_000_000


def test_a_copy_that_is_gone_is_made_again(tmp_path):
    reader, rows = opened(
        tmp_path, gzip.compress(TEXT.encode()), "a.csv.gz", Dialect(unpack_to=str(tmp_path / "copies"))
    )
    (copy,) = (tmp_path / "copies").glob("*.text")
    copy.unlink()
    assert read_all(reader).to_pylist() == rows


def test_folders(tmp_path):
    for day in ("2024-01-01", "2024-01-02"):
        (tmp_path / f"day={day}").mkdir()
        (tmp_path / f"day={day}" / "part-0.csv").write_text("label,user\n1,a\n")
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / ".part-0.csv.crc").write_bytes(b"crc")
    (tmp_path / "README.txt").write_text("what is here")
    _, rows = rows_of(open_files(tmp_path))
    assert [row["day"] for row in rows] == ["2024-01-01", "2024-01-02"]
    pq.write_table(pa.table({"label": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"Parquet, .*a.parquet, and 2"):
        open_files(tmp_path)


def test_options_win(tmp_path):
    text = "2019;2020\n1;2\n"
    assert opened(tmp_path, text)[0].schema.names == ["c0", "c1"]
    assert opened(tmp_path, text, dialect=Dialect(header=True))[0].schema.names == ["2019", "2020"]
    assert opened(tmp_path, text, dialect=Dialect(names=("a", "b")))[1][0] == {"a": 2019, "b": 2020}
    assert opened(tmp_path, text, dialect=Dialect(delimiter=",", header=True))[0].schema.names == ["2019;2020"]
    assert opened(tmp_path, "a\n1\n", dialect=Dialect(types={"a": "string"}))[1] == [{"a": "1"}]
    assert opened(tmp_path, "a\né\n".encode("cp1251", "replace"), dialect=Dialect(encoding="utf-8"))[1] == [{"a": "?"}]
    with pytest.raises(DataError, match=r"line 1 is not UTF-8|is not utf-8"):
        opened(tmp_path, b"a\n\xe9\n", dialect=Dialect(encoding="utf-8"))


def test_facts_of_bytes():
    assert find_encoding("a,é\n".encode()[:4], whole=False) == "utf-8"  # cut inside a character
    assert find_encoding(b"a,\x81\n", whole=True) == "latin-1"
    assert find_layout(b"a;b\n1,5;2\n", Dialect()).delimiter == ";"
    assert find_heading([["1", "2"]], Dialect()).header is False
    assert widest(pa.int64(), pa.float64()) == pa.float64()
    assert widest(pa.date32(), pa.timestamp("s")) == pa.timestamp("s")
    assert widest(pa.bool_(), pa.int64()) is None


KINDS = [
    (pa.int32(), pa.int64(), pa.int64(), 1),
    (pa.int64(), pa.float64(), pa.float64(), 1),
    (pa.uint32(), pa.int32(), pa.int64(), 1),
    (pa.float32(), pa.int64(), pa.float64(), 1),
    (pa.null(), pa.int64(), pa.int64(), None),
    (pa.dictionary(pa.int32(), pa.string()), pa.string(), pa.string(), "x"),
    (pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("ns"), 1),
    (pa.list_(pa.int32()), pa.list_(pa.int64()), pa.list_(pa.int64()), [1]),
]


@pytest.mark.parametrize(("one", "other", "both", "value"), KINDS, ids=repr)
@pytest.mark.parametrize("turned", [False, True])
def test_types_of_parquet_files_widen(tmp_path, one, other, both, value, turned):
    for name, kind in zip("ab", (other, one) if turned else (one, other), strict=True):
        pq.write_table(pa.table({"x": pa.array([value], kind)}), tmp_path / f"{name}.parquet")
    reader = ParquetReader(tmp_path)
    assert reader.schema.field("x").type == both
    assert read_all(reader)["x"].type == both


def test_parquet_columns_come_and_go(tmp_path):
    pq.write_table(pa.table({"a": [1], "old": ["x"], "who": ["u"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [2], "new": [0.5], "who": [7]}), tmp_path / "b.parquet")
    reader = ParquetReader(tmp_path)
    first, second = (reader.read(split, ("a", "old", "new")).to_pylist()[0] for split in reader.splits())
    assert (first, second) == ({"a": 1, "old": "x", "new": None}, {"a": 2, "old": None, "new": 0.5})
    assert sum("it has no value there" in note for note in reader.notes) == 2
    with pytest.raises(DataError, match=r".*'who' holds int64, but"):
        reader.read(reader.splits()[1], ("who",))


def test_fields_of_structs_are_columns(tmp_path):
    rows = [{"a": 1, "in": {"b": "x", "c": {"d": 2}}}, {"a": 2, "in": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    reader = ParquetReader(tmp_path / "a.parquet")
    assert reader.schema.names == ["a", "in.b", "in.c.d"]
    assert read_all(reader).to_pylist() == [{"a": 1, "in.b": "x", "in.c.d": 2}, {"a": 2, "in.b": None, "in.c.d": None}]
    pieces = list(reader.pieces(reader.splits()[0], ("in.c.d",), 1))
    assert [piece.to_pylist() for piece in pieces] == [[{"in.c.d": 2}], [{"in.c.d": None}]]


def test_arrows_threads_hold_no_memory_of_python():
    """One that released it as the process ended killed the process."""
    data = bytearray(b"1,2\n3,4")

    class Names(tuple):
        def __iter__(self):  # when Arrow has its input
            data.append(ord("5"))  # is refused while anybody holds the memory
            return super().__iter__()

    table = parse_lines(data, Names(("a", "b")), Dialect(quotes=False), None, ("a", "b"))
    assert (table.to_pylist(), data[-1:]) == ([{"a": 1, "b": 2}, {"a": 3, "b": 4}], b"5")

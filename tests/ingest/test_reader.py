"""What every Reader promises, checked on all of them, and what each says of bad files."""

import importlib
import json
import pickle

import pyarrow as pa
import pyarrow.csv
import pytest
from pyarrow import parquet as pq

from rowwise import DataError
from rowwise.ingest import CsvReader, Dialect, FrameReader, GeneratorReader, ParquetReader
from rowwise.ingest.arrow_files import ArrowReader

ROWS = 1000


def make(first, count):
    rows = range(first, first + count)
    return pa.table(
        {
            "label": pa.array([r % 2 for r in rows], pa.int64()),
            "x": pa.array([r / 8 for r in rows], pa.float64()),
            "word": pa.array([f"wört {r % 7}" for r in rows], pa.string()),
        }
    )


def parquet_reader(folder):
    for index in range(3):
        pq.write_table(make(index * 400, min(400, ROWS - index * 400)), folder / f"{index}.parquet", row_group_size=150)
    (folder / "_SUCCESS").write_text("")
    return ParquetReader(folder)


def csv_reader(folder, **dialect):
    for index in range(2):
        pyarrow.csv.write_csv(make(index * 500, 500), folder / f"{index}.csv")
    return CsvReader(folder, Dialect(split_bytes=777, **dialect))


def tsv_reader(folder):
    """Without a header, a last line without an end, and lines that end as Windows has it."""
    lines = ["\t".join(map(str, row.values())) for row in make(0, ROWS).to_pylist()]
    (folder / "a.tsv").write_bytes("\r\n".join(lines).encode())
    return CsvReader(folder / "a.tsv", Dialect(delimiter="\t", names=("label", "x", "word"), split_bytes=1000))


def frame_reader(folder):
    return FrameReader(pa.concat_tables([make(0, 300), make(300, 700)]), split_rows=128)


def generator_reader(folder):
    return GeneratorReader(make, ROWS, split_rows=300)


def arrow_reader(folder):
    """As `datasets` saves it: two files of small batches, and state.json with their names."""
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, rows in zip(names, (make(0, 600), make(600, 400)), strict=True):
        with pa.ipc.new_stream(folder / name, rows.schema) as file:
            file.write_table(rows, max_chunksize=100)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "all"})
    )
    return arrow_again(ArrowReader(folder, split_rows=256))


ALL = (parquet_reader, csv_reader, tsv_reader, frame_reader, generator_reader, arrow_reader)


@pytest.fixture(params=ALL, ids=lambda f: f.__name__)
def reader(request, tmp_path):
    return request.param(tmp_path)


def test_all_rows_in_order(reader):
    tables = [reader.read(split, reader.schema.names) for split in reader.splits()]
    assert len(tables) > 2
    assert pa.concat_tables(tables).to_pylist() == make(0, ROWS).to_pylist()


def test_reading_is_pure(reader):
    splits = reader.splits()
    forth = [reader.read(split, ("x", "word")) for split in splits]
    back = [reader.read(split, ("x", "word")) for split in reversed(splits)]
    assert all(a.equals(b) for a, b in zip(forth, reversed(back), strict=True))
    assert reader.splits() == splits


def test_columns_come_as_asked_for(reader):
    for split in reader.splits()[:2]:
        table = reader.read(split, ("word", "label"))
        assert table.schema.names == ["word", "label"]
        assert all(table.schema.field(name).type == reader.schema.field(name).type for name in ("word", "label"))


def test_a_missing_column_is_named_with_the_nearest(reader):
    split = reader.splits()[0]
    with pytest.raises(DataError, match=r"you mean 'label'. There") as caught:
        reader.read(split, ("lable",))
    assert str(caught.value).startswith(split.source)


def test_splits_say_where_a_row_is(reader):
    split = reader.splits()[1]
    assert split.locate_row(3).startswith(f"{split.source}: row ")
    if split.first_row is not None:
        label = reader.read(split, ("x",))["x"][3].as_py()
        known = split.first_row + (400 if split.source.endswith("1.parquet") else 0)
        assert label == (known + 3) / 8


def test_a_pattern_of_files(tmp_path):
    parquet_reader(tmp_path)
    reader = ParquetReader(tmp_path / "[12].parquet")
    assert {split.source for split in reader.splits()} == {str(tmp_path / f"{i}.parquet") for i in (1, 2)}


def test_only_needed_columns_are_read(tmp_path):
    reader = parquet_reader(tmp_path)
    path = tmp_path / "0.parquet"
    data = bytearray(path.read_bytes())
    word = pq.read_metadata(path).row_group(0).column(2)
    begin = word.dictionary_page_offset or word.data_page_offset
    data[begin : begin + word.total_compressed_size] = bytes(word.total_compressed_size)
    path.write_bytes(data)
    split = reader.splits()[0]
    assert reader.read(split, ("x",)).num_rows == 150
    with pytest.raises(DataError, match=r"0.parquet: cannot be read"):
        reader.read(split, ("word",))


def test_truncated_parquet(tmp_path):
    pq.write_table(make(0, 100), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"read as Parquet: .*footer"):
        ParquetReader(tmp_path)


@pytest.mark.parametrize("kind", [ParquetReader, CsvReader])
def test_no_such_file(kind, tmp_path):
    with pytest.raises(DataError, match="nowhere: no such file"):
        kind(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no file in it ends with .(parquet|csv)"):
        kind(tmp_path)
    with pytest.raises(DataError, match="file matches the pattern"):
        kind(tmp_path / "*.x")


@pytest.mark.parametrize(("kind", "name"), [(ParquetReader, "a.parquet"), (CsvReader, "a.csv")])
def test_empty_file(kind, name, tmp_path):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=f"{name}: the file is empty"):
        kind(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", "no row below the header"),
        ("a,b\n\n", "no row"),
    ],
    ids=repr,
)
def test_headers_that_are_refused(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        CsvReader(tmp_path / "a.csv")


def test_csv_headers_differ(tmp_path):
    (tmp_path / "0.csv").write_text("a,b\n1,2\n")
    (tmp_path / "1.csv").write_text("c,a\n0.5,2\n")
    reader = CsvReader(tmp_path)
    rows = [row for split in reader.splits() for row in reader.read(split, ("a", "b", "c")).to_pylist()]
    assert rows == [{"a": 1, "b": 2, "c": None}, {"a": 2, "b": None, "c": 0.5}]
    assert [note.partition(" ")[2].partition(",")[0] for note in reader.notes] == ["lacks b", "alone has c"]


@pytest.mark.usefixtures("short_head")
def test_csv_types_are_those_of_the_head(tmp_path):
    (tmp_path / "a.csv").write_text("a\n" + "1\n" * 600 + "x\n")
    reader = CsvReader(tmp_path)
    with pytest.raises(DataError, match="602, column 'a': 'x'"):
        reader.read(reader.splits()[0], ("a",))
    assert CsvReader(tmp_path, Dialect(types={"a": "string"})).schema.field("a").type == pa.string()


def test_csv_missing_values(tmp_path):
    (tmp_path / "a.csv").write_text("\ufeffa,b,c\n1,,\n,NA,\n")
    reader = CsvReader(tmp_path)
    rows = reader.read(reader.splits()[0], ("a", "b", "c")).to_pylist()
    assert rows == [{"a": 1, "b": None, "c": None}, {"a": None, "b": "NA", "c": None}]
    assert reader.schema.field("c").type == pa.string()


def test_csv_quotes(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n"x, ""y""",1\n"two\nlines",2\n')
    reader = CsvReader(path, Dialect(line_breaks=False))
    with pytest.raises(DataError, match=r"a.csv: line 3"):
        reader.read(reader.splits()[0], ("a",))
    reader = CsvReader(path)
    assert reader.read(reader.splits()[0], ["a"])["a"].to_pylist() == ['x, "y"', "two\nlines"]
    path.write_text('a,b\n"x, ""y""",1\n')
    reader = CsvReader(path)
    assert reader.read(reader.splits()[0], ("a",))["a"].to_pylist() == ['x, "y"']


def test_csv_that_cannot_be_unpacked(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"a.csv.gz: cannot"):
        CsvReader(tmp_path / "a.csv.gz")


class Stream:
    """What polars and pandas frames look like from here."""

    def __init__(self, table):
        self.table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


def test_frames_of_any_kind():
    reader = FrameReader(Stream(make(0, 20)))
    assert reader.read(reader.splits()[0], ("x",)).equals(make(0, 20).select(["x"]))
    assert FrameReader(make(0, 0)).splits() == ()
    with pytest.raises(DataError, match="table of pyarrow, pandas"):
        FrameReader({})


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_frames_of_other_packages(package):
    frames = importlib.import_module(package)
    reader = FrameReader(frames.DataFrame({"id": [3, 4], "word": ["a", None]}))
    assert reader.read(reader.splits()[0], ("id", "word")).to_pylist() == [
        {"id": 3, "word": "a"},
        {"id": 4, "word": None},
    ]


def test_saved_datasets_that_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"no state.json in it: expected a folder of Dataset.save_to_disk"):
        ArrowReader(tmp_path)
    reader = arrow_reader(tmp_path)
    file = tmp_path / "data-00001-of-00002.arrow"
    whole, split = file.read_bytes(), arrow_again(reader).splits()[3]
    with pa.ipc.new_stream(file, make(0, 1).schema) as stream:
        stream.write_table(make(600, 9))
    with pytest.raises(DataError, match=r"00002.arrow: 9 rows, had 256 or more: the file has changed"):
        reader.read(split, ("x",))
    file.write_bytes(whole[:200])
    with pytest.raises(DataError, match=r"00001-of-00002.arrow: cannot be read as a stream of Arrow"):
        ArrowReader(tmp_path)
    with pa.ipc.new_stream(file, make(0, 1).select(["x"]).schema) as stream:
        stream.write_table(make(600, 9).select(["x"]))
    with pytest.raises(DataError, match="its columns differ from those of"):
        ArrowReader(tmp_path)
    file.unlink()
    with pytest.raises(DataError, match=r"00001-of-00002.arrow: the file is gone"):
        ArrowReader(tmp_path)
    for state, message in (
        ("{}", "state.json: .*_data_files"),
        ('{"_data_files": []}', "no file with rows"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "a"}]}', r"selected by indices; .*flatten_indices"),
    ):
        (tmp_path / "state.json").write_text(state)
        with pytest.raises(DataError, match=message):
            ArrowReader(tmp_path)
    parts = tmp_path / "dict"
    (parts / "train").mkdir(parents=True)
    (parts / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (parts / "train/state.json").write_text("{}")
    with pytest.raises(DataError, match=f"a dict of datasets: expected hf:{parts}/train"):
        ArrowReader(parts)


def arrow_again(reader):
    """As another process has it."""
    return pickle.loads(pickle.dumps(reader))


def test_generator_makes_too_few():
    reader = GeneratorReader(lambda first, count: make(0, count // 2), 10, name="mine")
    with pytest.raises(DataError, match=r"5 rows for .0"):
        reader.read(reader.splits()[0], ("x",))

"""`rowwise data bench` as users meet it, and what its numbers are taken to mean."""

import json
import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from pyarrow import csv
from pyarrow import parquet as pq
from small import sections, write_rows
from test_cli import rowwise_cli

from rowwise.ingest.batcher import Batcher, Batching
from rowwise.ingest.bench.measure import PreparationTimes, WorkerSeconds, measure
from rowwise.ingest.bench.packed import unpacking_of
from rowwise.ingest.bench.verdict import PARTS, HintFacts, judge, shares_of, workers_for
from rowwise.ingest.columns import Columns, Sparse
from rowwise.ingest.parquet import ParquetReader
from rowwise.tables.spec import Table

ROWS = 20_000


def clicks(rows=ROWS):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 9, rows)
    starts = np.concatenate([[0], np.cumsum(ids)]).astype(np.int32)
    seen = pa.ListArray.from_arrays(pa.array(starts), pa.array(rng.integers(0, 5000, starts[-1]) << 28))
    columns = {"label": rng.integers(0, 2, rows, np.int8), "price": rng.random(rows, np.float32)}
    words = pa.array([f"w{x}" for x in rng.integers(0, 500, rows)])
    return pa.table(columns | {"user_id": rng.integers(0, 900, rows) << 30, "word": words, "seen_ids": seen})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("bench")
    pq.write_table(clicks(), place / "a.parquet", row_group_size=5000, compression="zstd")
    csv.write_csv(clicks(3000).drop_columns(["seen_ids"]), place / "a.csv")
    maps = pa.array([[(1, 2), (3, 4)]] * 3000, pa.map_(pa.int64(), pa.int64()))
    pq.write_table(clicks(3000).append_column("wide", maps), place / "maps.parquet")
    write_rows(place / "rows.parquet", 2000)
    made = sections(place)
    made["data"]["dataset"] = "parquet:rows.parquet"
    (place / "small.yaml").write_text(yaml.safe_dump(made))
    return place


def verdict(folder, *args):
    done = rowwise_cli("data", "bench", *map(str, args), "--json", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.slow
def test_parquet(folder):
    found = verdict(folder, "a.parquet", "--splits", 2)
    measured = found["measured"]
    assert (measured["splits"], measured["of"], measured["rows"], measured["rows_in"]) == (2, 4, 10_000, 10_000)
    assert measured["codec"] == "zstd"
    assert found["columns"] == 5
    group = pq.read_metadata(folder / "a.parquet").row_group(0)
    size = sum(group.column(leaf).total_compressed_size for leaf in range(group.num_columns))
    assert measured["bytes_wanted"] == pytest.approx(2 * size, rel=0.05)
    assert measured["bytes_read"] >= measured["bytes_wanted"]
    assert found["rows_s_core"] == pytest.approx(measured["rows"] / measured["cpu_s"])
    assert sum(found["shares"].values()) == pytest.approx(1)
    # What is between the parts is little, and each part is its best round, which the whole need not be.
    assert 0.5 < sum(measured["parts"].values()) / measured["wall_s"] < 1.1
    assert found["slowest"] == max(found["shares"], key=found["shares"].get)
    assert set(found["workers"]) == {"100000", "300000", "1000000"}


@pytest.mark.slow
def test_lines(folder):
    found = verdict(folder, "a.csv", "--samples-s", "1.5M")
    assert found["measured"]["rows"] == 3000
    assert found["measured"]["bytes_read"] == (folder / "a.csv").stat().st_size
    assert found["measured"]["parts"]["decompress_s"] == 0
    assert found["hint"].startswith("lines are parsed anew each time: rowwise data convert a.csv DEST")
    assert set(found["workers"]) == {"1500000"}


@pytest.mark.slow
def test_maps(folder):
    hint = verdict(folder, "maps.parquet")["hint"]
    assert hint == (
        "column 'wide' is a map, which is read whole: rowwise data convert maps.parquet DEST makes a column of each key"
    )


@pytest.mark.slow
def test_a_recipe_and_its_own_rows(folder):
    """Columns and transforms are the recipe's; the rows are those that it names, or others."""
    own = verdict(folder, "small.yaml")
    other = verdict(folder, "rows.parquet", "--recipe", "small.yaml")
    assert own["source"] == other["source"] == "rows.parquet"
    assert own["columns"] == other["columns"]
    assert own["measured"]["bytes_encoded"] == other["measured"]["bytes_encoded"]


@pytest.mark.slow
def test_what_people_see(folder):
    done = rowwise_cli("data", "bench", "a.parquet", "--samples-s", "10k", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("a.parquet: 5 columns, 15,000 rows of 3 of 4 splits, best of ")
    for said in ("rows/s a core by CPU time", *PARTS, "MB (zstd), 1.", "1 for 10,000 samples/s", "\nhint        "):
        assert said in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["none.parquet"], "none.parquet: no such file or folder"),
        (
            ["a.parquet", "--samples-s", "fast"],
            "--samples-s fast: expected samples a second, such as 50000, 300k or 1M",
        ),
        (["a.parquet", "--samples-s", "0"], "--samples-s 0: expected"),
        (["a.parquet", "--recipe", "none.yaml"], "none.yaml: no such file: expected a recipe file"),
        (["a.parquet", "--recipe", "small.yaml"], "a.parquet: no column"),
        (["small.yaml", "--recipe", "small.yaml"], "small.yaml and --recipe small.yaml are both recipes"),
        (["words.txt"], "words.txt: the file is empty: expected lines of columns"),
        (["bad.parquet"], "bad.parquet: cannot be read as Parquet"),
        (["numbers.parquet"], "no column of ids: expected at least one; name it: rowwise data inspect --sparse COLUMN"),
    ],
)
def test_mistakes_are_one_line(folder, args, said):
    (folder / "words.txt").write_text("")
    (folder / "bad.parquet").write_bytes(b"no Parquet at all")
    pq.write_table(pa.table({"label": [0, 1], "price": [0.5, 1.5]}), folder / "numbers.parquet")
    done = rowwise_cli("data", "bench", *args, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rowwise: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_mistakes_need_no_torch(folder):
    script = """if True:
        import sys
        from rowwise.cli.main import make_app
        try:
            make_app()(["data", "bench", "none.parquet"])
        except SystemExit:
            sys.exit("torch" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0


def task_of(path):
    sparse = (Sparse(column="user_id"), Sparse(column="word"), Sparse(column="seen_ids"))
    tables = [Table(name=one.column, rows=1000, dim=4) for one in sparse]
    reader = ParquetReader(path)
    return Batcher(reader, Columns(labels=("label",), sparse=sparse), tables, Batching(size=512)).task


@pytest.mark.few(1)
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd", "gzip"])
def test_unpacking_is_a_share(tmp_path, codec):
    pq.write_table(clicks(), tmp_path / "a.parquet", compression=codec)
    task = task_of(tmp_path / "a.parquet")
    found = unpacking_of(task.reader, task.splits[0], task.preparation.names)
    assert found.codec == ("" if codec == "none" else codec)
    assert found.share == 0 if codec == "none" else 0 <= found.share < 1


@pytest.mark.slow
def test_gzip_takes_long_to_unpack(tmp_path):
    pq.write_table(clicks(), tmp_path / "a.parquet", compression="gzip")
    task = task_of(tmp_path / "a.parquet")
    assert unpacking_of(task.reader, task.splits[0], task.preparation.names).share > 0.1


def test_no_threads_are_left_changed(tmp_path):
    pq.write_table(clicks(2000), tmp_path / "a.parquet", row_group_size=500)
    before, told = pa.cpu_count(), []
    measured = measure(task_of(tmp_path / "a.parquet"), 512, 9, 0.0, lambda done, of: told.append((done, of)))
    assert pa.cpu_count() == before
    assert told == [(1, 7), (2, 7)]
    assert (measured.splits, measured.rounds, measured.rows) == (4, 2, 2000)


times = st.floats(1e-6, 1e3)


@st.composite
def measurements(draw):
    parts = WorkerSeconds(**{f"{name}_s": draw(times) for name in PARTS})
    whole = sum(getattr(parts, name) for name in parts.__struct_fields__)
    rows = draw(st.integers(1, 10**9))
    return PreparationTimes(
        splits=draw(st.integers(1, 9)),
        of=draw(st.integers(9, 99)),
        rounds=2,
        rows=rows,
        rows_in=rows,
        wall_s=whole,
        cpu_s=whole,
        parts=parts,
        hand_off_s=draw(times),
        bytes_read=draw(st.integers(0, 10**12)),
        bytes_wanted=draw(st.integers(0, 10**12)),
        bytes_encoded=draw(st.integers(1, 10**12)),
        first_read_s=draw(times),
        codec=draw(st.sampled_from(["", "zstd", "gzip"])),
    )


@given(measurements(), st.booleans(), st.integers(0, 3), st.integers(1, 10**7))
def test_a_verdict_of_anything(measured, lines, texts, speed):
    found = judge(measured, HintFacts(source="a", lines=lines, texts=texts, columns=4), (speed,))
    assert math.isclose(sum(found.shares.values()), 1)
    assert found.shares[found.slowest] == max(found.shares.values())
    assert found.hint
    workers = found.workers[speed]
    # So many keep up with a tenth to spare, and one less would not.
    assert workers * found.rows_s * (1 + 1e-9) >= 1.1 * speed
    assert workers == 1 or (workers - 1) * found.rows_s <= 1.1 * speed * (1 + 1e-9)


def test_hints():
    parts = WorkerSeconds(read_s=1.0, decompress_s=1.0, decode_s=1.0, transform_s=1.0, encode_s=1.0)
    base = PreparationTimes(
        splits=1, of=4, rounds=2, rows=50_000, rows_in=50_000, wall_s=5.0, cpu_s=5.0, parts=parts, hand_off_s=0.1,
        bytes_read=100, bytes_wanted=100, bytes_encoded=10**6, first_read_s=1.0, codec="zstd",
    )  # fmt: skip
    facts = HintFacts(source="a")

    def hint(facts=facts, slow="decode", **changes):
        slow_parts = structs.replace(parts, **{f"{slow}_s": 9.0})
        return judge(structs.replace(base, parts=slow_parts, **changes), facts).hint

    assert "parsed anew" in hint(HintFacts(source="a", lines=True))
    assert "column 'm' is a map" in hint(HintFacts(source="a", maps=("m",)))
    assert "row group is huge (2,000,000 rows, 1 MB" in hint(rows_in=2_000_000)
    assert "row group is huge (50,000 rows, 1,000 MB" in hint(bytes_encoded=10**9)
    assert "has 100 rows only" in hint(rows_in=100)
    assert "2.0 times the bytes wanted" in hint(bytes_read=200)
    assert "not compressed" in hint(slow="read", codec="")
    assert "faster disk" in hint(slow="read")
    assert "zstd takes long to unpack: rowwise data convert a DEST --compression snappy" in hint(slow="decompress")
    assert "gzip takes long to unpack: rowwise data convert a DEST --compression zstd" in hint(
        codec="gzip", slow="decompress"
    )
    assert "gzip takes long" not in hint(codec="gzip")
    assert "snappy takes long to unpack: rowwise data convert a DEST --compression none" in hint(
        codec="snappy", slow="decompress"
    )
    assert "functions of your own" in hint(slow="transform")
    assert "2 columns of text are hashed" in hint(HintFacts(source="a", texts=2), slow="encode")
    assert "fewer ids" in hint(slow="encode")
    assert "leave out columns" in hint()
    assert shares_of(base)["read"] == pytest.approx(0.2)
    assert workers_for(base, 10_000) == 2

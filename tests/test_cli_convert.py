"""`rowwise data convert` as users meet it: its options, its messages, and the memory that it takes."""

import json
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from rowwise.base.errors import SpecError
from rowwise.cli.convert import convert, parse_size
from rowwise.ingest.parquet import ParquetReader


def run(*args):
    command = [sys.executable, "-m", "rowwise", "data", "convert", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def lines(path, rows=100):
    path.write_text("click,day,user,price\n" + "".join(f"{i % 2},{i % 3},u{i % 7},{i / 4}\n" for i in range(rows)))
    return path


@pytest.mark.slow
def test_csv_to_warehouse(tmp_path):
    source, dest = lines(tmp_path / "a.csv"), tmp_path / "w"
    order = ("--partition-by", "day", "--cluster-by", "user")
    args = (source, dest, *order, "--row-group-rows", 10, "--column-type", "price=float")
    done = run(*args)
    assert done.returncode == 0, done.stderr
    assert re.search(r"100 rows of 3 columns; 12 row groups of 8 rows", done.stderr)
    reader = ParquetReader(dest)
    assert reader.schema.names == ["click", "user", "price", "day"]
    assert reader.schema.field("price").type == pa.float32()
    assert sorted(p.name for p in dest.iterdir()) == ["_rowwise", "day=0", "day=1", "day=2"]
    again = run(*args, "--json")
    assert json.loads(again.stdout)["was_done"]
    other = run(source, dest, "--column-type", "price=float")
    assert other.returncode == 2
    assert re.fullmatch(r"rowwise: .*made with other options \(.*\).*\n", other.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--memory", "2 cows"], "--memory 2 cows: expected a size such as 500MB"),
        (["--memory", "1MB"], "layout: memory of 1MB: expected at least"),
        (["--keys", "m"], "--keys m: expected column=value"),
        (["--popularity", "none", "--columns", "prise"], "no column 'prise'; did you mean 'price'"),
        (["--sort-by", "day"], "without cluster_by"),
    ],
)
def test_mistakes_are_one_line(args, said, tmp_path):
    done = run(lines(tmp_path / "a.csv"), tmp_path / "w", *args)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_places_that_overlap(tmp_path):
    lines(tmp_path / "a.csv")
    with pytest.raises(SpecError, match=r"inside .* or contains"):
        convert(str(tmp_path), str(tmp_path / "w"))


def test_sizes():
    assert [parse_size("x", text) for text in ("2GB", "48MiB", "1.5k", "7")] == [2 * 10**9, 48 << 20, 1500, 7]


PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


READ = """
import sys
from rowwise.ingest.parquet import ParquetReader
reader = ParquetReader(sys.argv[1])
for split in reader.splits():
    reader.read(split, reader.schema.names)
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", [(), ("--cluster-by", "session")])
def test_memory_is_bounded(tmp_path, order):
    """Of converting, and of reading what was converted: several times as much data as memory."""
    rng, rows = np.random.default_rng(0), 250_000
    schema = pa.schema({"session": pa.int64(), **{f"x{i}": pa.float64() for i in range(32)}})
    with pq.ParquetWriter(tmp_path / "a.parquet", schema, compression="none", use_dictionary=False) as out:
        while (tmp_path / "a.parquet").stat().st_size < 1_200_000_000:
            columns = [rng.integers(0, 10**6, rows), *(rng.random(rows) for _ in range(32))]
            out.write_table(pa.table(columns, schema=schema), row_group_size=rows)
    command = [sys.executable, "-m", "rowwise", "data", "convert", str(tmp_path / "a.parquet"), str(tmp_path / "w")]
    command += ["--memory", "450MB", *order]
    for one in (command, [sys.executable, "-c", READ, str(tmp_path / "w")]):
        done = subprocess.run([sys.executable, "-c", PEAK, *one], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.split()[-1]) * 1024 < 450e6

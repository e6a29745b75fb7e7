"""`rowwise bench cache`: traces from files and from Zipf's law, and hit rates beside those that are predicted."""

import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from tables.store.zipf import zipf_rows


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = zipf_rows(1.0, 2_000, 30_000)
    np.save("rows.npy", rows)
    lists = pa.array(rows.reshape(-1, 3).tolist(), pa.list_(pa.int64()))
    pq.write_table(pa.table({"ids": lists, "x": np.ones(10_000)}), "rows.parquet")
    return tmp_path


def bench(command, *args):
    code, out, err = command("bench", "cache", *args)
    assert (code, err) == (0, "")
    return out


def test_files_of_the_same_rows_give_the_same_rates(command, place):
    found = [
        json.loads(bench(command, "--trace", trace, "--rows-cached", "100,10%", "--json"))
        for trace in ("rows.npy", "rows.parquet:ids")
    ]
    assert found[0]["results"] == found[1]["results"]
    assert (found[0]["accesses"], found[0]["skipped"]) == (30_000, 15_000)
    rates = {(x["rows_cached"], x["kind"]): (x["hit_rate"], x["predicted"]) for x in found[0]["results"]}
    assert {slots for slots, _ in rates} == {128, 192}  # whole sets
    for (slots, kind), (rate, predicted) in rates.items():
        assert rate <= rates[slots, "belady"][0] or kind == "belady"
        assert (predicted is None) == (kind in ("full_lru", "belady"))
        assert predicted is None or predicted == pytest.approx(rate, abs=0.02)


def test_a_law_is_drawn_and_shown_as_a_table(command):
    lines = bench(command, "--trace", "zipf:1.05:5000", "--policy", "lru").splitlines()
    assert lines[0] == "zipf:1.05:5000: 50,000 accesses to 5,000 rows; the last 25,000 are counted"
    assert lines[1].split() == ["rows", "cached", "share", "LRU", "closed", "form", "one", "set,", "LRU", "optimum"]
    assert [line.split()[0] for line in lines[2:]] == ["64", "224", "800", "2,528"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "bench cache: expected --trace, such as --trace zipf:1.05:100000"),
        (("--trace", "zipf:1.05:100000", "--quick"), "bench cache: expected --trace"),
        (("--trace", "zipf:x:10"), "--trace zipf:x:10: expected zipf:POWER:ROWS"),
        (("--trace", "zipf:1:0"), "--trace zipf:1:0: expected zipf:POWER:ROWS"),
        (("--trace", "rows.csv"), "--trace rows.csv: expected FILE.npy"),
        (("--trace", "rows.parquet:nope"), "rows.parquet: no column 'nope': expected one of ids, x"),
        (("--trace", "rows.parquet:x"), "rows.parquet:x: double"),
        (("--trace", "rows.npy", "--rows-cached", "0"), "--rows-cached '0': expected rows"),
        (("--trace", "rows.npy", "--rows-cached", "1,x%"), "--rows-cached 'x%': expected rows"),
        (("--trace", "rows.npy", "--policy", "fifo"), "--policy 'fifo': expected lru or lfu"),
    ],
)
def test_what_cannot_be_run_is_refused(command, place, args, said):
    code, out, err = command("bench", "cache", *args)
    assert (code, out) == (2, "")
    assert said.replace("double", "float64") in err
    assert err.count("\n") == 1


def test_options_of_the_cache_are_for_no_other_benchmark(command):
    code, _, err = command("bench", "ops", "--trace", "rows.npy")
    assert code == 2
    assert "--trace is for the benchmark cache: expected rowwise bench cache --trace TRACE" in err

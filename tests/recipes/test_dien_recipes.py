"""Recipes of DIEN: from rows with histories to a version that predicts."""

import signal

import numpy as np
import pyarrow as pa
import pytest
from launching import started, wait_for_step
from pyarrow import parquet as pq
from small import same, saved

ROWS, KINDS, ITEMS = 1500, 6, 30
RECIPE = """
data: {dataset: "parquet:rows.parquet", test_share: 0.2}
columns: {labels: [click], sparse: [{column: shown, table: item}, {column: seen, table: item}]}
tables: {list: [{name: item, rows: 30, dim: 16, features: [shown, seen], pooling: sequence}]}
model: {kind: dien, top: [8], histories: {seen: shown}}
train: {batch: 64, epochs: 3, threads: 1}
log: {every: 2}
save: {every: 5}
"""


@pytest.fixture
def written(command, tmp_path):
    draws = np.random.default_rng(0)
    shown, seen = draws.integers(0, ITEMS, ROWS), [draws.integers(0, ITEMS, n) for n in draws.integers(0, 7, ROWS)]
    click = np.array([len(ids) > 0 and ids[-1] % KINDS == item % KINDS for ids, item in zip(seen, shown, strict=True)])
    pq.write_table(pa.table({"shown": shown, "seen": pa.array(seen), "click": click.astype(np.int8)}), "rows.parquet")
    (tmp_path / "dien.yaml").write_text(RECIPE)
    return command


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_with_the_bits_of_a_whole_one(written, tmp_path):
    assert written("train", "dien.yaml", "--set", "name=whole")[0] == 0
    with started(tmp_path, "train", "dien.yaml", "--set", "name=killed") as process:
        wait_for_step(tmp_path / "runs/killed/1", 8)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert written("resume", "runs/killed/1")[0] == 0
    assert same(*(saved(tmp_path / "runs" / name / "1") for name in ("whole", "killed")))


@pytest.mark.slow
def test_a_version_predicts_the_bits_of_its_run(written, tmp_path):
    assert written("train", "dien.yaml")[0] == 0
    assert written("export", "runs/dien/1", "version")[0] == 0
    for source, file in (("runs/dien/1", "run.parquet"), ("version", "version.parquet")):
        assert written("predict", source, "--data", "rows.parquet", "--out", file)[0] == 0
    rows = pq.read_table("rows.parquet").slice(700, 3)
    pq.write_table(rows, "few.parquet")
    assert written("predict", "version", "--data", "few.parquet", "--out", "some.parquet")[0] == 0
    whole, exported, some = (pq.read_table(f"{name}.parquet") for name in ("run", "version", "some"))
    assert exported.equals(whole)
    assert some["click_logit"].to_pylist() == whole["click_logit"].to_pylist()[700:703]

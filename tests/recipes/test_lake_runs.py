"""Runs on tables of lakes: the version is that of the start, whatever is committed until the end."""

import os
import signal

import pytest
from lakes import LAKES, DeltaLake
from launching import ELASTIC, is_there, rowwise, started, wait_for, wait_for_step, write_recipe
from small import WORLD, check_resumed, same, saved, tensors, trained

from rowwise import DataError
from rowwise.ingest.kafka import has_fixed_end
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.trained import evaluate, predict_rows


def rows(first=0, count=2000):
    return WORLD.rows(first, count).drop_columns(["logit"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(LAKES))
def test_a_resumed_run_reads_the_version_of_its_start(tmp_path, kind):
    lake = LAKES[kind](tmp_path)
    lake.append(rows(0, 1200))
    lake.append(rows(1200, 800))
    data = {"dataset": lake.name}

    def commit():
        lake.append(rows(5000, 500))
        lake.overwrite(rows(9000))

    check_resumed(tmp_path, 5, {"epochs": 2}, before_resuming=commit, data=data)
    first, cut = sorted((tmp_path / "runs/small").iterdir())
    pinned = f"{lake.name}@{lake.versions()[1]}"
    assert all(f"dataset: {pinned}\n" in (run / "recipe.yaml").read_text() for run in (first, cut))
    newest, _ = trained(tmp_path, train={"epochs": 2}, data=data)
    assert not same(saved(newest.folder.path), saved(first))
    named, _ = trained(tmp_path, train={"epochs": 2}, data={"dataset": pinned})
    assert same(saved(named.folder.path), saved(first))
    # Other commands read the newest version, or that which they name.
    assert predict_rows(first, tmp_path / "p.parquet", data=lake.name) == 2000
    assert evaluate(first, data=pinned).tasks != evaluate(first, data=lake.name).tasks
    lake.forget(lake.versions()[1 if kind == "iceberg" else 0])
    with pytest.raises(DataError, match="expired"):
        TrainingRun.resume(first, ["train.epochs=3"])


@pytest.mark.slow
@pytest.mark.dist
def test_a_killed_run_with_workers_reads_the_version_of_its_start(tmp_path):
    """A table without partitions, of several files; the workers know nothing of Delta."""
    steps = {
        "train": ELASTIC | {"epochs": 12},
        "evaluate": {"patience": None},
        "save": {"every": 1},
        "log": {"every": 1},
    }
    lake = DeltaLake(tmp_path)
    for at in range(3):
        lake.append(rows(2000 * at))
    write_recipe(tmp_path / "whole", 10, **steps)
    write_recipe(tmp_path / "killed", 10, **steps)
    dataset = f"data.dataset={lake.name.replace(str(tmp_path), '..')}"
    done = rowwise(tmp_path / "whole", "train", "small.yaml", "--set", dataset)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "killed/runs/small/1"
    with started(tmp_path / "killed", "train", "small.yaml", "--set", dataset, "--set", "data.workers=2") as process:
        wait_for_step(run, 8)
        lake.append(rows(20_000))
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not is_there(process.pid))
    lake.overwrite(rows(30_000))
    done = rowwise(tmp_path, "resume", "killed/runs/small/1", "--nproc", "2", "--set", "data.workers=1")
    assert done.returncode == 0, done.stderr
    assert same(tensors(run), tensors(tmp_path / "whole/runs/small/1"))


@pytest.mark.slow
def test_several_runs_need_a_version(tmp_path):
    lake = DeltaLake(tmp_path)
    lake.append(rows())
    write_recipe(tmp_path / "small", 10, data={"valid_share": 0.2})
    dataset = ("--set", f"data.dataset={lake.name}")
    for command in (("tune", "small.yaml", "--trials", "1"), ("train", "small.yaml", "--seeds", "2")):
        done = rowwise(tmp_path / "small", *command, *dataset)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert (
            f"{lake.name}: each run would read what is newest then: expected a version, such as {lake.name}@0"
            in done.stderr
        )


@pytest.mark.parametrize(
    ("name", "is_fixed"),
    [
        ("kafka:h:1/t@0:0-5,1:3-9", True),
        ("kafka:h:1/t@0:0-5,1:3-", False),
        ("kafka:h:1/t@0:0-,1:3-4", False),
        ("kafka:h:1/t", False),
    ],
)
def test_ranges_with_ends(name, is_fixed):
    assert has_fixed_end(name.removeprefix("kafka:")) is is_fixed

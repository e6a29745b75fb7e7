"""A run says whether it had its rows in time and which it could not use: on the console, in its files and report."""

import csv
import io
import json

import numpy as np
import pyarrow as pa
import pytest
import yaml
from msgspec import structs
from rich.console import Console
from small import sections, write_rows
from test_cli import rowwise_cli

from rowwise.base.textfile import decode_json
from rowwise.cli.console import show_result
from rowwise.recipes.run_result import RunResult
from rowwise.train.feeding import DataWait

ADVICE = "of the time for rows: set data.workers"
SLOW = """
import time

def d2(d0):
    time.sleep(0.15)
    return d0
"""


def write_recipe(folder, *, slow=False, bad=(), **data):
    def label(table):
        return pa.array(np.where(np.isin(np.arange(2000), bad), 7.0, table["label"].to_numpy()))

    write_rows(folder / "rows.parquet", 2000, group=100, label=label)
    (folder / "slow.py").write_text(SLOW)
    made = sections(folder, data=data | {"valid_share": 0.0}, train={"epochs": 1, "batch": 32}, log={"every": 5})
    if slow:
        made["transforms"] = [{"kind": "own", "function": "slow.py:d2"}]
        made["columns"]["dense"] = [{"column": "d2"}, {"column": "d1"}]
    (folder / "small.yaml").write_text(yaml.safe_dump(made))


def train(folder, *args):
    done = rowwise_cli("train", "small.yaml", *args, cwd=folder)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "runs/small/1/result.json").read_text())
    with (folder / "runs/small/1/steps.csv").open() as file:
        return done.stderr.splitlines(), result, list(csv.DictReader(file))


@pytest.mark.slow
def test_rows_in_time_and_all_of_them(tmp_path):
    write_recipe(tmp_path)
    told, result, steps = train(tmp_path)
    assert not any(ADVICE in line or "quarantined" in line for line in told)
    assert (result["bad_rows"], result["bad_reasons"], result["workers"]) == (0, [], None)
    assert {line["workers"] for line in steps} == {""}
    page = (tmp_path / "runs/small/1/report.html").read_text()
    assert "quarantined" not in page


@pytest.mark.slow
def test_a_trainer_that_waits_for_itself(tmp_path):
    write_recipe(tmp_path, slow=True)
    told, result, _ = train(tmp_path)
    share = result["data_wait"]["seconds"] / result["data_wait"]["of_s"]
    assert share > 0.3
    assert not any(ADVICE in line for line in told)  # workers would take as long to start as this run takes in all
    shown = io.StringIO()
    longer = structs.replace(decode_json(json.dumps(result), RunResult), data_wait=DataWait(40.0, 100.0))
    show_result(longer, Console(file=shown, width=200))
    said = "data    training waited 40% of the time for rows: set data.workers; "
    assert f"{said}rowwise data bench runs/small/1/recipe.yaml computes how many\n" in shown.getvalue()
    # What it says can be done, and finds the cause.
    found = rowwise_cli("data", "bench", "runs/small/1/recipe.yaml", "--json", cwd=tmp_path)
    assert json.loads(found.stdout)["slowest"] == "transform"


@pytest.mark.dist
def test_workers_and_bad_rows(tmp_path):
    write_recipe(tmp_path, slow=True, bad=(3, 1703), on_bad_rows="quarantine", workers={"count": 1})
    told, result, steps = train(tmp_path)
    [line] = [line for line in told if "quarantined" in line]
    first = f"{tmp_path / 'rows.parquet'}: row 3: column 'label': "
    assert line.startswith(f"rows    2 bad rows are quarantined in runs/small/1/bad_rows, such as {first}")
    assert (result["bad_rows"], result["workers"]) == (2, 1)
    assert sorted(reason.split(": ")[1] for reason in result["bad_reasons"]) == ["row 1703", "row 3"]
    assert {(line["workers"], line["restarts"]) for line in steps} == {("1", "0")}
    page = (tmp_path / "runs/small/1/report.html").read_text()
    assert "2 rows quarantined in bad_rows/" in page
    assert "but the run is too short to need action" in page

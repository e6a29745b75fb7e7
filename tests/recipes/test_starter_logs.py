"""Whatever recipe `rowwise data inspect` writes trains, and where it writes none it says so in its exit code."""

import numpy as np
import pyarrow as pa
import pytest
from logs import LOGS
from pyarrow import csv
from pyarrow import parquet as pq

from rowwise.recipes.ensemble import predict_ensemble
from rowwise.recipes.export import export
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import read
from rowwise.recipes.trained import predict_rows

ROWS = 600


def train(folder, name="a"):
    """Three steps of the recipe, and predictions for the log."""
    changed = [f"train.{x}" for x in ("epochs=1", "threads=1", "ahead=0", "steps=3")]
    run = TrainingRun.start(read(folder / f"{name}.yaml", changed), folder / "runs")
    assert run.go().status == "finished"
    return run


def numbers_only(draw):
    return {"x": draw.normal(size=ROWS), "y": draw.gamma(1, 9, ROWS)}


def not_finite(draw):
    x = draw.normal(size=ROWS)
    x[::50], x[1::50], x[2::50] = np.inf, -np.inf, np.nan
    return {"user": draw.integers(0, 30, ROWS), "x": x, "y": np.where(draw.random(ROWS) < 0.9, np.inf, 1.5)}


def ids_of_one_row(draw):
    return {"user": draw.integers(0, 30, ROWS), "ticket": [f"t{i}" for i in range(ROWS)], "x": draw.normal(size=ROWS)}


def only_ids_of_one_row(draw):
    return {"ticket": [f"t{i}" for i in range(ROWS)], "x": draw.normal(size=ROWS)}


def floats_and_texts(draw):
    seller = pa.array(draw.integers(0, 40, ROWS).astype(float), mask=draw.random(ROWS) < 0.1)
    on = [f"{d:02}/{m:02}/2024" for d, m in zip(draw.integers(13, 28, ROWS), draw.integers(1, 13, ROWS), strict=True)]
    return {"seller": seller, "on": on, "price": [f"${p:.2f}" for p in draw.gamma(2, 9, ROWS)]}


def groups(draw):
    patient = draw.permutation(np.repeat(np.arange(ROWS // 4), 4))
    return {"label": draw.integers(0, 2, ROWS // 4)[patient], "patient_id": patient, "kind": draw.integers(0, 5, ROWS)}


def unlabelled(draw):
    label = pa.array(draw.integers(0, 2, ROWS), mask=draw.random(ROWS) < 0.1)
    return {"label": label, "user": draw.integers(0, 30, ROWS)}


ODD = (numbers_only, not_finite, ids_of_one_row, only_ids_of_one_row, floats_and_texts, groups, unlabelled)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_odd_logs_train(command, tmp_path, make, ending):
    draw = np.random.default_rng(0)
    table = pa.table({"label": draw.integers(0, 2, ROWS)} | make(draw))
    (csv.write_csv if ending == "csv" else pq.write_table)(table, tmp_path / f"a.{ending}")
    code, out, err = command("data", "inspect", f"a.{ending}")
    assert (code, err) == (0, "")
    recipe = read(tmp_path / "a.yaml")
    assert recipe.data.group == ("patient_id" if make is groups else None)
    if make is not_finite:
        assert "! 'x' has 24 numbers that are infinite in 32 bits: read as missing" in out
        assert [d.column for d in recipe.columns.dense] == ["x"]
    if make is floats_and_texts:
        assert {"on_hour", "on_weekday"} & {s.column for s in recipe.columns.sparse} == {"on_weekday"}
    run = train(tmp_path)
    held_out = predict_rows(run.folder.path, tmp_path / "p.parquet", keep=("label",))
    assert 0 < held_out < ROWS / 3


@pytest.mark.slow
@pytest.mark.parametrize("name", LOGS)
def test_logs_of_strangers_train(command, tmp_path, name):
    make, rows = LOGS[name]
    log = make(np.random.default_rng(0), rows)
    csv.write_csv(log.table, tmp_path / "a.csv")
    code, _, err = command("data", "inspect", "a.csv", "--label", log.label)
    assert (code, err) == (0, "")
    run = train(tmp_path)
    assert predict_rows(run.folder.path, tmp_path / "p.parquet", data="csv:a.csv") == rows


@pytest.mark.slow
def test_times_in_text_divide_the_rows(command, tmp_path):
    draw = np.random.default_rng(0)
    day = np.sort(draw.integers(1, 28, ROWS))
    on = [f"{d:02}/12/2023" for d in day]
    order = draw.permutation(ROWS)
    table = pa.table({"label": draw.integers(0, 2, ROWS), "user": draw.integers(0, 30, ROWS), "on": on}).take(order)
    csv.write_csv(table, tmp_path / "a.csv")
    assert command("data", "inspect", "a.csv", "--time", "on")[0] == 0
    recipe = read(tmp_path / "a.yaml")
    assert recipe.data.share.formats == ("%d/%m/%Y",)
    predict_rows(train(tmp_path).folder.path, tmp_path / "p.parquet", keep=("on",))
    tested = set(pq.read_table(tmp_path / "p.parquet")["on"].to_pylist())
    border = int(recipe.data.share.test_from[8:10])
    assert tested == {text for text in on if int(text[:2]) >= border}


def test_without_a_recipe_the_exit_code_says_so(command, tmp_path):
    csv.write_csv(pa.table({"label": [0, 1] * 20, "same": [7] * 40}), tmp_path / "a.csv")
    code, out, err = command("data", "inspect", "a.csv")
    assert code == 2
    assert "same" in out
    assert err.startswith("rowwise: no recipe: a.csv: no column is left to learn from")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv"]


@pytest.mark.slow
def test_a_version_reads_text_as_its_run_does(command, tmp_path):
    """Codes of digits are text in the log, and would be numbers in the few lines to predict for."""
    draw = np.random.default_rng(0)
    lines = [
        f"{draw.integers(0, 2)};{draw.integers(0, 9):03};{draw.random():.2f}".replace(".", ",") for _ in range(ROWS)
    ]
    (tmp_path / "a.csv").write_text("\n".join(["label;shop;price", *lines, ""]))
    (tmp_path / "new.csv").write_text("shop;price\n111;0,5\n3;0,25\n")
    assert command("data", "inspect", "a.csv", "--column-type", "shop=string")[0] == 0
    run = train(tmp_path)
    export(run.folder.path, tmp_path / "models")
    found = []
    for path in (run.folder.path, tmp_path / "models"):
        assert predict_ensemble([path], tmp_path / "p.parquet", data=f"csv:{tmp_path / 'new.csv'}") == 2
        found.append(pq.read_table(tmp_path / "p.parquet")["label_logit"].to_pylist())
    assert found[0] == found[1]

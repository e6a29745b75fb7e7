"""A recipe of two towers: from rows of users, items and whether they met, to items found for users."""

import json
import subprocess

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import warm
from pyarrow import parquet as pq
from small import lines, sections

from rowwise import SpecError
from rowwise.recipes.outlook import dry_run
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode
from rowwise.recipes.trained import evaluate, predict_rows

USERS, ITEMS, KINDS = 200, 120, 6
BASE = {
    "name": "towers",
    "data": {"valid_share": 0.1, "test_share": 0.2},
    "columns": {
        "labels": ["met"],
        "sparse": [{"column": name, "ids": "direct"} for name in ("user", "item", "kind")],
        "dense": [{"column": "price"}, {"column": "age"}],
        "key": "row",
    },
    "tables": {
        "list": [
            {"name": name, "rows": rows, "dim": 16, "optimizer": {"kind": "rowwise_adagrad", "lr": 0.1}}
            for name, rows in (("user", USERS), ("item", ITEMS), ("kind", KINDS))
        ]
    },
    "model": {
        "kind": "two_tower",
        "item": "item",
        "user_features": ["user"],
        "item_features": ["kind"],
        "user_dense": ["age"],
        "item_dense": ["price"],
        "sizes": [16],
        "ks": [5, 20],
    },
    "train": {"batch": 256, "epochs": 6, "threads": 1, "optimizer": {"kind": "adam", "lr": 0.01}},
    "evaluate": {"metric": "recall@20"},
    "log": {"every": 10},
}


def write_meetings(path, rows=6000):
    """People meet what is of the kind that they like, mostly; a fifth of the rows are of no meeting."""
    draw = np.random.default_rng(0)
    user = draw.integers(0, USERS, rows)
    kind = np.where(draw.random(rows) < 0.9, user % KINDS, draw.integers(0, KINDS, rows))
    item = draw.integers(0, ITEMS // KINDS, rows) * KINDS + kind
    met = draw.random(rows) < 0.8
    item = np.where(met, item, draw.integers(0, ITEMS, rows))
    price, age = (item % 10).astype(float), (user % 7).astype(float)
    columns = {"user": user, "item": item, "kind": item % KINDS, "price": price, "age": age, "met": met.astype(int)}
    pq.write_table(pa.table(columns | {"row": np.arange(rows)}), path, row_group_size=1500)


def recipe(folder, **changes):
    return decode(sections(folder, BASE, **changes), "")


@pytest.mark.slow
def test_it_finds_items(tmp_path):
    write_meetings(tmp_path / "rows.parquet")
    run = TrainingRun.start(recipe(tmp_path), tmp_path / "runs")
    result = run.go()
    found = result.test["met"]
    # Chance finds k of all items; who knows the kind has its 20 items 9 times of 10.
    assert found["recall@20"] > 3 * 20 / ITEMS
    assert found["recall@5"] > 3 * 5 / ITEMS
    assert found["ndcg@20"] > 0.2
    assert result.best.metric == "recall@20"
    assert evaluate(run.folder.path).tasks == result.test
    assert {line[2] for line in lines(run.folder.path)[1:]} == {"train", "lifetime", "valid", "test"}
    count = predict_rows(run.folder.path, tmp_path / "p.parquet")
    rows, predicted = pq.read_table(tmp_path / "rows.parquet"), pq.read_table(tmp_path / "p.parquet")
    assert predicted.column_names == ["row", "met_logit", "met_probability"]
    assert count == predicted.num_rows
    # Who likes a kind is given higher scores with it.
    asked = rows.take(predicted["row"])
    liked = asked["user"].to_numpy() % KINDS == asked["kind"].to_numpy()
    scores = predicted["met_logit"].to_numpy()
    assert scores[liked].mean() > scores[~liked].mean() + 1
    assert json.loads((run.folder.path / "result.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"item": "itm"}}, "two_tower: no feature itm; there are user, item, kind"),
        ({"model": {"user_features": ["usr"]}}, "two_tower: no feature usr; there are user, item, kind"),
        ({"model": {"user_features": ["user", "kind"]}}, "two_tower: feature kind is in both towers"),
        ({"model": {"user_features": []}}, "two_tower: "),
        ({"model": {"user_dense": ["wage"]}}, "two_tower: no dense column wage; there are price, age"),
        (
            {"evaluate": {"metric": "ne"}},
            "evaluate.metric='ne' is not measured: expected one of recall@5, recall@20, ndcg",
        ),
        ({"columns": {"labels": ["met", "kind"]}}, "two_tower: labels met, kind: expected one"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path, changes, message):
    write_meetings(tmp_path / "rows.parquet", 100)
    with pytest.raises(SpecError) as caught:
        dry_run(recipe(tmp_path, **changes))
    assert message in str(caught.value)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("loss", ["softmax", "bpr"])
def test_processes_find_what_one_finds(tmp_path, loss):
    """Also where dense parameters are sharded; rounding may change the places of a few items."""
    write_meetings(tmp_path / "rows.parquet")
    made = recipe(tmp_path, model={"loss": loss, "hardest": 40, "sizes": [128, 64]}, train={"epochs": 2, "batch": 1024})
    (tmp_path / "meet.yaml").write_text(json.dumps(msgspec.to_builtins(made)))
    found = []
    for how in ([], ["--nproc", "2"], ["--nproc", "2", "--set", "train.dense_parallel.kind=full"]):
        command = [*warm.command(), "train", "meet.yaml", "--json", "--runs", f"runs{len(found)}"]
        said = subprocess.run([*command, *how], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        found.append(json.loads(said))
    one, *others = (result["test"]["met"] for result in found)
    for other in others:
        assert other == pytest.approx(one, rel=0.02)
    (run,) = (tmp_path / "runs2").glob("*/*")
    assert evaluate(run).tasks["met"] == pytest.approx(others[1], rel=1e-6)

"""Recipes of sequence models: from rows with a list of items to the item that follows."""

import json

import numpy as np
import pyarrow as pa
import pytest
from item_lists import BASE, ITEMS, KINDS, sections, write_lists
from pyarrow import parquet as pq
from small import lines, same, saved, tensors, train_on_ranks

from rowwise import Jagged, SpecError
from rowwise.base.errors import RowwiseError
from rowwise.recipes.outlook import dry_run
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode, write
from rowwise.recipes.trained import evaluate, load_trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("lists")
    write_lists(place / "rows.parquet")
    return place


@pytest.mark.few(1)
@pytest.mark.parametrize("negatives", [None, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_it_finds_the_item_that_follows(kind, negatives, folder, tmp_path):
    run = TrainingRun.start(
        decode(sections(folder, model={"kind": kind, "negatives": negatives}, train={"epochs": 6, "batch": 32}), ""),
        tmp_path,
    )
    result = run.go()
    assert 0.5 < result.test["next_item"]["recall@1"] < 1
    assert result.best.metric == "recall@1"
    assert evaluate(run.folder.path).tasks == result.test
    assert {line[2] for line in lines(run.folder.path)[1:]} == {"train", "lifetime", "valid", "test"}
    _, model = load_trained(run.folder.path)
    model.eval()
    assert model.scores(Jagged.from_lists({"seen": [[1, 2, 5], [5]]})).argmax(1).tolist() == [16, 16]


@pytest.fixture
def written(command, tmp_path):
    """The recipe in the folder of the command."""
    write_lists(tmp_path / "rows.parquet", 300)
    made = sections(tmp_path, model={"kind": "hstu", "negatives": 7, "dropout": 0.5})
    (tmp_path / "lists.yaml").write_text(write(decode(made, "")))
    return command


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_stopped(written, tmp_path):
    assert written("train", "lists.yaml", "--set", "name=whole")[0] == 0
    assert written("train", "lists.yaml", "--set", "name=stopped", "--set", "train.epochs=1")[0] == 0
    assert written("resume", "runs/stopped/1", "--set", "train.epochs=3")[0] == 0
    runs = [tmp_path / "runs" / name / "1" for name in ("whole", "stopped")]
    assert same(*map(saved, runs))
    results = [json.loads((run / "result.json").read_text()) for run in runs]
    assert results[0]["test"] == results[1]["test"]
    code, out, _ = written("eval", "runs/whole/1", "--json")
    assert (code, json.loads(out)["tasks"]) == (0, results[0]["test"])
    for args, error in (
        (
            ("eval", "runs/whole/1", "--slices", "seen"),
            "slices seen: model.kind=hstu ranks all items: expected no",
        ),
        (("explain", "runs/whole/1"), "model.kind=hstu ranks items, and has no loss of a row"),
        (("baseline", "runs/whole/1"), "model.kind=hstu ranks items, and trees do not"),
        (("eval", "runs/whole/1", "runs/stopped/1"), "model.kind=hstu ranks items, and has no probabilities"),
        (("train", "lists.yaml", "--seeds", "2"), "--seeds 2: model.kind=hstu ranks items, and has no probabilities"),
    ):
        code, _, err = written(*args)
        assert code == 2
        assert error in err.replace("\n", " ")
        assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.usefixtures("models_one_after_the_other")
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_what_one_learns(kind, tmp_path):
    """Batches of two blocks, so that both ranks have lists; the table is cut by rows."""
    write_lists(tmp_path / "rows.parquet", 700, least=1)
    write_lists(tmp_path / "test.parquet", 300)
    halves = [{"table": "item", "rank": r, "rows": [20 * r, 20 * r + 20], "cols": [0, 8]} for r in range(2)]
    (tmp_path / "plan.json").write_text(json.dumps({"world": 2, "tiles": halves}))
    sgd = {"kind": "sgd", "lr": 0.3}  # Adam would enlarge rounding where a gradient is 0
    made = sections(tmp_path, model={"kind": kind, "dropout": 0.0}, train={"batch": 512, "epochs": 5, "optimizer": sgd})
    made["tables"] = {"list": [{**BASE["tables"]["list"][0], "optimizer": sgd}]}
    made["data"] = {"dataset": made["data"]["dataset"], "test": f"parquet:{tmp_path / 'test.parquet'}"}
    made["evaluate"] = {}
    ((alone, one),) = train_on_ranks(1, decode(made, ""), tmp_path / "one")
    (result, two), _ = train_on_ranks(2, decode(made | {"plan": str(tmp_path / "plan.json")}, ""), tmp_path / "two")
    wanted, found = (tensors(path, state=False) for path in (one, two))
    assert found.keys() == wanted.keys()
    assert all(np.allclose(found[name], tensor, rtol=1e-4, atol=1e-5) for name, tensor in wanted.items())
    assert result.test["next_item"] == pytest.approx(alone.test["next_item"], abs=1e-2)
    assert result.test["next_item"]["count"] == 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"columns": {"labels": ["row"]}},
            "model.kind=sasrec: columns seen, row: expected one sparse column, the lists of",
        ),
        (
            {"columns": {"dense": [{"column": "row"}]}},
            "model.kind=sasrec: columns seen, row: expected one sparse column",
        ),
        ({"model": {"kind": "hstu", "heads": 3}}, "model.kind=hstu: heads=3: expected a divisor of 8"),
        ({"model": {"length": 0}}, "model.kind=sasrec: length=0: expected at least 1"),
        ({"model": {"negatives": 0}}, "model.negatives=0: expected at least 1, or null for a softmax over all items"),
        (
            {"evaluate": {"metric": "ne"}},
            "evaluate.metric='ne' is not measured: expected one of recall@1, recall@5, ndcg@1",
        ),
        ({"evaluate": {"metric": "mrr", "task": "x"}}, "evaluate.task='x' is not a label: expected one of next_item"),
        (
            {"train": {"determinism": "elastic"}},
            "train.determinism=elastic: model.kind=sasrec has sequence lookups",
        ),
    ],
    ids=str,
)
def test_recipes_that_do_not_fit_are_refused(folder, changes, message):
    with pytest.raises(SpecError) as caught:
        dry_run(decode(sections(folder, **changes), ""))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"pooling": "mean"}, "table 'item' has pooling mean: expected pooling: sequence"),
        ({"features": ["seen", "shown"]}, "features seen, shown: expected one table with one feature"),
        ({"managed": {}}, "table 'item' is managed: expected a row for each item, as all are scored"),
    ],
    ids=str,
)
def test_tables_that_do_not_fit_are_refused(folder, table, message):
    made = sections(folder)
    made["tables"] = {"list": [{**BASE["tables"]["list"][0], **table}]}
    with pytest.raises(SpecError, match=r"model\.kind=sasrec: ") as caught:
        dry_run(decode(made, ""))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([[1, 2], [ITEMS, 3]], f"row 1, column 'seen': id {ITEMS}: expected 0 to 39, the rows of table 'item'"),
        (
            [[1, 2], [3]],
            "feature 'seen' has 1 items in sample 1: expected at least 2, a history and the item that follows",
        ),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_end_an_evaluation(folder, tmp_path, items, message):
    run = TrainingRun.start(decode(sections(folder, train={"steps": 1}), ""), tmp_path)
    run.go()
    pq.write_table(pa.table({"seen": items, "row": range(2)}), tmp_path / "bad.parquet")
    with pytest.raises(RowwiseError) as caught:
        evaluate(run.folder.path, data=f"parquet:{tmp_path / 'bad.parquet'}")
    assert message in str(caught.value)

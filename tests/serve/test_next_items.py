"""The items that follow lists, by exported models of lists: those of `NextItem.scores`, whoever asks for them."""

import json
from functools import cache

import numpy as np
import pyarrow as pa
import pytest
import torch
from item_lists import BASE, ITEMS, KINDS, sections, write_lists
from pyarrow import csv
from pyarrow import parquet as pq
from serving import quiet_server
from small import trained

from rowwise import DataError, Jagged, SpecError
from rowwise.cli.notebook import FittedRun
from rowwise.recipes.export import export
from rowwise.recipes.export_items import ItemOptions
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.served import open_version
from rowwise.recipes.text import decode
from rowwise.recipes.trained import load_trained
from rowwise.serve.client import ScoringClient
from rowwise.serve.items import read_item_table
from rowwise.serve.retrieval import RetrieveBody

CLOSE = 1e-5
KNOWN = 30  # items of the vocabulary; the others share row 0
RUNS = [
    ("hstu", "direct"),
    ("sasrec", "vocabulary"),
    pytest.param(("sasrec", "direct"), marks=pytest.mark.slow),
    pytest.param(("hstu", "hash"), marks=pytest.mark.slow),
]
OPTIONS = ["--workers", "1", "--record", "kept", "--record-share", "100%"]
LISTS = [[3], [1, 2, 5], [], [7, 7, 7, 22], [9, 28, 5, 16, 9, 28, 5, 16, 9], [39]]  # of up to 6 items, 6 are read


def words(lists):
    return [[f"w{item}" for item in items] for items in lists]


def train_lists(folder, kind, ids, rows=200, negatives=None, **changes):
    """A run of a few steps; of text, unless ids are `direct`."""
    write_lists(folder / "rows.parquet", rows)
    made = sections(
        folder, model={"kind": kind, "dropout": 0.0, "negatives": negatives}, **{"train": {"epochs": 1}} | changes
    )
    if ids != "direct":
        table = pq.read_table(folder / "rows.parquet")
        table = table.set_column(0, "seen", pa.array(words(table["seen"].to_pylist())))
        pq.write_table(table, folder / "rows.parquet", row_group_size=100)
        sparse, listed = dict(BASE["columns"]["sparse"][0]), dict(BASE["tables"]["list"][0])
        if ids == "vocabulary":
            (folder / "words.txt").write_text("".join(f"w{item}\t{item + 1}\n" for item in range(KNOWN)))
            del sparse["ids"]
            sparse["vocabulary"], listed["rows"] = str(folder / "words.txt"), KNOWN + 1
        else:
            sparse["ids"] = "hash"
        made["columns"]["sparse"], made["tables"] = [sparse], {"list": [listed]}
    run = TrainingRun.start(decode(made, ""), folder / "runs")
    run.go()
    return run.folder.path


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def made(request, tmp_path_factory):
    """A run, how its ids are given, and a version of it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("-".join(request.param))
    run = train_lists(folder, *request.param)
    return run, request.param[1], export(run, folder / "models").folder.path


def as_given(ids, lists):
    return lists if ids == "direct" else words(lists)


def rows_of(resolved, ids, lists):
    """The rows of lists of items."""
    if ids == "direct":
        return lists
    if ids == "vocabulary":
        return [[item + 1 if item < KNOWN else 0 for item in items] for items in lists]
    preparation = resolved.parts.bind(resolved.rows.train.reader.schema, resolved.transforms)
    prepared = preparation({"seen": pa.array(words(lists), pa.list_(pa.string()))}, np.arange(len(lists)))
    found = np.split(prepared.values_N, np.cumsum(prepared.lengths_FB)[:-1])
    return [rows.tolist() for rows in found]


@cache
def loaded(run):
    resolved, model = load_trained(run)
    return resolved, model.eval()


def scores_of(run, ids, lists):
    """The scores of all items after each list, by the key that is given for the item."""
    resolved, model = loaded(run)
    lengths = torch.tensor([len(items) for items in lists])
    rows = [row for found in rows_of(resolved, ids, lists) for row in found]
    with torch.no_grad():
        batch = Jagged(features=("seen",), values_N=torch.tensor(rows, dtype=torch.int64), lengths_FB=lengths)
        scores_BR = model.scores(batch)
    row_I = [row for (row,) in rows_of(resolved, ids, [[item] for item in range(ITEMS)])]
    keys = [key for (key,) in as_given(ids, [[item] for item in range(ITEMS)])]
    return [dict(zip(keys, scores_R[row_I].tolist(), strict=True)) for scores_R in scores_BR]


def check_best(scores, k, items, found):
    """Items and their scores are the k best; of nearly equal ones any."""
    assert len(set(items)) == len(items) == min(k, len(scores))
    assert found == sorted(found, reverse=True)
    np.testing.assert_allclose(found, sorted(scores.values(), reverse=True)[: len(items)], atol=CLOSE)
    np.testing.assert_allclose(found, [scores[item] for item in items], atol=CLOSE)


def test_items_are_those_of_the_scores(made):
    run, ids, version = made
    retriever = open_version(version).retriever
    given = as_given(ids, LISTS)
    train = loaded(run)[0].rows.train
    seen = {
        item
        for split in train.reader.splits()
        for items in train.reader.read(split, ["seen"])["seen"].to_pylist()
        for item in items
    }
    assert (
        set(retriever.items.keys.to_pylist()) == seen == {key for (key,) in as_given(ids, [[i] for i in range(ITEMS)])}
    )
    for scores, items in zip(scores_of(run, ids, LISTS), given, strict=True):
        for k in (1, 10, 100):
            found = retriever.retrieve({"seen": items}, k)
            check_best(scores, k, found.items, found.scores)
            assert found.exact
        left = retriever.retrieve({"seen": items}, 5, without=[*items, *as_given(ids, [[99]])[0]])
        check_best({item: score for item, score in scores.items() if item not in items}, 5, left.items, left.scores)
        assert left.unknown == 1


def test_a_vector_has_the_same_bits_beside_others(made):
    """Lists of other lengths, in other places."""
    retriever = open_version(made[2]).retriever
    rows = [retriever.read(RetrieveBody({"seen": items})).rows for items in as_given(made[1], LISTS)]
    alone = torch.cat([retriever.vectors([one])[0] for one in rows])
    for order in (range(6), [5, 3, 1, 0, 2, 4, 1, 1, 1], [1, 4] * 8):
        together, _ = retriever.vectors([rows[place] for place in order])
        assert torch.equal(together.view(torch.int32), alone[list(order)].view(torch.int32))
    assert alone[2].tolist() == [0] * 8


def test_predict_writes_what_a_version_answers(made, command, tmp_path):
    run, ids, version = made
    given = pa.array(as_given(ids, LISTS), pa.list_(pa.string() if ids != "direct" else pa.int64()))
    pq.write_table(pa.table({"row": range(100, 106), "seen": given}), tmp_path / "asked.parquet")
    for place, out, k in (
        (run, "run.parquet", 7),
        (version, "version.parquet", 7),
        (version.parents[1], "all.csv", 10),
    ):
        asked = ("--k", str(k)) if k != 10 else ()
        code, _, err = command("predict", str(place), "--data", "asked.parquet", "--out", out, *asked)
        assert code == 0, err
    table = pq.read_table("run.parquet")
    assert table.equals(pq.read_table("version.parquet"))
    assert table.schema.names == ["row", "items", "scores"]
    assert table.schema.types == [pa.int64(), given.type, pa.list_(pa.float32())]
    assert table["row"].to_pylist() == list(range(100, 106))
    for scores, items, found in zip(scores_of(run, ids, LISTS), *table.columns[1:], strict=True):
        check_best(scores, 7, items.as_py(), found.as_py())
    texts = csv.read_csv("all.csv")
    assert texts.column_names == table.column_names
    for name in ("items", "scores"):
        found = [json.loads(text) for text in texts[name].to_pylist()]
        assert {len(values) for values in found} == {10}
        assert [values[:7] for values in found] == table[name].to_pylist()


def test_a_notebook_has_no_probability_of_a_list(made):
    with pytest.raises(SpecError, match="ranks items for lists: expected a run with a label; use rowwise predict"):
        FittedRun(made[0]).predict(pa.table({"seen": as_given(made[1], LISTS)}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_answers_the_same_and_is_audited(kind, tmp_path, command):
    run = train_lists(tmp_path, kind, "direct")
    version = export(run, tmp_path / "models", warn=[].append)
    options = [*OPTIONS, "--expect", version.digest]
    with (
        quiet_server(tmp_path / "models", *options) as netloc,
        ScoringClient(f"http://{netloc}", timeout_s=60) as client,
    ):
        answers = [client.retrieve({"seen": items}, 10, without=items) for items in LISTS]
        some = client.retrieve({"seen": LISTS[1]}, among=[4, 8, 400])
    retriever = open_version(version.folder.path).retriever
    for scores, items, answer in zip(scores_of(run, "direct", LISTS), LISTS, answers, strict=True):
        assert (answer.items, answer.scores) == retriever.retrieve({"seen": items}, 10, without=items)[:2]
        check_best({i: score for i, score in scores.items() if i not in items}, 10, answer.items, answer.scores)
    assert (sorted(some.items), some.unknown) == ([4, 8], 1)
    code, out, err = command("audit", "models", "kept", "--json")
    assert code == 0, err
    assert (json.loads(out)["rows"], json.loads(out)["wrong"]) == (len(LISTS) + 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_scores_of_last_items(kind, tmp_path):
    run = train_lists(tmp_path, kind, "direct")
    version = open_version(export(run, tmp_path / "models").folder.path)
    assert version.identity == "exact"
    found = version.forward({"seen": pa.array(LISTS, pa.list_(pa.int64()))}, len(LISTS), 64)
    wanted = scores_of(run, "direct", [items[:-1] for items in LISTS])
    wanted = [scores[items[-1]] if len(items) > 1 else 0.0 for scores, items in zip(wanted, LISTS, strict=True)]
    np.testing.assert_allclose(found[:, 0], wanted, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_increment_answers_by_its_own_weights(kind, tmp_path):
    tables = {"list": [{**BASE["tables"]["list"][0], "rows": 2000}]}
    run = train_lists(
        tmp_path, kind, "direct", tables=tables, negatives=20, train={"epochs": 2}, save={"every": 2, "keep": 9}
    )
    steps = sorted(int(path.name.partition("-")[2]) for path in (run / "ckpt").glob("step-*"))
    first = export(run, tmp_path / "models", which=f"step-{steps[0]}")
    second = export(run, tmp_path / "models", which=f"step-{steps[-1]}", like=first.folder)
    assert (second.base, second.items.items) == (1, ITEMS)
    answered = []
    for one, step in ((first, steps[0]), (second, steps[-1])):
        retriever = open_version(one.folder.path).retriever
        _, model = load_trained(run, f"step-{step}")
        scores_BR = model.eval().scores(Jagged.from_lists({"seen": LISTS[:2]}))
        for scores_R, items in zip(scores_BR, LISTS, strict=False):
            found = retriever.retrieve({"seen": items}, 10)
            check_best(dict(enumerate(scores_R[:ITEMS].tolist())), 10, found.items, found.scores)
            answered.append(found.scores)
    assert answered[:2] != answered[2:]


@pytest.mark.slow
def test_items_of_a_file(made, tmp_path):
    run, ids, _ = made

    def exported(items, kind=None):
        pq.write_table(pa.table({"seen": pa.array(items, kind)}), tmp_path / "items.parquet")
        return export(run, tmp_path / "models", items=ItemOptions(str(tmp_path / "items.parquet"))).folder.path

    keys = [key for (key,) in as_given(ids, [[3], [11], [5]])]
    retriever = open_version(version := exported(keys)).retriever
    assert read_item_table(version)["seen"].to_pylist() == keys
    (scores,) = scores_of(run, ids, [[1, 2]])
    found = retriever.retrieve({"seen": as_given(ids, [[1, 2]])[0]})
    check_best({key: scores[key] for key in keys}, 100, found.items, found.scores)
    for items, kind, message in (
        ([], retriever.items.keys.type, "has no rows: expected at least one item"),
        ([*keys, keys[0]], None, "occurs twice"),
        ([*keys, None], None, "has 1 null keys"),
        ([keys], None, "expected the types of the training data"),
    ):
        with pytest.raises(DataError, match=message):
            exported(items, kind)


def test_wrong_questions_are_told_so_in_a_line(made, command):
    run, ids, version = made
    retriever = open_version(version).retriever
    (items,) = as_given(ids, [[1, 2]])
    wrong = {
        "k=0: expected 1 to 16384 items": ({"seen": items}, 0, {}),
        "no column 'seen'": ({"sene": items}, 5, {}),
        "row 0, column 'seen': 3.5: expected ": ({"seen": items}, 5, {"without": [3.5]}),
    }
    if ids == "direct":
        wrong["row 0, column 'seen': id 40: expected 0 to 39"] = ({"seen": [40]}, 5, {})
    for message, (context, k, more) in wrong.items():
        with pytest.raises(DataError) as caught:
            retriever.retrieve(context, k, **more)
        assert message in str(caught.value)
    code, _, err = command("predict", str(run), "--k", "20000", "--out", "p.csv")
    assert (code, err) == (2, "rowwise: --k 20000: expected 1 to 16384 items\n")


def test_only_models_of_lists_take_k(command, tmp_path):
    run, _ = trained(tmp_path, train={"epochs": 1, "steps": 1})
    code, _, err = command("predict", str(run.folder.path), "--k", "5", "--out", "p.csv")
    assert code == 2
    assert "--k 5: the model ranks no items for a list: expected a run with model.kind=sasrec or hstu" in err.replace(
        "\n", " "
    )


@pytest.mark.slow
def test_lists_without_keys_are_scored_and_not_retrieved(command, tmp_path):
    """A transform makes them, so that nobody knows what a row of the table is called."""
    write_lists(tmp_path / "rows.parquet", 100)
    made = sections(tmp_path, train={"steps": 1})
    made["columns"]["sparse"] = [{"column": "few", "ids": "direct", "table": "item", "feature": "seen"}]
    made["transforms"] = [{"kind": "first_x", "column": "seen", "to": "few", "count": 5}]
    run = TrainingRun.start(decode(made, ""), tmp_path / "runs")
    run.go()
    told = []
    written = export(run.folder.path, tmp_path / "models", warn=told.append)
    assert written.items is None
    assert [line for line in told if "a transform makes column 'few'" in line]
    assert open_version(written.folder.path).retriever is None
    for place in (run.folder.path, tmp_path / "models"):
        code, _, err = command("predict", str(place), "--data", "rows.parquet", "--out", "p.csv")
        assert (code, "Traceback" in err) == (2, False), err
        assert "items" in err

"""Recommendations for every user: those of scoring every item, without what the user has seen."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import test_two_tower_recipe as towers
import torch
from item_lists import sections, write_lists
from pyarrow import csv
from pyarrow import parquet as pq

from rowwise import DataError, Jagged, SpecError, report
from rowwise.models.inference import evaluation_mode
from rowwise.recipes.recommend import RecommendOptions, recommend
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode
from rowwise.recipes.trained import load_trained, predict_rows
from rowwise.report.read import read_run

K = 7


def train(made, folder):
    run = TrainingRun.start(decode(made, ""), folder)
    run.go()
    return run.folder.path


def read(path):
    table = pq.read_table(path)
    key, items, scores = (table[name].to_pylist() for name in table.column_names)
    return {k: (i, s) for k, i, s in zip(key, items, scores, strict=True)}


@pytest.fixture(scope="module")
def meetings(tmp_path_factory):
    """Two towers; a ranker of the same rows; the rows."""
    folder = tmp_path_factory.mktemp("meetings")
    towers.write_meetings(folder / "rows.parquet", 3000)
    made = towers.sections(folder, towers.BASE, train={"epochs": 1})
    ranker = made | {"name": "ranker", "model": {"kind": "dlrm", "bottom": [16], "top": [8]}, "evaluate": {}}
    ranker["log"] = {}
    return train(made, folder / "runs"), train(ranker, folder / "runs"), pq.read_table(folder / "rows.parquet")


def items_of(rows):
    columns = ["item", "kind", "price"]
    return rows.group_by("item").aggregate([("kind", "min"), ("price", "min")]).rename_columns(columns)


def seen_of(rows, users):
    seen = {user: set() for user in users}
    for user, item in zip(rows["user"].to_pylist(), rows["item"].to_pylist(), strict=True):
        seen[user].add(item)
    return seen


@pytest.mark.slow
def test_two_towers_recommend_the_largest_dots(meetings, tmp_path):
    run, _, rows = meetings
    written = recommend(run, tmp_path / "best.parquet", RecommendOptions(k=K))
    best, users = read(tmp_path / "best.parquet"), sorted(set(rows["user"].to_pylist()))
    assert list(best) == users
    _, model = load_trained(run)
    items = sorted(set(rows["item"].to_pylist()))
    last = {user: age for user, age in zip(rows["user"].to_pylist(), rows["age"].to_pylist(), strict=True)}
    seen, given = seen_of(rows, users), set()
    with evaluation_mode(model), torch.inference_mode():
        for user in users:
            dense = torch.tensor([[last[user], item % 10] for item in items], dtype=torch.float32)
            ids = {"user": [[user]] * len(items), "item": [[i] for i in items], "kind": [[i % 6] for i in items]}
            dots = torch.stack(model.towers.vectors(dense, Jagged.from_lists(ids))).prod(0).sum(1)
            wanted = {i: float(dot) for i, dot in zip(items, dots, strict=True) if i not in seen[user]}
            chosen, scores = best[user]
            assert len(set(chosen)) == min(K, len(wanted))
            np.testing.assert_allclose(scores, sorted(wanted.values(), reverse=True)[:K], atol=1e-5)
            np.testing.assert_allclose([wanted[i] for i in chosen], scores, atol=1e-5)
            given |= set(chosen)
    assert (written.users, written.items, written.short) == (len(users), len(items), 0)
    assert written.coverage == len(given) / len(items)
    assert read_run(run).recommended == written
    assert f"{written.novelty:.2f} bits" in report.write(run).read_text()


@pytest.mark.slow
def test_users_and_items_of_files(meetings, tmp_path):
    run, _, rows = meetings
    some = items_of(rows)
    pq.write_table(
        some.append_column("colour", pa.array(["red", "blue"] * (len(some) // 2))), tmp_path / "items.parquet"
    )
    csv.write_csv(pa.table({"user": [5, 9, 3], "age": [1.0, 2.0, 3.0]}), tmp_path / "users.csv")
    options = RecommendOptions(
        k=200, users=str(tmp_path / "users.csv"), items=str(tmp_path / "items.parquet"), where=("colour = red",)
    )
    written = recommend(run, tmp_path / "best.parquet", options)
    best, red = read(tmp_path / "best.parquet"), set(some["item"].to_pylist()[::2])
    assert list(best) == [5, 9, 3]
    assert {user: set(items) for user, (items, _) in best.items()} == {
        user: red - items for user, items in seen_of(rows, range(towers.USERS)).items() if user in best
    }
    assert written.short == 3
    recommend(run, tmp_path / "best.csv", RecommendOptions(k=2, users=options.users, seen="none"))
    assert csv.read_csv(tmp_path / "best.csv").column_names == ["user", "items", "scores"]


@pytest.mark.slow
def test_a_ranker_scores_each_user_with_each_item(meetings, tmp_path):
    _, run, rows = meetings
    items = items_of(rows)
    items = items.slice(0, 30)
    users = pa.table({"user": [8, 2], "age": [1.0, 4.0]})
    pq.write_table(items, tmp_path / "items.parquet")
    pq.write_table(users, tmp_path / "users.parquet")
    options = RecommendOptions(
        k=K,
        users=f"parquet:{tmp_path / 'users.parquet'}",
        items=str(tmp_path / "items.parquet"),
        user="user",
        item="item",
        seen="none",
    )
    recommend(run, tmp_path / "best.parquet", options)
    pairs = items.take(pa.array(np.tile(np.arange(30), 2)))
    pairs = pa.table({name: pairs[name] for name in items.column_names} | {
        name: users[name].take(pa.array(np.repeat([0, 1], 30))) for name in users.column_names
    })  # fmt: skip
    pq.write_table(pairs, tmp_path / "pairs.parquet")
    predict_rows(run, tmp_path / "logits.parquet", data=f"parquet:{tmp_path / 'pairs.parquet'}")
    logits_UI = np.array(pq.read_table(tmp_path / "logits.parquet")["met_logit"]).reshape(2, 30).astype(np.float32)
    for logits_I, (chosen, scores) in zip(logits_UI, read(tmp_path / "best.parquet").values(), strict=True):
        order = np.argsort(-logits_I, kind="stable")[:K]
        assert chosen == [items["item"][int(i)].as_py() for i in order]
        assert scores == logits_I[order].tolist()
    with pytest.raises(SpecError, match="--item is missing: the model scores rows"):
        recommend(run, tmp_path / "best.parquet", RecommendOptions(items=options.items))


@pytest.mark.slow
def test_lists_are_ranked_as_by_predict(tmp_path):
    write_lists(tmp_path / "rows.parquet", 300)
    run = train(sections(tmp_path, model={"kind": "sasrec"}, train={"epochs": 1, "batch": 32}), tmp_path / "runs")
    predict_rows(run, tmp_path / "predicted.parquet", k=K)
    recommend(run, tmp_path / "all.parquet", RecommendOptions(k=K, seen="none"))
    predicted = pq.read_table(tmp_path / "predicted.parquet")
    ranked, predicted = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("all", "predicted"))
    assert all(ranked[name].to_pylist() == predicted[name].to_pylist() for name in ("row", "items", "scores"))
    recommend(run, tmp_path / "new.parquet", RecommendOptions(k=K))
    rows = pq.read_table(tmp_path / "rows.parquet")
    seen = dict(zip(rows["row"].to_pylist(), map(set, rows["seen"].to_pylist()), strict=True))
    best = read(tmp_path / "new.parquet")
    assert list(best) == predicted["row"].to_pylist()
    assert not any(seen[row] & set(items) for row, (items, _) in best.items())
    recommend(run, tmp_path / "file.parquet", RecommendOptions(k=K, users=str(tmp_path / "rows.parquet")))
    of_file = read(tmp_path / "file.parquet")
    assert len(of_file) == 300
    assert {row: of_file[row] for row in best} == best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"user": "nope"}, DataError, "no column 'nope'"),
        ({"item": "item"}, SpecError, "--item item: the recipe names the items"),
        ({"where": ("kind = 99",)}, DataError, "no item passes --where"),
        ({"where": ("kind = red",)}, DataError, "'kind' holds int64, but is compared with 'red'"),
        ({"users": "nope.parquet"}, DataError, "nope.parquet"),
    ],
)
def test_what_does_not_fit_is_refused(meetings, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        recommend(meetings[0], tmp_path / "best.parquet", RecommendOptions(**options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_users_of_a_file_have_the_types_of_the_training_data(meetings, tmp_path):
    run, _, rows = meetings
    recommend(run, tmp_path / "all.parquet", RecommendOptions(k=K))
    best, ages = read(tmp_path / "all.parquet"), dict(zip(*(rows[n].to_pylist() for n in ("user", "age")), strict=True))
    users = str(tmp_path / "users.parquet")
    for kind in (pa.string(), pa.int8(), pa.uint64(), pa.float64()):
        of_file = pa.table({"user": pa.array([5, 3]).cast(kind), "age": [str(ages[5]), str(ages[3])]})
        if kind == pa.string():
            of_file = of_file.set_column(0, "user", of_file["user"].dictionary_encode())
        pq.write_table(of_file, users)
        recommend(run, tmp_path / "best.parquet", RecommendOptions(k=K, users=users))
        assert read(tmp_path / "best.parquet") == {user: best[user] for user in (5, 3)}
    for wrong, message in (
        (["a", "b"], "column 'user' holds string: Failed to parse"),
        ([[5], [3]], "column 'user' holds list"),
        ([1.5, 2.0], "column 'user' holds double: Float value 1.5"),
    ):
        pq.write_table(pa.table({"user": wrong, "age": [1.0, 2.0]}), users)
        with pytest.raises(DataError, match=f"--users {users}: {message}.*expected int64, as in the training data"):
            recommend(run, tmp_path / "no.parquet", RecommendOptions(users=users))
    assert not list(tmp_path.glob("no*"))


@pytest.mark.slow
def test_test_rows_of_another_type_are_seen(tmp_path):
    towers.write_meetings(tmp_path / "rows.parquet", 1000)
    rows = pq.read_table(tmp_path / "rows.parquet")
    kinds = {"user": pa.int32(), "item": pa.int16()}
    fields = [pa.field(field.name, kinds.get(field.name, field.type)) for field in rows.schema]
    pq.write_table(rows.slice(0, 500).cast(pa.schema(fields)), tmp_path / "test.parquet")
    data = {"test": f"parquet:{tmp_path / 'test.parquet'}", "test_share": 0.0}
    run = train(towers.sections(tmp_path, towers.BASE, data=data, train={"steps": 1}), tmp_path / "runs")
    written = recommend(run, tmp_path / "best.parquet", RecommendOptions(k=K))
    assert written.users == len(set(rows["user"].to_pylist()))


@pytest.mark.slow
def test_lists_that_are_none_are_refused(tmp_path):
    write_lists(tmp_path / "rows.parquet", 100)
    run = train(sections(tmp_path, model={"kind": "sasrec"}, train={"steps": 1, "batch": 32}), tmp_path / "runs")
    pq.write_table(pa.table({"seen": [1, 2]}), tmp_path / "users.parquet")
    with pytest.raises(DataError, match=r"column 'seen' holds int64: .*expected list<element: int64>"):
        recommend(run, tmp_path / "best.parquet", RecommendOptions(users=str(tmp_path / "users.parquet")))
    with pytest.raises(SpecError, match="expected the name of a file in an existing folder"):
        recommend(run, tmp_path / "no" / "best.parquet", RecommendOptions())
    with pytest.raises(OSError, match=r"best.parquet.part"):
        recommend(run, Path("/proc/best.parquet"), RecommendOptions())

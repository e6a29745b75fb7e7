"""Labels as people have them: what a text means, which is chosen for a column, and rows without one are left out."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv

from rowwise import DataError, SpecError
from rowwise.ingest import Batcher, Batching, Columns, FrameReader, Sparse
from rowwise.ingest.inspect import inspect
from rowwise.ingest.labels import choose_label, choose_labels, parse_label, value_counts
from rowwise.ingest.share import Share
from rowwise.tables.spec import Table

ROWS = 400
TABLES = (Table(name="user", rows=50, dim=4),)


def chosen(name, values):
    array = pa.array(values)
    return choose_label(name, array.type, value_counts(array))


def labels_of(text, **columns):
    return parse_label(text).values({name: pa.array(values) for name, values in columns.items()}).tolist()


@pytest.mark.parametrize(
    ("values", "text", "ones"),
    [
        (["Yes", "No", "No"], "y = Yes", [1, 0, 0]),
        (["N", "Y", "N"], "y = Y", [0, 1, 0]),
        (["bad", "good", "bad"], "y = good", [0, 1, 0]),
        (["clicked", "none", "none"], "y = clicked", [1, 0, 0]),
        (["shown", "none", "none"], "y = shown", [1, 0, 0]),
        (["false", "true", "true"], 'y = "true"', [0, 1, 1]),
        (["A", "A", "B"], "y = B", [0, 0, 1]),
        ([-1, 1, 1], "y = 1", [0, 1, 1]),
        ([0, 5, 5], "y = 5", [0, 1, 1]),
        ([1, 2, 1], "y = 2", [0, 1, 0]),
        ([True, False, True], "y", [1, 0, 1]),
        ([0.0, 1.0, 0.0], "y", [0, 1, 0]),
        (["not sure", "it's", "not sure"], 'y = "it\'s"', [0, 1, 0]),
        ([5, 1, 2, 3, 4], "y >= 4", [1, 0, 0, 0, 1]),
        ([2, 1, 3], "y >= 3", [0, 0, 1]),
    ],
)
def test_of_two_values_the_one_that_means_yes_and_of_ratings_the_good_ones(values, text, ones):
    choice = chosen("y", values)
    assert (choice.text, choice.values) == (text, "clicks")
    assert labels_of(choice.text, y=values) == ones
    assert ("--label" in choice.note) == (text != "y")


def test_the_line_names_the_option_for_the_other_value():
    assert chosen("my label", ["Yes", "No"]).note.endswith("for the other, --label '`my label`=No'")
    assert "--label 'rating>=5'" in chosen("rating", [1, 2, 3, 4, 5]).note
    assert "--amount" in chosen("stars", [0.5, 1.0, 2.5, 5.0]).note


@pytest.mark.parametrize(
    ("name", "values", "want"),
    [
        ("views", [0, 3, 70, 2], "amounts"),
        ("price", [100, 3000, 70], "numbers"),
        ("watch_s", [0.5, 17.25, 3.0], "numbers"),
        ("change", [-3, 0, 40], "numbers"),
        ("items", [0, 1, 2, 3], "amounts"),
    ],
)
def test_counts_and_amounts(name, values, want):
    choice = chosen(name, values)
    assert (choice.text, choice.values) == (name, want)
    assert choice.note.startswith(f"the label {name!r} is a")


def test_words_of_many_kinds_name_the_ways_out():
    with pytest.raises(DataError, match="'city' has 3 different"):
        chosen("city", ["Paris", "Paris", "Rome", "Oslo"])
    with pytest.raises(DataError, match="'a' in all rows"):
        chosen("city", ["a", "a"])


def test_conditions_are_those_of_row_filters():
    nan = float("nan")
    assert labels_of("churn=Yes", churn=["Yes", None, "No"]) == pytest.approx([1, nan, 0], nan_ok=True)
    assert labels_of("`a b` in [x, y]", **{"a b": ["x", "z", "y"]}) == [1, 0, 1]
    assert labels_of("y", y=[1.0, nan, None]) == pytest.approx([1, nan, nan], nan_ok=True)
    assert labels_of("r >= 4 and d < 3", r=[5, 5, 1], d=[1, 7, 1]) == [1, 0, 0]
    assert labels_of("bought is not null", bought=["x", None]) == [1, 0]
    assert parse_label("my label").name == "my label"
    assert parse_label("`a>b`").columns == ("a>b",)
    with pytest.raises(SpecError, match="label: 'churn=not sure': "):
        parse_label("churn=not sure")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("churn", "'churn' holds string: expected numbers for a label, or a condition such as churn = Yes"),
        ("churn = 1", "label: column 'churn' holds string, but is compared with 1: expected text, in quotes"),
        ("churm = Yes", "no column 'churm'; did you mean 'churn'"),
    ],
)
def test_a_label_that_the_column_does_not_have(text, message):
    columns = Columns(labels=(text,), sparse=(Sparse(column="user", ids="direct"),))
    table = pa.table({"churn": ["Yes", "No"], "user": [1, 2]})
    with pytest.raises(DataError, match=message):
        columns.check(table.schema, "frame")


def test_tasks_are_columns_or_conditions_where_a_column_has_two():
    sparse = (Sparse(column="user"),)
    assert Columns(labels=("rating >= 4", "y"), sparse=sparse).tasks == ("rating", "y")
    assert Columns(labels=("r >= 4", "r >= 2"), sparse=sparse).tasks == ("r >= 4", "r >= 2")
    with pytest.raises(SpecError, match="expected each label once"):
        Columns(labels=("y", "y"), sparse=sparse)


@pytest.mark.parametrize("share", [Share(), Share(begin=0.2, end=0.8)], ids=["all", "share"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_without_a_label_are_left_out(share, shuffle):
    draw = np.random.default_rng(0)
    words = [None if k % 7 == 0 else "Yes" if x else "No" for k, x in enumerate(draw.integers(0, 2, ROWS))]
    users = draw.integers(0, 50, ROWS)
    asked = pa.table({"churn": words, "user": users, "row": range(ROWS)})
    kept = asked.filter(asked["churn"].is_valid())

    def samples(table, label):
        columns = Columns(labels=(label,), sparse=(Sparse(column="user", ids="direct"),), key="row")
        batching = Batching(size=64, shuffle=shuffle, share=share)
        batches = Batcher(FrameReader(table, split_rows=100), columns, TABLES, batching)
        return {
            int(key): (int(label), int(user))
            for batch in batches
            for key, label, user in zip(batch.keys_B, batch.labels_BK[:, 0], batch.sparse.values_N, strict=True)
        }

    found = samples(asked, "churn = Yes")
    rows = {row: (int(word == "Yes"), user) for word, user, row in zip(*kept.to_pydict().values(), strict=True)}
    assert found.items() <= rows.items()
    if share == Share():
        assert found == rows


def test_a_card_of_words_counts_rows_without_a_label():
    draw = np.random.default_rng(0)
    churn = [None if k % 4 == 0 else "Yes" if x else "No" for k, x in enumerate(draw.integers(0, 2, ROWS))]
    table = pa.table({"churn": churn, "user": draw.integers(0, 30, ROWS)})
    card = inspect(FrameReader(table, split_rows=150), "churn").card
    assert (card.label, card.labels, card.rows, card.unlabelled) == ("churn", ("churn = Yes",), 300, 100)
    assert card.label_rate == pytest.approx(churn.count("Yes") / 300)
    assert card.label_choices[-1] == "100 of 400 rows have no label and are left out"
    assert {c.name: c.role for c in card.columns} == {"churn": "label", "user": "sparse"}
    assert inspect(FrameReader(table), "churn=No").card.labels == ("churn=No",)
    assert inspect(FrameReader(table.rename_columns(["click", "user"]))).card.labels == ("click = Yes",)


def test_several_labels_are_of_one_form():
    table = pa.table({"click": [0, 1, 1] * 5, "buy": ["no", "yes", "no"] * 5, "spend": [0.5, 7.0, 1.25] * 5})
    reader = FrameReader(table)
    texts = [choice.text for choice in choose_labels(reader, reader.splits(), ("click", "buy"))]
    assert texts == ["click", "buy = yes"]
    with pytest.raises(DataError, match=r"click \(yes or no\)"):
        choose_labels(reader, reader.splits(), ("click", "spend"))


def test_a_label_is_looked_for_in_splits_until_two_values_are_found():
    reader = FrameReader(pa.table({"y": ["No"] * 20 + ["Yes"] * 20}), split_rows=10)
    assert choose_labels(reader, reader.splits(), ("y",))[0].text == "y = Yes"


def test_the_command_takes_conditions_and_several_labels(command, tmp_path):
    draw = np.random.default_rng(0)
    rating = draw.integers(1, 6, 200)
    table = pa.table({"rating": rating, "buy": draw.integers(0, 2, 200), "user_id": draw.integers(0, 9, 200)})
    csv.write_csv(table, tmp_path / "t.csv")
    code, out, _ = command("data", "inspect", "t.csv", "--label", "rating>=3", "--label", "buy")
    assert code == 0
    assert "labels: [rating>=3, buy]" in (tmp_path / "t.yaml").read_text()
    assert "'rating>=3' are positive" in out
    _, out, _ = command("data", "inspect", "t.csv", "--label", "rating", "--amount", "--recipe", "a.yaml")
    assert "the label 'rating' is a count" in out
    assert "objective: {kind: poisson}" in (tmp_path / "a.yaml").read_text()

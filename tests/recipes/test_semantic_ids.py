"""Folders of semantic ids: the same for any order of items, extended without a change, refused if damaged."""

import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from rowwise import DataError, SpecError
from rowwise.recipes.semantic import FitOptions, append_ids, describe_ids, fit_ids, open_ids, read_vectors

OPTIONS = FitOptions(sizes=(8, 4), unit=True)


def write_items(path, items=120, shuffled=False, columns=None, dim=5):
    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((200, dim)).astype(np.float32)[:items]
    order = np.random.default_rng(1).permutation(items) if shuffled else np.arange(items)
    table = pa.table({"item": [f"item {i:03}" for i in order], "v": list(vectors[order])} | (columns or {}))
    pq.write_table(table, path)
    return str(path)


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_same_folder_for_any_order_and_new_items_behind_the_old(tmp_path):
    path = write_items(tmp_path / "items.parquet")
    ids = fit_ids(read_vectors(path, "item", "v"), tmp_path / "ids", "item", "v", OPTIONS)
    shuffled = write_items(tmp_path / "shuffled.parquet", shuffled=True)
    fit_ids(read_vectors(shuffled, "item", "v"), tmp_path / "same", "item", "v", OPTIONS)
    assert files_of(tmp_path / "ids") == files_of(tmp_path / "same")
    more = read_vectors(write_items(tmp_path / "more.parquet", 132), "item", "v")
    append_ids(open_ids(tmp_path / "ids"), more, tmp_path / "more")
    after, table = open_ids(tmp_path / "more"), pq.read_table(tmp_path / "more" / "items.parquet")
    assert table.slice(0, 120).equals(pq.read_table(tmp_path / "ids" / "items.parquet"))
    assert (after.facts.items, after.facts.fitted) == (132, 120)
    assert after.facts.drift > 1
    assert describe_ids(after).digest != describe_ids(ids).digest
    lines = (tmp_path / "more" / "prefix-2.tsv").read_text().splitlines()
    codes = table["codes"].to_pylist()
    assert lines == [f"{k}\t{4 * a + b}" for k, (a, b) in zip(table["item"].to_pylist(), codes, strict=True)]
    assert len({(*code, n) for code, n in zip(codes, table["number"].to_pylist(), strict=True)}) == 132
    with pytest.raises(SpecError, match="it exists"):
        append_ids(after, more, tmp_path / "more")
    (tmp_path / "ids" / "prefix-1.tsv").write_text("item 000\t1\n")
    with pytest.raises(DataError, match=r"prefix-1.tsv does not match its checksum"):
        open_ids(tmp_path / "ids")


def test_columns_of_numbers(tmp_path):
    path = write_items(tmp_path / "items.parquet", 20, columns={"a": np.arange(20), "b": np.arange(20) / 2})
    keys, vectors = read_vectors(path, "item", "a,b")
    assert vectors.tolist() == [[i, i / 2] for i in range(20)]
    assert len(keys) == 20


@pytest.mark.parametrize(
    ("columns", "names", "message"),
    [
        ({"v": [[1.0, 2.0], [1.0], [3.0, 4.0]]}, "v", "item 2 has a vector of another length than item 1"),
        ({"v": [[1.0], [float("nan")], [2.0]]}, "v", "item 2 has a number that is not finite"),
        ({"v": [[1.0], None, None]}, "v", r"item 2 \(and 1 more\) has no vector in column 'v'"),
        ({"v": [[1.0], [2.0], [None]]}, "v", "the vector of item 3 has a null"),
        ({"v": ["a", "b", "c"]}, "v", "column 'v' holds string"),
        ({"a": [1.0, None, 2.0]}, "a", "item 2 has no number in column 'a'"),
        ({"item": [1, 1, 2], "v": [[1.0]] * 3}, "v", "key 1 occurs twice"),
        ({"v": [[1.0]] * 3}, "w", "no column 'w'; there are item, v"),
        ({"v": [[1e16], [1.0], [2.0]]}, "v", "item 1 has a number that is not finite, or beyond 1e"),
        ({"v": [[1.0] * 16385] * 3}, "v", "vectors of 16,385 numbers: expected at most 16,384"),
        ({"item": ["a", "b\tc", "d"], "v": [[1.0]] * 3}, "v", r"key 'b\\tc' has a tab"),
        ({"item": [1.5, 2.5, 3.5], "v": [[1.0]] * 3}, "v", "items.parquet: column 'item' holds double"),
    ],
)
def test_vectors_that_cannot_be(tmp_path, columns, names, message):
    pq.write_table(pa.table({"item": [1, 2, 3]} | columns), tmp_path / "items.parquet")
    with pytest.raises(DataError, match=message):
        read_vectors(str(tmp_path / "items.parquet"), "item", names)


def test_appended_vectors_are_of_the_fits_kind(tmp_path):
    path = write_items(tmp_path / "items.parquet")
    ids = fit_ids(read_vectors(path, "item", "v"), tmp_path / "ids", "item", "v", OPTIONS)
    other = read_vectors(write_items(tmp_path / "other.parquet", dim=4), "item", "v")
    with pytest.raises(DataError, match="vectors of 4 numbers: expected 5"):
        append_ids(ids, other, tmp_path / "more")
    with pytest.raises(DataError, match="keys of int64: expected string"):
        append_ids(
            ids,
            other._replace(keys=pa.array(range(120)), vectors_ND=other.vectors_ND[:, :1].repeat(5, 1)),
            tmp_path / "more",
        )


def test_drift_of_few_items_and_of_a_perfect_fit(tmp_path):
    items = read_vectors(write_items(tmp_path / "items.parquet"), "item", "v")
    ids = fit_ids(items, tmp_path / "ids", "item", "v", OPTIONS)
    more = read_vectors(write_items(tmp_path / "more.parquet", 121), "item", "v")
    assert 0.01 < append_ids(ids, more, tmp_path / "more").facts.drift < 10
    two = read_vectors(write_items(tmp_path / "two.parquet", 2), "item", "v")
    ids = fit_ids(two, tmp_path / "two", "item", "v", FitOptions(sizes=(2,)))
    assert (ids.facts.error, describe_ids(ids, two).levels[0].entropy) == (0, 1)
    append_ids(ids, read_vectors(write_items(tmp_path / "3.parquet", 3), "item", "v"), tmp_path / "three")
    assert open_ids(tmp_path / "three").facts.drift > 1e20


def test_keys_of_another_layout_are_the_same_items(tmp_path):
    items = read_vectors(write_items(tmp_path / "items.parquet"), "item", "v")
    ids = fit_ids(items, tmp_path / "ids", "item", "v", OPTIONS)
    table = pq.read_table(tmp_path / "items.parquet")
    keys = {"large": table["item"].cast(pa.large_string()), "coded": table["item"].dictionary_encode()}
    for name, column in keys.items():
        pq.write_table(table.set_column(0, "item", column), tmp_path / "other.parquet")
        other = read_vectors(str(tmp_path / "other.parquet"), "item", "v")
        assert len(append_ids(ids, other, tmp_path / name).keys) == 120


@pytest.mark.parametrize("change", [{"key": "other"}, {"sizes": []}, {"sizes": [4, 4]}, {"sizes": [8]}, {"sha256": {}}])
def test_a_damaged_description_is_refused(tmp_path, change):
    items = read_vectors(write_items(tmp_path / "items.parquet"), "item", "v")
    fit_ids(items, tmp_path / "ids", "item", "v", OPTIONS)
    facts = json.loads((tmp_path / "ids" / "ids.json").read_text())
    (tmp_path / "ids" / "ids.json").write_text(json.dumps(facts | change))
    with pytest.raises(DataError, match=r"ids"):
        open_ids(tmp_path / "ids")
    with pytest.raises(DataError, match=r"no ids.json in it: expected a folder of rowwise sid fit"):
        open_ids(tmp_path)


def test_the_command_refuses_before_it_fits(tmp_path, refused):
    path = write_items(tmp_path / "items.parquet", 9)
    (tmp_path / "runs").mkdir()
    fit = ("sid", "fit", path, "--codes", "2x2", "--out")
    assert "--key is missing: expected the name of a column of" in refused(*fit, "ids", "--vectors", "v")
    assert "--vectors is missing: expected" in refused(*fit, "ids", "--key", "item")
    assert "--key item: runs is a run; leave it out" in refused("sid", "fit", "runs", "--key", "item", "--out", "ids")
    assert f"--out {tmp_path}: it exists" in refused(*fit, tmp_path, "--key", "item", "--vectors", "v")
    problem = "9 items for 16 codes: expected no more codes a level than items"
    assert problem in refused(*fit, "ids", "--key", "item", "--vectors", "v", "--codes", "16")

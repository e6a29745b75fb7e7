"""Vocabularies: ids are counted exactly, frequent ones come first, known ones keep their rows."""

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import SpecError
from rowwise.ingest.evidence import find_separator
from rowwise.ingest.vocabulary import IdCounter, check_grown, read_vocabulary, write_vocabularies

TEXTS = st.text(st.characters(exclude_categories=("C", "Z")), max_size=3)
KINDS = {
    "int64": (st.integers(-5, 5), pa.int64()),
    "uint8": (st.integers(0, 9), pa.uint8()),
    "string": (TEXTS, pa.string()),
    "large_string": (TEXTS, pa.large_string()),
    "dictionary": (TEXTS, pa.dictionary(pa.int32(), pa.string())),
}


def count(arrays, most=100):
    counter = IdCounter(most)
    for array in arrays:
        counter.add(array)
    return counter.ids()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_ids_of_two_rows_or_more_by_their_number_of_rows(kind, data):
    values, type_ = KINDS[kind]
    splits = data.draw(st.lists(st.lists(values, max_size=12), min_size=1, max_size=4))
    rows = Counter(value for split in splits for value in split)
    kept = sorted((value for value, n in rows.items() if n >= 2), key=lambda v: (-rows[v], _order(v)))
    assert count(pa.array(split, type_) for split in splits) == [str(value) for value in kept]


def _order(value):
    return value.encode() if isinstance(value, str) else value


@given(ids=st.lists(st.integers(0, 30), min_size=1, max_size=60), cuts=st.integers(1, 5))
def test_more_ids_than_may_be_listed_are_hashed_however_the_data_are_split(ids, cuts):
    splits = [pa.array(ids[n::cuts], pa.int64()) for n in range(cuts)]
    assert (count(splits, most=10) is None) == (len(set(ids)) > 10)


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["a\tb"] * 2), pa.array(["a\nb"] * 2), pa.array(["a\u2028b"] * 2), pa.array([b"a", b"a"]),
        pa.array([2**63, 2**63], pa.uint64()),
    ],
    ids=str,
)  # fmt: skip
def test_ids_that_a_file_cannot_hold_are_hashed(array):
    assert count([array]) is None


@given(first=st.lists(TEXTS, unique=True, min_size=1), more=st.lists(TEXTS, unique=True, min_size=1))
def test_a_grown_vocabulary_keeps_rows_and_adds_the_new_ids_behind(tmp_path_factory, first, more):
    folder = tmp_path_factory.mktemp("ids")
    write_vocabularies({"c": first}, {"c": folder / "old" / "c.txt"})
    write_vocabularies({"c": more}, {"c": folder / "new" / "c.txt"}, folder / "old")
    old, new = (read_vocabulary(folder / name / "c.txt") for name in ("old", "new"))
    assert old == {one: row for row, one in enumerate(first, 1)}
    assert [*new] == [*first, *(one for one in more if one not in first)]
    assert sorted(new.values()) == list(range(1, len(new) + 1))
    check_grown("c", old, new, "runs/a/1")
    if len(first) > 1:
        write_vocabularies({"c": first[::-1]}, {"c": folder / "other" / "c.txt"})
        with pytest.raises(SpecError, match="'c' had row 1"):
            check_grown("c", old, read_vocabulary(folder / "other" / "c.txt"), "runs/a/1")


@pytest.mark.parametrize(
    ("texts", "separator"),
    [
        (["a|b", "b", "a|c", "c|b|a", "a", "c", "b|c"], "|"),
        (["red; blue", "blue", "red;green", "green;blue", "red", "green; red; blue"], ";"),
        ([f"Smith, {n}" for n in range(50)], ""),
        ([f"title {n}, part {n % 3}" for n in range(50)], ""),
        (["a", "b", "c"], ""),
        ([], ""),
    ],
    ids=str,
)
def test_a_separator_stands_between_words_that_recur(texts, separator):
    assert find_separator(pa.array(texts, pa.large_string())) == separator

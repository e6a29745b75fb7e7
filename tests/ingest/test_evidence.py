"""Whole numbers are read as ids or as amounts by evidence; where there is none, the card says that it is close."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import DataError
from rowwise.ingest import FrameReader
from rowwise.ingest.evidence import shape_of, weigh
from rowwise.ingest.inspect import find_separators, inspect

ROWS = 20_000


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def zipf(draw, count):
    """Ids of which the first ones come most often."""
    return np.minimum(count ** draw.random(ROWS), count - 1).astype(np.int64)


def effect(draw, ids_N, scale):
    """A logit for each id, at random."""
    values, at_N = np.unique(ids_N, return_inverse=True)
    return draw.normal(0, scale, len(values))[at_N]


def many_kinds(draw):
    """By name: values, what they add to the logit, and the role that is right; None: any."""
    ids, words, prefix = zipf(draw, 2000), zipf(draw, 400), draw.choice(draw.integers(200, 999, 300), ROWS)
    even, big = draw.integers(1000, 1300, ROWS), zipf(draw, 5000) * 7919 + 10**6
    amount, visits = np.exp(draw.normal(3, 1, ROWS)).astype(np.int64), draw.geometric(0.02, ROWS)
    age, price = np.clip(draw.normal(40, 14, ROWS), 16, 95).astype(np.int64), np.exp(draw.normal(2, 1, ROWS))
    rating, flag = draw.integers(1, 6, ROWS), draw.integers(0, 2, ROWS)
    genres = [sorted(set(draw.choice(12, draw.integers(1, 4)).tolist())) for _ in range(ROWS)]
    holes = [None if lost else n for lost, n in zip(draw.random(ROWS) < 0.3, amount.tolist(), strict=True)]
    none = np.zeros(ROWS)
    return {
        "ids": (ids, effect(draw, ids, 0.8), "sparse"),
        "scattered ids": (big, effect(draw, big, 0.8), "sparse"),
        "ids of no use": (zipf(draw, 3000), none, "sparse"),
        "ids that come alike": (draw.integers(0, 3000, ROWS), none, "sparse"),
        "hashed words": ([f"{n * 2654435761 % 2**32:08x}" for n in words.tolist()], effect(draw, words, 0.8), "sparse"),
        "small ids": (even, effect(draw, even, 0.5), "sparse"),
        "phone prefixes": (prefix, effect(draw, prefix, 0.5), "sparse"),
        "ratings": (rating, 0.5 * rating - 1.5, "sparse"),
        "0 and 1": (flag, 0.8 * flag - 0.4, "sparse"),
        "booleans": (flag.astype(bool), 0.8 * flag - 0.4, "dense"),
        "lists in text": (
            ["|".join(f"g{n}" for n in row) for row in genres],
            [len(row) - 2 for row in genres],
            "sparse",
        ),
        "amounts": (amount, 0.6 * np.log1p(amount) - 2, "dense"),
        "amounts with holes": (pa.array(holes, pa.int64()), none, "dense"),
        "amounts of no use": (np.exp(draw.normal(5, 2, ROWS)).astype(np.int64), none, "dense"),
        "visits": (visits, 0.4 * np.log1p(visits) - 1.5, "dense"),
        "prices": (price, 1 - 0.5 * np.log(price), "dense"),
        "ages": (age, (age - 40) / 15, None),
        "times": (1_600_000_000 + draw.integers(0, 3 * 10**7, ROWS), none, "time"),
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(3))
def test_columns_with_planted_truth(seed):
    draw = np.random.default_rng(seed)
    for kind, (x, told, wanted) in many_kinds(draw).items():
        label = draw.random(ROWS) < sigmoid(np.asarray(told) - np.mean(told) - 1)
        reader = FrameReader(pa.table({"label": label.astype(np.int64), "c": x}))
        found = inspect(reader, separators=find_separators(reader)).card.columns[1]
        assert wanted in (None, found.role), (kind, found)
        assert found.why or found.note


def test_ids_in_the_order_of_their_rate_with_few_rows_each():
    """As numbers they tell much, too: of eleven rows of an id, most have to be seen to tell more."""
    draw = np.random.default_rng(1)
    x_N = np.sort(draw.integers(0, 4000, 44_000))
    logit_N = 2 - x_N / 1000 + 0.8 * draw.normal(size=4000)[x_N]
    label = draw.random(44_000) < sigmoid(logit_N)
    card = inspect(FrameReader(pa.table({"label": label.astype(np.int64), "n": x_N}))).card
    (found,) = (one for one in card.columns if one.name == "n")
    assert (found.role, found.close) == ("sparse", True)


@pytest.mark.slow
def test_ten_tables_of_columns_without_telling_names():
    """At least 95 % of the columns are used rightly, and the others are marked as close."""
    right = wrong = 0
    for seed in range(10):
        draw = np.random.default_rng(seed)
        kinds = many_kinds(draw)
        chosen = draw.permutation(list(kinds))[:12].tolist()
        logit = sum(np.asarray(kinds[name][1]) for name in chosen) / 2
        label = draw.random(ROWS) < sigmoid(logit)
        columns = {f"c{n}": kinds[name][0] for n, name in enumerate(chosen)}
        reader = FrameReader(pa.table({"label": label.astype(np.int64), **columns}), split_rows=5000)
        cards = inspect(reader, separators=find_separators(reader)).card.columns[1:]
        for name, card in zip(chosen, cards, strict=True):
            fine = kinds[name][2] in (None, card.role) and (card.separator == "|") == (name == "lists in text")
            right, wrong = right + fine, wrong + (not fine)
            assert fine or card.close, (seed, name, card)
    assert right >= 0.95 * (right + wrong)


def test_a_column_is_used_as_told():
    draw = np.random.default_rng(0)
    table = pa.table(
        {"label": draw.integers(0, 2, ROWS), "n": draw.integers(0, 500, ROWS), "w": ["a", "b"] * (ROWS // 2)}
    )
    for role in ("sparse", "dense", "unused"):
        card = inspect(FrameReader(table), roles={"n": role}).card
        assert next((c.role, c.why) for c in card.columns if c.name == "n") == (role, "as told")
    with pytest.raises(DataError, match="column 'w' holds string"):
        inspect(FrameReader(table), roles={"w": "dense"})
    with pytest.raises(DataError, match="no column 'm'"):
        inspect(FrameReader(table), roles={"m": "dense"})


@given(st.lists(st.tuples(st.integers(-(1 << 62), 1 << 62), st.booleans()), min_size=2, max_size=60))
def test_losses_are_finite_whatever_the_numbers_are(rows):
    x_N, positive_N = np.array([x for x, _ in rows]), np.array([y for _, y in rows])
    evidence, shape = weigh(x_N, positive_N), shape_of(x_N)
    assert (evidence is None) == (positive_N.all() or not positive_N.any())
    assert evidence is None or np.isfinite(evidence).all()
    assert 0 < shape.filled <= 1
    assert shape.repeats >= 1

"""Whole numbers are read as ids or as amounts by evidence; where there is none, the card says that it is close."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise import DataError
from rowwise.ingest import FrameReader
from rowwise.ingest.evidence import shape_of, weigh
from rowwise.ingest.inspect import inspect

ROWS = 20_000


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def zipf(draw, count):
    """Ids of which the first ones come most often."""
    return np.minimum(count ** draw.random(ROWS), count - 1).astype(np.int64)


def planted(draw):
    """By name: values, what they add to the label, and what they are."""
    ids, even = zipf(draw, 3000), draw.integers(0, 2000, ROWS)
    amounts = np.exp(draw.normal(3, 1, ROWS)).astype(np.int64)
    age = np.clip(draw.normal(40, 14, ROWS), 16, 95).astype(np.int64)
    visits = draw.geometric(0.01, ROWS)
    prefixes = draw.choice(draw.integers(200, 999, 300), ROWS)
    ratings = draw.integers(1, 6, ROWS)
    return {
        "f0": (ids + 957, draw.normal(0, 1, 3000)[ids], "sparse"),
        "f1": (even + 100, draw.normal(0, 1, 2000)[even], "sparse"),
        "f2": (amounts, 0.6 * np.log1p(amounts) - 2, "dense"),
        "f3": (visits, 0.5 * np.log1p(visits) - 2, "dense"),
        "f4": (prefixes, draw.normal(0, 0.5, 1000)[prefixes], "sparse"),
        "f5": (ratings, 0.5 * ratings - 1.5, "sparse"),
        "f6": (draw.integers(0, 2, ROWS), np.zeros(ROWS), "sparse"),
        "f7": (draw.integers(1_300_000_000, 1_500_000_000, ROWS), np.zeros(ROWS), "time"),
        "f8": (draw.integers(0, 3000, ROWS), np.zeros(ROWS), "sparse"),
        "f9": (np.exp(draw.normal(5, 2, ROWS)).astype(np.int64), np.zeros(ROWS), "dense"),
        "paid": (age, (age - 40) / 15, None),  # either is right
    }


@pytest.mark.parametrize("seed", range(3))
def test_columns_with_planted_truth(seed):
    draw = np.random.default_rng(seed)
    columns = planted(draw)
    for name, (x, effect, _) in columns.items():
        label = draw.random(ROWS) < sigmoid(effect - effect.mean() - 1)
        card = inspect(FrameReader(pa.table({"label": label.astype(np.int64), name: x})))
        (found,) = (one for one in card.columns if one.name == name)
        wanted = columns[name][2]
        assert wanted is None or found.role == wanted or found.close, (name, found)
        assert wanted is None or found.role == wanted, (name, found)
        assert found.why or found.note


def test_a_column_is_used_as_told():
    draw = np.random.default_rng(0)
    table = pa.table(
        {"label": draw.integers(0, 2, ROWS), "n": draw.integers(0, 500, ROWS), "w": ["a", "b"] * (ROWS // 2)}
    )
    for role in ("sparse", "dense", "unused"):
        card = inspect(FrameReader(table), roles={"n": role})
        assert next((c.role, c.why) for c in card.columns if c.name == "n") == (role, "as told")
    with pytest.raises(DataError, match="column 'w' holds string: it cannot be used as dense; leave out --dense w"):
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

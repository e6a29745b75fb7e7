"""Ticks are round and cover their range, thin series keep their extremes, numbers read as people write them."""

import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.quantity import DASH, format_count, format_duration, format_metric, format_percent, format_size
from rowwise.report.metric import find_metric
from rowwise.report.read import flatten
from rowwise.report.scale import bin_means, thin_points, tick_labels, ticks, ticks_inside, widen_range

values = st.floats(-1e299, 1e299)
ranges = st.tuples(values, values).map(sorted)


@given(ranges, st.integers(2, 10))
def test_ticks_are_nice_and_cover(ends, most):
    found = ticks(*ends, most)
    low, high = widen_range(*ends)
    step = found[1] - found[0]
    assert 2 <= len(found) <= most + 2
    assert found[0] <= low + 1e-6 * step
    assert found[-1] >= high - 1e-6 * step
    assert found[0] > low - 1.001 * step
    assert found[-1] < high + 1.001 * step
    assert all(math.isclose(b - a, step, rel_tol=1e-5) for a, b in itertools.pairwise(found))
    digits = f"{step:.5e}".split("e")[0]
    assert digits in ("1.00000", "2.00000", "5.00000")


@given(ranges)
def test_ticks_inside_are_inside(ends):
    low, high = widen_range(*ends)
    assert all(low - 1e-6 * (high - low) <= t <= high + 1e-6 * (high - low) for t in ticks_inside(low, high))


@given(ranges, st.sampled_from(["", "B", "%"]))
def test_labels_tell_ticks_apart(ends, unit):
    found = ticks(*ends)
    labels = tick_labels(found, unit)
    assert len(labels) == len(found)
    if (
        max(map(abs, found)) < 1e15
        and max(map(abs, found)) < 1e4 * (found[1] - found[0])
        and found[1] - found[0] > 1e-4
    ):
        assert len(set(labels)) == len(found)


def test_labels():
    assert ticks(0.44, 0.56, 6) == (0.44, 0.46, 0.48, 0.5, 0.52, 0.54, 0.56)
    assert tick_labels((0.0, 0.5, 1.0)) == ("0", "0.5", "1.0")
    assert tick_labels((0.0, 5e6, 1e7)) == ("0", "5\u202fM", "10\u202fM")
    assert tick_labels((0.0, 1e9, 2e9), "B") == ("0", "1\u202fGB", "2\u202fGB")


@given(st.integers(601, 3000), st.sampled_from([0, 0.1, 0.9, 1]), st.integers(0, 99))
def test_thinning_keeps_extremes_and_ends(many, gaps, seed):
    noise = random.Random(seed)
    ys = [math.nan if noise.random() < gaps else noise.gauss(0, 1) for _ in range(many)]
    points = list(enumerate(ys))
    kept = thin_points(points, 600)
    assert len(kept) <= 600
    assert list(kept) == sorted(kept, key=lambda p: p[0])
    assert (kept[0] is points[0], kept[-1] is points[-1]) == (True, True)
    known = [y for y in ys if not math.isnan(y)]
    if known:
        left = [y for _, y in kept if not math.isnan(y)]
        assert (min(left), max(left)) == (min(known), max(known))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500))
def test_means_lie_between_the_extremes(ys):
    found = bin_means(list(enumerate(ys)), 50)
    assert 1 <= len(found) <= 50
    assert all(min(ys) - 1e-6 <= y <= max(ys) + 1e-6 for _, y in found)


def test_numbers_for_people():
    assert [format_count(v) for v in (0.0, 60_000.0, 1_234_567.0, 2.5e9, math.nan)] == [
        "0",
        "60,000",
        "1.23\u202fM",
        "2.50\u202fG",
        DASH,
    ]
    assert [format_size(v) for v in (12.0, 1000.0, 3.4e9, None)] == ["12\u202fB", "1.00\u202fkB", "3.40\u202fGB", DASH]
    assert [format_duration(v) for v in (0.25, 8.0, 83.0, 7500.0, 200_000.0)] == [
        "250\u202fms",
        "8.0\u202fs",
        "1\u202fmin 23\u202fs",
        "2\u202fh 05\u202fmin",
        "2\u202fd 08\u202fh",
    ]
    assert [format_metric(v) for v in (0.81234, 12.3456, 1e-5, -math.inf)] == ["0.8123", "12.35", "1e-05", DASH]
    assert format_percent(0.1234) == "12.3\u202f%"


@given(st.one_of(st.none(), st.floats()))
def test_any_number_can_be_said(value):
    for said in (format_count, format_size, format_duration, format_metric, format_percent):
        assert 0 < len(said(value)) < 40 or abs(value) > 1e20


def test_which_way_is_better():
    better = {name: find_metric(name).better for name in ("loss", "auc", "recall@10", "ndcg@50", "calibration", "odd")}
    assert list(better.values()) == ["lower", "higher", "higher", "higher", "one", "unknown"]
    assert find_metric("calibration").cost(0.9) > find_metric("calibration").cost(1.05)


def test_recipes_by_dotted_key():
    flat = flatten({"a": {"b": "1"}, "t": [{"name": "user", "dim": "4"}, {"x": ["1", "2"]}], "e": {}, "n": None})
    assert flat == {"a.b": "1", "t.user.name": "user", "t.user.dim": "4", "t.1.x": "1, 2", "e": "", "n": ""}

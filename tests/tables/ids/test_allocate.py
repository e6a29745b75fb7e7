"""The allocation is the best there is, against all combinations; curves only fall, and sizes between lie on them."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.errors import SpecError
from rowwise.tables.ids.allocate import FULL, SizeOption, allocate, interpolate_sizes, list_options

SIZES = st.integers(1, 60)
LOSSES = st.integers(-3, 40).map(lambda n: n / 8)  # sums are exact
OPTIONS = st.lists(
    st.builds(SizeOption, method=st.sampled_from("ab"), size_bytes=SIZES, loss=LOSSES), min_size=1, max_size=6
)
TABLES = st.lists(OPTIONS, min_size=1, max_size=4).map(lambda each: {f"t{n}": tuple(o) for n, o in enumerate(each)})


def fitting(tables, budget_bytes, left_bytes):
    """Losses of all combinations that fit."""
    for combination in product(*tables.values()):
        if left_bytes + sum(option.size_bytes for option in combination) <= budget_bytes:
            yield sum(option.loss for option in combination)


@given(TABLES, st.integers(0, 250), st.integers(0, 30))
def test_no_other_choice_that_fits_loses_less(tables, budget_bytes, left_bytes):
    losses = list(fitting(tables, budget_bytes, left_bytes))
    if not losses:
        least = left_bytes + sum(min(o.size_bytes for o in options) for options in tables.values())
        with pytest.raises(SpecError, match=f"expected at least {least:,}$"):
            allocate(tables, budget_bytes, left_bytes)
        return
    found = allocate(tables, budget_bytes, left_bytes)
    assert found.loss == min(losses)
    assert found.error == 0
    assert found.size_bytes <= budget_bytes
    assert found.size_bytes == left_bytes + sum(option.size_bytes for option in found.chosen.values())
    assert list(found.chosen) == list(tables)
    assert all(found.chosen[name] in options for name, options in tables.items())


@given(TABLES, st.integers(60, 250), st.integers(2, 6))
def test_with_few_sums_kept_the_error_says_how_far_it_can_be_off(tables, budget_bytes, most):
    losses = list(fitting(tables, budget_bytes, 0))
    if losses:
        found = allocate(tables, budget_bytes, max_points=most)
        assert min(losses) <= found.loss <= min(losses) + found.error + 1e-12
        assert found.size_bytes <= budget_bytes


@pytest.mark.slow
def test_many_large_tables_take_a_moment():
    curve = tuple(SizeOption(method="a", size_bytes=10**9 // n + 7 * n, loss=n**1.1) for n in range(1, 200))
    found = allocate({f"t{n}": curve for n in range(40)}, 2 * 10**9)
    assert found.size_bytes <= 2 * 10**9
    assert found.error < 0.05 * found.loss


def test_sizes_between_lie_on_straight_lines_over_the_logarithm():
    low, high = SizeOption(method="a", size_bytes=100, loss=3.0), SizeOption(method="a", size_bytes=10_000, loss=1.0)
    made = interpolate_sizes((low, high), 1)
    assert made == (low, SizeOption(method="a", size_bytes=1000, loss=2.0, measured=False), high)


@given(OPTIONS)
def test_a_table_can_always_stay_as_it_is(points):
    made = list_options(points, 40)
    full = [one for one in made if one.method == FULL]
    assert full == [SizeOption(method=FULL, size_bytes=40, loss=0.0)]
    assert all(one.size_bytes < 40 for one in made if one.method != FULL)
    for method in "ab":
        sizes = [one.size_bytes for one in made if one.method == method]
        assert sizes == sorted(sizes)

"""Id maps that follow from a rule: spread evenly, quotients and remainders that tell all ids apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.errors import SpecError
from rowwise.ingest import mix
from rowwise.tables.ids import rules
from rowwise.tables.ids.rows import look_up_rows, permute, scramble

seeds = st.integers(0, (1 << 32) - 1)


@given(ids=st.integers(1, 3000), more=st.integers(0, 3000), seed=seeds)
def test_no_two_ids_share_quotient_and_remainder(ids, more, seed):
    least = min(d + -(-ids // d) for d in range(1, ids + 1))
    rows = least + more
    id_map = rules.quotient_remainder_map(ids, rows, seed)
    assert id_map.shape.rows <= rows
    divisor = id_map.shape.sections[1].divisor
    assert divisor == max(d for d in range(1, ids + 1) if d + -(-ids // d) <= rows)
    assert len(np.unique(look_up_rows(id_map, np.arange(ids)), axis=0)) == ids
    product = rules.quotient_remainder_map(ids, rows, seed, "product")
    quotients, remainders = product.shape.parts
    assert quotients.rows + remainders.rows == id_map.shape.rows
    assert np.array_equal(look_up_rows(product, np.arange(ids)), look_up_rows(id_map, np.arange(ids)))


@given(ids=st.integers(3, 1 << 39))
def test_too_few_rows_say_how_many_are_needed(ids):
    with pytest.raises(SpecError, match="expected at least") as told:
        rules.quotient_remainder_map(ids, 2)
    least = int(str(told.value).split("expected at least ")[1].split(",")[0])
    assert rules.quotient_remainder_map(ids, least).shape.rows <= least
    assert least == int(np.ceil(2 * np.sqrt(ids))) or ids > 1 << 50
    with pytest.raises(SpecError, match="expected at least"):
        rules.quotient_remainder_map(ids, least - 1)


def test_an_order_is_a_permutation_that_depends_on_the_seed():
    for ids in (1, 2, 3, 4, 5, 100, 4096, 4097):
        orders = [permute(np.arange(ids), seed, ids) for seed in range(3)]
        assert all(np.array_equal(np.sort(places), np.arange(ids)) for places in orders)
        assert ids < 5 or len({tuple(places) for places in orders}) == 3


def test_scrambling_is_that_of_ingestion():
    ids = np.arange(1000)
    wanted = mix.mix(ids.astype(np.uint64) ^ mix.mix(np.array([7], np.uint64)))
    assert np.array_equal(scramble(ids, 7), wanted)


def chi_square(rows_N, rows):
    counts = np.bincount(rows_N, minlength=rows)
    wanted = len(rows_N) / rows
    return ((counts - wanted) ** 2 / wanted).sum()


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("step", [1, 2, 1000, 1 << 20])
def test_rows_are_taken_evenly(seed, step):
    rows, count = 997, 100_000
    id_map = rules.double_hash_map(count * step, rows, seed, 3)
    found_NC = look_up_rows(id_map, np.arange(count) * step)
    for column in range(3):  # mean 996, deviation 45
        assert abs(chi_square(found_NC[:, column], rows) - rows) < 6 * np.sqrt(2 * rows)
    # Hashes are independent: as many ids share both rows as would by chance.
    pairs = found_NC[:, 0] * rows + found_NC[:, 1]
    alike = count - len(np.unique(pairs))
    chance = count - rows**2 * (1 - (1 - 1 / rows**2) ** count)
    assert abs(alike - chance) < 6 * np.sqrt(chance)


def test_quotients_of_neighbours_are_apart():
    id_map = rules.quotient_remainder_map(100_000, 1100)
    divisor = id_map.shape.sections[0].divisor
    found_N = look_up_rows(id_map, np.arange(2000))[:, 0]
    assert chi_square(found_N, -(-100_000 // divisor)) < 3 * 100_000 / divisor


@pytest.mark.parametrize(
    "make",
    [
        lambda: rules.hash_map(0, 5),
        lambda: rules.hash_map(5, 0),
        lambda: rules.hash_map(5, 5, -1),
        lambda: rules.double_hash_map(5, 5, 0, 1),
        lambda: rules.double_hash_map(5, 5, 0, 9),
    ],
)
def test_what_holds_nothing_is_refused(make):
    with pytest.raises(SpecError, match="expected"):
        make()

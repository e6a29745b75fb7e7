"""Sharded is unsharded: every layout, pooling, optimizer and row type, on every world, with batches of any sizes.

The fast test covers every pair of choices, those of a table with those of its world as well. The slow one draws from
all combinations, of which there are a million.
"""

import random
from itertools import combinations, product

import pytest
from parallel.shard.jobs import TABLE, WORLD, WORLDS, Setting, draw, draw_job, make_job
from parallel.shard.layout_cases import CASES
from tiers import FULL_SHARE

from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.thread import run_threads


def pairs_of(world: Setting, table: Setting):
    """The pairs of choices that a table in a world makes."""
    return set(combinations((world | table).items(), 2))


def all_pairs():
    """In order."""
    for (a, ones), (b, others) in combinations((WORLD | TABLE).items(), 2):
        yield from product(product([a], ones), product([b], others))


def covering(tables=8, tries=20):
    """Worlds with tables that make every pair of choices between them: the next is the best of some that help."""
    draws, left = random.Random(0), dict.fromkeys(all_pairs())
    while left:
        world = draw(draws, WORLD, draws.choice(list(left)))
        chosen: list[Setting] = []
        for _ in range(tables):
            near = [pair for pair in left if all(world.get(name, value) == value for name, value in pair)]
            aims = [draws.choice(near) if near else () for _ in range(tries)]
            candidates = [draw(draws, TABLE, aim) for aim in aims]
            chosen.append(max(candidates, key=lambda table: len(left.keys() & pairs_of(world, table))))
            for pair in pairs_of(world, chosen[-1]):
                left.pop(pair, None)
        yield world, chosen


def check(world, settings, seed):
    job = make_job(world, settings, seed)
    whole = job.whole()
    if world["world"] == "alone":
        found = [whole.differences(solo())]
    else:
        found = run_threads(WORLDS[world["world"]], whole.differences, timeout_s=60)
    tables = [f"{table.rows} x {table.dim} {s}" for table, s in zip(job.tables, settings, strict=True)]
    assert not any(found), "\n".join([*[text for texts in found for text in texts][:20], str(world), *tables])


COVERING = list(covering())


def test_the_covering_jobs_make_every_pair_of_choices():
    made = {pair for world, tables in COVERING for table in tables for pair in pairs_of(world, table)}
    assert made >= set(all_pairs())


@pytest.mark.few(3)
@pytest.mark.parametrize("number", range(len(COVERING)))
def test_sharded_is_unsharded(number):
    check(*COVERING[number], seed=number)


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", CASES)
def test_all_tables_in_one_layout(layout):
    draws = random.Random(layout)
    check(draw(draws, WORLD), [draw(draws, TABLE, [("layout", layout)]) for _ in range(6)], seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_a_large_sample_of_all_combinations(number, pytestconfig):
    """A third of a thousand worlds with 6,000 tables, half of which are in one layout; there are 1,021,440 in all."""
    count = 25 if pytestconfig.getoption("all_examples") else 25 // FULL_SHARE
    for seed in range(25 * number, 25 * number + count):
        check(*draw_job(seed), seed=seed)

"""What of the tests is fast: `make test` has 240 seconds of processor time for all of them and for lint.

A plugin of pytest that `conftest.py` loads. Without `--full`, Hypothesis draws a few examples, the same ones in every
run. Of a test marked `few(n)` only n combinations of parameters are fast: those that have the most pairs of values
between them; the others are marked slow. With `--full`, as `make test-all` runs them, tests with Hypothesis have random
examples, as many as they ask for.
"""

from collections import defaultdict
from itertools import combinations

import pytest
from hypothesis import HealthCheck, settings

EXAMPLES = 4

settings.register_profile("rowwise", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rowwise")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="random examples, as many as a test asks for")


def pytest_configure(config):
    config.addinivalue_line("markers", "few(n): so many combinations of parameters are fast, the others are slow")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    by_test = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few"):
            by_test[item.nodeid.partition("[")[0]].append(item)
        if not config.getoption("full") and getattr(item.obj, "is_hypothesis_test", False):
            shorten(item.obj)
    for alike in by_test.values():
        kept = covering([item.callspec.indices for item in alike], alike[0].get_closest_marker("few").args[0])
        for index, item in enumerate(alike):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


def shorten(test):
    """Few examples, the same ones each time."""
    full = test._hypothesis_internal_use_settings
    few = min(full.max_examples, EXAMPLES)
    test._hypothesis_internal_use_settings = settings(full, max_examples=few, derandomize=True, database=None)


def covering(choices, count):
    """The places of so many choices, greedily: the next has the most pairs of values that none before it has."""
    pairs = [set(combinations(sorted(choice.items()), 2)) | {(pair,) for pair in choice.items()} for choice in choices]
    kept, seen = [], set()
    while len(kept) < min(count, len(choices)):
        best = max((k for k in range(len(choices)) if k not in kept), key=lambda k: len(pairs[k] - seen))
        kept.append(best)
        seen |= pairs[best]
    return set(kept)

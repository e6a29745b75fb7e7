"""What of the tests is fast: `make test` has 240 seconds of processor time for all of them and for lint.

A plugin of pytest that `conftest.py` loads. Hypothesis draws the same examples in every run, so that a change is never
refused for the luck of its examples: a few without `--full`; with it, as CI runs, a third of what a test asks for.
`--random`, as `make test-all` and each night run, draws others every time. `--all-examples` draws as many as a test
asks for, which takes longer than people wait. Of a test marked `few(n)` only n combinations of parameters are fast:
those that have the most pairs of values between them; the others are marked slow.
"""

import sys
from collections import defaultdict
from itertools import combinations

import pytest
import warm
from hypothesis import HealthCheck, settings

EXAMPLES, FULL_SHARE = 4, 3  # in fast tests; one in so many of what a test asks for, in full ones

settings.register_profile("rowwise", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rowwise")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="a third of the examples that a test asks for")
    parser.addoption("--random", action="store_true", help="with --full: other examples in every run")
    parser.addoption("--all-examples", action="store_true", help="with --full: as many as a test asks for")


def pytest_configure(config):
    config.addinivalue_line("markers", "few(n): so many combinations of parameters are fast, the others are slow")
    warm.on = sys.platform == "linux"


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    by_test = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few"):
            by_test[item.nodeid.partition("[")[0]].append(item)
        if getattr(item.obj, "is_hypothesis_test", False):
            if not config.getoption("full"):
                shorten(item.obj)
            else:
                thin(item.obj, share=1 if config.getoption("all_examples") else FULL_SHARE)
                if not config.getoption("random"):
                    fix(item.obj)
    for alike in by_test.values():
        kept = covering([item.callspec.indices for item in alike], alike[0].get_closest_marker("few").args[0])
        for index, item in enumerate(alike):
            if index not in set(kept):
                item.add_marker(pytest.mark.slow)


def shorten(test):
    """Few examples, the same ones each time."""
    full = test._hypothesis_internal_use_settings
    test._hypothesis_internal_use_settings = settings(full, max_examples=min(full.max_examples, EXAMPLES))
    fix(test)


def thin(test, share):
    """Fewer examples, once for each test: one function may have several sets of parameters."""
    asked = test._hypothesis_internal_use_settings
    if not hasattr(test, "asked_examples"):
        test.asked_examples = asked.max_examples
        few = min(asked.max_examples, max(EXAMPLES, asked.max_examples // share))
        test._hypothesis_internal_use_settings = settings(asked, max_examples=few)


def fix(test):
    """The same examples in each run."""
    drawn = test._hypothesis_internal_use_settings
    test._hypothesis_internal_use_settings = settings(drawn, derandomize=True, database=None)


def covering(choices, count):
    """The places of so many choices, greedily: the next has the most pairs of values that none before it has."""
    pairs = [set(combinations(sorted(choice.items()), 2)) | {(pair,) for pair in choice.items()} for choice in choices]
    kept, seen = [], set()
    while len(kept) < min(count, len(choices)):
        best = max((k for k in range(len(choices)) if k not in kept), key=lambda k: len(pairs[k] - seen))
        kept.append(best)
        seen |= pairs[best]
    return kept


def cases_in_order(items):
    """For the id of each test its place among the cases of its function: first those that cover pairs of values."""
    by_test = defaultdict(list)
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    places = {}
    for cases in by_test.values():
        parameters = [getattr(item, "callspec", None) for item in cases]
        first = covering([one.indices if one else {} for one in parameters], EXAMPLES)
        rest = [k for k in range(len(cases)) if k not in set(first)]
        places |= {cases[k].nodeid: place for place, k in enumerate([*first, *rest])}
    return places

"""Processor time of tests, and what a file of fast ones may take: `seconds.json` beside this file.

`pytest --forks 2 --budget` fails for a file that takes more than it has there, for a test that takes more than half a
second and is not in `END_TO_END`, and for a list too long in all; `--save-seconds` writes the list anew. Seconds
are of processors, those of the processes that a test starts included, so that a busy machine counts little. A machine
that is slower in all files is allowed to be.
"""

import contextlib
import json
import os
import resource
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from warm import SECONDS, USED

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("seconds.json")
ALL_FAST_s = 205.0  # of the 240 of `make test`; the rest is lint and collection
# A file may take so many times its seconds, and so many more: the first that needs a module imports it for all others.
SLACK, SLACK_s, SLACK_OF_ALL = 1.6, 4.0, 1.3
TEST_s, TEST_SLACK = 0.5, 5.0  # of a test that is not in END_TO_END, and how many times as many it may take, once
# One way through each subsystem from end to end, which takes a fast test more than half a second.
END_TO_END = frozenset(
    {
        "tests/checkpoint/test_streams.py::test_increments_of_streams_are_the_changed_rows",
        "tests/ingest/test_service.py::test_the_batches_are_those_made_here",
        "tests/tables/ops/test_triton.py::test_kernels_have_the_bits_of_the_reference",
        "tests/tables/ops/test_triton.py::test_machine_code_keeps_its_budget",
        "tests/recipes/test_disk_tables.py::test_a_run_with_tables_on_disk_ends_as_one_in_memory",
        "tests/recipes/test_managed_runs.py::test_a_run_learns_and_is_continued_exactly",
        "tests/recipes/test_mirrored_runs.py::test_a_run_goes_on_from_its_mirror_with_the_same_bits",
        "tests/recipes/test_sequence_recipes.py::test_it_finds_the_item_that_follows",
        "tests/recipes/test_tower_recipes.py::test_pictures_tell_what_users_like",
        "tests/recipes/test_tune.py::test_a_setting_that_cannot_be_trained_is_a_failed_trial_with_its_reason",
        "tests/serve/test_retrieved_items.py::test_a_version_whose_items_are_damaged_is_refused",
        "tests/serve/test_served.py::test_answers_are_the_bits_of_predict",
        "tests/base/storage/test_read_cache.py::test_several_threads_share_a_folder",
        "tests/test_cli_simulate.py::test_a_run_is_compared_with_its_simulation",
        "tests/test_slurm.py::test_without_slurm_a_line_names_the_way_out",
        "tests/train/test_pipeline.py::test_any_depth_leaves_what_one_step_after_another_leaves",
        "tests/train/test_resume.py::test_stopped_and_resumed_is_uninterrupted",
    }
)
TICKS = os.sysconf("SC_CLK_TCK")
taken, called = pytest.StashKey[dict[str, float]](), pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser):
    parser.addoption("--budget", action="store_true", help="fail where a file takes more processor time than it has")
    parser.addoption("--save-seconds", action="store_true", help="write the processor time of each file that is run")


def saved(tier="fast"):
    return json.loads(LIST.read_text())[tier] if LIST.exists() else {}


def measured(config, seconds, calls):
    """Keep the seconds of tests by their ids, with and without those of their fixtures."""
    config.stash.setdefault(taken, {}).update(seconds)
    config.stash.setdefault(called, {}).update(calls)


def processor_seconds():
    """Of this process, of all that it has started, and of the commands that were forks of another process."""
    return _own_seconds() + _fork_seconds()


def _own_seconds():
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used) + sum(map(_of_process, _descendants(os.getpid())))


def _fork_seconds():
    path = Path(os.environ.get(USED, "")) / str(os.getpid())
    return sum(seconds for (seconds,) in SECONDS.iter_unpack(path.read_bytes())) if path.is_file() else 0.0


def _descendants(pid):
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                for child in file.read().split():
                    yield child
                    yield from _descendants(child)


def _of_process(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def by_file(seconds):
    found = defaultdict(float)
    for test, taken_s in seconds.items():
        found[test.partition("::")[0]] += taken_s
    return found


def excess(seconds, calls, budget):
    """Files and tests that take more than they have, each with what it may take on this machine."""
    files = by_file(seconds)
    known = [files[file] / budget[file] for file in files if budget.get(file, 0) > 1]
    slower = max(1.0, statistics.median(known)) if len(known) > 9 else 1.0
    most = {file: SLACK * slower * budget.get(file, 0.0) + SLACK_s for file in files}
    found = {file: (files[file], most[file]) for file in files if files[file] > most[file]}
    sum_s, most_of_all_s = sum(files.values()), SLACK_OF_ALL * slower * sum(budget.get(file, 0.0) for file in files)
    if sum_s > most_of_all_s + SLACK_s:
        found["all files"] = sum_s, most_of_all_s
    max_s = TEST_SLACK * slower * TEST_s
    return found | {
        test: (taken_s, max_s)
        for test, taken_s in calls.items()
        if taken_s > max_s and test.partition("[")[0] not in END_TO_END
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    result = yield
    config = session.config
    if found := config.stash.get(taken, {}):
        if config.getoption("save_seconds"):
            _save(found, "slow" if config.getoption("full") else "fast")
        elif config.getoption("budget"):
            for name, (taken_s, max_s) in excess(found, config.stash[called], saved()).items():
                text = f"{taken_s:.1f} s of processor time, {max_s:.1f} at most here: make it cheaper, mark it slow, "
                text += "or measure again with --save-seconds"
                location = name.partition("::")[0], None, name
                report = pytest.TestReport(f"{name} budget", location, {}, "failed", text, "call")
                config.hook.pytest_runtest_logreport(report=report)
    return result


def _save(found, tier):
    """Of fast tests the seconds of each file; of slow ones the mean of each function's."""
    seconds = by_file(found)
    if tier == "slow":
        cases = defaultdict(list)
        for test, taken_s in found.items():
            cases[test.partition("[")[0]].append(taken_s)
        seconds = {test: statistics.mean(taken_s) for test, taken_s in cases.items()}
    lists = json.loads(LIST.read_text()) if LIST.exists() else {}
    merged = lists.get(tier, {}) | {name: round(taken_s, 1) for name, taken_s in seconds.items()}
    kept = {name: taken_s for name, taken_s in merged.items() if taken_s and (ROOT / name.partition("::")[0]).exists()}
    lists[tier] = dict(sorted(kept.items()))
    LIST.write_text(json.dumps(lists, indent=1, sort_keys=True) + "\n")

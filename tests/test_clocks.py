"""Wall clocks of hosts may be hours apart: nothing is removed, resumed or refused by them."""

import os
import re
import threading
import time
from pathlib import Path

import clocks
import pytest
from base.storage.stores import s3_server
from launching import started

from rowwise.ingest.warehouse.popularity import log_use, popularity
from rowwise.report.watched import LineAges, read_status

needs_compiler = pytest.mark.skipif(bool(clocks.missing()), reason=clocks.missing())
SOURCE = Path(__file__).parents[1] / "src/rowwise"
WALL = re.compile(
    r"\btime\.time(_ns)?\(|[^_.\w]time\(\)|st_[mc]time|getmtime|modified_s\b|last_modified|datetime\.now|utcnow"
)
# Why each of them may be wrong by hours. What is only shown, or put into a name, decides nothing.
USES = {
    "planning/calibrate/net.py": "shown",
    "checkpoint/listing.py": "shown",
    "cli/convert.py": "uses of columns within days of it, before or after",
    "cli/job.py": "shown; jobs are listed in this order",
    "ingest/plain_copy.py": "equal or not, and which copies are removed first",
    "ingest/warehouse/source.py": "equal or not",
    "ingest/warehouse/storage.py": "equal or not",
    "planning/perf/links.py": "a note about a probe of another month",
    "recipes/mirror.py": "equal or not",
    "recipes/run_files.py": "uses of columns within days of it, before or after",
    "report/read.py": "shown, and which run a hint names",
    "report/watched.py": "bounded by a monotonic clock",
    "base/scratch.py": "a folder that is taken away before its process has locked it is made again",
    "serve/record.py": "in a name, and equal or not",
    "base/storage/cloud.py": "handed on",
    "base/storage/interface.py": "handed on",
    "base/storage/local.py": "handed on",
    "base/storage/read_cache.py": "which of its files are removed first",
    "train/mllog.py": "times of MLPerf's log, which its checker compares within the log",
    "train/run_folder.py": "shown",
    "train/trackers.py": "shown",
}


def python(code, hours, folder, *args):
    """A program whose clock is ahead by so many hours, with its temporary files in a folder; it ends with the block."""
    variables = clocks.shifted(hours) | {"TMPDIR": str(folder)}
    return started(folder, *args, program=("-c", code), environment=variables)


def test_every_use_of_the_wall_clock_is_known():
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if WALL.search(path.read_text())}
    assert found == USES.keys(), "say why a clock that is wrong by hours does no harm, or use time.monotonic"


TIMES = """
import datetime, os, threading, time
begin = time.monotonic()
threading.Event().wait(0.2)
print(time.time(), time.time_ns() / 1e9, datetime.datetime.now().timestamp(), time.monotonic() - begin)
"""


@needs_compiler
@pytest.mark.dist
@pytest.mark.parametrize("hours", [-5, 0, 3])
def test_a_shifted_clock_shifts_wall_times_alone(hours, tmp_path):
    with python(TIMES, hours, tmp_path) as shifted:
        *walls, waited_s = map(float, shifted.communicate(timeout=60)[0].split())
    assert all(abs(wall - time.time() - 3600 * hours) < 60 for wall in walls)
    assert 0.2 <= waited_s < 30


REMOVES = (
    "from rowwise.base.scratch import remove_stale_folders\nprint(flush=True)\nwhile True:\n    remove_stale_folders()"
)
MAKES = """
import os, sys, time
from rowwise.base.scratch import LOCK, Scratch

seen = []

def wait_until_gone(event, args):  # a slow host: the first folder is not locked before the other one has looked
    if event == "open" and str(args[0]).endswith(LOCK) and not seen:
        seen.append(os.path.dirname(args[0]))
        end_s = time.monotonic() + 60
        while os.path.exists(seen[0]):
            assert time.monotonic() < end_s
            time.sleep(0.001)

sys.addaudithook(wait_until_gone)
for _ in range(20):
    with Scratch() as scratch:
        (scratch.path / "file").write_text("")
        assert (scratch.path / "file").exists()
assert seen
"""


@needs_compiler
@pytest.mark.dist
def test_a_host_that_is_ahead_takes_no_temporary_folder_away(tmp_path):
    """In one folder for temporary files: to that host, each empty one is hours old."""
    with python(REMOVES, 3, tmp_path) as ahead:
        assert ahead.stdout.readline() == "\n"
        with python(MAKES, 0, tmp_path) as here:
            assert here.communicate(timeout=120) == ("", "")
    assert here.returncode == 0


@pytest.mark.parametrize("hours", [-30, -1, 0, 1, 30])
def test_uses_of_columns_by_a_host_with_another_clock_count(hours, tmp_path):
    (tmp_path / "_rowwise").mkdir()
    now = 1_700_000_000.0
    log_use(tmp_path, ("x",), now + 3600 * hours)
    log_use(tmp_path, ("y",), now + 3600 * 24 * 9)
    assert popularity(tmp_path, now) == {"x": 1.0}


@pytest.mark.parametrize("hours", [-30, -1, 0, 1, 30])
def test_a_line_that_was_seen_to_appear_is_young_by_any_clock(hours, tmp_path):
    """Files get their times from the host of a store, whose clock differs."""
    (tmp_path / "recipe.yaml").write_text("name: x")
    ages, begin_s = LineAges(), time.monotonic()
    for step in range(3):
        with (tmp_path / "steps.csv").open("a") as file:
            file.write(f"{step}\n" if step else "step\n0\n")
        os.utime(tmp_path / "steps.csv", (time.time() + 3600 * hours,) * 2)
        age_s = read_status("x", tmp_path, ages).age_s
        assert step == 0 or 0 <= age_s <= time.monotonic() - begin_s
    threading.Event().wait(0.05)
    assert 0.05 <= read_status("x", tmp_path, ages).age_s <= time.monotonic() - begin_s


CONNECTS = """
import sys
from base.storage.stores import connect
from rowwise.base.errors import StorageError
try:
    print(connect(sys.argv[1]).list(""))
except StorageError as error:
    print(error)
"""


@needs_compiler
@pytest.mark.dist
def test_a_store_that_refuses_a_wrong_clock_is_said_so(tmp_path):
    with s3_server(tmp_path / "s3", skew_s=900) as server:
        for hours, said in ((0, "[]"), (0.1, "[]"), (-1, "clock"), (1, "clock")):
            with python(CONNECTS, hours, tmp_path, server.endpoint) as client:
                told = client.communicate(timeout=60)[0]
            assert said in told
            assert said == "[]" or "s3://bucket/: the clock of this machine is not the store's: " in told

"""What is temporary goes: at the end, or, where its process was killed, when the next one starts."""

import json
import os
import subprocess
import sys
import time

import pytest
from small import sections, write_rows

from rowwise.base.scratch import LOCK, Scratch, remove_stale_folders

OWNER = (
    "import time; from rowwise.base.scratch import Scratch; s = Scratch(); print(s.path, flush=True); time.sleep(600)"
)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def started(place, *command, **more):
    around = {**os.environ, "TMPDIR": str(place)}
    return subprocess.Popen([sys.executable, *command], env=around, text=True, **more)


def end(process):
    process.kill()
    process.communicate()


def owner(place):
    process = started(place, "-c", OWNER, stdout=subprocess.PIPE)
    return process, process.stdout.readline().strip()


def test_a_folder_is_there_until_it_is_closed():
    with Scratch() as scratch:
        (scratch.path / "file").write_text("")
        remove_stale_folders()
        assert (scratch.path / "file").exists()
    assert not scratch.path.exists()


def test_what_is_kept_stays():
    scratch = Scratch()
    try:
        (scratch.path / "file").write_text("")
        scratch.keep()
        os.utime(scratch.path, (0, 0))
        remove_stale_folders()
        assert (scratch.path / "file").exists()
        (scratch.path / "file").unlink()
        os.utime(scratch.path, (0, 0))
        remove_stale_folders()
        assert not scratch.path.exists()
    finally:
        scratch.close()


@pytest.mark.dist
def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(place):
    (dead, left), (alive, used) = owner(place), owner(place)
    (place / "rowwise-tmp-link").symlink_to(place.parent)
    (place / "others").mkdir()
    end(dead)
    assert os.path.exists(os.path.join(left, LOCK))
    last, mine = owner(place)
    assert {str(path) for path in place.iterdir()} == {used, mine, f"{place}/rowwise-tmp-link", f"{place}/others"}
    end(alive)
    end(last)


@pytest.mark.dist
@pytest.mark.parametrize("options", [("--nproc", "2"), ("--set", "data.workers.count=1")])
def test_a_killed_training_leaves_nothing_after_the_next_start(tmp_path, place, options):
    write_rows(tmp_path / "rows.parquet")
    (tmp_path / "small.yaml").write_text(json.dumps(sections(tmp_path, train={"epochs": 1000})))
    command = ["-m", "rowwise", "train", "small.yaml", *options]
    process = started(place, *command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end_s = time.monotonic() + 120
    while not list(tmp_path.glob("runs/*/*/metrics*.csv")) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert process.poll() is None
    assert list(place.iterdir())
    end(process)
    sweeping = "from rowwise.base.scratch import remove_stale_folders; remove_stale_folders()"
    while time.monotonic() < end_s + 60 and list(place.iterdir()):  # its ranks and workers notice, and end
        started(place, "-c", sweeping).wait()
        time.sleep(0.2)
    assert not list(place.iterdir())


@pytest.mark.dist
def test_ranks_leave_nothing_and_say_nothing_at_the_end(place):
    lines = (
        "from rowwise.parallel.comm.spawn import run_processes",
        "if __name__ == '__main__':",
        "    run_processes(2, str)",
    )
    (place.parent / "ranks.py").write_text("\n".join(lines))
    process = started(place, "ranks.py", cwd=place.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.communicate() == ("", "")
    assert not list(place.iterdir())

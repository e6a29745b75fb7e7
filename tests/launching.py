"""Runs on several ranks as users start them: processes, their ranks, and how to wait for them."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import warm
import yaml
from hypothesis import strategies as st
from small import sections, write_rows

from rowwise.cli.job import JobRequest

PYTHON = (sys.executable, *subprocess._args_from_interpreter_flags())
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
# Of 768 samples: three blocks, so that three ranks have one each; the third of a split is the last of an epoch.
ELASTIC = {"batch": 768, "determinism": "elastic", "virtual_shards": 6}
SCHEDULED = {  # a run long enough to be stopped
    "train": {**ELASTIC, "epochs": 1000, "steps": 150}, "log": {"every": 2}, "save": {"every": 25, "keep": 9},
}  # fmt: skip
LONGER = SCHEDULED | {"train": {**ELASTIC, "epochs": 5000}}
PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20)
FILE_NAMES = PRINTABLE.filter(lambda text: "/" not in text and text not in (".", ".."))
SMALL_JOB = JobRequest(
    recipe="small",
    command=("train", "small.yaml"),
    cwd=Path("/shared"),
    runs=Path("/shared/runs"),
    run=None,
    nodes=3,
    nproc=2,
    settings={},
)


def write_recipe(folder, rows=2000, **changes):
    """small.yaml in a folder, and the rows beside it."""
    folder.mkdir(exist_ok=True)
    if not (folder / "rows.parquet").exists():
        write_rows(folder / "rows.parquet", rows)
    made = sections(folder, **changes)
    made["data"]["dataset"] = "parquet:rows.parquet"
    (folder / "small.yaml").write_text(yaml.safe_dump(made))
    return folder


def rowwise(folder, *args, timeout=120, environment=None):
    """A command that ends by itself."""
    environment = ENVIRONMENT | (environment or {})
    return subprocess.run(
        [*warm.command(environment), *args],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


@contextmanager
def started(folder, *args, program=("-m", "rowwise"), environment=None):
    """A process that runs; killed at the end, if it has not ended."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [*PYTHON, *program, *args]
    environment = ENVIRONMENT | (environment or {})
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(what, seconds=60.0):
    """What a function finds, once it finds something."""
    end_s = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end_s, f"waited {seconds} s"
        time.sleep(0.005)
    return found


def ranks_of(run, after=0):
    """The processes of a run's ranks, once it says them for the time after so many others."""

    def find():
        log = run / "log.txt"
        found = re.findall(r"processes ([\d ]+)\n", log.read_text()) if log.exists() else []
        return found[after:]

    return [int(pid) for pid in wait_for(find)[0].split()]


def wait_for_step(run, step):
    """Until a step of a run was written down."""

    def there():
        path = run / "metrics.csv"
        lines = path.read_text().splitlines() if path.exists() else []
        return any(line.partition(",")[0].isdecimal() and int(line.partition(",")[0]) >= step for line in lines)

    wait_for(there, 200)  # ranks of a busy machine start late


def is_there(pid):
    """Whether a process runs."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def told(err):
    """The lines by which a command says that it failed."""
    return [line for line in err.splitlines() if line.startswith("rowwise: ")]

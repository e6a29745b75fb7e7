"""Commands that are forks are as commands that are not: what they print, how they end, and what they know."""

import os
import resource
import signal
import subprocess
import sys

import pytest
import warm
from launching import is_there, wait_for

COLD = [sys.executable, "-m", "rowwise"]
MODEL = """
import os, resource, signal, sys
print(resource.getrlimit(resource.RLIMIT_NOFILE), os.listdir("/proc/self/fd"), os.environ["MINE"], os.getcwd())
print(sys.path, sys.argv)
{then}
"""
RECIPE = "data: {dataset: synthetic, rows: 100, test_rows: 10}\nmodel: ./net.py:Net\n"


@pytest.fixture(scope="module")
def first():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "on", True)
        return warm.command()


def limit():
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))


def ended(command, folder, args):
    done = subprocess.run(
        [*command, *args], cwd=folder, env={**os.environ, "MINE": "\udcff é"}, capture_output=True, preexec_fn=limit,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr.partition(b"Traceback")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "then"),
    [
        (["--version"], ""),
        (["nope", "\x1b\udcff"], ""),
        (["train", "my.yaml", "--dry-run"], "raise SystemExit('no')"),
        (["train", "my.yaml", "--dry-run"], "raise ZeroDivisionError"),
        (["train", "my.yaml", "--dry-run"], "os.kill(os.getpid(), signal.SIGKILL)"),
        (["train", "my.yaml", "--dry-run"], "os.kill(os.getpid(), signal.SIGUSR1)"),
    ],
    ids=str,
)
def test_a_fork_is_as_a_new_interpreter(first, tmp_path, args, then):
    (tmp_path / "my.yaml").write_text(RECIPE)
    (tmp_path / "net.py").write_text(MODEL.format(then=then))
    assert ended(first, tmp_path, args) == ended(COLD, tmp_path, args)


@pytest.mark.slow
def test_variables_that_count_early_are_those_of_an_interpreter(first, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('early')\n")
    asked = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*first, "--version"], env=asked, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("early\nrowwise ")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_signals_the_client_signals_the_fork(first, tmp_path, number):
    (tmp_path / "my.yaml").write_text(RECIPE)
    (tmp_path / "net.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen([*first, "train", "my.yaml"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        process.send_signal(number)
    assert process.returncode == -number
    wait_for(lambda: not is_there(pid))

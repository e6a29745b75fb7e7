"""The command line as users meet it: real processes, their output and exit codes."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import typer
import warm
from launching import ENVIRONMENT
from options import BASE

import rowwise
from rowwise.cli import main

EXAMPLES = {"calibrate": 3, **dict.fromkeys(("plan", "train", "resume", "drill", "compress"), 2)}  # others: 1
CHECKOUT = Path(__file__).parents[1]


def rowwise_cli(*args, cwd=CHECKOUT, python=(), **settings):
    warmed = not (python or settings)
    first = warm.command(ENVIRONMENT) if warmed else [sys.executable, *python, "-m", "rowwise"]
    settings = {"env": ENVIRONMENT} if warmed else settings
    return subprocess.run([*first, *args], cwd=cwd, capture_output=True, text=True, check=False, **settings)


@pytest.fixture
def checkout(tmp_path):
    """A checkout with one benchmark, which the test writes."""
    (tmp_path / "src" / "rowwise").mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()

    def write(body):
        text = f'"""How fast is it?\n\nMore.\n\nTakes: a minute\nNeeds: nothing\n"""\nimport sys, time\n{body}\n'
        (tmp_path / "benchmarks" / "mine.py").write_text(text)
        (tmp_path / "benchmarks" / "parts").mkdir()
        (tmp_path / "benchmarks" / "parts" / "not_one.py").write_text("")
        return tmp_path

    return write


@pytest.mark.parametrize("name", ["", "data", "ckpt", "net", *BASE])
def test_help_has_examples(command, name):
    code, out, _ = command(*name.split(), "--help")
    assert not re.search("[\U0001f300-\U0001faff]", out)  # :key: in a help text would be a picture of one
    assert code == 0
    assert len(re.findall(f"Example: .*rowwise {name}", out)) >= EXAMPLES.get(name, 1)


def loaded_by(*args, **settings):
    """The modules that a command has loaded at its end."""
    done = rowwise_cli(*args, python=["-X", "importtime"], **settings)
    assert done.returncode == 0
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


HELPS = ("doctor", "data inspect", "cp", "train", "resume", "report", "drill", "ckpt export", "calibrate", "compress")


@pytest.mark.few(1)
@pytest.mark.parametrize("args", ["--help", "--version", "bench", "ls", *(f"{name} --help" for name in HELPS)])
def test_starts_without_torch(args):
    loaded = loaded_by(*args.split())
    assert "rowwise" in loaded
    assert loaded.isdisjoint({"torch", "pandas", "pyarrow.pandas_compat"})


@pytest.mark.slow
def test_help_of_plans_loads_nothing_large():
    assert loaded_by("plan", "--help").isdisjoint({"torch", "pyarrow", "scipy", "numpy"})


def test_without_arguments_the_first_commands_are_said():
    done = rowwise_cli()
    assert (done.returncode, done.stderr) == (0, "")
    first, _, *commands = done.stdout.splitlines()
    assert first == "Three commands to begin with:"
    assert [line.split()[:3] for line in commands[:3]] == [
        ["rowwise", "train", "dlrm-synthetic"],
        ["rowwise", "data", "inspect"],
        ["rowwise", "train", "FILE.yaml"],
    ]


def test_version():
    assert rowwise_cli("--version").stdout == f"rowwise {rowwise.__version__}\n"


@pytest.mark.slow
def test_doctor_passes_here():
    done = rowwise_cli("doctor", "--json", "--seconds", "0", cwd="/")
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["ok"] is True
    machine = {"rowwise", "python", "torch", "cuda", "numpy", "os", "cpu", "cores", "torch_threads"}
    assert report["machine"].keys() >= machine | {"omp_wait_policy", "huge_pages", "memory_gb"}
    assert report["machine"]["omp_wait_policy"] == "passive"
    assert report["native"]["isa"] in report["native"]["isa_sets"]
    assert Path(report["native"]["library"]).stat().st_size == report["native"]["library_bytes"]
    checks = {check["name"]: check["failure"] for check in report["result"]["checks"]}
    assert len(checks) == 2 + (1 + 7) * len(report["native"]["isa_sets"])
    assert not any(checks.values())
    assert all(number > 0 for number in report["result"]["speed"].values())


@pytest.mark.slow
def test_doctor_without_native_operators(tmp_path):
    """The package without its library: says what is missing and the way out."""
    shutil.copytree(Path(rowwise.__file__).parent, tmp_path / "rowwise", ignore=shutil.ignore_patterns("_lib"))
    packages = [p for p in sys.path if p.endswith("-packages")]
    # -S: an editable installation would bring the library back.
    done = rowwise_cli("doctor", cwd="/", python=["-S"], env={"PYTHONPATH": ":".join([str(tmp_path), *packages])})
    assert done.returncode == 1
    assert "librowwise_ops.so is not in" in done.stdout
    assert "make build" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_doctor_names_what_fails():
    """A reference that disagrees with the kernels is what a broken kernel looks like."""
    script = """if True:
        from rowwise.tables.ops.reference import apply
        apply.column_sum = lambda x_ND: x_ND.sum(1) + 1
        from rowwise.cli.main import make_app
        make_app()(["doctor", "--seconds", "0"])
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    # Those that sum over columns; each fails at the first shape it is tried with.
    assert {line.split(": dim 4, ")[0].split(", ")[-1] for line in failed} == {"RowWiseAdagrad", "RowWiseAdam", "Lamb"}
    assert all("dim 4, mean, fp32: " in line and "numbers differ" in line for line in failed)


def test_bench_lists_what_each_answers_takes_and_needs(checkout):
    folder = checkout("")
    done = rowwise_cli("bench", "--list", cwd=folder)
    assert done.stdout.split() == ["mine", "How", "fast", "is", "it?", "Takes:", "a", "minute.", "Needs:", "nothing"]
    assert rowwise_cli("bench", cwd=folder).stdout == done.stdout


RESULT = '{"rows": [1], "floors": [{"name": "speed", "value": 1, "floor": 2, "ok": false}]}'
ENDINGS = {  # what a benchmark does: what is said of it, and the exit code of all
    f"print(sys.argv[1:]); print({RESULT!r})": ("ok  1 floors, 1 missed, 1 rows", 0),
    f"print({RESULT!r}); sys.exit(1)": ("exit code 1", 1),
    "print('done')": ("its last line is not a result as JSON", 1),
    "": ("its last line is not a result as JSON", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("body", ENDINGS)
def test_bench_all_says_how_each_ended(checkout, body):
    said, code = ENDINGS[body]
    done = rowwise_cli("bench", "--all", "--smoke", cwd=checkout(body))
    assert done.returncode == code
    assert done.stdout.splitlines()[0].startswith("mine ")
    assert done.stdout.splitlines()[0].endswith(f" s  {said}")


@pytest.mark.slow
def test_bench_passes_arguments_and_exit_code_on(checkout):
    folder = checkout("print(sys.argv[1:]); sys.exit(3)")
    done = rowwise_cli("bench", "mine", "--quick", "--", "--save", "x.json", cwd=folder / "src")
    assert done.stdout == "['--quick', '--save', 'x.json']\n"
    assert done.returncode == 3


@pytest.mark.slow
def test_bench_unknown_name(checkout):
    folder = checkout("")
    done = rowwise_cli("bench", "yours", cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    listed = "See rowwise bench --list"
    assert done.stderr == f"rowwise: no benchmark 'yours': expected one of mine. {listed}\n"
    near = rowwise_cli("bench", "mime", cwd=folder)
    assert near.stderr == f"rowwise: no benchmark 'mime'; did you mean 'mine'? {listed}\n"


@pytest.mark.slow
def test_wrong_option_is_a_user_error():
    done = rowwise_cli("doctor", "--jsn")
    assert done.returncode == 2
    assert "--json" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_with_one_line(checkout):
    folder = checkout("print('ready', flush=True); time.sleep(60)")
    command = [sys.executable, "-m", "rowwise.cli.main", "bench", "mine"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "rowwise: stopped by Ctrl-C\n"


def test_ctrl_c_waits_for_threads_that_python_takes_for_ended(capsys):
    """An interrupted join marks a thread as ended before Python 3.13."""
    ended = []

    class Worker(threading.Thread):
        def is_alive(self):
            return False

        def run(self):
            time.sleep(0.2)
            ended.append(True)

    app = typer.Typer()

    @app.command(cls=main.CheckedCommand)
    def command():
        Worker().start()
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        app([])
    assert (stopped.value.code, ended) == (130, [True])
    assert "stopped by Ctrl-C" in capsys.readouterr().err

"""Training from the command line: what is printed, how it ends, and that stopped and resumed is uninterrupted."""

import csv
import json
import os
import pty
import random
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import warm
from launching import told, write_recipe
from pyarrow import parquet as pq
from small import lines, same, saved, write_rows
from test_cli import loaded_by, rowwise_cli

COMMAND = (sys.executable, "-m", "rowwise.cli.main")


def start(folder, *args, command=COMMAND, **settings):
    """A process that trains."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | settings
    return subprocess.Popen([*command, *args], cwd=folder, **pipes)


def wait_for_lines(run, count, process):
    """Until so many lines of metrics.csv are there: then it trains."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        path = run / "metrics.csv"
        if path.exists() and path.read_text().count("\n") > count:
            return
        time.sleep(0.002)
    raise AssertionError(f"the run ended with {process.poll()} before it wrote {count} lines")


HUGE = ("--set", "tables.each.user.rows=100000000000")  # 3.6 TB


def test_tables_larger_than_memory_are_refused_in_one_line(refused, command, tmp_path):
    write_recipe(tmp_path)
    need = r"the tables need 3\.6 TB of memory here .* the largest is 'user' with 100,000,000,000 x 8.* are free.*"
    assert re.search(need + r": expected .*tables\.each\.user\.rows=\d+ \(\d+", refused("train", "small.yaml", *HUGE))
    assert not (tmp_path / "runs").exists()
    assert command("train", "small.yaml", "--set", "train.epochs=1")[0] == 0
    run = tmp_path / "runs/small/1"
    assert re.search(need + "ranks on ", refused("resume", str(run), *HUGE))
    kept = (run / "recipe.yaml").read_text()
    assert len(re.findall(r"\brows: 50\b", kept)) == 1
    (run / "recipe.yaml").write_text(re.sub(r"\brows: 50\b", "rows: 100000000000", kept))
    for args in (("eval", str(run)), ("predict", str(run), "--out", str(tmp_path / "p.parquet"))):
        assert re.search(need + r"a machine with 3\.6 TB free; or a run with ", refused(*args))


@pytest.mark.dist
def test_ranks_whose_tables_are_larger_than_memory_are_refused_in_one_line(tmp_path):
    write_recipe(tmp_path)
    done = rowwise_cli("train", "small.yaml", "--nproc", "2", *HUGE, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = told(done.stderr)
    assert "the tables need 3.6 TB of memory here" in line
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_train_then_everything_else(command, tmp_path):
    """What a newcomer does, one command after the other."""
    write_recipe(tmp_path)
    done = rowwise_cli("train", "small.yaml", "--set", "train.epochs=3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert len(done.stderr.splitlines()) < 20
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr
    assert done.stderr.startswith("small  runs/small/1\n")
    for part in (
        "data    parquet:",
        "model   DLRM, ",
        "tables  3 of 100 rows",
        "memory  ",
        "best    ne ",
        "finished: ",
        "step    ",
    ):
        assert part in done.stderr
    assert "report  runs/small/1/report.html\ntrees   boosted trees reach AUC " in done.stderr
    _, out, _ = command("eval", "runs/small/1", "--json")
    result = json.loads((tmp_path / "runs/small/1/result.json").read_text())
    assert json.loads(out)["tasks"] == result["test"]
    _, out, _ = command("predict", "runs/small/1", "--out", "p.parquet")
    rows = pq.read_metadata(tmp_path / "p.parquet").num_rows
    assert out == f"wrote p.parquet: {rows:,} rows\n"
    assert rows == result["test"]["label"]["count"]


def test_the_commands_that_look(command, tmp_path):
    write_recipe(tmp_path)
    code, out, _ = command("train", "small.yaml", "--json", "--set", "evaluate.slices=[user]")
    assert code == 0
    result = json.loads(out)
    code, out, _ = command("eval", "runs/small/1")
    assert code == 0
    assert f"{result['test']['label']['auc']:.4f}" in out
    code, out, _ = command("eval", "runs/small/1", "--slices", "user,item", "--which", "last", "--json")
    assert {row["feature"] for row in json.loads(out)["slices"]} == {"user", "item"}
    code, out, _ = command("report", "runs/small/1", "--out", "r.html")
    assert (code, out) == (0, "r.html\n")
    assert (tmp_path / "r.html").read_text().lstrip().lower().startswith("<!doctype html>")
    code, out, _ = command("report", "runs/small/1", "runs/small/1", "--out", "c.html")
    assert (code, out) == (0, "c.html\n")


def test_a_dry_run_writes_nothing(command, tmp_path):
    write_recipe(tmp_path)
    code, out, err = command("train", "small.yaml", "--dry-run")
    assert (code, out) == (0, "")
    assert "small  dry run: nothing is trained or written" in err
    assert "memory  7.2 kB without batches: 3.2 kB of rows and 400 B of their optimizer state" in err
    code, out, _ = command("train", "small.yaml", "--dry-run", "--json", "--set", "tables.all.rows=100000000")
    found = json.loads(out)
    assert (found["rows"], found["rows_bytes"], found["state_bytes"]) == (3 * 10**8, 3 * 32 * 10**8, 3 * 4 * 10**8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.parquet", "small.yaml"]


LONG = {"train": {"epochs": 30, "ahead": 2}, "log": {"every": 2}, "save": {"every": 7}, "evaluate": {"every": 11}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    write_recipe(folder, **LONG)
    done = rowwise_cli("train", "small.yaml", "--json", cwd=folder)
    # One object is all that is printed.
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["status"] == "finished"
    assert result == json.loads((folder / "runs/small/1/result.json").read_text())
    return folder / "runs/small/1"


def assert_equal_runs(one, other):
    assert same(saved(one), saved(other))
    assert lines(one) == lines(other)
    results = [json.loads((run / "result.json").read_text()) for run in (one, other)]
    for key in ("status", "steps", "samples", "best", "test"):
        assert results[0][key] == results[1][key]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_and_resumed_is_uninterrupted(whole, command, tmp_path, number, code):
    write_recipe(tmp_path, **LONG)
    run = tmp_path / "runs/small/1"
    with start(tmp_path, "train", "small.yaml") as process:
        wait_for_lines(run, 100, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert "stopping after this step; Ctrl-C again stops at once\n" in err
    assert err.endswith("resume it with: rowwise resume runs/small/1\n")
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "stopped"
    assert 0 < result["steps"] < 30 * 10
    code, out, err = command("resume", "runs/small/1")
    assert (code, out) == (0, "")
    assert f"resumed at step {result['steps']}\n" in err
    assert_equal_runs(run, whole)


@pytest.mark.slow
def test_killed_and_resumed_is_uninterrupted(command, tmp_path):
    """Ten times, at random moments of its training."""
    changes = {**LONG, "train": {"epochs": 150, "ahead": 2}}
    run, draw, kills = tmp_path / "runs/small/1", random.Random(0), 0
    write_recipe(tmp_path, **changes)
    args = ("train", "small.yaml")
    while kills < 10:
        before = (run / "metrics.csv").stat().st_size if run.exists() else 0
        with start(tmp_path, *args, command=warm.command()) as process:
            wait_for_change(run, before, process)
            time.sleep(draw.uniform(0, 0.1))
            process.kill()
            process.communicate()  # until whoever wrote to it has ended
        assert process.returncode == -signal.SIGKILL  # it had not finished
        args = ("resume", "runs/small/1")
        kills += 1
    assert command(*args)[0] == 0
    (tmp_path / "other").mkdir()
    assert command("train", "small.yaml", "--runs", "other")[0] == 0
    assert_equal_runs(run, tmp_path / "other/small/1")


def wait_for_change(run, before, process):
    """Until there is another length of metrics.csv: it has gone back to its checkpoint, and trains."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        path = run / "metrics.csv"
        if path.exists() and path.stat().st_size not in (0, before):
            time.sleep(0.02)
            return
        time.sleep(0.002)
    raise AssertionError("it did not train")


@pytest.mark.slow
def test_a_terminal_shows_one_line_that_goes_away(tmp_path):
    write_recipe(tmp_path, train={"epochs": 40})
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "150"}
    args = ("train", "small.yaml", "--no-baseline")
    with start(tmp_path, *args, stdout=slave, stderr=slave, stdin=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                found = os.read(master, 4096)
            except OSError:  # the terminal has closed
                break
            if not found:
                break
            shown += found
        process.wait(timeout=60)
    os.close(master)
    assert process.returncode == 0
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()
    live = [part for part in re.split(r"[\r\n]+", text) if "samples/s, loss" in part]
    assert live  # shown while it trains
    # Each look is drawn over the one before, and the last one is wiped out.
    assert shown.count(b"\x1b[2K") >= len(live)
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")  # the cursor is back
    assert text.rstrip().endswith("report  runs/small/1/report.html")
    assert "Traceback" not in text


def test_wrong_recipes(refused, tmp_path):
    write_recipe(tmp_path)
    assert "no recipe 'smal': expected one of avazu-x1-dlrm, " in refused("train", "smal")
    assert "none.yaml: no such file: expected a recipe file" in refused("train", "none.yaml")
    assert "no key 'epoch' in train; did you mean 'epochs'?" in refused("train", "small.yaml", "--set", "train.epoch=3")
    wrong = refused("train", "small.yaml", "--set", "columns.labels=[lable]")
    assert "rows.parquet: no column 'lable'; did you mean 'label'?" in wrong
    wrong = refused("train", "small.yaml", "--set", "data.dataset=movielens-10")
    assert "no dataset 'movielens-10'; did you mean 'movielens-100k'?" in wrong
    wrong = refused("train", "small.yaml", "--set", "data.dataset=movielens-100k")
    assert "movielens-100k is not here: rowwise data get movielens-100k" in wrong
    wrong = refused("train", "small.yaml", "--set", "data.dataset=csv:none.csv")
    assert "none.csv: no such file or folder" in wrong
    assert "log.profile='x': expected the first and last step" in refused("train", "small.yaml", "--profile", "x")
    assert "nowhere is not a checkpoint" in refused("train", "small.yaml", "--init-from", "nowhere")
    (tmp_path / "empty.yaml").write_text("")
    assert "empty.yaml: expected a recipe with a section `data:`" in refused("train", "empty.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.yaml", "rows.parquet", "small.yaml"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "rows.parquet: the file is empty: expected a Parquet file"),
        (b"not parquet", "rows.parquet: cannot be read as Parquet: "),
        (None, "rows.parquet: cannot be read as Parquet: "),
    ],
    ids=["empty", "other", "truncated"],
)
def test_files_that_are_broken(refused, tmp_path, content, message):
    write_recipe(tmp_path)
    path = tmp_path / "rows.parquet"
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    assert message in refused("train", "small.yaml")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("label", 2, "rows.parquet: row 1234, column 'label': 2: expected a label of 0 or 1"),
        (
            "user",
            50,
            "rows.parquet: row 1234, column 'user': id 50: expected 0 to 49, the rows of table 'user'; ids='hash'",
        ),
        ("d0", float("inf"), "rows.parquet: row 1234, column 'd0': inf: expected a finite number in 32 bits"),
    ],
)
def test_a_wrong_value_in_the_middle(command, tmp_path, column, value, message):
    write_rows(
        tmp_path / "rows.parquet",
        **{column: lambda t: [*t[column].to_pylist()[:1234], value, *t[column].to_pylist()[1235:]]},
    )
    write_recipe(tmp_path)
    code, out, err = command("train", "small.yaml")
    (line,) = told(err)
    assert (code, out, err.splitlines()[-1]) == (2, "", line)
    assert message in line
    result = json.loads((tmp_path / "runs/small/1/result.json").read_text())
    assert result["status"] == "failed"
    assert message in result["message"]
    assert not (tmp_path / "runs/small/1/ckpt").exists()


def test_a_word_where_an_id_belongs(refused, tmp_path):
    write_rows(tmp_path / "rows.parquet", user=lambda rows: [str(x) for x in rows["user"].to_pylist()])
    write_recipe(tmp_path)
    wrong = refused("train", "small.yaml")
    assert "column 'user' holds string: expected whole numbers, or lists of them; set ids='hash' for text" in wrong
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    """Files of some length cannot be written, as on a disk that has no more room."""
    write_recipe(tmp_path, tables={"list": [{"name": n, "rows": 100_000, "dim": 8} for n in ("user", "item", "seen")]})
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # noqa: E731
    done = subprocess.run(
        [*COMMAND, "train", "small.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False, preexec_fn=limit
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = told(done.stderr)
    assert "was not saved: " in line
    run = tmp_path / "runs/small/1"
    assert json.loads((run / "result.json").read_text())["status"] == "failed"
    assert list((run / "ckpt").iterdir()) == []


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_start(tmp_path):
    write_recipe(tmp_path)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # noqa: E731
    done = subprocess.run(
        [*COMMAND, "train", "small.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False, preexec_fn=limit
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("rowwise: runs/small/1/recipe.yaml: not written: ")
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "runs/small").iterdir()) == []


def test_runs_that_are_none(refused, tmp_path):
    write_recipe(tmp_path)
    for args in (("resume", "."), ("eval", "."), ("predict", ".", "--out", "p.parquet"), ("eval", "nowhere")):
        assert " is not a run: it has no recipe.yaml: expected a folder such as runs/" in refused(*args)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.parquet", "small.yaml"]


@pytest.mark.slow
def test_a_finished_run(command, refused, tmp_path):
    write_recipe(tmp_path)
    command("train", "small.yaml")
    before = (tmp_path / "runs/small/1/result.json").read_text()
    out = "--set train.epochs=3 trains longer, rowwise eval runs/small/1 measures it"
    assert refused("resume", "runs/small/1").endswith(f"runs/small/1 has finished at step 20; {out}")
    assert (tmp_path / "runs/small/1/result.json").read_text() == before
    assert "has no checkpoint 'step-3': expected one of last, best, step-" in refused(
        "eval", "runs/small/1", "--which", "step-3"
    )
    assert command("resume", "runs/small/1", "--set", "train.epochs=3")[0] == 0


@pytest.mark.slow
def test_a_run_in_use_and_stopped_twice(refused, tmp_path):
    """The second Ctrl-C ends it at once."""
    write_recipe(tmp_path, train={"epochs": 100_000})
    with start(tmp_path, "train", "small.yaml") as process:
        wait_for_lines(tmp_path / "runs/small/1", 20, process)
        assert "runs/small/1: another process is working on this run; wait for it" in refused("resume", "runs/small/1")
        process.send_signal(signal.SIGINT)
        time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_who_makes_ranks_loads_no_torch():
    check = "import sys, rowwise.cli.launch, rowwise.parallel.comm.spawn; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


AROUND = tuple(
    f"rowwise.{name}"
    for name in (
        "planning.calibrate.", "planning.simulate.", "recipes.compress.", "recipes.drills.", "recipes.explain.",
        "recipes.tune.", "recipes.baseline", "recipes.ensemble", "serve.app", "serve.fleet", "serve.host",
        "cli.kubernetes", "cli.notebook", "cli.ray", "cli.slurm",
    )
)  # fmt: skip


@pytest.mark.slow
def test_training_starts_without_what_takes_long(tmp_path):
    """torch's compiler takes longer to load than everything else together, and nothing is compiled; so does Triton."""
    write_recipe(tmp_path)
    loaded = loaded_by("train", "small.yaml", "--no-baseline", cwd=tmp_path)
    assert "torch" in loaded
    assert not {"torch._dynamo", "torch._inductor", "sympy", "triton", "tensorboard", "matplotlib", "sklearn"} & loaded
    assert not [name for name in loaded if name.startswith(AROUND)]
    assert sum(name.startswith("rowwise.") for name in loaded) < 530


def test_a_table_of_metrics_can_be_read(tmp_path, command):
    write_recipe(tmp_path)
    command("train", "small.yaml")
    with (tmp_path / "runs/small/1/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["split"] for row in rows} == {"train", "lifetime", "valid", "test"}

"""What is said of a run is what its files say, while it trains, after its end, and on another machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from small import recipe, sections, trained, write_rows

from rowwise.base.errors import DataError
from rowwise.base.storage.folder import as_storage
from rowwise.recipes.runs import TrainingRun
from rowwise.report.csvfile import read_csv
from rowwise.report.watch_pages import STATES, cells_of, families_of
from rowwise.report.watched import find_runs, read_status


def status(place):
    ((name, one),) = find_runs(place).items()
    return read_status(name, one)


def test_a_run_that_has_ended_is_as_its_files_say(tmp_path):
    run, result = trained(tmp_path)
    found = status(run.folder.path)
    newest = read_csv(run.folder.path / "steps.csv", ()).rows[-1]
    assert (found.run, found.state, found.step, found.samples) == ("small/1", "finished", result.steps, result.samples)
    assert found.memory_bytes == newest.number("memory_bytes")
    assert found.seconds["forward"] == newest.number("forward_s")
    assert found.metrics["test"]["label"]["auc"] == result.test["label"]["auc"]
    assert list(find_runs(tmp_path / "runs")) == ["small/1"]
    assert list(find_runs(as_storage(tmp_path / "runs"))) == ["small/1"]
    elsewhere = status(as_storage(tmp_path / "runs" / "small" / "1"))
    assert (elsewhere.state, elsewhere.step, elsewhere.metrics) == ("finished", found.step, found.metrics)


def test_states_follow_a_run(tmp_path):
    seen = []
    run = TrainingRun.start(recipe(tmp_path, log={"every": 1}), tmp_path / "runs")
    place = run.folder.path
    before = status(place)
    assert (before.state, before.step, before.age_s, before.metrics) == ("training", 0, None, {})
    run.trainer._on_step = lambda shown: (
        seen.append((status(place).state, status(place).step)),
        run.trainer.stop() if shown.progress.step == 5 else None,
    )
    run.go()
    assert seen == [("training", step) for step in range(1, 6)]
    assert status(place).state == "stopped"
    (place / "result.json").unlink()
    assert status(place).state == "killed"
    assert status(as_storage(place)).state == "unknown"
    TrainingRun.resume(place).go()
    assert status(place).state == "finished"


@pytest.mark.parametrize("name", ["steps.csv", "metrics.csv", "result.json", "warnings.txt", "caches.csv"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"step",
        b"\xff\xfe\n1,2\n",
        b"step,samples\n1\n",
        b"{}",
        b"step\nx\nnan\n1e999\n",
        b"step,samples\n1\r2\r\n",
    ],
)
def test_damaged_files_are_left_out(name, content, tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: x")
    (tmp_path / name).write_bytes(content)
    found = read_status("x", tmp_path)
    assert cells_of(found)[0] == "x"
    assert list(families_of([found]))


def test_only_the_end_of_a_long_file_is_read(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: x")
    lines = "".join(f"{step},{step},1,2\n" for step in range(200_000))
    (tmp_path / "steps.csv").write_text(f"step,samples,samples_s,data_s\n{lines}")
    begin = time.process_time()
    assert read_status("x", tmp_path).step == 199_999
    assert time.process_time() - begin < 0.5


def test_names_of_strangers_are_one_printable_line(tmp_path):
    for name in (b"\xff\xfe", b"a\nb", b"\x1b[2J"):
        os.makedirs(os.fsencode(tmp_path / "runs") + b"/" + name)
        Path(os.fsdecode(os.fsencode(tmp_path / "runs") + b"/" + name), "recipe.yaml").touch()
    found = find_runs(tmp_path / "runs")
    assert sorted(found) == ["\\udcff\\udcfe", "\\x1b[2J", "a\\nb"]
    for name, place in found.items():
        assert json.loads(msgspec.json.encode(read_status(name, place)))["state"] == "killed"


def test_only_the_newest_warnings_are_read(tmp_path):
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / "warnings.txt").write_bytes(b"\n" * (8 << 20) + b"w" * 100 + b"\n")
    assert len(status(tmp_path).warnings) < 1 << 16
    assert status(tmp_path).warnings[-1] == "w" * 100


def test_a_place_without_runs_is_refused(tmp_path):
    for place in (tmp_path, as_storage(tmp_path)):
        with pytest.raises(DataError, match="has no run"):
            find_runs(place)


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_the_command_follows_a_run_to_its_end_and_answers(tmp_path):
    """A run that trains, one that is killed; a terminal, JSON, Prometheus and a browser see the same."""
    write_rows(tmp_path / "rows.parquet", 60_000)
    changes = {"train": {"batch": 32, "epochs": 50}, "log": {"every": 5}, "save": {"every": 50}}
    (tmp_path / "small.yaml").write_text(json.dumps(sections(tmp_path, **changes)))
    begin = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "rowwise"]
    with subprocess.Popen([*command, "train", "small.yaml"], **begin) as run:
        end = time.monotonic() + 60
        while not (tmp_path / "runs" / "small" / "1" / "steps.csv").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        page = [*command, "watch", "runs", "--port", "0", "--every", "0.1", "--json"]
        with (
            subprocess.Popen(page, **begin) as watch,
            subprocess.Popen([*command, "watch", "runs/small/1", "--every", "0.1"], **begin) as lines,
        ):
            address = watch.stderr.readline().partition("/ and ")[0]
            assert json.loads(watch.stdout.readline())["state"] == "training"
            text = get(f"{address}/metrics")
            assert 'rowwise_train_state{run="small/1",state="training"} 1.0' in text
            assert re.search(r'^rowwise_train_samples_total\{run="small/1"\} \d', text, re.M)
            assert re.search(
                r'^rowwise_train_metric\{metric="ne",run="small/1",split="train",task="label"\} \.?\d', text, re.M
            )
            assert "report/small/1" in get(f"{address}/")
            assert "<h1" in get(f"{address}/report/small/1")
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(f"{address}/report/..%2F..")
            run.kill()
            run.communicate()
            out, _ = lines.communicate(timeout=60)
            assert lines.returncode == 1
            assert "small/1 training: step " in out
            assert out.splitlines()[-1].startswith("small/1 killed: step ")
            text = get(f"{address}/metrics")
            assert 'rowwise_train_state{run="small/1",state="killed"} 1.0' in text
            watch.send_signal(signal.SIGINT)
            watch.communicate(timeout=60)
    once = subprocess.run(
        [*command, "watch", "runs", "--once", "--json"], cwd=tmp_path, capture_output=True, check=False
    )
    assert (once.returncode, json.loads(once.stdout)["state"]) == (1, "killed")


def test_alerts_of_the_tutorial_are_on_metrics_that_there_are(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "tutorials" / "watching.md"
    named = set(re.findall(r"rowwise_train_\w+", page.read_text()))
    trained(tmp_path)
    runs = [status(tmp_path / "runs")]
    known = {family.name + ("_total" if family.type == "counter" else "") for family in families_of(runs)}
    assert named
    assert named <= known
    assert set(STATES) >= {one.state for one in runs}

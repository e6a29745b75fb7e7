"""Trackers: each gets what the run's files have, and none stops or slows a run."""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from small import recipe, write_rows
from trainings import read_csv

from rowwise import SpecError
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import write
from rowwise.recipes.tune import tune
from rowwise.train import trackers
from rowwise.train.run_folder import RunFolder
from rowwise.train.trackers import _QueuedTracker

SERVER = Path(sys.prefix) / "mlflow" / "bin" / "mlflow"  # of `make test-all`


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A tracker has minutes at the end of a run: this machine may do other work."""
    monkeypatch.setattr(trackers, "DEADLINE_s", 300.0)


class Recorded:
    """A tracker that keeps what it gets; it may be slow, or fail."""

    def __init__(self, wait=None, fail=False):
        self.got, self.ended, self._wait, self._fail = [], None, wait, fail

    def begin(self):
        pass

    def log(self, values, step):
        if self._wait is not None:
            self._wait.wait(60)
        if self._fail:
            raise ConnectionError("http://me:secret@host:1/x refused\nmore")
        self.got.append((step, values))

    def end(self, status, files):
        self.ended = status, files


def test_lines_arrive_in_order_and_before_the_end():
    warned, tracker = [], Recorded()
    remote = _QueuedTracker("mlflow", tracker, warned.append)
    remote.begin()
    for step in range(500):
        remote.log({"a": step / 2}, step)
    remote.end("finished", [Path("report.html")])
    assert tracker.got == [(step, {"a": step / 2}) for step in range(500)]
    assert tracker.ended == ("finished", [Path("report.html")])
    assert warned == []


def test_a_tracker_that_fails_is_named_once_and_its_losses_are_counted():
    warned = []
    remote = _QueuedTracker("mlflow", Recorded(fail=True), warned.append)
    remote.begin()
    remote.log({}, 1)
    while not remote._error:
        time.sleep(0.001)
    for step in range(2, 11):
        remote.log({}, step)
    remote.end("finished", [])
    first, last = warned
    assert first == "log.mlflow: http://host:1/x refused: the run continues, and its files have all numbers"
    assert last == "log.mlflow: 10 lines were not sent: http://host:1/x refused"


def test_a_tracker_that_hangs_delays_nothing(monkeypatch):
    monkeypatch.setattr(trackers, "DEADLINE_s", 0.2)
    release = threading.Event()
    warned, tracker = [], Recorded(wait=release)
    remote = _QueuedTracker("wandb", tracker, warned.append)
    remote.begin()
    begin = time.monotonic()
    for step in range(3000):
        remote.log({}, step)
    remote.end("finished", [])
    assert time.monotonic() - begin < 5
    assert warned[0] == "log.wandb: its queue of 1,000 lines is full: the run continues, and its files have all numbers"
    assert "lines were not sent" in warned[1]
    release.set()


@pytest.mark.parametrize(("key", "package"), [("mlflow", "mlflow-skinny"), ("wandb", "wandb")])
def test_a_package_that_is_missing(key, package, tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.parquet", 100)
    monkeypatch.setitem(sys.modules, key, None)
    with pytest.raises(SpecError, match=rf"log\.{key}: {key} is not installed; pip install {package}"):
        TrainingRun.start(recipe(tmp_path, log={key: "mine"}), tmp_path / "runs")
    with pytest.raises(SpecError, match="name of an experiment"):
        recipe(tmp_path, log={key: ""})


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """An MLflow server on a port of loopback."""
    port, home = free_port(), tmp_path / "server"
    home.mkdir()
    options = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    stores = ["--backend-store-uri", f"sqlite:///{home}/runs.db", "--artifacts-destination", str(home / "files")]
    with open(home / "log.txt", "w") as log:
        process = subprocess.Popen(
            [SERVER, "server", *options, *stores], cwd=home, stdout=log, stderr=log, start_new_session=True
        )
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            break
        except OSError:
            assert process.poll() is None, (home / "log.txt").read_text()
            time.sleep(0.1)
    for name, value in (("TRACKING_URI", f"http://127.0.0.1:{port}"), ("HTTP_REQUEST_MAX_RETRIES", "0")):
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    yield process
    stop(process)


def stop(process):
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait()


def history(run, name="label/loss/train"):
    from mlflow import MlflowClient

    saved = json.loads((run / "trackers.json").read_text())["mlflow"]
    found = MlflowClient().get_metric_history(saved, name)
    assert len({metric.step for metric in found}) == len(found)
    return {metric.step: metric.value for metric in found}


def written(run, split="train", metric="loss"):
    rows = read_csv(run / "metrics.csv")
    return {int(r["step"]): float(r["value"]) for r in rows if (r["split"], r["metric"]) == (split, metric)}


def warnings(run):
    file = run / "warnings.txt"
    return file.read_text() if file.exists() else ""


def settings(tmp_path, steps, **log):
    write_rows(tmp_path / "rows.parquet", 2000)
    training = {"epochs": 50, "steps": steps}
    return recipe(tmp_path, train=training, save={"every": 4}, log={"every": 2, **log})


@pytest.mark.slow
@pytest.mark.dist
def test_mlflow_has_the_run_its_recipe_and_its_files(server, tmp_path):
    from mlflow import MlflowClient

    run = TrainingRun.start(settings(tmp_path, 8, mlflow="clicks"), tmp_path / "runs")
    assert run.go().status == "finished"
    folder = run.folder.path
    assert history(folder) == pytest.approx(written(folder))
    assert history(folder, "label/auc/test") == pytest.approx(written(folder, "test", "auc"))
    client = MlflowClient()
    found = client.get_run(json.loads((folder / "trackers.json").read_text())["mlflow"])
    assert found.info.status == "FINISHED"
    assert found.data.params["train.steps"] == "8"
    assert client.get_experiment(found.info.experiment_id).name == "clicks"
    assert {f.path for f in client.list_artifacts(found.info.run_id)} == {"recipe.yaml", "result.json", "report.html"}
    assert "mlflow" not in warnings(folder)


@pytest.mark.slow
@pytest.mark.dist
def test_a_resumed_run_goes_on_at_mlflow_without_a_step_twice(server, tmp_path):
    run = TrainingRun.start(settings(tmp_path, 6, mlflow="clicks"), tmp_path / "runs")
    run.go()
    folder = run.folder.path
    before = history(folder)
    again = TrainingRun.resume(folder, changes=["train.steps=12"])
    again.go()
    assert before.items() <= history(folder).items()
    assert history(folder) == pytest.approx(written(folder))


@pytest.mark.slow
@pytest.mark.dist
def test_a_server_that_dies_does_not_end_the_run(server, tmp_path):
    run = TrainingRun.start(settings(tmp_path, 40, mlflow="clicks"), tmp_path / "runs")
    run.trainer._on_step = lambda view: stop(server) if run.trainer.progress.step == 10 else None
    assert run.go().status == "finished"
    warned = warnings(run.folder.path)
    assert "log.mlflow: " in warned
    assert "the run continues" in warned
    assert "lines were not sent" in warned
    assert len(written(run.folder.path)) == 20


@pytest.mark.slow
def test_a_server_that_is_not_there_is_said_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = TrainingRun.start(settings(tmp_path, 8, mlflow="clicks"), tmp_path / "runs")
    with pytest.raises(SpecError, match=r"log\.mlflow=clicks: .*"):
        run.go()


def wandb_records(file):
    """The records of a W&B file: in blocks of 32 KiB, each with checksum, length and place in its record."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        length, place = struct.unpack("<HB", data[at + 4 : at + 7])
        if at + 7 + length > len(data):
            return  # it is still being written
        if place == 0:  # padding: the next record begins with the next block
            at = (at // 32_768 + 1) * 32_768
            continue
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if 32_768 - at % 32_768 < 7:
            at = (at // 32_768 + 1) * 32_768
        if place in (1, 4):  # a whole record, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def wandb_lines(file, kind):
    """The history or the summaries of a W&B file, which its service may finish after the run has ended."""
    end_s = time.monotonic() + 120
    while "exit" not in {record.WhichOneof("record_type") for record in wandb_records(file)}:
        assert time.monotonic() < end_s, f"{file}: no end of a run in two minutes"
        time.sleep(0.05)
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == kind:
            items = record.history.item if kind == "history" else record.summary.update
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_that_was_killed_before_its_test_has_test_metrics_at_mlflow(server, tmp_path):
    run = TrainingRun.start(settings(tmp_path, 8, mlflow="clicks"), tmp_path / "runs")
    run.trainer.run()
    run.trainer.trackers.end("stopped", [])
    run.folder.release()
    folder = run.folder.path
    TrainingRun.resume(folder).go()
    for split in ("train", "valid", "test"):
        assert history(folder, f"label/auc/{split}") == pytest.approx(written(folder, split, "auc"))


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_whose_files_cannot_be_written_has_ended_at_mlflow(server, tmp_path):
    from mlflow import MlflowClient

    run = TrainingRun.start(settings(tmp_path, 8, mlflow="clicks"), tmp_path / "runs")
    (run.folder.path / "result.json").mkdir()
    with pytest.raises(OSError, match=r"result\.json"):
        run.go()
    saved = json.loads((run.folder.path / "trackers.json").read_text())["mlflow"]
    assert MlflowClient().get_run(saved).info.status == "FINISHED"


@pytest.mark.slow
@pytest.mark.dist
def test_trials_are_a_group_at_mlflow(server, tmp_path):
    from mlflow import MlflowClient

    write_rows(tmp_path / "rows.parquet", 2000)
    made = recipe(tmp_path, train={"epochs": 1}, evaluate={"every": 2}, log={"mlflow": "clicks"})
    (tmp_path / "small.yaml").write_text(write(made))
    tune(str(tmp_path / "small.yaml"), tmp_path / "study", trials=2)
    client = MlflowClient()
    experiment = client.get_experiment_by_name("clicks").experiment_id
    found = client.search_runs([experiment], "tags.group = 'study'")
    assert sorted(run.info.run_name.split("/")[0] for run in found) == ["0000", "0001"]


@pytest.mark.slow
@pytest.mark.dist
def test_wandb_offline_has_the_numbers(tmp_path, monkeypatch):
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = TrainingRun.start(settings(tmp_path, 8, wandb="clicks"), tmp_path / "runs")
    assert run.go().status == "finished"
    assert "log.wandb" not in warnings(run.folder.path)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = {row["_step"]: row["label/loss/train"] for row in wandb_lines(file, "history") if "label/loss/train" in row}
    assert found == pytest.approx(written(run.folder.path))
    summary = {name: value for line in wandb_lines(file, "summary") for name, value in line.items()}
    assert summary["label/auc/test"] == pytest.approx(written(run.folder.path, "test", "auc")[8])
    assert summary["status"] == "finished"
    assert {path.name for path in (file.parent / "files").iterdir()} >= {"recipe.yaml", "result.json", "report.html"}
    RunFolder.open(run.folder.path).hold()  # it has no links in it

"""Studies of settings: the recipe's own come first, a kill loses and repeats none, the test rows are read once."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml
from small import recipe, sections

from rowwise import SpecError
from rowwise.base.records import StudyOutcome, TrialRecord
from rowwise.recipes.find import find, names
from rowwise.recipes.model_configs import RetrievalConfig
from rowwise.recipes.text import parse, read
from rowwise.recipes.tune import tune
from rowwise.recipes.tune.space import changes_of, own_values, search_space, stored
from rowwise.recipes.tune.study import records
from rowwise.report.tuning import draw_study

RATES = {"train.optimizer.lr": {"low": 0.001, "high": 0.1, "log": True}, "model.top": {"choices": [[4], [8], [16]]}}


def write_recipe(folder, **changes):
    recipe(folder)  # writes the rows
    path = folder / "small.yaml"
    made = sections(folder, train={"epochs": 2}, evaluate={"metric": "ne"}, tune=RATES, **changes)
    path.write_text(yaml.safe_dump(made))
    return path


def unique(trials):
    return len({json.dumps(one.values, sort_keys=True) for one in trials}) == len(trials)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    path = write_recipe(folder)
    told = []
    return path, folder / "tune", tune(str(path), folder / "tune", trials=7, tell=lambda t, n: told.append(n)), told


@pytest.mark.slow
def test_the_best_of_all_trials_is_no_worse_than_the_recipe(study):
    path, out, outcome, told = study
    assert told == list(range(1, 8))
    assert [one.number for one in outcome.trials] == list(range(7))
    own = outcome.trials[0]
    assert (own.values["train.optimizer.lr"], own.values["model.top"]) == (0.01, "[8]")
    best = next(one for one in outcome.trials if one.number == outcome.best)
    assert best.value == min(one.value for one in outcome.trials if one.state == "complete")
    assert best.value <= own.value
    assert {one.state for one in outcome.trials} <= {"complete", "pruned"}
    assert unique(outcome.trials)
    tuned = read(out / "best.yaml")
    assert tuned.train.optimizer.lr == best.values["train.optimizer.lr"]
    assert list(tuned.model.top) == json.loads(best.values["model.top"])
    assert not tuned.tune
    assert 0.3 < outcome.test["label"]["ne"] < 1.2
    assert f"Tuning of {path}" in (out / "report.html").read_text("utf-8")


def test_only_the_best_trial_keeps_its_checkpoints_and_none_has_seen_test_rows(study):
    _, out, outcome, _ = study
    kept = [one.number for one in outcome.trials if (out / one.run / "ckpt").exists()]
    assert kept == [outcome.best]
    assert all(json.loads((out / one.run / "result.json").read_text())["test"] == {} for one in outcome.trials)


def test_the_same_command_adds_nothing_and_more_trials_go_on(study):
    path, out, outcome, _ = study
    before = (out / "test.json").stat().st_mtime_ns
    assert tune(str(path), out, trials=7) == outcome
    assert (out / "test.json").stat().st_mtime_ns == before
    more = tune(str(path), out, trials=9)
    assert more.trials[:7] == outcome.trials
    assert len(more.trials) == 9
    assert unique(more.trials)


def test_no_time_begins_no_trial(tmp_path):
    assert tune(str(write_recipe(tmp_path)), tmp_path / "out", minutes=0.0).trials == ()


@pytest.mark.slow
def test_processes_share_the_trials(tmp_path):
    outcome = tune(str(write_recipe(tmp_path)), tmp_path / "out", trials=6, processes=2)
    assert [one.number for one in outcome.trials] == list(range(6))
    assert unique(outcome.trials)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_study_goes_on_without_a_trial_lost_or_repeated(processes, tmp_path):
    """Processes of a killed command end before the study goes on, so none of their trials is counted twice."""
    path, out = write_recipe(tmp_path, log={"every": 1}), tmp_path / "out"
    command = [sys.executable, "-m", "rowwise", "tune", str(path), "--trials", "8", "--out", str(out)]
    command += ["--nproc", str(processes)]
    for wanted in (2, 5):
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while not (out / f"trials/{wanted:04}").exists() and running.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    outcome = tune(str(path), out, trials=8)
    assert len(outcome.trials) == 8
    assert unique(outcome.trials)
    journal = [json.loads(line) for line in (out / "journal.log").read_text().splitlines() if line.startswith("{")]
    begun_anew = [line["user_attr"]["again"] for line in journal if "again" in line.get("user_attr", {})]
    assert len(begun_anew) == len(set(begun_anew)) <= 2 * processes


def test_two_commands_do_not_share_a_folder(study, tmp_path):
    path, out, _, _ = study
    with pytest.raises(SpecError, match=r"study of .*small\.yaml"):
        tune(str(path), out, changes=["train.epochs=1"])
    for text in ("[]", '{"recipe": 1, "changes": []}', "[" * 100_000, ""):
        (tmp_path / "theirs").mkdir(exist_ok=True)
        (tmp_path / "theirs/study.json").write_text(text)
        with pytest.raises(SpecError, match="another --out"):
            tune(str(path), tmp_path / "theirs")
    (tmp_path / "journal").mkdir()
    journal = tmp_path / "journal/journal.log"
    for craft in (
        lambda: journal.write_text(
            (out / "journal.log").read_text().replace('"user_attr":{', '"user_attr":{"x":1,', 1)
        ),
        lambda: journal.write_text("[]\n"),
        lambda: journal.write_text("[" * 100_000 + "\n"),
        lambda: os.truncate(journal, 1 << 40),
        lambda: (journal.unlink(), os.mkfifo(journal)),
        lambda: (journal.unlink(), journal.symlink_to("/dev/zero")),
    ):
        craft()
        (tmp_path / "journal/study.json").write_bytes((out / "study.json").read_bytes())
        with pytest.raises((SpecError, OSError), match=r"journal\.log|link|FIFO"):
            tune(str(path), tmp_path / "journal")
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(SpecError, match="new folder for --out"):
        tune(str(path), tmp_path)


def test_a_setting_that_cannot_be_trained_is_a_failed_trial_with_its_reason(tmp_path):
    path = write_recipe(tmp_path)
    made = yaml.safe_load(path.read_text())
    made["tune"] = {"model.top": {"choices": [[8], [0]]}}
    path.write_text(yaml.safe_dump(made))
    outcome = tune(str(path), tmp_path / "out", trials=6)
    failed = [one for one in outcome.trials if one.state == "failed"]
    assert failed
    assert all(one.values["model.top"] == "[0]" and "top" in one.why for one in failed)
    assert outcome.best is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"valid_share": 0.0}}, "tune needs validation rows"),
        ({"tune": {"train.batch": {"choices": [64]}}}, "train.batch is 128 in the recipe"),
        ({"tune": {"train.bach": {"low": 1, "high": 2}}}, "train.bach is None in the recipe"),
        ({"tune": {"train.batch": {"low": 5, "high": 2}}}, "expected finite numbers, low below high"),
        ({"tune": {"train.batch": {"low": 5}}}, "expected choices, or low and high"),
        ({"tune": {"train.batch": {"low": 0, "high": 2, "log": True}}}, "with log: expected low above 0"),
    ],
)
def test_what_is_wrong_is_named(changes, message, tmp_path):
    recipe(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(sections(tmp_path, **changes)))
    with pytest.raises(SpecError, match=re.escape(message)):
        tune(str(path), tmp_path / "out")


def test_without_optuna_the_way_out_is_said(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = command("tune", "dlrm-synthetic", "--out", "out")
    assert (code, err) == (2, "rowwise: tuning needs Optuna; pip install 'rowwise[tune]'\n")


@pytest.mark.parametrize("name", names())
def test_recipes_that_ship_have_a_usual_space_around_their_values(name):
    path = find(name)
    made = read(path)
    space = search_space(made, parse(path.read_text(), name))
    values = own_values(space, made)
    assert values["train.optimizer.lr"] == made.train.optimizer.lr
    if not isinstance(made.model, RetrievalConfig):
        assert "model.dropout" in space
    again = read(path, changes_of(values))
    assert again == made
    assert stored(values, space).keys() == space.keys()


def page_of(*trials):
    study = {"recipe": "<x>", "metric": "ne", "smaller_is_better": True, "best": None, "importance": {}, "test": {}}
    return draw_study(StudyOutcome(trials=trials, **study))


def test_a_page_of_no_trial_and_of_failed_ones():
    assert "No trial is complete yet" in page_of()
    assert "&lt;x&gt;" in page_of()
    failed = TrialRecord(number=0, state="failed", value=None, values={"a": 1}, run="", seconds=0.0, why="too <big>")
    assert "failed: too &lt;big&gt;" in page_of(failed)


def test_records_of_a_study_without_trials():
    class Empty:
        def get_trials(self, **_):
            return []

    assert records(Empty()) == []

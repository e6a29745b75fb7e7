"""Fault drills survive here, and say so; and they would say so if something did not."""

import json
import tempfile

import numpy as np
import pyarrow as pa
import pytest
from ingest.test_datasets import fetched
from launching import rowwise
from msgspec import structs

from rowwise.recipes.drills import drill, serving, small_disk
from rowwise.recipes.drills.serving import ServingCase, ServingReport
from rowwise.recipes.find import load
from rowwise.serve.package import GoldenRows, version_folder, write_golden

SURVIVED = "ends equal, bit by bit"
SYSTEMS = (  # of papers, each in a recipe
    "discs-pictures",
    "dlrm-managed",
    "dlrm-stale",
    "dlrm-tiers",
    "movielens-dhen-hybrid",
    "movielens-din-sessions",
    "movielens-lightgcn",
    "movielens-smc",
)
WANTED = {
    "kill-rank": {"SIGKILL of rank 1 in a step", "SIGKILL of rank 0 in a save", "SIGKILL of rank 1 in a save"},
    "corrupt-ckpt": {
        "a flipped byte in step-000000015",
        "a file cut short in step-000000015",
        "no manifest in step-000000015",
    },
}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", WANTED)
def test_everything_survives(tmp_path, what):
    done = rowwise(tmp_path, "drill", what, "--json", "--folder", "here", timeout=550)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["drill"], report["ranks"]) == (what, 2)
    assert {case["damage"] for case in report["cases"]} == WANTED[what]
    for case in report["cases"]:
        assert (case["resumed"], case["survived"]) == (SURVIVED, True)
        assert "Traceback" not in case["said"]
        if what == "kill-rank":
            assert case["ended_s"] < 30
            assert case["verified"] == "whole"
    if what == "corrupt-ckpt":
        flipped = report["cases"][0]
        for text in (flipped["said"], flipped["verified"]):
            assert "step-000000015" in text
            assert "do not match their checksum" in text
            assert " of tensor '" in text


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SYSTEMS)
def test_each_system_is_killed_and_resumed_to_the_bit(tmp_path, name):
    if load(name).data.dataset != "synthetic":
        fetched(load(name).data.dataset, tmp_path / "data")
    nproc = load(name).about.run.partition(" --nproc ")[2] or "2"
    done = rowwise(tmp_path, "drill", "kill-rank", "--recipe", name, "--nproc", nproc, "--json", timeout=550)
    assert (done.returncode, done.stderr) == (0, "")
    assert [case["resumed"] for case in json.loads(done.stdout)["cases"]] == [SURVIVED] * 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_survives(tmp_path):
    done = rowwise(tmp_path, "drill", "serve", "--json", "--folder", "here", timeout=550)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert (report["drill"], report["workers"], len(report["cases"])) == ("serve", 2, 10)
    for case in report["cases"]:  # not that all survived: times depend on what else runs here
        assert (case["wrong"], case["trouble"]) == (0, "")
        assert case["answers"] > 0
        assert case["may_fail"] or not case["failed"]
        assert case["may_fail"] == ("SIGKILL of a worker" in case["fault"] or "host" in case["fault"])
    assert report["cases"][3]["versions"] == [2, 3, 4]


def test_what_a_server_must_not_do(command, monkeypatch):
    good = ServingCase(fault="x", answers=9, wrong=0, failed=0, may_fail=False, back_s=0.1, max_s=5.0, versions=(1,))
    bad = [{"wrong": 1}, {"failed": 1}, {"back_s": 9.0}, {"answers": 0}, {"trouble": "took more than 60 s"}]
    assert good.survived
    assert structs.replace(good, failed=1, may_fail=True).survived
    for change in bad:
        assert not structs.replace(good, **change).survived
    report = ServingReport(drill="serve", workers=2, cases=(good, structs.replace(good, wrong=3)))
    monkeypatch.setattr(serving, "run_serving_drill", lambda *_: report)
    code, out, _ = command("drill", "serve", "--folder", "here")
    assert code == 1
    assert "1 of 2 faults were not survived" in out


def test_a_wrong_answer_is_seen(tmp_path):
    """The drill's clients see one wrong bit of one row."""
    path = version_folder(tmp_path, 1).path
    path.mkdir(parents=True)
    logits = np.array([0.1, 0.2, 0.3], np.float32)
    write_golden(path, GoldenRows(pa.table({"x": [1, 2, 3]}), pa.table({"label": logits})))
    answer = {"version": 1, "outputs": {"label_logit": logits[[2, 0]].tolist()}}
    assert serving.is_right(tmp_path, answer, [2, 0])
    answer["outputs"]["label_logit"][1] = float(np.nextafter(logits[0], np.float32(9)))
    assert not serving.is_right(tmp_path, answer, [2, 0])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mounts", [True, False], ids=["tmpfs", "limit"])
def test_a_full_disk_is_survived(tmp_path, monkeypatch, mounts):
    if not mounts:
        monkeypatch.setattr(small_disk, "_mount", lambda *_: None)
    told = []
    report = drill.run_drill("fill-disk", 2, tmp_path / "here", told.append)
    (case,) = report.cases
    assert report.survived, case
    assert case.resumed == SURVIVED
    assert "was not saved: " in case.error_line
    assert told[0] == "an undisturbed run"
    if "tmpfs" in case.damage:
        assert "No space left on device" in case.error_line
        assert (case.checkpoint, case.verified) == ("step-5", "whole")


@pytest.mark.parametrize("survived", [True, False])
def test_a_drill_says_what_was_lost(command, monkeypatch, tmp_path, survived):
    case = drill.DrillCase(
        damage="a meteor", ended_s=1.25, error_line="rowwise: help", checkpoint="step-5", verified="", resumed="gone",
        survived=survived,
    )  # fmt: skip
    report = drill.DrillReport(drill="kill-rank", ranks=2, cases=(case,))
    monkeypatch.setattr(drill, "run_drill", lambda *_: report)
    code, out, err = command("drill", "kill-rank", "--folder", "here")
    assert code == (0 if survived else 1)
    assert ("ok " if survived else "LOST") in out
    for part in ("a meteor", "1.2 s", "step-5", "gone", "a meteor, console: rowwise: help"):
        assert part in out
    assert ("every job recovered" in out) == survived
    assert f"the job's files are in {tmp_path}" in err or "the job's files are in here" in err


def test_drills_that_cannot_be(command, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    for args, want in (
        (("kill-rank", "--nproc", "1"), "--nproc 1: expected at least 2"),
        (("fill-disk", "--nproc", "0"), "--nproc 0: expected at least 1"),
        (
            ("serve", "--recipe", "x.yaml"),
            "serve with --recipe x.yaml: expected a drill of training; serve exports a run of its own",
        ),
        (
            ("kill-rank", "--recipe", "x.yaml"),
            "x.yaml: no such file: expected a recipe file, or a name from rowwise ls",
        ),
        (("fill-disk", "--folder", "full"), "--folder full: expected an empty or a new folder"),
    ):
        (tmp_path / "full").mkdir(exist_ok=True)
        (tmp_path / "full" / "x").touch()
        code, out, err = command("drill", *args)
        assert (code, out, err) == (2, "", f"rowwise: {want}\n")
    assert list((tmp_path / "tmp").iterdir()) == []
    code, _, err = command("drill", "earthquake")
    assert code == 2
    assert "kill-rank" in err

"""Benchmarks that start processes of their own still run, and say what they measured in one line of JSON."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(find_spec("torchrec") is None, reason="needs the extra 'peers'")
def test_torchrec_can_be_measured_over_two_processes(tmp_path):
    saved = tmp_path / "shard_step.json"
    command = [sys.executable, "-W", "ignore", BENCHMARKS / "shard_step.py", "--quick", "--peer-only", "--save", saved]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(saved.read_text())
    rows = result["rows"]
    assert {row["kind"] for row in rows} == {"step", "tables", "scaling", "plans"}
    assert all(row["samples_s"] > 0 for row in rows if row["kind"] != "plans")
    # The same model by another way of adding up; a state for each piece of a row is not the same model.
    away = {row["layout"]: row["difference"] / row["moved"] for row in rows if row["kind"] == "plans"}
    assert away["row-wise"] < 1e-5
    assert away["column-wise"] > 0.01


@pytest.mark.dist
def test_ours_send_no_more_than_the_formulas_say(tmp_path):
    command = [sys.executable, "-W", "ignore", BENCHMARKS / "shard_step.py", "--quick", "--only", "bytes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    floors = json.loads(done.stdout.splitlines()[-1])["floors"]
    assert len(floors) >= 4
    assert all(floor["ok"] for floor in floors)


@pytest.mark.slow
@pytest.mark.dist
def test_a_calibration_is_measured_and_judged(tmp_path):
    """As a whole, on little data: what it finds is in order, if not good."""
    saved = tmp_path / "calibrate.json"
    sections = ["sets", "chosen", "plans"]
    command = [sys.executable, "-W", "ignore", BENCHMARKS / "calibrate.py", "--quick", "--only", *sections]
    done = subprocess.run([*command, "--save", saved], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(saved.read_text())
    found = {section: [row for row in result["rows"] if row["section"] == section] for section in sections}
    (sets,) = found["sets"]
    assert sets["errors"][0]["tau"] > 0.5
    assert len(found["chosen"]) == 2
    assert {"ours", "ldm", "dreamshard"} <= {row["plan"] for row in found["plans"]}
    assert all(row["measured_ms"] > 0 and row["predicted_ms"] > 0 for row in found["chosen"] + found["plans"])
    assert len(result["floors"]) == 6


@pytest.mark.slow
@pytest.mark.dist
def test_shared_bags_are_looked_up_and_sent_once(tmp_path):
    """As often as samples repeat less is looked up and sent, and nothing else changes."""
    saved = tmp_path / "recd.json"
    command = [sys.executable, "-W", "ignore", BENCHMARKS / "recd.py", "--quick", "--save", saved]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(saved.read_text())
    assert {row["where"] for row in result["rows"]} == {"one device", "two ranks"}
    assert all(row["equal"] for row in result["rows"])
    assert sum(floor["floor"] == 0.95 for floor in result["floors"]) == 4
    assert all(floor["ok"] for floor in result["floors"])

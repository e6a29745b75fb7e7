"""From a plan to a run and back: what was predicted is measured, and what was counted makes the next plan."""

import csv
import json
import os
import re

import pytest
from launching import rowwise, write_recipe

from rowwise.planning.planner.inputs import read_tables

pytestmark = [pytest.mark.dist, pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="wants Linux")]
HOW = {"train": {"batch": 512, "steps": 8, "epochs": 9}, "log": {"every": 2}}


def stages(run):
    with (run / "stages.csv").open() as file:
        return list(csv.DictReader(file))


def done(folder, *args):
    found = rowwise(folder, *args)
    assert found.returncode == 0, found.stderr
    return found


def test_from_a_run_back_to_the_planner(tmp_path):
    write_recipe(tmp_path, **HOW)
    done(tmp_path, "train", "small.yaml", "--nproc", "2", "--hardware", "cpu")
    run = tmp_path / "runs/small/1"
    plan = json.loads((run / "plan.json").read_text())
    expected = plan["forecast"]["stages_s"]
    rows = stages(run)
    assert {row["rank"] for row in rows} == {"0", "1"}
    for row in rows:
        if row["phase"] in ("lookup", "exchange", "wait", "update"):
            assert float(row["predicted_s"]) == expected[row["phase"]][int(row["rank"])] >= 0
            assert float(row["measured_s"]) > 0
        else:
            assert row["predicted_s"] == ""
    page = (run / "report.html").read_text()
    assert "Predicted by roofline of cpu, for 512 samples a step." in page
    for stage in ("lookup", "exchange", "wait", "update"):
        drawn = re.search(rf'data-chart="stage-{stage}".*?</svg>', page, re.S)[0]
        titles = re.findall(r"<title>rank (\d), (\w+): [^<]*ms</title>", drawn)
        assert titles == [(rank, kind) for rank in "01" for kind in ("predicted", "measured")]

    statistics = run / "access.json"
    assert [w.table.name for w in read_tables(statistics).workloads] == ["user", "item", "seen"]
    asked = ("plan", "--tables", str(statistics), "--topology", "2xcpu", "--batch", "512")
    told = done(tmp_path, *asked, "--replan", str(run / "plan.json"), "--json", "new.json")
    assert "wrote   new.json" in told.stdout
    done(tmp_path, "resume", str(run), "--nproc", "2", "--plan", "new.json", "--set", "train.steps=14")
    new = json.loads((tmp_path / "new.json").read_text())
    assert json.loads((run / "plan.json").read_text())["forecast"] == new["forecast"]
    last = [row for row in stages(run) if row["step"] == "14" and row["phase"] == "lookup"]
    assert [float(row["predicted_s"]) for row in last] == new["forecast"]["stages_s"]["lookup"]
    done(tmp_path, "train", "small.yaml", "--nproc", "2", "--plan", "new.json")


def test_one_process_with_a_profile(tmp_path):
    """Nothing is placed elsewhere, and the step is predicted as well; without one, all is as before."""
    write_recipe(tmp_path, **HOW)
    done(tmp_path, "train", "small.yaml", "--hardware", "cpu")
    done(tmp_path, "train", "small.yaml")
    plans = [json.loads((tmp_path / f"runs/small/{n}/plan.json").read_text()) for n in (1, 2)]
    assert plans[0]["tiles"] == plans[1]["tiles"]
    assert "forecast" in plans[0]
    assert "forecast" not in plans[1]
    pages = [(tmp_path / f"runs/small/{n}/report.html").read_text() for n in (1, 2)]
    assert 'data-chart="stage-lookup"' in pages[0]
    assert 'data-chart="stage-lookup"' not in pages[1]
    assert "The run has no forecast: rowwise train --hardware takes a preset" in pages[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "gpu",
            "rowwise: hardware 'gpu': no such preset, there are a100-like, zionex, h100-like, a100-80gb-like, "
            "h200-like, mi300x-like, cpu, xeon, zen4, zen5: expected a ",
        ),
        ("2xcpu", "rowwise: hardware '2xcpu': no such preset, there are a100-like, "),
        ("no.json", "no.json: no such file: expected a preset, a profile that "),
        ("small.json", "small.json: not a hardware profile: "),
    ],
)
def test_hardware_that_is_none(tmp_path, name, said):
    write_recipe(tmp_path, **HOW)
    (tmp_path / "small.json").write_text("{}")
    found = rowwise(tmp_path, "train", "small.yaml", "--hardware", name)
    assert (found.returncode, found.stdout) == (2, "")
    assert said in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_profile_in_a_file_beside_the_recipe(tmp_path):
    """Its place is kept with the run, so that it goes on from anywhere."""
    from rowwise.planning.perf.hardware import hardware_named

    write_recipe(tmp_path, **HOW)
    (tmp_path / "mine.json").write_text(hardware_named("cpu").to_json())
    done(tmp_path, "train", "small.yaml", "--hardware", "mine.json")
    (tmp_path / "elsewhere").mkdir()
    done(tmp_path / "elsewhere", "resume", "../runs/small/1", "--set", "train.steps=10")
    assert f"hardware: {tmp_path}/mine.json" in (tmp_path / "runs/small/1/recipe.yaml").read_text()

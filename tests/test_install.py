"""The wheel in a new environment, without a compiler, with the oldest and with the newest of what it runs beside."""

import json
import os
import random
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CPU_TORCH = f"torch=={version('torch')}"  # an older one without CUDA may not be there


def wheel():
    """What `make wheel` made; `make test-all` runs that first."""
    found = sorted(ROOT.glob(f"dist/*_{os.uname().machine}.whl"), key=lambda path: path.stat().st_mtime)
    assert found, "no wheel in dist: make wheel"
    return str(found[-1])


def oldest():
    return [one.replace(">=", "==") for one in PROJECT["dependencies"] if "torch" not in one]


def newest():
    return ["pandas", "polars", *(re.sub(r">=.*", "", one) for one in PROJECT["dependencies"] if "torch" not in one)]


class Environment:
    """A virtual environment, an empty home, and a PATH on which there is nothing else."""

    def __init__(self, folder):
        self.bin, self.home = folder / "venv" / "bin", folder / "home"
        self.home.mkdir()
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)

    def install(self, *what):
        where = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
        for more in ([], where):
            command = [self.bin / "python", "-m", "pip", "install", "--quiet", *more, *what]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
        raise AssertionError(done.stderr)

    def run(self, *command):
        found = {"PATH": str(self.bin), "HOME": str(self.home), "COLUMNS": "120"}
        done = subprocess.run(command, cwd=self.home, env=found, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Warning" not in done.stderr
        return done.stdout


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("versions", [oldest, newest])
def test_the_readme_in_a_new_environment_without_a_compiler(versions, tmp_path):
    environment = Environment(tmp_path)
    environment.install(wheel(), CPU_TORCH, *versions())
    environment.run("python", "-m", "pip", "check")
    assert "rowwise train dlrm-synthetic" in environment.run("rowwise")
    small = ("--set", "data.rows=40960", "--set", "data.test_rows=20000")
    result = json.loads(environment.run("rowwise", "train", "dlrm-synthetic", *small, "--json"))
    assert 0.6 < result["test"]["label"]["auc"] < result["ceiling"]["label"]["auc"]

    made = random.Random(3)
    lines = (
        f"{made.random() < 0.3:d},u{made.randrange(200)},{made.randrange(50)},{made.random()}" for _ in range(4000)
    )
    text = "\n".join(["clicked,user,item,price", *lines, ""])
    for name in ("clicks", "tomorrow"):
        (environment.home / f"{name}.csv").write_text(text)
    environment.run("rowwise", "data", "inspect", "clicks.csv", "--label", "clicked")
    environment.run("rowwise", "train", "clicks.yaml", "--nproc", "2")
    environment.run("rowwise", "predict", "runs/clicks/1", "--data", "csv:tomorrow.csv", "--out", "predictions.parquet")
    environment.run("rowwise", "plan", "--recipe", "clicks.yaml", "--topology", "8xa100-like", "--explain")
    assert (environment.home / "runs/clicks/1/report.html").stat().st_size > 10_000

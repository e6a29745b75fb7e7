"""What earlier versions wrote is read, and means what it meant; losses and elastic bits are what they were.

A test here that fails says that a change breaks what users have. `make.py` writes files anew for a new format; those of
earlier versions stay, and their tests too.
"""

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from golden import contents
from golden.elastic_bits import JOBS, WORLDS, digest
from golden.losses import CLOSE, losses_of

from rowwise.recipes.runs import TrainingRun

FILES = Path(__file__).parent / "files"
HOME = "/golden"
SAID = json.loads((FILES / "contents.json").read_text())
NEAR = 1e-5  # relative; float rounding of torch's dense products


def unpack(copy):
    """The files as if they had been written there."""
    torch.set_num_threads(1)
    shutil.copytree(FILES, copy)
    for packed in copy.rglob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    recipe = copy / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(HOME, str(copy)))
    return copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return unpack(tmp_path_factory.mktemp("golden") / "files")


def test_plans_id_maps_warehouses_and_checkpoints_hold_what_they_held(folder):
    found = contents.exact(folder)
    for name, said in SAID["exact"].items():
        assert found[name] == said, name


def test_a_profile_and_a_run_predict_what_they_predicted(folder):
    found = contents.near(folder)
    for name, said in SAID["near"].items():
        assert found[name] == pytest.approx(said, rel=NEAR, abs=NEAR), name


def test_a_run_goes_on(tmp_path):
    folder = unpack(tmp_path / "files")
    run = TrainingRun.resume(folder / "run", ["train.epochs=2"])
    assert run.go().status == "finished"
    assert run.trainer.progress.step > SAID["exact"]["steps"][-1]


@pytest.mark.parametrize("name", CLOSE)
def test_losses(folder, name):
    said = SAID["losses"][name]
    assert len(said) == 20
    assert losses_of(name, folder) == pytest.approx(said, rel=CLOSE[name])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("job", JOBS)
def test_elastic_bits(job, world):
    assert digest(JOBS[job], *WORLDS[world]) == SAID["elastic bits"][job]


def test_golden_files_name_no_place_of_a_machine():
    for path in (path for path in FILES.rglob("*") if path.suffix in (".json", ".yaml", ".txt", ".csv")):
        absolute = re.findall(r"(?<![\w.])/\w+/", path.read_text())
        assert set(absolute) <= {f"{HOME}/"}, path

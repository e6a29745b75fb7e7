"""`rowwise calibrate` as users meet it: what cannot be measured is one line, and what was measured is kept."""

import json
import os
import re
import signal

import pytest
from launching import started, wait_for
from test_cli import rowwise_cli

from rowwise.planning.calibrate.draw import SetLimits
from rowwise.planning.calibrate.folder import MeasurementSpec, open_folder

LIMITS = SetLimits(pool_bytes=20_000_000, vector_floats=1 << 20, max_s=5e-3)
REFUSED = {
    "--minutes 0": "--minutes 0: expected a number of minutes above 0, such as 10",
    "--minutes nan": "--minutes nan: expected a number of minutes above 0, such as 10",
    "--device gpu": "--device 'gpu': expected cpu or cuda",
    "--transport rdma": "--transport 'rdma': expected shared or gloo",
    "--device cuda --nproc 2": "--nproc 2 with --device cuda: expected 1",
    "a-file": "a-file: is a file: expected a folder for measurements",
    "other": "other: not empty, and without order.json: expected a new folder",
    "--tables missing.csv": "missing.csv: No such file or directory",
    "--tables no-dim.csv": "no-dim.csv, line 2, column 'dim': is empty: expected a whole number",
    "--tables huge.csv": "huge.csv: no table fits ",
}


@pytest.fixture
def refused(refused, tmp_path):
    """The one line of a command that ends as a user's mistake; it leaves nothing."""
    (tmp_path / "a-file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").write_text("")
    (tmp_path / "no-dim.csv").write_text("name,rows,pooling\na,100,1\n")
    (tmp_path / "huge.csv").write_text("name,rows,dim,pooling\na,90000000000,16,1\n")

    def run(*args):
        before = sorted(tmp_path.rglob("*"))
        err = refused("calibrate", *args)
        assert sorted(tmp_path.rglob("*")) == before
        return err

    return run


@pytest.mark.parametrize("args", REFUSED)
def test_what_cannot_be_measured_is_one_line(refused, args):
    assert REFUSED[args] in refused(*args.split())


def test_a_gpu_that_is_not_there_is_one_line(refused):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "--device cuda: torch finds no GPU: expected --device cpu" in refused("--device", "cuda")


def test_a_folder_that_was_measured_otherwise_is_refused(refused, tmp_path):
    open_folder(tmp_path / "made", MeasurementSpec(world=2, limits=LIMITS))
    wanted = r"made/order\.json: measured with --nproc 2, not 1: expected the same options, or another folder"
    assert re.search(wanted, refused("made", "--nproc", "1"))
    with_seed = refused("made", "--nproc", "2", "--seed", "3")
    assert "measured with --seed 0, not 3" in with_seed


@pytest.mark.dist
def test_ctrl_c_says_that_the_same_command_goes_on(tmp_path):
    folder = open_folder(tmp_path / "made", MeasurementSpec(world=2, limits=LIMITS))
    with started(tmp_path, "calibrate", "made", "--nproc", "2", "--minutes", "10") as process:
        wait_for(lambda: len(folder.read()) > 3, 120)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-2:] == [
        "measurements are in made; the same command continues",
        "rowwise: stopped by Ctrl-C",
    ]
    assert len(folder.read()) > 3


@pytest.mark.dist
@pytest.mark.slow
def test_a_profile_is_written_that_plans_are_made_with(tmp_path):
    open_folder(tmp_path / "made", MeasurementSpec(world=2, limits=LIMITS))
    with started(tmp_path, "calibrate", "made", "--nproc", "2", "--minutes", "0.5", "--name", "here") as process:
        out, err = process.communicate(timeout=280)
    assert (process.returncode, out) == (0, "")
    assert "use it  rowwise plan --tables FILE --topology 2xmade/machine.json" in err
    assert json.loads((tmp_path / "made" / "machine.json").read_text())["name"] == "here"
    assert json.loads((tmp_path / "made" / "quality.json").read_text())["sets"] > 0
    (tmp_path / "tables.csv").write_text("name,rows,dim,pooling\na,10000,16,1\nb,20000,32,3\n")
    planned = rowwise_cli("plan", "--tables", "tables.csv", "--topology", "2xmade/machine.json", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr

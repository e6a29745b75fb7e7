"""The loops of `examples` in Lightning and accelerate, run as a user does: losses of our own loop, ranks, resumes."""

import json
import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rowwise.checkpoint.read import Checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"
LOOPS = Path(__file__).parent / "accumulating_loops.py"
ROWS = 12288  # six batches
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="needs the extra 'frameworks'"),
]


def run(*command: object, **variables: str) -> list[float]:
    """The last loss of each epoch that a program prints, with one thread a rank."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | variables
    words = [sys.executable, *map(str, command), "--rows", str(ROWS)]
    said = subprocess.run(words, capture_output=True, text=True, env=env, timeout=240)
    assert said.returncode == 0, said.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"epoch \d: last loss (\S+)\n", said.stdout)]


@pytest.fixture(scope="module")
def own():
    """Those of two epochs of `own_loop.py`."""
    losses = run(EXAMPLES / "own_loop.py", "--epochs", 2)
    assert len(losses) == 2
    return losses


def lightning(folder: Path, *arguments: object) -> list[float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return run(EXAMPLES / "lightning_loop.py", "--folder", folder, *arguments, MASTER_PORT=str(port))


def accelerate(folder: Path, *arguments: object, ranks: int = 1) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    return run(*launcher, EXAMPLES / "accelerate_loop.py", "--folder", folder, *arguments)


def same_tables(first: Path, second: Path, tolerance: float = 0.0) -> None:
    """Rows and optimizer state of two folders."""
    saved, others = Checkpoint.open(first), Checkpoint.open(second)
    assert sorted(saved.names()) == sorted(others.names())
    for name in saved.names():
        torch.testing.assert_close(saved.load(name), others.load(name), rtol=tolerance, atol=tolerance)


def test_lightning(own, tmp_path):
    """The bits of our own loop, also when it stops after an epoch and goes on from Lightning's checkpoint."""
    assert lightning(tmp_path / "whole", "--epochs", 2) == own
    assert lightning(tmp_path / "half", "--epochs", 1) == own[:1]
    assert lightning(tmp_path / "rest", "--epochs", 2, "--resume", tmp_path / "half/last.ckpt") == own[1:]
    same_tables(tmp_path / "whole/tables-12", tmp_path / "rest/tables-12")


@pytest.mark.dist
def test_lightning_on_two_ranks(own, tmp_path):
    assert lightning(tmp_path / "two", "--epochs", 1, "--devices", 2) == pytest.approx(own[:1], abs=1e-5)
    on_one = lightning(tmp_path / "one", "--epochs", 2, "--resume", tmp_path / "two/last.ckpt")
    assert on_one == pytest.approx(own[1:], abs=1e-5)
    two = lightning(tmp_path / "again", "--epochs", 2, "--devices", 2, "--resume", tmp_path / "two/last.ckpt")
    assert two == pytest.approx(own[1:], abs=1e-5)
    same_tables(tmp_path / "one/tables-12", tmp_path / "again/tables-12", 1e-4)


def test_accelerate(own, tmp_path):
    """The bits of our own loop, also when it stops after an epoch and goes on from `load_state`."""
    assert accelerate(tmp_path / "whole", "--epochs", 2) == own
    assert accelerate(tmp_path / "half", "--epochs", 1) == own[:1]
    assert accelerate(tmp_path / "rest", "--epochs", 2, "--resume", tmp_path / "half") == own[1:]
    same_tables(tmp_path / "whole/tables", tmp_path / "rest/tables")


@pytest.mark.dist
def test_accelerate_on_two_ranks(own, tmp_path):
    assert accelerate(tmp_path / "two", "--epochs", 1, ranks=2) == pytest.approx(own[:1], abs=1e-5)
    assert json.loads((tmp_path / "two/position.json").read_bytes())["epoch"] == 1
    on_one = accelerate(tmp_path / "one", "--epochs", 2, "--resume", tmp_path / "two")
    assert on_one == pytest.approx(own[1:], abs=1e-5)
    two = accelerate(tmp_path / "again", "--epochs", 2, "--resume", tmp_path / "two", ranks=2)
    assert two == pytest.approx(own[1:], abs=1e-5)
    same_tables(tmp_path / "one/tables", tmp_path / "again/tables", 1e-4)


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_accumulated_gradients_are_one_update(framework, tmp_path):
    """By the hook of the optimizer that the tutorial shows."""
    own, others = (
        subprocess.check_output([sys.executable, LOOPS, loop], text=True, cwd=tmp_path).splitlines()[-1]
        for loop in ("own", framework)
    )
    assert len(json.loads(own)) == 8
    assert others == own

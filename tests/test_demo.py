"""The demo of the README runs, and gives the same numbers twice."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "dlrm_synthetic.py"


def run(*args: str) -> str:
    command = [sys.executable, str(SCRIPT), "--samples", "20480", "--threads", "1", *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_demo():
    first, second = run(), run()
    model = re.search(r"held-out samples: loss (\d\.\d{6}), AUC (0\.\d{4})\n", first)
    teacher = re.search(r"the teacher's: +loss (\d\.\d{6}), AUC (0\.\d{4})\n", first)
    assert model
    assert teacher
    assert model[0] in second, "the same seed gives the same loss"
    assert 0.6 < float(model[2]) < float(teacher[2])  # ten batches only: on its way from 0.5
    assert re.search(r"speed: [\d,]+ samples/s on 1 threads\n", first)

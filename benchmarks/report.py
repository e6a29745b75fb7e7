"""What every benchmark prints and saves beside its numbers: where they come from, and a table of its floors."""

import math
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def environment() -> dict:
    """Machine, versions and commit."""
    import torch

    from rowwise.ops.native import isa

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return {
        "cpu": cpu_model(),
        "cores": torch.get_num_threads(),
        "isa": isa(),
        "python": platform.python_version(),
        "versions": {name: found for name in ("rowwise", "torch", "fbgemm-gpu-cpu") if (found := installed(name))},
        "commit": commit.strip(),
    }


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def print_table(floors: list[dict]) -> None:
    print()
    for f in floors:
        print(f"{'ok  ' if f['ok'] else 'MISS'}  {f['value']:>8}  (floor {f['floor']})  {f['name']}")
    print()

"""What every benchmark prints and saves beside its numbers: where they come from, and a table of its floors."""

import json
import math
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rowwise.recipes.machine import Machine, Native


def environment() -> dict:
    """Machine, versions and commit."""
    machine, native = Machine.read("passive"), Native.read()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return {
        "cpu": machine.cpu,
        "cores": machine.usable_cores,
        "isa": native.isa,
        "huge_pages": machine.huge_pages,
        "python": machine.python,
        "versions": {"rowwise": machine.rowwise, "torch": machine.torch, **peers()},
        "commit": commit.strip(),
    }


def peers() -> dict[str, str]:
    found = {}
    for name in ("fbgemm-gpu-cpu", "torchrec"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def print_table(floors: list[dict]) -> None:
    print()
    for f in floors:
        print(f"{'ok  ' if f['ok'] else 'MISS'}  {f['value']:>8}  (floor {f['floor']})  {f['name']}")
    print()


def save(result: dict, path: Path | None) -> None:
    """Write the JSON, if there is somewhere to write it."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def finish(result: dict, path: Path | None) -> None:
    """Print the floors, save the result, and print it as the last line."""
    print_table(result["floors"])
    save(result, path)
    print(json.dumps(result))

"""What every benchmark takes from its command line, and what it prints and saves beside its numbers."""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from parts import BENCHMARKS
from parts.processor import this_processor
from rowwise.recipes.machine import Environment, NativeLibrary

RESULTS = BENCHMARKS / "results"
STARTED_s = time.perf_counter()
# Packages, and what is imported of them.
PEERS = {
    "fbgemm-gpu-cpu": "fbgemm_gpu",
    "torchrec": "torchrec",
    "rocksdict": "rocksdict",
    "torch-geometric": "torch_geometric",
    "mlcommons-loadgen": "mlperf_loadgen",
}


def saved(name: str) -> Path:
    """Where the results of this processor are kept."""
    return RESULTS / this_processor() / f"{name}.json"


def options(name: str, doc: str, *, only: Sequence[str] = (), data: bool = False) -> argparse.ArgumentParser:
    """What all benchmarks take; of those with sections also which to run, with datasets also where these are."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a coarser answer, most of them in under a minute")
    size.add_argument("--smoke", action="store_true", help="tiny: does it run, and are its results right? No times")
    where = "write the JSON to FILE; without FILE to benchmarks/results/PROCESSOR, of --quick as NAME.quick.json"
    parser.add_argument("--save", type=Path, metavar="FILE", nargs="?", const=saved(name), help=where)
    if only:
        parser.add_argument("--only", nargs="+", choices=only, default=list(only), help="of the sections")
    if data:
        parser.add_argument("--data", type=Path, default=Path("data"), help="where the datasets are")
    return parser


def parsed(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """A smoke run is a quick one, and smaller still."""
    args = parser.parse_args(words)
    if args.smoke and args.save and args.save.is_relative_to(RESULTS):
        parser.error("--smoke measures nothing that is worth keeping: give --save a FILE elsewhere")
    args.quick |= args.smoke
    if args.quick and args.save and args.save.is_relative_to(RESULTS):
        args.save = args.save.with_suffix(".quick.json")  # beside the full result, which stays
    return args


def has_peer(package: str, args: argparse.Namespace) -> bool:
    """Whether a peer is installed; without it only a smoke run goes on."""
    if find_spec(PEERS[package]) is not None:
        return True
    line = f"{package} is not installed (`make bench` installs it)"
    if not args.smoke:
        sys.exit(f"{line}: nothing to compare with")
    print(f"left out: {line}", flush=True)
    return False


def environment() -> dict:
    """Machine, versions and commit."""
    machine, native = Environment.read("passive"), NativeLibrary.read()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=BENCHMARKS
    ).stdout
    return {
        "processor": this_processor(),
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
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def at_least(name: str, value: float, floor: float | None) -> dict:
    """A number and its floor; without one it is only reported."""
    return {"name": name, "value": round(float(value), 6), "floor": floor, "ok": floor is None or bool(value >= floor)}


def at_most(name: str, value: float, floor: float | None) -> dict:
    ok = floor is None or bool(value <= floor)
    return {"name": f"{name} (at most)", "value": round(float(value), 6), "floor": floor, "ok": ok}


def exactly(name: str, value: float, wanted: float) -> dict:
    """A result that does not depend on the machine: what smoke runs are held to."""
    return {"name": f"{name} (exactly)", "value": value, "floor": wanted, "ok": value == wanted}


def print_table(floors: list[dict]) -> None:
    print()
    for f in floors:
        print(f"{'ok  ' if f['ok'] else 'MISS'}  {f['value']:>10}  (floor {f['floor']})  {f['name']}")
    print()


def shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else str(value)


def show(row: Mapping[str, object]) -> None:
    """A row as soon as it is measured; what it nests is in the JSON alone."""
    cells = (f"{name} {shown(value)}" for name, value in row.items() if not isinstance(value, dict))
    print("  ".join(cells), flush=True)


def save(result: dict, path: Path | None) -> None:
    """Write the JSON, if there is somewhere to write it."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def finish(name: str, rows: object, floors: list[dict], args: argparse.Namespace, **more: object) -> None:
    """Print the floors, save the result, and print it as the last line. A smoke run that misses one fails."""
    run = "smoke" if args.smoke else "quick" if args.quick else "full"
    result = {"benchmark": name, "environment": environment(), "rows": rows, "floors": floors, **more}
    result |= {"run": run, "took_s": round(time.perf_counter() - STARTED_s, 1)}
    print_table(floors)
    save(result, args.save)
    print(json.dumps(result))
    if args.smoke and not (floors and all(floor["ok"] for floor in floors)):
        sys.exit(1)

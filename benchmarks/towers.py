"""Do towers keep their promises: noisy labels that cost little, pictures at the size that each is worth, graphs?

    python benchmarks/towers.py [--quick | --smoke] [--only noise images graphs] [--data data] [--save]

Runs the benchmarks noise, images and graphs one after the other, each in a process of its own, and collects their rows
and floors. With `--save` each of them saves its own result, too. The last printed line is one JSON object.

Takes: an hour; --quick 5 minutes
Needs: what the three need: `rowwise data get` for movielens-100k and complete-journey; scikit-learn, Pillow
"""

import argparse
import json
import subprocess
import sys

from parts import BENCHMARKS
from parts.report import RESULTS, finish, options, parsed

PARTS = ("noise", "images", "graphs")
WITH_DATA = ("noise", "graphs")


def run(name: str, args: argparse.Namespace) -> dict:
    """The result of a benchmark, whose other lines are printed as they come."""
    size = ["--smoke"] if args.smoke else ["--quick"] if args.quick else []
    keep = ["--save"] if args.save and args.save.is_relative_to(RESULTS) else []
    data = ["--data", str(args.data)] if name in WITH_DATA else []
    last = ""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *size, *keep, *data]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(last, end="", flush=True)
            last = line
    if running.returncode:
        sys.exit(f"{name} ended with exit code {running.returncode}; its messages are above")
    return json.loads(last)


def main() -> None:
    args = parsed(options("towers", __doc__, only=PARTS, data=True))
    results = {name: run(name, args) for name in args.only}
    rows = [{"benchmark": name, **row} for name, result in results.items() for row in result["rows"]]
    floors = [{**f, "name": f"{name}: {f['name']}"} for name, result in results.items() for f in result["floors"]]
    finish("towers", rows, floors, args)


if __name__ == "__main__":
    main()

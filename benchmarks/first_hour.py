"""What does a newcomer get in the first hour from rowwise, FuxiCTR, RecBole and LightGBM, on the same rows?

    python benchmarks/first_hour.py [--quick | --smoke] [--fuxictr-python PYTHON] [--recbole-python PYTHON]
        [--frappe frappe.validation.libfm] [--save]

Each side starts from the same three CSV files (training, validation, test) and the same columns: those that the recipe
of `rowwise data inspect` has, in the roles that it gives them.

- effort: what a user types and writes. rowwise needs `data inspect` and `train`. The scripts of the peers are
  `parts/first_hour_fuxictr.py` and `parts/first_hour_recbole.py`; of their lines, those of the watch are not counted.
- speed: DeepFM and DCN-v2 of dim 16 with an MLP of 128-64 on 60,000 flights of ten columns. `epoch`: samples a second
  of the best epoch after the first, loading included, and of rowwise with its metrics, of which it writes a line an
  epoch; `alone`: without loading. A number of threads is what each side may use: rowwise takes one for small steps.
  `start` is from the start of the process to the end of the first step; rowwise has its vocabularies from
  `data inspect`, whose seconds are given beside it. Memory is that of the process and all that it starts. Sides take
  turns, and the best of their repeats counts. FuxiCTR loads by Ray, as it does by itself, and from npz files.
- quality: test AUC and log loss. rowwise trains its starter recipe as it is; `ensemble` is `rowwise eval` of its runs
  together. The model `defaults` of a peer is DeepFM with the sizes, batch and epochs of its documents; `deepfm` and
  `dcn` have the sizes, dropout, batch and epochs of the starter recipe, and stop after two epochs without a better log
  loss. All peers have Adam at .001. LightGBM is that of `rowwise baseline`. Bytes are all that a side leaves on disk.
- Frappe has to be there: --frappe takes the file `frappe.validation.libfm` of 57,722 rows that the authors of Neural
  FM publish. Its terms do not allow passing it on.

Peers have environments of their own, and one that is not given is left out:

    python -m venv fuxictr && fuxictr/bin/pip install torch "polars<2" "fuxictr==2.3.10"
    python -m venv recbole && recbole/bin/pip install torch "numpy<2" "pandas<2.3" "recbole==1.2.1"

Then `--fuxictr-python fuxictr/bin/python --recbole-python recbole/bin/python`. A CPU build of torch is enough. The
number of threads is torch's; Ray and the workers of loaders come on top. With --sides and --sets, other rows of the
saved result stay. The last printed line is one JSON object.

Takes: 3 hours with all peers; --quick 10 minutes
Needs: LightGBM, environments of the peers, and packages with the rows, which pip gets
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from parts import BENCHMARKS
from parts.first_hour_data import is_written, write_first, write_rows
from parts.first_hour_sides import Rows, Run, Work, inspect, run_ensemble, run_rowwise, run_trees, sides_of
from parts.report import at_least, at_most, environment, exactly, finish, options, parsed, show

SECTIONS = ("effort", "speed", "quality")
SETS = ("movielens", "adult", "reviews", "flights")
FRAPPE = "frappe"
SIDES = ("rowwise", "LightGBM", "FuxiCTR", "RecBole")
MODELS = ("defaults", "deepfm", "dcn")  # of the peers
SAME = ("section", "set", "side", "model", "seed", "batch", "threads")  # rows with the same of these are one
SPEED_SET, SPEED_ROWS = "flights", 60_000
SEEDS, REPEATS = 3, 2
START_s, RATIO, TREES = 3.0, 1.5, 0.01
SPEEDS = ("epoch_samples_s", "alone_samples_s")
COMMANDS = {"rowwise": 2, "FuxiCTR": 1, "RecBole": 1}
SCRIPTS = {"FuxiCTR": "first_hour_fuxictr.py", "RecBole": "first_hour_recbole.py"}
MEASURING = "# The rest is for the watch."  # in scripts
SLOW = ("FuxiCTR",)  # its loader by Ray: measured once, as an epoch takes seconds whatever the model


def effort() -> list[dict]:
    """Commands to type, and lines of code to write, without those of the watch and blank ones."""
    rows = []
    for side, commands in COMMANDS.items():
        script = SCRIPTS.get(side)
        code = (BENCHMARKS / "parts" / script).read_text().splitlines() if script else []
        code = code[: code.index(MEASURING)] if MEASURING in code else code
        lines = [line for line in code if line.strip() and "watch" not in line.lower() and "alone" not in line]
        rows.append({"section": "effort", "side": side, "commands": commands, "files": len(code and [script])})
        rows[-1]["lines"] = len(lines)
        show(rows[-1])
    return rows


def cells(args: argparse.Namespace) -> list[Work]:
    if args.smoke:
        return [Work(batch=64, threads=1)]
    quick = [Work(threads=n) for n in (1, 2)]
    if args.quick:
        return quick
    more = [Work(batch=batch, threads=n) for batch in (512, 2048) for n in (1, 2)]
    return [*quick, *(Work("dcn", threads=n) for n in (1, 2)), *more]


def measure_speed(rows: Rows, sides: dict[str, Run], args: argparse.Namespace) -> list[dict]:
    found = []
    for number, work in enumerate(cells(args)):
        mine = {name: run for name, run in sides.items() if number == 0 or name not in SLOW}
        repeats: dict[str, list[dict]] = {name: [] for name in mine}
        for _ in range(1 if args.quick else REPEATS):
            for name, run in mine.items():
                repeats[name].append(run(rows, work))
        for name, several in repeats.items():
            best = {speed: max(one[speed] for one in several) for speed in SPEEDS}
            row = {"section": "speed", "side": name, **work._asdict(), **best}
            row |= {name: min(one[name] for one in several) for name in ("first_step_s", "peak_bytes")}
            row |= {"rows": several[0]["rows"], "positives": several[0]["positives"]}
            row |= {"versions": several[0]["versions"]} if "versions" in several[0] else {}
            if name == "rowwise":
                fastest = max(several, key=lambda one: one["epoch_samples_s"])
                row |= {"inspect_s": rows.inspect_s, "phases_ms": fastest["phases_ms"]}
            found.append(row)
            show(row)
    return found


def measure_quality(rows: Rows, sides: dict[str, Run], args: argparse.Namespace, runs: Path) -> list[dict]:
    found: list[dict] = []
    seeds = 1 if args.quick else SEEDS
    for seed in range(seeds):
        for (name, model), run in quality_runs(rows, sides, args, runs).items():
            work = rows.for_peer(name, model, seed) if name in sides else rows.starter(seed=seed)
            add_quality(found, rows, name, model, seed, run(work))
    if "rowwise" in args.sides and seeds > 1:
        row = run_ensemble(rows, runs, rows.starter().threads)
        row["seconds"] += sum(one["seconds"] for one in found if one["side"] == "rowwise")
        add_quality(found, rows, "rowwise", "ensemble", 0, row)
    return found


def quality_runs(
    rows: Rows, sides: dict[str, Run], args: argparse.Namespace, runs: Path
) -> dict[tuple[str, str], Callable[[Work], dict]]:
    """What is measured for each seed, by side and model."""
    found: dict[tuple[str, str], Callable[[Work], dict]] = {}
    if "rowwise" in args.sides:
        found["rowwise", "starter"] = lambda work: run_rowwise(rows, work, (), runs)
    if "LightGBM" in args.sides and find_spec("lightgbm") is None:
        print("left out: LightGBM is not installed", flush=True)
    elif "LightGBM" in args.sides:
        found["LightGBM", "trees"] = partial(run_trees, rows)
    for name, run in sides.items():
        if name != "rowwise" and name not in SLOW:
            found |= {(name, model): partial(run, rows) for model in args.models}
    return found


def add_quality(found: list[dict], rows: Rows, side: str, model: str, seed: int, result: dict) -> None:
    found.append({"section": "quality", "set": rows.folder.name, "side": side, "model": model, "seed": seed, **result})
    show(found[-1])


def saved_rows(rows: list[dict], args: argparse.Namespace) -> list[dict]:
    """Rows of the saved result that were not measured now, then the measured ones, each with its commit."""
    made = environment()["commit"]
    kept = []
    if args.save and args.save.exists() and not args.smoke:
        before = json.loads(args.save.read_text())
        new = {tuple(row.get(name) for name in SAME) for row in rows}
        left = [row for row in before["rows"] if tuple(row.get(name) for name in SAME) not in new]
        kept = [{"commit": before["environment"]["commit"]} | row for row in left]
    return kept + [row | {"commit": made} for row in rows]


def quality_floors(rows: list[dict]) -> list[dict]:
    floors = []
    for name in dict.fromkeys(row["set"] for row in rows):
        auc: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            if row["set"] == name:
                auc.setdefault((row["side"], row["model"]), []).append(row["auc"])
        ours = auc.pop(("rowwise", "starter"), None)
        if ours is None:
            continue
        auc.pop(("rowwise", "ensemble"), None)
        mine, trees = statistics.mean(ours), auc.pop(("LightGBM", "trees"), None)
        if trees:
            floors.append(at_least(f"{name}: AUC over LightGBM's", mine - statistics.mean(trees), -TREES))
        if auc:
            best = max(auc.values(), key=statistics.mean)
            spread = max(max(values) - min(values) for values in (ours, best))
            floors.append(at_least(f"{name}: AUC over the best peer's", mine - statistics.mean(best), -spread))
    return floors


def speed_floors(rows: list[dict]) -> list[dict]:
    floors = []
    for ours in (row for row in rows if row["side"] == "rowwise"):
        alike = [r for r in rows if all(r[key] == ours[key] for key in ("model", "batch", "threads"))]
        peers = [row["epoch_samples_s"] for row in alike if row["side"] != "rowwise"]
        what = "{model}, batch {batch}, {threads} threads".format(**ours)
        if peers:
            floors.append(
                at_least(f"samples/s over the fastest peer's, {what}", ours["epoch_samples_s"] / max(peers), RATIO)
            )
    first = [row["first_step_s"] for row in rows if row["side"] == "rowwise"]
    return [*floors, at_most("seconds from start to first step", min(first), START_s)] if first else floors


def smoke_floors(rows: list[dict], folder: Path) -> list[dict]:
    lines = (folder / "test.csv").read_text().splitlines()[1:]
    seen = (len(lines), sum(line.startswith("1,") for line in lines))
    measured = [row for row in rows if row["section"] != "effort"]
    same = sum((row["rows"], row["positives"]) == seen for row in measured)
    finite = sum(math.isfinite(row["auc"]) and math.isfinite(row["log_loss"]) for row in measured if "auc" in row)
    timed = sum(row[speed] > 0 for row in measured if row["section"] == "speed" for speed in SPEEDS)
    return [
        exactly("runs that saw the same test rows", same, len(measured)),
        exactly("runs with finite metrics", finite, sum("auc" in row for row in measured)),
        exactly("speeds that were found", timed, len(SPEEDS) * sum(row["section"] == "speed" for row in measured)),
    ]


def main() -> None:
    parser = options("first_hour", __doc__, only=SECTIONS)
    parser.add_argument("--fuxictr-python", help="python of an environment with FuxiCTR")
    parser.add_argument("--recbole-python", help="python of an environment with RecBole")
    parser.add_argument(
        "--data", type=Path, default=Path("data/first-hour"), help="where the CSV files are, or are put"
    )
    parser.add_argument("--frappe", type=Path, metavar="FILE", help="frappe.validation.libfm, for the set of this name")
    parser.add_argument("--sets", nargs="+", choices=(*SETS, FRAPPE), help="for quality; --quick: the first")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="for quality")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS[:2], help="of the peers, for quality")
    args = parsed(parser)
    if FRAPPE in (args.sets or ()) and args.frappe is None and not is_written(FRAPPE, args.data):
        parser.error("--sets frappe: expected --frappe FILE, the path of frappe.validation.libfm")
    for name, python in (("FuxiCTR", args.fuxictr_python), ("RecBole", args.recbole_python)):
        if not python:
            print(f"left out: {name}, as no --{name.lower()}-python is given", flush=True)
    sides = {
        name: run
        for name, run in sides_of(args.fuxictr_python, args.recbole_python).items()
        if name.partition(",")[0] in args.sides
    }
    rows = effort() if "effort" in args.only else []
    with tempfile.TemporaryDirectory() as folder:
        out, data = Path(folder), args.data.absolute()
        tiny = write_rows("tiny", out / "made") if args.smoke else None
        if "speed" in args.only:
            few = tiny or write_first(SPEED_ROWS, write_rows(SPEED_SET, data), out / f"{SPEED_SET}-first")
            rows += measure_speed(inspect(few, out), sides, args)
        if "quality" in args.only:
            every = (*SETS, FRAPPE) if args.frappe else SETS
            for name in args.sets or every[: 1 if args.quick else None]:
                whole = tiny or write_rows(name, data, args.frappe)
                rows += measure_quality(inspect(whole, out), sides, args, out / f"runs-{name}")
        rows = saved_rows(rows, args)
        if tiny:
            floors = smoke_floors(rows, tiny)
        else:
            by = {section: [row for row in rows if row["section"] == section] for section in SECTIONS}
            floors = speed_floors(by["speed"]) + quality_floors(by["quality"])
    finish("first_hour", rows, floors, args)


if __name__ == "__main__":
    main()

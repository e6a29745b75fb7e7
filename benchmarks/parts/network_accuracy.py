"""Steps of two ranks of this machine beside their simulation, by a profile that was measured just before.

The part of `network.py` that needs a quiet machine: `python benchmarks/network.py --only accuracy`. With a folder
`--runs`, profile and runs stay there, and what is there is not made again: so another simulation can be compared with
the same measurements. Printed are the stages that make the errors, too.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from scipy.stats import spearmanr

from parts.command import rowwise
from parts.report import at_least, at_most, show

SETTINGS = [  # batch, bottom and top widths, wire and layout of a run of two ranks
    {"train.batch": batch, "model.bottom": width, "model.top": width, "wire": wire, "layout": layout}
    for batch in (1024, 4096)
    for width in ("[64]", "[512,512]")
    for wire in ("fp32", "int8")
    for layout in ("planned", "row_wise")
]
STEPS, LINE = 100, 20  # a line of the log takes as long as several small steps: as often as in the library's recipes
PROFILE = "profile/machine.json"


def accuracy_floors(args: argparse.Namespace) -> tuple[list[dict], dict]:
    if args.smoke:
        return [], {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if args.runs is None else args.runs
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / PROFILE).exists():
            rowwise("calibrate", "profile", "--minutes", "3" if args.quick else "6", "--nproc", "2", cwd=folder)
        settings = SETTINGS[::2] if args.quick else SETTINGS
        rows = [_run_beside(folder, SETTINGS.index(one), one) for one in settings]
    sizes = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    predicted, measured = ([row[name] for row in rows] for name in ("predicted_s", "measured_s"))
    by_stage = share_by_stage(rows)
    show(by_stage)
    rank = spearmanr(predicted, measured)
    floors = [
        at_most("error of a simulated step, median", statistics.median(sizes), 0.10),
        at_most("error of a simulated step, worst", max(sizes), 0.25),
        at_least("rank correlation of simulated and measured steps", rank.statistic, 0.9),
    ]
    return floors, {"rows": rows, "error_by_stage": by_stage}


def share_by_stage(rows: Sequence[dict]) -> dict[str, float]:
    """Simulated less measured seconds of each stage as a share of the measured step, the mean of all runs."""
    shares: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for stage, (predicted_s, measured_s) in row["stages"].items():
            shares[stage].append((predicted_s - measured_s) / row["measured_s"])
    return {stage: sum(found) / len(rows) for stage, found in shares.items()}


def _run_beside(folder: Path, number: int, settings: dict[str, object]) -> dict:
    """One run of two ranks, and what `rowwise simulate --check` says of it."""
    batch, wire, layout = (settings[name] for name in ("train.batch", "wire", "layout"))
    changes = {name: value for name, value in settings.items() if name.startswith(("train.", "model."))}
    changes |= {"data.rows": STEPS * int(batch), "train.epochs": 1, "log.every": LINE}
    if wire != "fp32":
        changes |= {f"wire.host.{way}": wire for way in ("forward", "backward")}
    words = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    runs, plan = f"runs-{number}", []
    if not any((folder / runs).rglob("result.json")):
        if layout != "planned":
            rowwise(
                "plan", "--recipe", "dlrm-synthetic", *words, "--topology", f"2x{PROFILE}",
                "--layouts", str(layout), "--seconds", "0.05", "--json", f"{number}.json", cwd=folder,
            )  # fmt: skip
            plan = ["--plan", f"{number}.json"]
        ranks = ["--nproc", "2", "--runs", runs, "--hardware", PROFILE]
        rowwise("train", "dlrm-synthetic", *words, *ranks, *plan, cwd=folder)
    (run,) = [path.parent.relative_to(folder) for path in (folder / runs).rglob("stages.csv")]
    found = json.loads(rowwise("simulate", "--check", str(run), "--json", cwd=folder))
    row = {**settings, "predicted_s": found["predicted_s"], "measured_s": found["measured_s"]}
    row["stages"] = {s["stage"]: [s["predicted_s"], s["measured_s"]] for s in found["stages"]}
    show(row)
    return row

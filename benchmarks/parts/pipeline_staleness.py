"""Runs of `pipeline.py` in its section staleness: a library recipe by how many steps old its rows may be.

A run is `rowwise train` in a process of its own, and its result the test metrics and the last checkpoint.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parts.command import rowwise
from parts.report import show
from rowwise.checkpoint.diff import diff
from rowwise.checkpoint.named import open_named

KEY = "train.staleness"
DATASET = "complete-journey"


class StalenessOrder(NamedTuple):
    recipe: str
    home: Path  # whose folder `data` has the dataset
    staleness: tuple[int, ...]
    seeds: int
    settings: tuple[str, ...] = ()


class TrainedRun(NamedTuple):
    result: dict[str, Any]
    checkpoint: Path

    @property
    def auc(self) -> float:
        (task,) = self.result["test"].values()
        return task["auc"]


def get_dataset(home: Path) -> None:
    """Get Complete Journey, unless it is there."""
    if not (home / "data" / DATASET / "train.parquet").exists():
        home.mkdir(parents=True, exist_ok=True)
        rowwise("data", "get", DATASET, cwd=home)


def train(order: StalenessOrder, runs: Path, seed: int, *settings: str) -> TrainedRun:
    changes = [word for one in (f"seed={seed}", *order.settings, *settings) for word in ("--set", one)]
    before = {path for path in runs.rglob("ckpt")}
    printed = rowwise("train", order.recipe, "--runs", str(runs), "--json", *changes, cwd=order.home)
    (made,) = {path for path in runs.rglob("ckpt")} - before
    return TrainedRun(json.loads(printed), made)


def measure_staleness(order: StalenessOrder) -> list[dict]:
    """AUC by staleness over seeds; and whether 0 has the bits of a recipe without the key."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        for staleness in order.staleness:
            trained = [train(order, runs, seed, f"{KEY}={staleness}") for seed in range(order.seeds)]
            rows.append(row_of(order, staleness, [run.auc for run in trained]))
            if staleness == 0:
                plain = train(order, runs, 0)
                rows[-1]["differences"] = differences(trained[0], plain)
            show(rows[-1])
    return rows


def row_of(order: StalenessOrder, staleness: int, aucs: Sequence[float]) -> dict:
    about = {"section": "staleness", "recipe": order.recipe, "staleness": staleness, "seeds": len(aucs)}
    return about | {"auc": statistics.mean(aucs), "spread": max(aucs) - min(aucs), "aucs": list(aucs)}


def differences(first: TrainedRun, second: TrainedRun) -> int:
    """Tensors that differ in a bit."""
    return len(diff(open_named(first.checkpoint.parent), open_named(second.checkpoint.parent)).tensors)

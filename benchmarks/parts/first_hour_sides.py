"""The sides of `first_hour.py`, each as its users run it, in processes of their own that are watched from here."""

import csv
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from parts import BENCHMARKS
from parts.process_tree import memory_bytes

LOOK_s, WEIGH_s = 0.01, 0.2  # how often files are looked for, and memory is measured
PHASES = ("data_s", "route_s", "lookup_s", "exchange_s", "wait_s", "forward_s", "backward_s", "update_s", "other_s")
LOADING = ("data_s", "wait_s")
DEFAULTS: dict[str, dict[str, Any]] = {  # of DeepFM: FuxiCTR's template DeepFM_default, and RecBole's properties
    "FuxiCTR": {"dim": 40, "deep": (300, 300, 300), "dropout": 0.0, "batch": 10_000, "epochs": 100, "patience": 2},
    "RecBole": {"dim": 10, "deep": (128, 128, 128), "dropout": 0.2, "batch": 2_048, "epochs": 300, "patience": 10},
}
LIST_MARK = "split"  # the transform of a column whose text holds lists


class Work(NamedTuple):
    """A run of a model: the same for all sides."""

    model: str = "deepfm"
    dim: int = 16
    deep: tuple[int, ...] = (128, 64)
    dropout: float = 0.0
    crosses: int = 2
    batch: int = 1024
    threads: int = 2
    epochs: int = 3
    seed: int = 0
    lr: float = 0.001  # of the peers: what both take by default
    patience: int = 2  # epochs
    validates: bool = False  # after each epoch
    alone: bool = True  # whether the loop is also run over batches that are there


class Rows(NamedTuple):
    """A data set, what `rowwise data inspect` makes of it, and how long that took."""

    folder: Path
    recipe: Path
    inspect_s: float
    train: int

    def columns(self) -> dict[str, list[str]]:
        """What peers are told: the roles that the recipe gives."""
        recipe = yaml.safe_load(self.recipe.read_text())
        lists = [one["column"] for one in recipe.get("transforms", ()) if one["kind"] == LIST_MARK]
        made = {one.get("to", one.get("column")) for one in recipe.get("transforms", ()) if one["kind"] == "bucketize"}
        ids = [one["column"] for one in recipe["columns"]["sparse"] if one["column"] not in made]
        numbers = [one["column"] for one in recipe["columns"].get("dense", ())]
        return {"ids": [name for name in ids if name not in lists], "lists": lists, "numbers": numbers}

    def starter(self, **changes: object) -> Work:
        """The sizes of the starter recipe."""
        recipe = yaml.safe_load(self.recipe.read_text())
        model, train = recipe["model"], recipe["train"]
        deep = model["deep" if "deep" in model else "top"]  # of a DCN, or of a DLRM
        sizes = {"deep": tuple(deep), "dropout": model.get("dropout", 0.0)}
        found = {"dim": recipe["tables"]["all"]["dim"], "batch": train["batch"], "epochs": train["epochs"], **sizes}
        return Work(validates=True, alone=False)._replace(**found | changes)

    def for_peer(self, side: str, model: str, seed: int) -> Work:
        """The sizes of the starter recipe, or with the model `defaults` DeepFM as the peer's documents have it."""
        if model != "defaults":
            return self.starter(seed=seed, model=model)
        return self.starter(seed=seed, model="deepfm", **DEFAULTS[side.partition(",")[0]])


class Watched(NamedTuple):
    """A process that has ended."""

    printed: str
    began_at: float
    seconds: float
    peak_bytes: int  # of it and all that it started, what they share counted once
    seen_at: float  # when the file that was waited for was there


def watch(
    command: list[str], threads: int, seen: Callable[[], bool] = lambda: False, folder: str | None = None
) -> Watched:
    began_at, peak, found_at, weighed = time.time(), 0, 0.0, 0.0
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore", "RAY_DEDUP_LOGS": "0"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=out, stderr=said, env=variables, cwd=folder)
        while process.poll() is None:
            if not found_at and seen():
                found_at = time.time()
            if time.time() - weighed > WEIGH_s:
                peak, weighed = max(peak, memory_bytes(process.pid)), time.time()
            time.sleep(LOOK_s)
        ended = time.time()
        out.seek(0)
        said.seek(0)
        printed, errors = out.read(), said.read()
    if process.returncode:
        raise AssertionError(f"{command[:3]} failed: {printed[-1500:]}{errors[-3000:]}")
    return Watched(printed, began_at, ended - began_at, peak, found_at)


def rowwise(*words: str) -> list[str]:
    return [sys.executable, "-m", "rowwise.cli.main", *words]


def inspect(folder: Path, out: Path) -> Rows:
    """The first command of rowwise: it writes the recipe."""
    recipe = Path(tempfile.mkdtemp(dir=out)) / f"{folder.name}.yaml"
    command = rowwise("data", "inspect", str(folder / "train.csv"), "--label", "label", "--recipe", str(recipe))
    with (folder / "train.csv").open() as file:
        rows = sum(1 for _ in file) - 1
    return Rows(folder, recipe, watch(command, 2).seconds, rows)


def _settings(rows: Rows, work: Work, more: tuple[str, ...]) -> list[str]:
    files = [f"data.{part}=csv:{rows.folder / part}.csv" for part in ("valid", "test")]
    given = [*files, "data.share=random", f"seed={work.seed}", *more]  # its threads follow from OMP_NUM_THREADS
    return [word for setting in given for word in ("--set", setting)]


def as_work(work: Work, every: int) -> tuple[str, ...]:
    """The starter recipe with another model, evaluated at the end only, and a line of metrics every so many steps."""
    crosses = f", crosses: {work.crosses}" if work.model == "dcn" else ""
    model = f"{{kind: {work.model}, deep: {list(work.deep)}, dropout: {work.dropout}{crosses}}}"
    sizes = (f"tables.all.dim={work.dim}", f"train.batch={work.batch}", f"train.epochs={work.epochs}")
    return (f"model={model}", *sizes, "evaluate.every=1000000", "evaluate.patience=null", f"log.every={every}")


def folder_bytes(folder: Path) -> int:
    """Of all files in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def run_rowwise(rows: Rows, work: Work, more: tuple[str, ...] | None = None, keep: Path | None = None) -> dict:
    """`rowwise train`: with the starter recipe as it is, where there is nothing `more`; the run stays in `keep`."""
    with tempfile.TemporaryDirectory() as folder:
        runs = keep or Path(folder)
        settings = _settings(rows, work, as_work(work, steps_of(rows, work)) if more is None else more)
        command = rowwise("train", str(rows.recipe), "--runs", str(runs), *settings, "--json")
        run = runs / rows.recipe.stem / str(1 + len(kept_runs(rows, runs)))
        done = watch(command, work.threads, (run / "steps.csv").exists)
        result = json.loads(done.printed)
        found = {"first_step_s": done.seen_at - done.began_at, "peak_bytes": done.peak_bytes, "seconds": done.seconds}
        found |= _measured(result["test"]["label"])
        found["disk_bytes"] = folder_bytes(run) + folder_bytes(rows.recipe.parent)
        return found | (speeds(run / "steps.csv", steps_of(rows, work), work.epochs) if work.alone else {})


def kept_runs(rows: Rows, runs: Path) -> list[Path]:
    """In the order in which they were trained."""
    return sorted((runs / rows.recipe.stem).glob("[0-9]*"), key=lambda run: int(run.name))


def run_ensemble(rows: Rows, runs: Path, threads: int) -> dict:
    """`rowwise eval` of kept runs together. Its seconds are its own, without those of training."""
    kept = kept_runs(rows, runs)
    done = watch(rowwise("eval", *map(str, kept), "--json"), threads)
    found = _measured(json.loads(done.printed)["tasks"]["label"])
    found |= {"seconds": done.seconds, "peak_bytes": done.peak_bytes}
    return found | {"disk_bytes": sum(map(folder_bytes, kept)) + folder_bytes(rows.recipe.parent)}


def run_timed(rows: Rows, work: Work) -> dict:
    """A run, and one of a single step, which shows when the first step ends."""
    short = (*as_work(work, every=1), "train.steps=1")
    first, found = run_rowwise(rows, work._replace(alone=False), short), run_rowwise(rows, work)
    return found | {"first_step_s": first["first_step_s"]}


def _measured(test: dict) -> dict:
    rows = int(test["count"])
    return {"auc": test["auc"], "log_loss": test["loss"], "rows": rows, "positives": round(test["base_rate"] * rows)}


def run_trees(rows: Rows, work: Work) -> dict:
    """LightGBM on the rows and columns of the starter recipe, by `rowwise baseline` of a run that hardly trains."""
    with tempfile.TemporaryDirectory() as runs:
        settings = _settings(rows, work, ("train.steps=1",))
        watch(rowwise("train", str(rows.recipe), "--runs", runs, *settings, "--json"), work.threads)
        run = Path(runs) / rows.recipe.stem / "1"
        done = watch(rowwise("baseline", str(run)), work.threads)
        found = json.loads((run / "baseline.json").read_text())
        return _measured(found["test"]) | {"peak_bytes": done.peak_bytes, "seconds": found["seconds"]}


def steps_of(rows: Rows, work: Work) -> int:
    """Steps of an epoch."""
    return -(-rows.train // work.batch)


def speeds(path: Path, steps: int, epochs: int) -> dict:
    """Samples a second of the best epoch but the first, also without the time that data took; and its phases."""
    with path.open() as file:
        lines = [{name: float(value or 0) for name, value in line.items()} for line in csv.DictReader(file)]
    ends = [next(line for line in lines if line["step"] == steps * epoch) for epoch in range(1, epochs + 1)]
    found = []
    for before, end in itertools.pairwise(ends):
        samples, busy_s = end["samples"] - before["samples"], sum(end[name] for name in PHASES if name not in LOADING)
        epoch = {"epoch_samples_s": samples / (end["time_s"] - before["time_s"]), "alone_samples_s": samples / busy_s}
        phases = {name.removesuffix("_s"): end[name] / steps * 1e3 for name in PHASES if end[name]}
        found.append(epoch | {"phases_ms": phases})
    return max(found, key=lambda one: one["epoch_samples_s"])


def run_peer(python: str, script: str, loader: str, rows: Rows, work: Work) -> dict:
    """A peer's script, by its own Python."""
    out = tempfile.mkdtemp()
    try:
        told = work._asdict() | rows.columns() | {"rows": str(rows.folder), "out": out, "loader": loader}
        command = [
            os.path.abspath(python),
            "-W",
            "ignore",
            str(BENCHMARKS / "parts" / f"{script}.py"),
            json.dumps(told),
        ]
        done = watch(command, work.threads, folder=out)  # they leave logs
        left_bytes = folder_bytes(Path(out))
    finally:
        shutil.rmtree(out, ignore_errors=True)
    result = json.loads(done.printed.splitlines()[-1])
    found = {name: result[name] for name in ("auc", "log_loss", "rows", "positives", "versions")}
    found |= {"first_step_s": result["first_step_at"] - done.began_at, "seconds": done.seconds}
    found |= {"peak_bytes": done.peak_bytes, "disk_bytes": left_bytes}
    if work.alone:
        found["epoch_samples_s"] = rows.train / min(result["epoch_s"])
        found["alone_samples_s"] = rows.train / min(result["alone_epoch_s"])
    return found


Run = Callable[[Rows, Work], dict]


def sides_of(fuxictr: str | None, recbole: str | None) -> dict[str, Run]:
    """Those whose Python is there; FuxiCTR has two loaders."""
    sides: dict[str, Run] = {"rowwise": run_timed}
    if fuxictr:
        sides["FuxiCTR"] = partial(run_peer, fuxictr, "first_hour_fuxictr", "parquet")
        sides["FuxiCTR, npz"] = partial(run_peer, fuxictr, "first_hour_fuxictr", "npz")
    if recbole:
        sides["RecBole"] = partial(run_peer, recbole, "first_hour_recbole", "")
    return sides

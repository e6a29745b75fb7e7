"""Which model of the zoo is best, with equally many parameters and a learning rate of its own?

    python benchmarks/models.py [--quick | --smoke] [--only stream] [--data data] [--save]

Every model of the zoo is trained on MovieLens-100k, on Complete Journey and on a stream of 5 million made-up clicks,
each seen once; stacks of DHEN of one to four layers on the stream only. The width of a model is chosen so that all
have about the same number of parameters beside their tables. The tables are the same, but for the weights of single
ids that deepfm, wide_deep and xdeepfm have besides. Rates of tables, batches and epochs are those of one recipe, that
of DCN on the first two datasets.

The rate of the dense parameters is the best of three by the validation rows, for one seed: after all epochs of
MovieLens, after 200 or 250 steps of the others. Then three seeds are trained and measured on test rows. Seeds change
the initial weights and the order of rows, but not of the stream. Runs have one thread each; as many run at once as
there are cores. `--quick` is one seed, two rates and a stream of 1 million. `--only` is a dataset.

Runs that have ended are kept in the folder `models` beside the datasets until all have, so that the same command goes
on after a kill. The last printed line is one JSON object.

Takes: 2 hours; --quick 10 minutes
Needs: `rowwise data get movielens-100k` and `rowwise data get complete-journey`
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from parts.model_work import DATA, DEPTHS, STACKS, Data, Job, step_speed, train, write_stream
from parts.report import RESULTS, at_least, at_most, exactly, finish, options, parsed, show
from parts.tiny_data import make_tiny
from rich.progress import Progress

RATES = (0.0005, 0.002, 0.008)
SEEDS = (0, 1, 2)
STREAM_ROWS = 5_000_000
SPEED_s = 2.0
SMOKE = ("dhen",)
WORST_NE = {"movielens-100k": 0.84, "complete-journey": 0.65, "stream": 0.7}  # of a mean over seeds
WIDEST = {"movielens-100k": 0.02, "complete-journey": 0.01, "stream": 0.002}  # between the NEs of a model


class Runs:
    """Runs that have ended, kept in a file that is read again after a kill."""

    def __init__(self, path: Path, folder: Path, processes: int) -> None:
        self._path, self._folder, self._processes = path, folder, processes
        # A line without its end was cut by a kill.
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        if whole != lines:
            path.write_text("".join(whole))
        self._rows = {self._key(row): row for row in map(json.loads, whole)}

    @staticmethod
    def _key(row: dict) -> tuple:
        return tuple(row[name] for name in Job._fields)

    def of(self, jobs: Sequence[Job], what: str) -> list[dict]:
        """The rows of these runs; those that are missing are trained."""
        missing = [job for job in jobs if tuple(job) not in self._rows]
        context = multiprocessing.get_context("spawn")
        with Progress() as progress, ProcessPoolExecutor(self._processes, context) as pool:
            task = progress.add_task(what, total=len(missing))
            try:
                for future in as_completed([pool.submit(train, job, self._folder) for job in missing]):
                    self._keep(future.result())
                    progress.advance(task)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [self._rows[tuple(job)] for job in jobs]

    def _keep(self, row: dict) -> None:
        self._rows[self._key(row)] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def forget(self) -> None:
        """Remove the file: the next runs are of another version."""
        self._path.unlink(missing_ok=True)


def best_rates(rows: Iterable[dict]) -> dict[str, float]:
    """By model: the rate of the lowest NE; one that did not learn is NaN, and never lowest."""
    by_model: dict[str, list[dict]] = {}
    for row in rows:
        by_model.setdefault(row["model"], []).append(row)
    return {
        name: min(mine, key=lambda row: (row["ne"] != row["ne"], row["ne"]))["lr"] for name, mine in by_model.items()
    }


def measure(data: Data, names: Sequence[str], runs: Runs, args: argparse.Namespace) -> list[dict]:
    """All seeds of all models on a dataset."""
    rates, seeds = (RATES[: 1 if args.smoke else 2], SEEDS[:1]) if args.quick else (RATES, SEEDS)
    job = partial(Job, data.name, smoke=args.smoke)
    tried = runs.of([job(name, lr, 0, True) for name in names for lr in rates], f"{data.name}: learning rates")
    chosen = best_rates(tried)
    return runs.of([job(name, chosen[name], seed, False) for name in names for seed in seeds], data.name)


def summary(rows: list[dict]) -> list[dict]:
    """A line for each model and dataset: means over seeds, and the widest difference of their NEs."""
    lines = []
    for data, name in dict.fromkeys((row["data"], row["model"]) for row in rows):
        mine = [row for row in rows if (row["data"], row["model"]) == (data, name)]
        ne = [row["ne"] for row in mine]
        lines.append(
            {
                "data": data,
                "model": name,
                "ne": round(statistics.mean(ne), 5),
                "spread": round(max(ne) - min(ne), 5),
                "auc": round(statistics.mean(row["auc"] for row in mine), 5),
                "lr": mine[0]["lr"],
                "parameters": mine[0]["parameters"],
                "flops": mine[0]["flops"],
            }
        )
    return sorted(lines, key=lambda line: (line["data"], line["ne"]))


def floors_of(lines: list[dict]) -> list[dict]:
    floors = []
    for data in dict.fromkeys(line["data"] for line in lines):
        mine = [line for line in lines if line["data"] == data]
        worst, widest = max(mine, key=lambda line: line["ne"]), max(mine, key=lambda line: line["spread"])
        floors.append(at_most(f"{data}: NE of the worst model, {worst['model']}", worst["ne"], WORST_NE[data]))
        floors.append(at_most(f"{data}: spread of NE, {widest['model']}", widest["spread"], WIDEST[data]))
        ne = {line["model"]: line["ne"] for line in mine}
        for what in STACKS:
            by_depth = [ne[name] for n in DEPTHS if (name := f"dhen of {what}, {n} layers") in ne]
            if by_depth:
                gain = at_least(
                    f"{data}: NE of dhen of {what}, 1 layer less 4 layers", by_depth[0] - by_depth[-1], None
                )
                floors.append(gain)
        parameters = [line["parameters"] for line in mine]
        edge = sum(line["lr"] in (min(RATES), max(RATES)) for line in mine)
        floors.append(at_most(f"{data}: models whose rate is the lowest or the highest tried", edge, None))
        floors.append(at_most(f"{data}: most parameters over fewest", max(parameters) / min(parameters), 1.1))
    return floors


def main() -> None:
    parser = options("models", __doc__, data=True)
    parser.add_argument("--only", default="", choices=["", *(data.name for data in DATA)], help="one dataset")
    args = parsed(parser)
    if args.only and args.save and args.save.is_relative_to(RESULTS):
        parser.error("--only measures one dataset, and the kept results are of all: give --save a FILE elsewhere")
    with tempfile.TemporaryDirectory() as folder:
        place = make_tiny(Path(folder)) if args.smoke else args.data.absolute()
        runs = Runs(place / "models" / ("quick.jsonl" if args.quick else "runs.jsonl"), place, os.cpu_count() or 1)
        rows: list[dict] = []
        write_stream(place, 8192 if args.smoke else 1_000_000 if args.quick else STREAM_ROWS)
        for data in DATA:
            if args.only in ("", data.name):
                rows += measure(data, SMOKE if args.smoke else data.models, runs, args)
        lines = summary(rows)
        for line in lines[:1] if args.smoke else lines:
            data = next(data for data in DATA if data.name == line["data"])
            line["samples_s"] = round(step_speed(data, line["model"], place, SPEED_s / 20 if args.smoke else SPEED_s))
        if not args.only:
            runs.forget()
    for line in lines:
        show(line)
    floors = (
        floors_of(lines)
        if not args.smoke
        else [
            exactly("runs", len(rows), len(SMOKE) * len(DATA)),
            exactly("runs whose NE is a number above 0", sum(row["ne"] > 0 for row in rows), len(rows)),
        ]
    )
    finish("models", rows, floors, args, lines=lines)


if __name__ == "__main__":
    main()

"""The models that are compared, the recipes that they are trained by, and one run of each."""

import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import pyarrow.parquet as pq
from msgspec import structs

from rowwise.base.errors import GradientError
from rowwise.ingest.datasets.synthetic import SyntheticColumns
from rowwise.models.cost import model_cost
from rowwise.recipes.compose import make_model, make_objective, resolve, set_threads
from rowwise.recipes.find import load
from rowwise.recipes.model_configs import ClickModel
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.resolved import make_batcher
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode
from rowwise.train.breakdown import Breakdown
from rowwise.train.step import StepContext, step

Config = dict[str, object]
DIM = 16
MAX_WIDTH = 1024
SMOKE_STEPS = 2
WARM_UP = 5  # steps before those that are timed
WORLD = SyntheticColumns(
    dense=4,
    ids=(("user", 20_000), ("item", 10_000), ("shop", 2_000), ("kind", 100)),
    bags=(("seen", 10_000), ("words", 2_000)),
)
TEST_ROWS = 200_000


def _dhen(layers: int, *interactions: str) -> Callable[[int], Config]:
    return lambda w: {"kind": "dhen", "top": [w, w], "layers": layers, "interactions": list(interactions), "vectors": 4}


# By name: the model's settings for a width, which is chosen so that all models have equally many parameters.
MODELS: dict[str, Callable[[int], Config]] = {
    "dlrm": lambda w: {"kind": "dlrm", "bottom": [w], "top": [w, w]},
    "deepfm": lambda w: {"kind": "deepfm", "deep": [w, w]},
    "wide_deep": lambda w: {"kind": "wide_deep", "deep": [w, w]},
    "dcn": lambda w: {"kind": "dcn", "deep": [w], "crosses": 2},
    "gdcn": lambda w: {"kind": "dcn", "deep": [w], "crosses": 2, "gated": True, "rank": 32},
    "masknet": lambda w: {"kind": "masknet", "blocks": [w, w], "top": [w], "reduction_ratio": 1},
    "final_mlp": lambda w: {"kind": "final_mlp", "first": [w, w], "second": [w, w], "gate": 16},
    "autoint": lambda w: {"kind": "autoint", "deep": [w, w], "layers": 2, "width": 16},
    "xdeepfm": lambda w: {"kind": "xdeepfm", "deep": [w, w], "products": [16, 16]},
    "wukong": lambda w: {"kind": "wukong", "top": [w, w], "hidden": [64], "layers": 2, "vectors": 8},
    "mmoe": lambda w: {"kind": "mmoe", "experts": 4, "expert_sizes": [w, 32]},
    "ple": lambda w: {"kind": "ple", "expert_sizes": [w, 32]},
    "dhen": _dhen(2, "cross", "linear"),
}
ZOO = tuple(MODELS)
DEPTHS = (1, 2, 4)
STACKS = {"one kind": ("cross",), "three kinds": ("cross", "linear", "dot")}  # of interactions in each layer
DEEP = {f"dhen of {what}, {n} layers": _dhen(n, *kinds) for what, kinds in STACKS.items() for n in DEPTHS}
MODELS |= DEEP


class Data(NamedTuple):
    """A dataset, what all models train it by, and the steps by which learning rates are compared."""

    name: str
    recipe: Callable[[Path], Recipe]
    parameters: int  # of each model, without its tables
    tuning_steps: int | None  # None: as many as a run has
    models: tuple[str, ...] = ZOO


def movielens(data: Path) -> Recipe:
    changes = [f"data.folder={data}", "train.epochs=12", "log.every=1000000"]
    return load("movielens-dcn", changes)


def complete_journey(data: Path) -> Recipe:
    return load("complete-journey-dcn", [f"data.folder={data}", "data.valid_share=0.02", "log.every=1000000"])


def stream(data: Path) -> Recipe:
    """Clicks in the order in which they come, each seen once; the rows after them are for validation and test."""
    columns = WORLD.columns()
    made = {
        "name": "stream",
        "data": {"dataset": f"parquet:{data}/stream/train.parquet"}
        | {part: f"parquet:{data}/stream/{part}.parquet" for part in ("valid", "test")},
        "columns": msgspec.to_builtins(columns),
        "tables": {
            "all": {"dim": DIM, "optimizer": {"kind": "rowwise_adagrad", "lr": 0.1}},
            "list": [msgspec.to_builtins(table) for table in WORLD.tables(DIM)],
        },
        "train": {"batch": 2048, "shuffle": False},
        "log": {"every": 1_000_000},
    }
    return decode(made, "stream")


DATA = (
    Data("movielens-100k", movielens, 100_000, None),
    Data("complete-journey", complete_journey, 150_000, 200),
    Data("stream", stream, 60_000, 250, tuple(MODELS)),
)


def write_stream(folder: Path, rows: int) -> None:
    """The files of `stream`, unless they are there; another number of rows moves all that follow."""
    size_file, begin = folder / "stream" / "rows.txt", 0
    if not size_file.exists() or size_file.read_text() != f"{rows} {WORLD}":
        shutil.rmtree(size_file.parent, ignore_errors=True)
        size_file.parent.mkdir(parents=True)
        size_file.write_text(f"{rows} {WORLD}")
    for part, count in (("train", rows), ("valid", TEST_ROWS), ("test", TEST_ROWS)):
        path = folder / "stream" / f"{part}.parquet"
        if not path.exists():
            unfinished = path.with_suffix(".part")
            with pq.ParquetWriter(unfinished, WORLD.rows(0, 1).schema) as writer:
                for first in range(begin, begin + count, WORLD.split_rows):
                    size = min(WORLD.split_rows, begin + count - first)
                    writer.write_table(WORLD.rows(first, size), row_group_size=size)
            os.replace(unfinished, path)
        begin += count


class Job(NamedTuple):
    """A run of a model."""

    data: str
    model: str
    lr: float  # of the dense parameters
    seed: int
    tuning: bool  # few steps, measured by the validation rows; else all steps, by the test rows
    smoke: bool = False


def train(job: Job, folder: Path) -> dict:
    """One run: NE of the validation rows while rates are compared, else metrics of the test rows."""
    data = next(data for data in DATA if data.name == job.data)
    recipe = with_model(data, job.model, folder)
    steps = SMOKE_STEPS if job.smoke else data.tuning_steps if job.tuning else None
    optimizer = structs.replace(recipe.train.optimizer, lr=job.lr)
    settings = structs.replace(recipe.train, optimizer=optimizer, steps=steps, threads=1)
    recipe = structs.replace(recipe, name="model", train=settings, seed=job.seed)
    with TemporaryDirectory() as runs:
        run = TrainingRun.start(recipe, Path(runs))
        try:
            result = run.go(test=not job.tuning)
        except GradientError:
            if not job.tuning:
                raise
            return job._asdict() | {"ne": math.nan}
        cost = model_cost(run.model, next(iter(make_batcher(run.resolved, run.resolved.rows.train))))
    if job.tuning:
        return job._asdict() | {"ne": math.nan if result.best is None else result.best.value}
    found = {name: result.test["label"][name] for name in ("ne", "auc")}
    return job._asdict() | found | msgspec.to_builtins(cost) | {"steps": result.steps, "wall_s": result.wall_s}


def step_speed(data: Data, name: str, folder: Path, seconds: float) -> float:
    """Samples a second of training steps, all threads, batches prepared before."""
    resolved = resolve(with_model(data, name, folder))
    set_threads(resolved.recipe)
    model = make_model(resolved)
    batches = list(islice(make_batcher(resolved, resolved.rows.train), 8))
    context = StepContext.create(model, make_objective(resolved, model), resolved.recipe.train, Breakdown())
    number, samples = 0, 0
    begin_s = end_s = time.perf_counter()
    while end_s < begin_s + seconds:
        number += 1
        samples += step(context, [batches[number % len(batches)]], number).samples
        if number == WARM_UP:
            begin_s, samples = time.perf_counter(), 0
        end_s = time.perf_counter()
    return samples / (end_s - begin_s)


def with_model(data: Data, name: str, folder: Path) -> Recipe:
    """The recipe of a dataset with a model whose number of parameters is nearest to the dataset's."""
    resolved = resolve(data.recipe(folder))

    def config(width: int) -> Recipe:
        model = msgspec.convert(MODELS[name](width), ClickModel)
        evaluate = structs.replace(resolved.recipe.evaluate, metric="ne")
        return structs.replace(resolved.recipe, model=model, evaluate=evaluate)

    def count(width: int) -> int:
        model = make_model(replace(resolved, recipe=config(width)), on_meta=True)
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    low, high = 2, MAX_WIDTH
    while high - low > 2:
        middle = (low + high) // 4 * 2  # even: FinalMLP has two heads
        low, high = (middle, high) if count(middle) < data.parameters else (low, middle)
    return config(min((low, high), key=lambda width: abs(count(width) - data.parameters)))

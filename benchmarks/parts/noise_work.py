"""Worlds whose training labels are partly wrong, and one training in them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet as pq
from torch import nn

from parts.recipe_job import job_of
from rowwise.recipes.compose import make_evaluator, make_model, make_settings, resolve
from rowwise.recipes.find import load
from rowwise.recipes.resolved import ResolvedRecipe, evaluation_batches
from rowwise.train.evaluate import Evaluator, Scores
from rowwise.train.objective import Objective
from rowwise.train.trainer import Trainer

PARTS = ("train", "valid", "test")
CLASSES, PIXELS, LEVELS = 10, 64, 17
TRAINED, VALIDATED = 1_000, 200  # digits; the others test


class World(NamedTuple):
    """A dataset and a recipe for it.

    Args:
        write: writes the parts into a folder, with a share of wrong labels among the training rows.
        recipe: a name, or a file that `write` makes.
        changes: to the recipe; {} is the folder.
        metric: measured on rows whose labels are right; higher is better.
        steps: of a training.
        augment: changes to the recipe that augment the samples.
    """

    write: Callable[[Path, Path, float], None]
    recipe: str
    changes: tuple[str, ...]
    metric: str
    steps: int
    augment: tuple[str, ...] = ("train.augment.drop_features=0.1",)


def wrong_labels(labels_N: np.ndarray, share: float, classes: int) -> np.ndarray:
    """Labels of which a share, drawn at random, is replaced by one of the other classes."""
    draw = np.random.default_rng(7)
    wrong = draw.permutation(len(labels_N))[: round(share * len(labels_N))]
    found = labels_N.copy()
    found[wrong] = (found[wrong] + draw.integers(1, classes, len(wrong))) % classes
    return found


def with_wrong_labels(rows: pa.Table, noise: float) -> pa.Table:
    place, field = rows.column_names.index("label"), rows.schema.field("label")
    labels_N = wrong_labels(rows["label"].to_numpy().astype(np.int8), noise, 2)
    return rows.set_column(place, field, pa.array(labels_N).cast(field.type))


def write_films(data: Path, folder: Path, noise: float) -> None:
    write_parts(folder / "movielens-100k", noise, {part: read(data, "movielens-100k", part) for part in PARTS})


def write_sales(data: Path, folder: Path, noise: float) -> None:
    """A tenth of the rows; half of those to test on validate."""
    train, test = (read(data, "complete-journey", part) for part in ("train", "test"))
    train, test = (rows.take(np.arange(0, len(rows), 10)) for rows in (train, test))
    half = len(test) // 2
    write_parts(folder / "complete-journey", noise, dict(zip(PARTS, (train, test[:half], test[half:]), strict=True)))


def read(data: Path, name: str, part: str) -> pa.Table:
    return pq.read_table(data / name / f"{part}.parquet")


def write_parts(folder: Path, noise: float, parts: dict[str, pa.Table]) -> None:
    folder.mkdir(parents=True)
    for part, rows in parts.items():
        pq.write_table(with_wrong_labels(rows, noise) if part == "train" else rows, folder / f"{part}.parquet")


def write_digits(_: Path, folder: Path, noise: float) -> None:
    """Images of 8 x 8 pixels; a pixel is an id, made of its place and its grey level, and each class is a label."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels_NP = np.arange(PIXELS) * LEVELS + found.data.astype(np.int64)
    ends = (0, TRAINED, TRAINED + VALIDATED, len(pixels_NP))
    folder.mkdir(parents=True)
    for part, begin, end in zip(PARTS, ends, ends[1:], strict=False):
        classes_N = wrong_labels(found.target[begin:end], noise if part == "train" else 0.0, CLASSES)
        labels = {f"is_{k}": pa.array((classes_N == k).astype(np.int8)) for k in range(CLASSES)}
        pq.write_table(
            pa.table({"pixels": pa.array(pixels_NP[begin:end].tolist()), **labels}), folder / f"{part}.parquet"
        )
    sections = {
        "data": {"dataset": f"parquet:{folder}/train.parquet"},
        "columns": {"labels": list(labels), "sparse": [{"column": "pixels", "ids": "direct"}]},
        "tables": {
            "list": [{"name": "pixels", "rows": PIXELS * LEVELS, "dim": 32, "optimizer": {"kind": "adam", "lr": 0.005}}]
        },
        "model": {"kind": "dcn", "deep": [128], "crosses": 1},
        "train": {"batch": 100, "optimizer": {"kind": "adam", "lr": 0.003}},
    }
    (folder / "digits.yaml").write_text(json.dumps(sections))  # JSON is YAML


LONG = ("evaluate.patience=null", "train.batch=2048", "train.optimizer.lr=0.002", "model.dropout=0.2", "data.folder={}")
OWN_ROWS = ("data.valid=parquet:{}/valid.parquet", "data.test=parquet:{}/test.parquet")
WORLDS = {
    "movielens": World(write_films, "movielens-dlrm", (*LONG, "train.epochs=15"), "auc", 600),
    "complete-journey": World(
        write_sales,
        "complete-journey-dlrm",
        (*LONG, "train.epochs=6", *(rows.replace("{}", "{}/complete-journey") for rows in OWN_ROWS)),
        "auc",
        600,
    ),
    "digits": World(
        write_digits,
        "{}/digits.yaml",
        ("train.epochs=40", "model.dropout=0.5", *OWN_ROWS),
        "accuracy",
        400,
        ("train.augment.drop_ids=0.1",),
    ),
}


class Curve:
    """An evaluator that keeps what it has measured."""

    def __init__(self, inner: Evaluator, measure: Callable[[Scores], float]) -> None:
        self.metrics, self._inner, self._measure = inner.metrics, inner, measure
        self.values: list[float] = []

    def __call__(self) -> Scores:
        scores = self._inner()
        self.values.append(self._measure(scores))
        return scores


def accuracy(resolved: ResolvedRecipe, model: nn.Module) -> float:
    """The share of test rows whose largest logit is that of their class; the model is left in evaluation mode."""
    model.eval()
    batches = evaluation_batches(resolved, resolved.rows.test)
    with torch.no_grad():
        return float(torch.cat([model(one).argmax(1) == one.labels_BK.argmax(1) for one in batches]).float().mean())


def run(
    world: World, folder: Path, seed: int, changes: list[str], make_objective: Callable[[nn.Module], Objective] | None
) -> dict[str, float]:
    """The metric on test rows at the end of a training; and on validation rows at its best and at its end."""
    fixed = [change.format(folder) for change in world.changes]
    resolved = resolve(load(world.recipe.format(folder), [*fixed, f"seed={seed}", "train.threads=1", *changes]))
    model = make_model(resolved)
    job = job_of(resolved, model)
    if make_objective is not None:
        job = replace(job, objective=make_objective(model))
    assert job.evaluate is not None

    def measure(scores: Scores) -> float:
        return scores.tasks[job.tasks[0]]["auc"] if world.metric == "auc" else accuracy(resolved, model)

    curve = Curve(job.evaluate, measure)
    progress = Trainer(replace(job, evaluate=curve), make_settings(resolved.recipe)).run()
    tested = make_evaluator(resolved, model, resolved.rows.test)()
    ne = [scores["ne"] for scores in tested.tasks.values()]
    return {
        world.metric: measure(tested),
        "best": max(curve.values),
        "last": curve.values[-1],
        "ne": sum(ne) / len(ne),
        "steps": progress.step,
    }

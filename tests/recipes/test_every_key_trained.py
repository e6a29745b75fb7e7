"""Nothing that a recipe says is ignored by the run: another value of a key leaves another run, or is said not to.

Two small runs for each key: one of its struct's recipe, one with another value.
"""

import json
from functools import cache

import pytest
import torch
from every_key import NEAR
from key_recipes import KEYS, base, changed, outcome, write_folder
from small import lines, saved

from rowwise.base.errors import RowwiseError
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode

LEFT_ALONE = {  # what makes no other run, and where it is seen
    "Recipe.about": "rowwise ls", "Recipe.hardware": "stages.csv", "Recipe.plan": "plan.json",
    "Recipe.memory": "plan.json", "Recipe.disk": "no table is on disk", "Recipe.network": "one host",
    "Recipe.pin": "no table is on disk",
    "Data.folder": "where a dataset is looked for", "Data.together": "the order of rows",
    "Data.on_bad_rows": "there are no bad rows", "Workers.ahead": "memory",
    "Workers.count": "speed: rows may end before the second process has begun", "Workers.most": "how many there are",
    "Workers.lease_s": "no worker hangs", "Workers.on": "a cluster", "Columns.key": "predictions",
    "Columns.shared": "speed: the same bits", "TableChanges.unknown": "no id is outside its table",
    "Table.unknown": "no id is outside its table", "Evaluation.batch": "the last digits",
    "Saving.incremental": "all rows change, so that every checkpoint is full",
    "Log.mlflow": "a server", "Log.wandb": "a server", "Log.group": "a server",
    "Saving.mirror": "files elsewhere",
    "Saving.background": "memory, and the time that steps wait", "Training.threads": "env.json",
    "Training.compile": "the last digits",
    "Training.determinism": "batches of one block: the same bits",
    "Managed.evict": "no bucket is full", "Managed.ttl_steps": "the run has fewer steps",
    "Managed.seed": "ids are admitted with probability 1",
    "Training.ahead": "memory, and the time that steps wait",
    **dict.fromkeys(("Training.dense_parallel", *(f"DenseParallel.{k}" for k in NEAR["DenseParallel"])), "one rank"),
    "MmoeConfig.chain": "one label", "PleConfig.chain": "one label",
    "Training.pipeline_depth": "the time that steps wait: the same bits",
    "Dialect.escape": "no backslash in the text", "Dialect.line_breaks": "none in quotes",
    "Dialect.trim": "no value begins with a space", "Dialect.encoding": "ASCII", "Dialect.types": "the same ids",
    "Dialect.thousands": "no such signs", "Dialect.signs": "plain numbers", "Dialect.missing": "no value is missing",
    "Dialect.unpack_to": "nothing is packed", "Dialect.unpacked_gb": "nothing is packed",
    "Recipe.tune": "rowwise tune", **dict.fromkeys((f"TuneRange.{key}" for key in NEAR["TuneRange"]), "rowwise tune"),
} | {f"About.{key}": "rowwise ls" for key in NEAR["About"]}  # fmt: skip
RESULTS = ("test", "best", "steps", "samples", "workers", "expected", "spread", "recipe")


def trained(made, folder):
    """What a run leaves, but for times and for its recipe; or why there is none."""
    try:
        run = TrainingRun.start(decode(made, "my.yaml"), folder / "runs")
        run.go()
    except RowwiseError as error:
        return str(error)
    place = run.folder.path
    names = sorted(str(p.relative_to(place)) for p in place.rglob("*") if p.is_file())
    tensors = {key: x.view(torch.uint8).numpy().tobytes() if x.dim() else x.item() for key, x in saved(place).items()}
    result = json.loads((place / "result.json").read_text())
    slices = place / "slices.csv"
    return names, tensors, {k: result[k] for k in RESULTS}, lines(place), slices.exists() and slices.read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def before(folder):
    """What the recipe of a struct leaves, trained once for all its keys."""
    return cache(lambda name: trained(base(name, folder), folder))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), [k for k in KEYS if ".".join(k) not in LEFT_ALONE], ids=lambda x: x)
def test_another_value_makes_another_run(name, key, folder, before, threads):
    made = changed(name, key, NEAR[name][key], folder)
    _, notes = outcome(made)
    if notes is not None and not any(key in line for line in notes):
        threads(1)
        assert not isinstance(before(name), str), before(name)
        assert trained(made, folder) != before(name)

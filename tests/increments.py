"""Checkpoints of a small run as versions of a model: each an increment of the one before, and each in full."""

import shutil
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet as pq
from small import RECIPE, WORLD, trained

from rowwise.recipes.ensemble import predict_ensemble
from rowwise.recipes.export import export
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.served import load_rows, open_version
from rowwise.serve.package import version_folder, write_traffic
from rowwise.serve.traffic import Traffic
from rowwise.serve.version import ServedVersion

STEPS = (4, 8, 12, 16)
NUMBERS = range(1, 1 + len(STEPS))
ROWS, TABLE_ROWS = 60, 20_000  # of new data; of each table, which has many rows that no sample has


class Increments(NamedTuple):
    run: TrainingRun
    models: object  # the folder of versions that are increments
    full: object  # that of the same versions with all rows
    data: object  # a file with new rows
    table: pa.Table
    logits: dict[int, np.ndarray]  # of the new rows, by version

    @property
    def rows(self) -> dict[str, list]:
        """The new rows, as clients send them."""
        return self.table.select(["user", "item", "seen", "d0", "d1"]).to_pydict()

    def copied(self, folder):
        """Versions of a test's own; the first is the current one."""
        models = shutil.copytree(self.models, folder / "models")
        write_traffic(models, Traffic(1))
        return models


def make_increments(folder) -> Increments:
    torch.set_num_threads(1)
    tables = [{**table, "rows": TABLE_ROWS} for table in RECIPE["tables"]["list"]]
    save = {"every": STEPS[0], "keep": 10}
    run, _ = trained(folder, tables={"list": tables}, train={"steps": STEPS[-1]}, save=save)
    for step in STEPS:
        export(run.folder.path, folder / "models", which=f"step-{step}")
        export(run.folder.path, folder / "full", which=f"step-{step}", full=True)
    table = WORLD.rows(90_000, ROWS).drop_columns(["label", "logit"])
    pq.write_table(table, folder / "new.parquet")
    logits = {number: predicted(folder / "full", number, folder / "new.parquet") for number in NUMBERS}
    return Increments(run, folder / "models", folder / "full", folder / "new.parquet", table, logits)


def open_all(models, tiers, file, numbers=(1,)) -> dict[int, ServedVersion]:
    """The versions as a worker has them: the first one is in the file, and newer rows of the others."""
    shared, opened = None, {}
    for number in numbers:
        shared = load_rows(models, tiers, number, file if shared is None else -1, numbers[0], shared)
        opened[number] = open_version(models, number=number, rows=shared, tiers=tiers)
    return opened


def predicted(models, number, data) -> np.ndarray:
    """What `rowwise predict` gives for a version."""
    out = models / "predictions.parquet"
    predict_ensemble([version_folder(models, number).path], out, data=f"parquet:{data}")
    return pq.read_table(out)["label_logit"].to_numpy()

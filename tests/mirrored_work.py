"""What processes do that are killed at random: a run with a mirror goes on, and a mirror's checkpoint is copied."""

import os
import sys
from pathlib import Path

from base.storage.stores import connect
from small import recipe

from rowwise.base.errors import DataError
from rowwise.base.storage.cloud import RetryPolicy
from rowwise.base.storage.folder import StorageFolder
from rowwise.checkpoint.copy import copy_checkpoint
from rowwise.checkpoint.named import open_named
from rowwise.recipes.mirror import fetch_run
from rowwise.recipes.runs import TrainingRun

URL, MIRROR, COPIES = "s3://bucket/run", "run", "copies"
STEPS = 60
SETTINGS = {"train": {"batch": 64, "epochs": 100, "steps": STEPS}, "log": {"every": 1}}
PRELOADED = ("rowwise.cli.rank", "pandas")  # modules of the tests cannot be: the server has another path
SAVE = {"every": 2, "keep": 3, "incremental": True}


def settle(tmp_path, endpoint):
    """Reach the store by variables, as commands do, and wait shortly between two attempts."""
    keys = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "key-1", "AWS_SECRET_ACCESS_KEY": "secret-2"}
    os.environ.update(keys | {"AWS_REGION": "x"})
    RetryPolicy.__new__.__defaults__ = (60.0, 0.01)
    sys.stdout = sys.stderr = (tmp_path / "said.txt").open("a", buffering=1)


def train(tmp_path, machine, endpoint, begun):
    """A run in a machine's folder, or the one of the mirror if that machine has none; `begun` with a new checkpoint."""
    settle(tmp_path, endpoint)
    runs = Path(machine) / "runs"
    folder = next(runs.glob("small/*/recipe.yaml"), None)
    try:
        if folder is not None:
            run = TrainingRun.resume(folder.parent)
        elif any(open_mirror(endpoint).relative_names()):
            run = TrainingRun.resume(fetch_run(URL, runs))
        else:
            run = TrainingRun.start(recipe(tmp_path, **SETTINGS, save={**SAVE, "mirror": URL}), runs)
    except DataError as error:  # it was killed when all was done
        if "has finished at step" not in str(error):
            raise
        begun.set()
        return
    first = run.trainer.progress.step + SAVE["every"]
    run.trainer._on_step = lambda shown: begun.set() if shown.progress.step >= first else None
    assert run.go().status == "finished"


def copy(tmp_path, machine, endpoint, begun):
    """The newest checkpoint of the mirror to another place of the bucket."""
    settle(tmp_path, endpoint)
    source = open_named(open_mirror(endpoint))
    begun.set()
    copy_checkpoint(source, StorageFolder(connect(endpoint), COPIES))


def open_mirror(endpoint):
    return StorageFolder(connect(endpoint), MIRROR)

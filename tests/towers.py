"""Small runs of two towers, and the items of their versions."""

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq
from small import RECIPE, WORLD, trained

TOWERS = {
    "kind": "two_tower",
    "item": "item",
    "user_features": ["user", "seen"],
    "user_dense": ["d0"],
    "item_dense": ["d1"],
    "sizes": [16, 8],
}
SETTINGS = {"train": {"epochs": 1}, "evaluate": {"metric": "recall@10"}}
MANY = 20_500  # items: enough for an index


def tables(items=30, **more):
    """Those of the small recipe, with so many rows of items."""
    made = [table | ({"rows": items, **more} if table["name"] == "item" else {}) for table in RECIPE["tables"]["list"]]
    return {"list": made}


def trained_towers(folder, items=30, **changes):
    """A run of two towers that has ended."""
    run, _ = trained(folder, model=TOWERS, tables=tables(items), **SETTINGS | changes)
    return run.folder.path


def write_item_table(path, items=MANY):
    """Keys in no order, and the number that the items' tower reads."""
    draw = np.random.default_rng(1)
    keys, numbers = draw.permutation(items), draw.standard_normal(items).astype(np.float32)
    pq.write_table(pa.table({"name": [f"item {key}" for key in keys], "item": keys, "d1": numbers}), path)
    return path


def contexts(count, first=90_000):
    """Columns of users that no run was trained on."""
    rows = WORLD.rows(first, count).select(["user", "seen", "d0"])
    return [{name: rows[name][row].as_py() for name in rows.column_names} for row in range(count)]

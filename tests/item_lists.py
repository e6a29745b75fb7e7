"""Lists of items in which one tells the next, and recipes of the models that learn it."""

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

ITEMS = 40
BASE = {
    "name": "lists",
    "data": {"valid_share": 0.1, "test_share": 0.2},
    "columns": {"labels": [], "sparse": [{"column": "seen", "ids": "direct", "table": "item"}], "key": "row"},
    "tables": {
        "list": [
            {
                "name": "item",
                "rows": ITEMS,
                "dim": 8,
                "features": ["seen"],
                "pooling": "sequence",
                "optimizer": {"kind": "adam", "lr": 0.02},
                "init": {"kind": "normal", "std": 0.1},
            }
        ]
    },
    "model": {"kind": "sasrec", "length": 6, "dropout": 0.1, "ks": [1, 5]},
    "train": {"batch": 64, "epochs": 3, "threads": 1, "ahead": 0, "optimizer": {"kind": "adam", "lr": 0.01}},
    "evaluate": {"metric": "recall@1"},
    "log": {"every": 5},
}
KINDS = ["sasrec", "hstu"]


def write_lists(path, rows=1000, least=2):
    """What follows an item is the item that many further; one time in ten it is any."""
    draw = np.random.default_rng(0)
    lists = []
    for length in draw.integers(least, 10, rows):
        items = [int(draw.integers(ITEMS))]
        while len(items) < length:
            items.append(int(draw.integers(ITEMS)) if draw.random() < 0.1 else (items[-1] * 3 + 1) % ITEMS)
        lists.append(items[:length])
    pq.write_table(
        pa.table({"seen": pa.array(lists, pa.list_(pa.int64())), "row": range(rows)}), path, row_group_size=250
    )


def sections(folder, **changes):
    made = {key: {**value, **changes.get(key, {})} if isinstance(value, dict) else value for key, value in BASE.items()}
    made |= {key: value for key, value in changes.items() if key not in BASE}
    made["data"]["dataset"] = f"parquet:{folder / 'rows.parquet'}"
    return made

"""Learned maps on made-up clicks: ids that behave alike are put together, and labels do not leak through them."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from small import sections

from rowwise.recipes.compose import resolve
from rowwise.recipes.compress.probe import learn
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode
from rowwise.tables.ids.file import save
from rowwise.tables.ids.methods import make_map, table_bytes

IDS, SHOPS, GROUPS, ROWS = 3000, 40, 6, 30_000


def clicks(folder, *, tells, seed=0):
    """Each id is in a group, which decides its rate of clicks, or tells nothing of them."""
    generator = np.random.default_rng(seed)
    rate_G = np.linspace(0.02, 0.9, GROUPS) if tells else np.full(GROUPS, 0.3)
    group_N = generator.integers(0, GROUPS, IDS)
    for name, rows in (("train", ROWS), ("test", ROWS // 3)):
        ids_R = generator.integers(0, IDS, rows)
        label_R = generator.random(rows) < rate_G[group_N[ids_R]]
        shop_R = generator.integers(0, SHOPS, rows)
        columns = {"user": ids_R, "shop": shop_R, "label": label_R.astype(np.float32)}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=5000)
    return group_N


def recipe(folder, maps=None):
    tables = [
        {"name": name, "rows": rows, "dim": 8, "optimizer": {"kind": "rowwise_adagrad", "lr": 0.2}}
        for name, rows in (("user", IDS), ("shop", SHOPS))
    ]
    tables[0]["init"] = {"kind": "constant", "value": 0.0}
    if maps is not None:
        save(folder / "user.idmap", "user", maps)
        tables[0]["id_map"] = {"kind": "stored", "file": str(folder / "user.idmap")}
    made = sections(
        folder,
        data={"dataset": f"parquet:{folder}/train.parquet", "test": f"parquet:{folder}/test.parquet"},
        tables={"list": tables},
        train={"epochs": 1, "batch": 256},
    )
    made["data"] |= {"valid_share": 0.0, "test_share": 0.0}
    made["columns"] = {"labels": ["label"], "sparse": [{"column": n, "ids": "direct"} for n in ("user", "shop")]}
    return decode(made, "clicks.yaml")


def measured(folder, maps):
    return TrainingRun.start(recipe(folder, maps), folder / "runs").go().test["label"]


@pytest.mark.slow
def test_a_learned_map_is_better_than_a_hash_of_the_same_bytes(tmp_path):
    clicks(tmp_path, tells=True)
    resolved = resolve(recipe(tmp_path))
    history = learn(resolved, ["user"], lambda _: None)["user"]
    table = resolved.tables[0]
    auc = {}
    for method in ("hash", "learned"):
        made = make_map(method, table, table_bytes(table, None) // 20, history)
        assert made is not None
        auc[method] = measured(tmp_path, made)["auc"]
    whole = measured(tmp_path, None)["auc"]
    assert auc["learned"] > auc["hash"] + 0.1
    assert auc["learned"] > whole - 0.04


@pytest.mark.slow
def test_labels_do_not_leak_through_a_map(tmp_path):
    """Where ids say nothing, a map of what their labels were says nothing either, if it comes in folds."""
    clicks(tmp_path, tells=False)
    resolved = resolve(recipe(tmp_path))
    history = learn(resolved, ["user"], lambda _: None)["user"]
    table = resolved.tables[0]
    ne = {}
    for name, one in (("in folds", history), ("without", replace(history, folded=None))):
        made = make_map("learned", table, table_bytes(table, None) // 8, one)
        assert made is not None
        ne[name] = measured(tmp_path, made)["ne"]
    assert ne["in folds"] < 1.02
    assert ne["without"] > ne["in folds"] + 0.03

"""Every key that a recipe can have, with a recipe in which it counts and another value that makes another run."""

import msgspec

TRANSFORMS = {  # by kind: what the others have to be for a run
    "sigrid_hash": {"column": "number", "rows": 20, "to": "item"},
    "first_x": {"column": "seen", "count": 2},
    "positive_modulus": {"column": "number", "rows": 20, "to": "item"},
    "enumerate": {"column": "seen"},
    "ngram": {"column": "seen", "rows": 20},
    "map_id": {"column": "user", "mapping": {1: 2}, "unknown": 0},
    "cartesian": {"columns": ["user", "item"], "to": "item", "rows": 20},
    "id_list": {"columns": ["seen", "seen"], "to": "seen"},
    "compute_score": {"ids": "seen", "scores": "seen", "to": "d0"},
    "bucketize": {"column": "d0", "borders": [0.5], "to": "user"},
    "clamp": {"column": "d0", "low": 0, "high": 1},
    "log1p": {"column": "d0"},
    "logit": {"column": "d0"},
    "box_cox": {"column": "d0", "power": 1},
    "fill": {"column": "holes", "value": 0.5, "to": "d0"},
    "onehot": {"column": "d0", "borders": [0.5], "to": "hot", "into": "columns"},
    "get_local_hour": {"column": "late", "to": "d0", "unit": "s"},
    "sampling": {"rate": 0.5, "column": "label", "value": 0},
    "own": {"function": "own.py:twice", "columns": ["d0"], "to": ["d0"]},
}
OWN = """
import pyarrow.compute as pc
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self, embeddings, dense_features, tasks, scale=1.0):
        super().__init__()
        self.embeddings, self.out, self.scale = embeddings, nn.Linear(dense_features + 24, tasks), scale

    def forward(self, batch):
        return self.scale * self.out(torch.cat([batch.dense_BF, self.embeddings(batch.sparse).values()], 1))

class Other(Mine):
    def forward(self, batch):
        return -super().forward(batch)

def twice(d0):
    return pc.multiply(d0, 2.0)

def thrice(d0):
    return pc.multiply(d0, 3.0)
"""
MOMENTS = {
    "lr": 0.5,
    "beta1": 0.5,
    "beta2": 0.5,
    "eps": 0.5,
    "weight_decay": 0.5,
    "clip": 1e-4,
    "schedule": {"warmup_steps": 4},
}
GRADIENTS = {"lr": 0.5, "weight_decay": 0.5, "clip": 1e-4, "schedule": {"warmup_steps": 4}}
SQUARES = {**GRADIENTS, "eps": 0.5, "initial": 0.5}
TO_USER, TO_D0, TO_SEEN = {"to": "item"}, {"to": "d1"}, {"to": "item"}
NEAR = {  # by class and key: another value, which makes another run
    "Recipe": {
        "about": {"expect": {"auc": 0.5}},
        "name": "other",
        "seed": 1,
        "data": {"dataset": "parquet:other.parquet"},
        "transforms": [{"kind": "log1p", "column": "d0"}],
        "columns": None,
        "tables": {"all": {"dim": 4}},
        "model": {"kind": "deepfm", "deep": [4]},
        "train": {"epochs": 2},
        "evaluate": {"every": 2},
        "save": {"every": 2, "keep": 2},
        "log": {"every": 1},
        "init_from": "start",
        "plan": "plan.json",
        "hardware": "cpu",
        "wire": {"dense": "fp16"},
    },
    "About": {
        "what": "a",
        "run": "a",
        "expect": {"auc": 0.5},
        "spread": {"auc": 0.5},
        "time_s": 1,
        "memory_gb": 1,
        "machine": "a",
    },
    "Data": {
        "dataset": "parquet:other.parquet",
        "folder": "elsewhere",
        "label": "click",
        "valid": "parquet:other.parquet",
        "test": "parquet:other.parquet",
        "valid_share": 0.4,
        "test_share": 0.4,
        "share": "last",
        "rows": 500,
        "test_rows": 500,
        "where": ["user < 20"],
        "together": "user",
        "on_bad_rows": "quarantine",
        "workers": 1,
    },
    "Workers": {"count": 2, "most": 1, "ahead": 1, "lease_s": 100.0, "on": "ray", "address": "auto", "cpus": 2.0},
    "SigridHash": {"column": "user", "to": "user", "rows": 10, "salt": 1},
    "FirstX": {"column": "user", **TO_SEEN, "count": 1},
    "PositiveModulus": {"column": "user", "to": "user", "rows": 7},
    "Enumerate": {"column": "item", **TO_SEEN},
    "NGram": {"column": "item", **TO_SEEN, "n": 3, "rows": 10},
    "MapId": {"column": "item", **TO_USER, "mapping": {1: 3}, "file": "map.csv", "unknown": 5},
    "Cartesian": {"columns": ["item", "user"], "to": "user", "rows": 10},
    "IdListTransform": {"columns": ["seen", "many"], **TO_SEEN},
    "ComputeScore": {"ids": "many", "scores": "many", **TO_D0, "by": "max", "among": "many"},
    "Bucketize": {"column": "d1", **TO_USER, "borders": [0.1, 0.2]},
    "Clamp": {"column": "d1", **TO_D0, "low": 0.2, "high": 0.4},
    "Log1p": {"column": "d1", **TO_D0},
    "Logit": {"column": "d1", **TO_D0, "eps": 0.3},
    "BoxCox": {"column": "d1", **TO_D0, "power": 2, "shift": 3.0},
    "Fill": {"column": "d1", **TO_D0, "value": 9.0},
    "Onehot": {"column": "d1", "to": "cold", "classes": [1], "borders": [0.1], "into": "lists"},
    "GetLocalHour": {"column": "moment", **TO_D0, "zone": "Europe/Vienna", "offset": "number", "unit": "ms"},
    "Sampling": {"rate": 0.25, "seed": 1, "column": "user", "value": 1, "key": "user"},
    "Own": {"function": "own.py:thrice", "columns": ["d1"], "to": ["d1"], "source": OWN.replace("2.0", "4.0")},
    "Columns": {
        "labels": ["click"],
        "sparse": [{"column": "user", "ids": "direct"}, {"column": "item", "ids": "direct"}],
        "dense": [{"column": "d0"}],
        "weight": "d1",
        "key": "user",
        "time": "row",
        "shared": ["user"],
    },
    "Sparse": {"column": "item", "table": "item", "ids": "hash", "first": 1, "feature": "visitor"},
    "Dense": {"column": "d1", "fill": 3.0, "log1p": True},
    "Tables": {"all": {"optimizer": {"kind": "sgd"}}, "each": {"seen": {"pooling": "sum"}}, "list": []},
    "TableChanges": {
        "rows": 60,
        "dim": 4,
        "pooling": "sum",
        "optimizer": {"kind": "sgd"},
        "init": {"kind": "normal"},
        "row_type": "fp16",
        "unknown": "last_row",
        "id_map": {"kind": "hash", "rows": 10},
    },
    "Table": {
        "name": "visitors",
        "rows": 60,
        "dim": 4,
        "features": ["visitor"],
        "pooling": "sum",
        "optimizer": {"kind": "sgd"},
        "init": {"kind": "normal"},
        "unknown": "last_row",
        "row_type": "fp16",
        "column_group": 16,
        "id_map": {"kind": "hash", "rows": 10},
    },
    "Sgd": GRADIENTS,
    "Adagrad": SQUARES,
    "RowWiseAdagrad": SQUARES,
    "Adam": MOMENTS,
    "RowWiseAdam": MOMENTS,
    "Lamb": MOMENTS,
    "Ftrl": {"lr": 0.5, "l1": 0.1, "l2": 0.5, "beta": 0.1, "initial": 0.5, "clip": 1e-4},
    "Schedule": {"warmup_steps": 4, "decay_start": 3, "decay_steps": 9, "shape": "cosine", "end": 0.5},
    "Uniform": {"bound": 0.5},
    "Normal": {"std": 0.5},
    "Constant": {"value": 0.5},
    "HashIds": {"rows": 10, "seed": 1},
    "DoubleHashIds": {"rows": 10, "seed": 1, "hashes": 3},
    "QuotientRemainderIds": {"rows": 30, "seed": 1, "combine": "product"},
    "StoredIds": {"file": "none", "digest": "0", "table": "item"},
    "Dlrm": {"bottom": [4], "top": [4]},
    "DeepFm": {"deep": [4]},
    "Dcn": {"deep": [4], "crosses": 2, "rank": 2, "structure": "parallel"},
    "WideAndDeep": {"deep": [4], "wide": {"kind": "sgd", "lr": 0.5}},
    "TwoTowers": {
        "item": "user",
        "user_features": ["seen"],
        "item_features": ["seen"],
        "user_dense": ["d1"],
        "item_dense": [],
        "sizes": [4],
        "temperature": 1.0,
        "correct": False,
        "ks": [3],
    },
    "OwnModel": {"module": "own.py:Other", "args": {"scale": 2.0}},
    "Training": {
        "batch": 64,
        "epochs": 2,
        "steps": 3,
        "optimizer": {"kind": "sgd"},
        "schedule": {"warmup_steps": 4},
        "accumulate": 2,
        "clip": 1e-3,
        "precision": "bf16_always",
        "task_weights": [0.5],
        "device": "cuda:99",
        "threads": 2,
        "determinism": "elastic",
        "virtual_shards": 4,
        "merge_shared": True,
        "shuffle": False,
        "ahead": 1,
    },
    "DenseSgd": {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.5},
    "DenseAdagrad": {"lr": 0.5, "eps": 0.5, "weight_decay": 0.5},
    "DenseAdam": {"lr": 0.5, "beta1": 0.5, "beta2": 0.5, "eps": 0.5, "weight_decay": 0.5},
    "Evaluation": {
        "every": 3,
        "batch": 100,
        "metric": "auc",
        "patience": 1,
        "min_gain": 0.0,
        "slices": ["user"],
        "slice_ids": 2,
        "task": "click",
    },
    "Saving": {"every": 4, "keep": 3, "background": True, "incremental": True, "bits": 8},
    "Log": {"every": 1, "window": 2, "tensorboard": True, "profile": "1:2"},
    "Wire": {"host": {"forward": "fp16"}, "network": {"forward": "fp16"}, "dense": "fp16", "error_feedback": True},
    "Codecs": {"forward": "fp16", "backward": "fp16"},
}


def name_of(kind: type[msgspec.Struct]) -> str:
    """As in NEAR; two are called Own."""
    return "OwnModel" if kind.__module__.endswith("recipe") and kind.__name__ == "Own" else kind.__name__

"""Recipes in which a key counts, with its value and with another, and what becomes of them."""

import copy
import io
import json
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pyarrow as pa
from every_key import NEAR, OWN, TRANSFORMS
from PIL import Image
from pyarrow import csv
from pyarrow import parquet as pq
from small import sections, write_rows

from rowwise.base.errors import RowwiseError, one_line
from rowwise.ingest.pictures import write_pictures
from rowwise.recipes.compose import make_model, resolve
from rowwise.recipes.outlook import dry_run, open_warm_start
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.resolved import make_batcher
from rowwise.recipes.text import decode
from rowwise.recipes.unused_keys import find_notes as notes_of
from rowwise.tables.ids.arrays import entry_map
from rowwise.tables.ids.file import save
from rowwise.tables.spec import Topology
from rowwise.train.loss_settings import AnyLoss


def structs(kind):
    """All structs in a type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for inner in get_args(kind):
        yield from structs(inner)


@cache
def all_structs():
    """By name, as they are met from the recipe down."""
    found, open_kinds = {}, [Recipe]
    while open_kinds:
        kind = open_kinds.pop()
        if found.setdefault(kind.__name__, kind) is kind:
            inner = [s for field in msgspec.structs.fields(kind) for s in structs(field.type)]
            open_kinds += [s for s in dict.fromkeys(inner) if s not in found.values()]
    return found


KEYS = [(name, key) for name in NEAR for key in NEAR[name]]
SECTIONS = {
    "About": "about", "Data": "data", "Columns": "columns", "Tables": "tables", "Training": "train",
    "Evaluation": "evaluate", "Saving": "save", "Log": "log", "Wire": "wire",
}  # fmt: skip
OFTEN = {"Evaluation": {"every": 1, "patience": 3, "min_gain": 0.05}, "Saving": {"every": 2, "keep": 2}}
MODELS = {
    "DhenConfig": {"interactions": ["attention", "convolution", "dot", "factorization"], "vectors": 4},
    "TwoTowerConfig": {"item": "item", "user_features": ["user"], "user_dense": ["d0"], "item_dense": ["d1"]},
    "GraphConfig": {"item": "item", "user": "user"},
    "UserModel": {"module": "own.py:Mine"},
}
SEQUENCES = {
    "columns": {"labels": [], "sparse": [{"column": "lists", "ids": "direct", "table": "seen"}]},
    "tables": {"list": [{"name": "seen", "rows": 20, "dim": 8, "features": ["lists"], "pooling": "sequence"}]},
    "evaluate": {"metric": "ndcg@10"},
}
AROUND = {  # sections that a model needs
    "TwoTowerConfig": {"evaluate": {"metric": "recall@10"}},
    "GraphConfig": {"evaluate": {"metric": "recall@10"}},
    "PictureConfig": {
        "model": {"kind": "two_tower", **MODELS["TwoTowerConfig"], "item_pictures": {"folder": "pictures"}},
        "evaluate": {"metric": "recall@10"},
    },
    "ScaleConfig": {
        "model": {
            "kind": "two_tower",
            **MODELS["TwoTowerConfig"],
            "item_pictures": {"folder": "pictures", "choose": {}},
        },
        "evaluate": {"metric": "recall@10"},
    },
    "SasRecConfig": SEQUENCES,
    "HstuConfig": SEQUENCES,
    "Dialect": {
        "data": {"dataset": "csv:rows.csv", "valid_share": 0.2, "test_share": 0.2, "text": {}},
        "columns": {"labels": ["label"], "sparse": [{"column": "user"}], "dense": [{"column": "d0"}]},
        "tables": {"list": [{"name": "user", "rows": 50, "dim": 8}]},
    },
    "Smc": {"model": {"kind": "dlrm", "bottom": [8], "top": [8], "dropout": 0.5}},
}
ID_MAPS = {"HashIds", "DoubleHashIds", "QuotientRemainderIds", "StoredIds"}


def write_small_pictures(folder, count, sizes=(8, 16)):
    """Pictures whose keys are numbers, each of its own colour."""
    pictures = []
    for number in range(count):
        file = io.BytesIO()
        Image.new("RGB", (24, 24), (number * 7 % 256, number * 31 % 256, 90)).save(file, "PNG")
        pictures.append((number, file.getvalue()))
    return write_pictures(folder, pictures, sizes)


def write_folder(place):
    """Rows of all kinds, and a module of one's own."""
    more = {
        "click": lambda t: pa.array([n % 2 for n in range(len(t))], pa.int8()),
        "d2": lambda t: pa.array([n / 7 if n % 3 else None for n in range(len(t))]),
        "holes": lambda t: pa.array([n / 9 if n % 2 else None for n in range(len(t))], pa.float32()),
        "many": lambda t: pa.array([[n % 7, n % 5] for n in range(len(t))]),
        "lists": lambda t: pa.array([[n % 7, n % 5, n % 20, n % 11, n % 3] for n in range(len(t))]),
        "texts": lambda t: pa.array([f"a{n % 7}|b/{n % 5}" for n in range(len(t))]),
        "others": lambda t: pa.array([f"a{n % 3}|b" for n in range(len(t))]),
        "when": lambda t: pa.array([f"2024-01-{n % 28 + 1:02} {n % 24:02}:00" for n in range(len(t))]),
        "late": lambda t: pa.array([n * 5000 for n in range(len(t))]),
        "moment": lambda t: pa.array([n * 9000 for n in range(len(t))]),
        "number": lambda t: pa.array([n % 20 for n in range(len(t))]),
    }
    write_rows(place / "rows.parquet", 400, group=100, **more)
    write_rows(place / "other.parquet", 400, group=100, first=1000, **more)
    save(place / "user.map", "user", entry_map(50, np.arange(50) % 7, 7))
    write_small_pictures(place / "pictures", 30)
    (place / "own.py").write_text(OWN)
    csv.write_csv(
        pq.read_table(place / "rows.parquet", columns=["label", "user", "item", "d0", "d1"]), place / "rows.csv"
    )
    (place / "map.csv").write_text("id,row\n1,4\n")
    return place


def context(name: str, place) -> tuple[dict[str, Any], tuple[str | int, ...]]:
    """A recipe in which a struct counts, and where it is."""
    made = json.loads(json.dumps(sections(place)))
    made["train"] |= {"epochs": 1, "batch": 32, "threads": 1}
    kind = all_structs()[name]
    tag = kind.__struct_config__.tag
    if name == "Recipe":
        return made, ()
    if name in SECTIONS:
        made[SECTIONS[name]] = {**made.get(SECTIONS[name], {}), **OFTEN.get(name, {})}
        return made, (SECTIONS[name],)
    if tag in TRANSFORMS and name != "UserModel":
        made["transforms"] = [{"kind": tag, **TRANSFORMS[tag]}]
        if tag == "split":
            made["columns"]["sparse"][2]["ids"] = "hash"
        if tag == "to_time":
            made["transforms"].append({"kind": "get_local_hour", "column": "seen_at", "to": "d0"})
        if tag == "onehot":
            made["columns"]["dense"] = [{"column": "hot_0"}, {"column": "hot_1"}]
        return made, ("transforms", 0)
    if name in ("Sparse", "Dense", "Table"):
        where = {"Sparse": ("columns", "sparse", 2), "Dense": ("columns", "dense", 0), "Table": ("tables", "list", 2)}
        if name == "Dense":
            made["columns"]["dense"][0]["column"] = "d2"
        return made, where[name]
    at, given = place_of(name, kind)
    if name == "TimeShare":
        made["data"] = {"dataset": made["data"]["dataset"]}
    inside(made, at[:-1])[at[-1]] = ({} if tag is None else {"kind": tag}) | given
    made |= copy.deepcopy(AROUND.get(name, {}))
    return made, at


def place_of(name: str, kind: type[msgspec.Struct]) -> tuple[tuple[str | int, ...], dict[str, Any]]:
    """Where a struct of a kind may be, and what it has to have there."""
    table = ("tables", "list", 0)
    if kind.__struct_config__.tag is None:
        return {
            "TimeShare": (("data", "share"), {"column": "row", "valid_from": 300, "test_from": 350}),
            "DataCache": (("data", "cache"), {"folder": "kept"}),
            "Dialect": (("data", "text"), {}),
            "Workers": (("data", "workers"), {}),
            "DenseParallel": (("train", "dense_parallel"), {}),
            "Augment": (("train", "augment"), {}),
            "TableChanges": (("tables", "all"), {}),
            "Schedule": (("train", "schedule"), {"warmup_steps": 2, "decay_steps": 5}),
            "Codecs": (("wire", "host"), {}),
            "Managed": ((*table, "managed"), {}),
            "PictureConfig": (("model", "item_pictures"), {"folder": "pictures"}),
            "ScaleConfig": (("model", "item_pictures", "choose"), {}),
            "TuneRange": (("tune", "train.batch"), {"low": 1, "high": 100}),
        }[name]
    if kind.__module__.endswith("recipes.model_configs"):
        return ("model",), MODELS.get(name, {})
    if kind in get_args(AnyLoss):
        return ("train", "objective"), {"steps": 20} if name in ("Smc", "CoTeaching") else {}
    if name.startswith("Dense"):
        return ("train", "optimizer"), {}
    if name in ID_MAPS:
        return (*table, "id_map"), {"file": "user.map"} if name == "StoredIds" else {"rows": 20}
    return (*table, "init" if name in ("Uniform", "Normal", "Constant") else "optimizer"), {}


def inside(made, at):
    for step in at:
        made = made.setdefault(step, {}) if isinstance(made, dict) else made[step]
    return made


def changed(name, key, value, place):
    """The recipe with one value changed."""
    made, at = context(name, place)
    inside(made, at)[key] = value
    return placed(made, place)


FILES = ("own.py", "rows.csv", "map.csv", "other.parquet", "user.map", "pictures")


def placed(value, place):
    """With the files of a folder."""
    if isinstance(value, dict):
        return {key: placed(inner, place) for key, inner in value.items()}
    if isinstance(value, list):
        return [placed(inner, place) for inner in value]
    if not isinstance(value, str) or "\n" in value:
        return value
    name = next((name for name in FILES if name in value), None)
    return value if name is None else value.replace(name, str(place / name))


def base(name, place):
    made, at = context(name, place)
    held = inside(made, at)
    key = next(iter(held), None)
    return changed(name, key, held[key], place) if key is not None else placed(made, place)


def outcome(made):
    """One line of refusal, or the resolved recipe and what is said of it."""
    try:
        recipe = decode(made, "my.yaml")
        resolved = resolve(recipe)
        found = notes_of(resolved, Topology())
        make_model(resolved, on_meta=True)
        make_batcher(resolved, resolved.rows.train)
        if recipe.init_from is not None:
            open_warm_start(Path(recipe.init_from))
        if recipe.plan is not None or recipe.hardware is not None:
            dry_run(recipe)
    except (RowwiseError, OSError) as error:
        line = one_line(error)
        assert line is not None
        assert "\n" not in line
        return line, None
    return resolved.recipe, found

"""Nothing that a recipe says is ignored: every key is refused, changes the run, or is said to be of no use in it.

The keys are those of the structs themselves: one without a line in `every_key.NEAR` fails.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from every_key import NEAR, OWN, TRANSFORMS, name_of
from small import sections, write_rows

from rowwise.errors import RowwiseError, one_line
from rowwise.hashing.file import save
from rowwise.hashing.placed import entries
from rowwise.recipes.compose import make_batcher, make_model, resolve
from rowwise.recipes.outlook import look_ahead, open_start
from rowwise.recipes.recipe import Recipe, TwoTowers
from rowwise.recipes.text import decode
from rowwise.recipes.unused import notes as notes_of
from rowwise.spec import Topology


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
        if found.setdefault(name_of(kind), kind) is kind:
            inner = [s for field in msgspec.structs.fields(kind) for s in structs(field.type)]
            open_kinds += [s for s in dict.fromkeys(inner) if s not in found.values()]
    return found


KEYS = [(name, key) for name in NEAR for key in NEAR[name]]
SECTIONS = {
    "About": "about", "Data": "data", "Columns": "columns", "Tables": "tables", "Training": "train",
    "Evaluation": "evaluate", "Saving": "save", "Log": "log", "Wire": "wire",
}  # fmt: skip
MODELS = {
    "TwoTowers": {"item": "item", "user_features": ["user"], "user_dense": ["d0"], "item_dense": ["d1"]},
    "OwnModel": {"module": "own.py:Mine"},
}
ID_MAPS = {"HashIds", "DoubleHashIds", "QuotientRemainderIds", "StoredIds"}
UNUSED = {  # in the recipe of its struct
    ("Data", "folder"), ("Workers", "cpus"), ("Columns", "time"), ("Wire", "dense"), ("Wire", "error_feedback"),
    ("Codecs", "forward"), ("Codecs", "backward"), ("Training", "virtual_shards"), ("Training", "merge_shared"),
    ("Evaluation", "slice_ids"),
}  # fmt: skip


def test_every_key_is_in_the_table():
    there = {(name, field.name) for name, kind in all_structs().items() for field in msgspec.structs.fields(kind)}
    assert set(KEYS) == there


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows of all kinds, and a module of one's own."""
    place = tmp_path_factory.mktemp("keys")
    more = {
        "click": lambda t: pa.array([n % 2 for n in range(len(t))], pa.int8()),
        "d2": lambda t: pa.array([n / 7 if n % 3 else None for n in range(len(t))]),
        "holes": lambda t: pa.array([n / 9 if n % 2 else None for n in range(len(t))], pa.float32()),
        "many": lambda t: pa.array([[n % 7, n % 5] for n in range(len(t))]),
        "late": lambda t: pa.array([n * 5000 for n in range(len(t))]),
        "moment": lambda t: pa.array([n * 9000 for n in range(len(t))]),
        "number": lambda t: pa.array([n % 20 for n in range(len(t))]),
    }
    write_rows(place / "rows.parquet", 400, group=100, **more)
    write_rows(place / "other.parquet", 400, group=100, first=1000, **more)
    save(place / "user.map", "user", entries(50, np.arange(50) % 7, 7))
    (place / "own.py").write_text(OWN)
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
        made.setdefault(SECTIONS[name], {})
        return made, (SECTIONS[name],)
    if tag in TRANSFORMS and name != "OwnModel":
        made["transforms"] = [{"kind": tag, **TRANSFORMS[tag]}]
        if tag == "onehot":
            made["columns"]["dense"] = [{"column": "hot_0"}, {"column": "hot_1"}]
        return made, ("transforms", 0)
    if name in ("Sparse", "Dense", "Table"):
        where = {"Sparse": ("columns", "sparse", 0), "Dense": ("columns", "dense", 0), "Table": ("tables", "list", 0)}
        return made, where[name]
    at, given = place_of(name, kind)
    inside(made, at[:-1])[at[-1]] = ({} if tag is None else {"kind": tag}) | given
    if name == "TwoTowers":
        made["evaluate"] = {"metric": "recall@10"}
    return made, at


def place_of(name: str, kind: type[msgspec.Struct]) -> tuple[tuple[str | int, ...], dict[str, Any]]:
    """Where a struct of a kind may be, and what it has to have there."""
    table = ("tables", "list", 0)
    if kind.__struct_config__.tag is None:
        return {
            "Workers": (("data", "workers"), {}),
            "TableChanges": (("tables", "all"), {}),
            "Schedule": (("train", "schedule"), {"warmup_steps": 2, "decay_steps": 5}),
            "Codecs": (("wire", "host"), {}),
        }[name]
    if kind.__module__.endswith("recipes.recipe"):
        return ("model",), MODELS.get(name, {})
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


FILES = ("own.py", "map.csv", "other.parquet", "user.map")


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
        make_model(resolved, described=not isinstance(resolved.recipe.model, TwoTowers))
        make_batcher(resolved, resolved.parts.train)
        if recipe.init_from is not None:
            open_start(Path(recipe.init_from))
        if recipe.plan is not None or recipe.hardware is not None:
            look_ahead(recipe)
    except (RowwiseError, OSError) as error:
        line = one_line(error)
        assert line is not None
        assert "\n" not in line
        return line, None
    return resolved.recipe, found


@cache
def outcome_of_base(name, folder):
    return outcome(base(name, folder))


@pytest.mark.parametrize(("name", "key"), KEYS, ids=lambda x: x)
def test_another_value_is_refused_or_resolved_or_said_to_be_unused(name, key, folder):
    before, fine = outcome_of_base(name, folder)
    assert fine is not None, before
    after, notes = outcome(changed(name, key, NEAR[name][key], folder))
    assert after != before
    if notes is not None and (name, key) in UNUSED:
        assert any(key in line and " is not used, because " in line for line in notes)


def wrong(kind):
    """Values that no key of a type takes; of numbers those that are none."""
    kinds = {inner for inner in flat(kind)}
    yield from ({"no such": {}}, [{"no such": 1}])
    if kinds & {int, float}:
        yield from (float("nan"), float("inf"), -float("inf"))
    if str not in kinds:
        yield "nonsense"
    if not kinds & {int, float, bool, Any}:
        yield 3
    if bool not in kinds and Any not in kinds:
        yield True
    if int in kinds and float not in kinds:
        yield 1.5


def flat(kind):
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return [type(word) for word in inner if not isinstance(word, str)]
    return [leaf for one in inner if one is not Ellipsis for leaf in flat(one)] if inner else [kind]


@pytest.mark.parametrize("name", NEAR)
def test_nonsense_is_refused(name, folder):
    accepted = []
    for field in msgspec.structs.fields(all_structs()[name]):
        for value in wrong(field.type):
            line, notes = outcome(changed(name, field.name, value, folder))
            if notes is not None:
                accepted.append((field.name, value))
            elif len(line) > 1000:
                accepted.append((field.name, line))
    assert accepted == []


WORDS = {"About.what", "About.run", "About.machine", "Recipe.name", "Data.folder"} | {  # any text will do
    f"{name}.to" for name in NEAR if "to" in NEAR[name]
}


@pytest.mark.parametrize(("name", "key"), [k for k in KEYS if ".".join(k) not in WORDS], ids=lambda x: x)
def test_a_word_that_names_nothing_is_refused(name, key, folder):
    (field,) = (f for f in msgspec.structs.fields(all_structs()[name]) if f.name == key)
    if str in flat(field.type):
        many = "tuple" in str(field.type)
        line, notes = outcome(changed(name, key, ["no-such"] if many else "no-such", folder))
        assert notes is None, line

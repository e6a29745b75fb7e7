"""Nothing that a recipe says is ignored: every key is refused, changes the run, or is said to be of no use in it.

The keys are those of the structs themselves: one without a line in `every_key.NEAR` fails.
"""

from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from every_key import NEAR
from key_recipes import KEYS, all_structs, base, changed, outcome, write_folder
from small import RECIPE, recipe

from rowwise import Topology
from rowwise.recipes.compose import resolve
from rowwise.recipes.unused_keys import find_notes

LISTED = [table for table in RECIPE["tables"]["list"] if table["name"] != "item"]

UNUSED = {  # in the recipe of its struct
    ("Data", "folder"), ("Data", "cache"), ("DataCache", "folder"), ("DataCache", "size"),
    ("Workers", "cpus"), ("Columns", "time"), ("Wire", "dense"), ("Wire", "error_feedback"),
    ("Wire", "far"), ("Codecs", "forward"), ("Codecs", "backward"), ("Training", "virtual_shards"),
    ("Training", "merge_shared"), ("Evaluation", "slice_ids"), ("Log", "group"), ("DinConfig", "attention"),
    ("DienConfig", "auxiliary"),
    ("GraphConfig", "sizes"),
}  # fmt: skip


def test_every_key_is_in_the_table():
    there = {(name, field.name) for name, kind in all_structs().items() for field in msgspec.structs.fields(kind)}
    assert set(KEYS) == there


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("keys"))


def fast_or_slow(keys):
    """Fast are the first key of each struct, and those that a run makes no use of."""
    first = dict(reversed(keys))
    fast = [(name, key) in UNUSED or first[name] == key for name, key in keys]
    marks = [() if one else pytest.mark.slow for one in fast]
    return [pytest.param(*key, marks=mark, id="-".join(key)) for key, mark in zip(keys, marks, strict=True)]


@cache
def outcome_of_base(name, folder):
    return outcome(base(name, folder))


@pytest.mark.parametrize(("name", "key"), fast_or_slow(KEYS))
def test_another_value_is_refused_or_resolved_or_said_to_be_unused(name, key, folder):
    before, fine = outcome_of_base(name, folder)
    assert fine is not None, before
    after, find_notes = outcome(changed(name, key, NEAR[name][key], folder))
    assert after != before
    if find_notes is not None and (name, key) in UNUSED:
        assert any(key in line and " is not used, because " in line for line in find_notes)


def test_the_first_ids_of_a_column_without_lists_are_said_to_be_unused(tmp_path):
    ids = [{"column": name, "ids": "direct", "first": 2} for name in ("user", "seen")]
    resolved = resolve(recipe(tmp_path, columns={"sparse": ids}, tables={"list": LISTED}))
    (line,) = find_notes(resolved, Topology())
    assert line == "columns.sparse: 'user': first=2 is not used, because the column has type int64, not a list"


def test_settings_of_interactions_that_a_dhen_does_not_have_are_said_to_be_unused(tmp_path):
    model = {"kind": "dhen", "interactions": ["dot", "linear"], "ffn_ratio": 3}
    lines = find_notes(resolve(recipe(tmp_path, model=model)), Topology())
    assert [line for line in lines if "ffn_ratio" in line] == [
        "model.ffn_ratio=3 is not used, because model.interactions has no attention"
    ]


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
            line, find_notes = outcome(changed(name, field.name, value, folder))
            if find_notes is not None:
                accepted.append((field.name, value))
            elif len(line) > 1000:
                accepted.append((field.name, line))
    assert accepted == []


ANY_TEXT = {
    "About.what",
    "About.run",
    "About.machine",
    "About.published_by",
    "Log.mlflow",
    "Log.mllog",
    "Log.wandb",
    "Log.group",
    "Recipe.name",
    "Recipe.network",  # a file that is read where several hosts meet
    "Recipe.disk",
    "Saving.mirror",
    "Data.folder",
    "DataCache.folder",
    "Dialect.missing",
    "Dialect.signs",  # columns, of which other files may lack some
    "Dialect.unpack_to",
    "SplitText.separator",
}
WORDS = ANY_TEXT | {f"{name}.to" for name in NEAR if "to" in NEAR[name]}


def texts():
    """The keys that take a text, which has to name something."""
    fields = {(name, f.name): f.type for name in NEAR for f in msgspec.structs.fields(all_structs()[name])}
    return [key for key in KEYS if ".".join(key) not in WORDS and str in flat(fields[key])]


@pytest.mark.parametrize(("name", "key"), fast_or_slow(texts()))
def test_a_word_that_names_nothing_is_refused(name, key, folder):
    (field,) = (f for f in msgspec.structs.fields(all_structs()[name]) if f.name == key)
    many = "tuple" in str(field.type)
    line, find_notes = outcome(changed(name, key, ["no-such"] if many else "no-such", folder))
    assert find_notes is None, line

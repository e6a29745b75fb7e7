"""What a recipe says and a run makes no use of: a line for each, so that nothing that was given is ignored in silence.

A value that contradicts another is refused where it is read. Here are those that are right and have no effect in this
run: with these rows, this model, so many ranks. What is as by default was not given.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from rowwise.ingest.columns import is_list
from rowwise.ingest.datasets.catalog import STORED
from rowwise.ingest.service.local import Workers
from rowwise.ingest.transform import unread
from rowwise.perf.learned import doubts_of
from rowwise.recipes.compose import ResolvedRecipe
from rowwise.recipes.place import hardware_of
from rowwise.recipes.recipe import DlrmConfig, TwoTowerConfig, UserModel
from rowwise.spec import Topology, Value


class UnusedRule(NamedTuple):
    """Keys of one section that have no effect, if it is so."""

    section: str
    keys: tuple[str, ...]
    holds: bool
    why: str


def notes(resolved: ResolvedRecipe, topology: Topology) -> tuple[str, ...]:
    """A line for each thing that is done otherwise than the recipe says, or not at all."""
    found = (
        *_by_rules(resolved, topology),
        *_schedules(resolved),
        *_tables(resolved),
        *_columns(resolved),
        *_transforms(resolved),
    )
    hardware = resolved.recipe.hardware
    return (*resolved.notes, *found, *(() if hardware is None else doubts_of(hardware_of(hardware))))


def _by_rules(resolved: ResolvedRecipe, topology: Topology) -> Iterator[str]:
    recipe = resolved.recipe
    sections: dict[str, Value] = {
        "data": recipe.data, "columns": resolved.columns, "train": recipe.train, "evaluate": recipe.evaluate,
        "wire": recipe.wire, "wire.host": recipe.wire.host, "wire.network": recipe.wire.network, "": recipe,
    }  # fmt: skip
    if isinstance(recipe.data.workers, Workers):
        sections["data.workers"] = recipe.data.workers
    if isinstance(recipe.model, DlrmConfig):
        sections["model"] = recipe.model
    rules = (*_of_rows(resolved), *_of_training(resolved), *_of_ranks(resolved, topology))
    for section, keys, holds, why in rules:
        for key in keys if holds and section in sections else ():
            value = getattr(sections[section], key)
            if value != _default(sections[section], key):
                yield _line(f"{section}.{key}".lstrip("."), value, why)


def _of_rows(resolved: ResolvedRecipe) -> tuple[UnusedRule, ...]:
    data, dataset = resolved.recipe.data, resolved.parts.dataset
    valid, test = data.valid or dataset.valid, data.test or dataset.test
    shares = (0.0 if valid else data.valid_share, 0.0 if test else data.test_share)
    of_workers = data.workers if isinstance(data.workers, Workers) else Workers()
    named = "the rows are named, or the dataset has rows of its own for it"
    return (
        UnusedRule(
            "data", ("folder",), data.dataset not in STORED, f"{data.dataset} is not what `rowwise data get` fetches"
        ),
        UnusedRule("data", ("valid_share",), valid is not None, named),
        UnusedRule("data", ("test_share",), test is not None, f"{named}: want data.test for others"),
        UnusedRule("data", ("share",), not any(shares), "no share of the training rows is taken away"),
        UnusedRule("data", ("test_rows",), data.test is not None, "data.test names the rows to test on"),
        UnusedRule(
            "data", ("together",), not resolved.recipe.train.shuffle, "rows that are not shuffled stay together"
        ),
        UnusedRule("data.workers", ("cpus",), of_workers.on != "ray", "workers on this machine are processes"),
        UnusedRule("data.workers", ("most",), of_workers.count is not None, "data.workers.count says how many"),
    )


def _of_training(resolved: ResolvedRecipe) -> tuple[UnusedRule, ...]:
    recipe, columns = resolved.recipe, resolved.columns
    towers, train = isinstance(recipe.model, TwoTowerConfig), recipe.train
    ranking = "a model of two towers is measured by ranks among all items, not by its label"
    checked, watched = resolved.parts.valid is not None, "there are no validation rows"
    return (
        UnusedRule("model", ("bottom",), not columns.dense, "there are no dense columns"),
        UnusedRule("columns", ("weight",), towers, "the loss of two towers counts every pair alike"),
        UnusedRule("columns", ("time",), not isinstance(recipe.model, UserModel), "only models of your own read it"),
        UnusedRule("train", ("virtual_shards",), train.determinism != "elastic", "train.determinism is not elastic"),
        UnusedRule("train", ("merge_shared",), not columns.shared, "columns.shared names no feature"),
        UnusedRule("train", ("task_weights",), towers, "the loss of two towers is one"),
        UnusedRule("evaluate", ("every", "metric", "patience", "min_gain", "task"), not checked, watched),
        UnusedRule("evaluate", ("task", "slices", "slice_ids"), towers and checked, ranking),
        UnusedRule(
            "evaluate", ("slice_ids",), not recipe.evaluate.slices and not towers, "evaluate.slices names no feature"
        ),
        UnusedRule("", ("hardware",), recipe.plan is not None, "the plan is given, and brings what it expects"),
    )


def _of_ranks(resolved: ResolvedRecipe, topology: Topology) -> tuple[UnusedRule, ...]:
    exact = resolved.recipe.wire.dense.facts.exact
    return (
        UnusedRule("wire.host", ("forward", "backward"), topology.devices == 1, "no two ranks are on one host"),
        UnusedRule("wire.network", ("forward", "backward"), topology.hosts == 1, "all ranks are on one host"),
        UnusedRule("wire", ("dense", "error_feedback"), topology.world == 1, "there is one rank"),
        UnusedRule("wire", ("error_feedback",), topology.world > 1 and exact, "wire.dense=fp32 rounds nothing"),
    )


def _schedules(resolved: ResolvedRecipe) -> Iterator[str]:
    recipe = resolved.recipe
    optimizers = {f"table {t.name!r}: optimizer": t.optimizer for t in resolved.tables}
    found = {"train.schedule": recipe.train.schedule}
    found |= {f"{at}.schedule": getattr(optimizer, "schedule", None) for at, optimizer in optimizers.items()}
    for at, schedule in found.items():
        if schedule is None or schedule.decay_steps:
            continue
        for key in ("decay_start", "shape", "end"):
            value = getattr(schedule, key)
            if value != _default(schedule, key):
                yield _line(f"{at}.{key}", value, "decay_steps=0 never falls")


def _tables(resolved: ResolvedRecipe) -> Iterator[str]:
    hashed = {sparse.feature_name for sparse in resolved.columns.sparse if sparse.ids == "hash"}
    for table in resolved.tables:
        if table.unknown != "raise" and set(table.feature_names) <= hashed:
            yield _line(f"table {table.name!r}: unknown", table.unknown, "hashing its ids leaves none outside")


def _columns(resolved: ResolvedRecipe) -> Iterator[str]:
    schema = resolved.parts.train.reader.schema
    for sparse in resolved.columns.sparse:
        if sparse.first is not None and sparse.column in schema.names and not is_list(schema.field(sparse.column).type):
            why = f"the column holds {schema.field(sparse.column).type}, not lists"
            yield _line(f"columns.sparse: {sparse.column!r}: first", sparse.first, why)


def _transforms(resolved: ResolvedRecipe) -> Iterator[str]:
    for step in unread(resolved.transforms, resolved.columns.names):
        made = ", ".join(map(repr, step.transform.makes))
        yield f"{step} is not used, because nothing reads what it makes: {made}"


def _line(key: str, value: Any, why: str) -> str:
    return f"{key}={msgspec.to_builtins(value)!r} is not used, because {why}"


def _default(section: Value, key: str) -> Any:
    (field,) = (field for field in msgspec.structs.fields(section) if field.name == key)
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()

"""Notes on settings of a recipe that are valid but have no effect with the run's rows, model and ranks.

Contradicting settings raise where they are read. A setting with its default value gets no note.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from rowwise.base.storage.cloud import SCHEMES
from rowwise.ingest.datasets.catalog import STORED
from rowwise.ingest.kinds import is_list
from rowwise.ingest.service.local import Workers
from rowwise.ingest.transform import unread
from rowwise.planning.perf.learned import profile_warnings
from rowwise.recipes.model_configs import INTERACTION_KEYS
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.recipe import TimeShare
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.sharding import load_hardware
from rowwise.tables.spec import Topology, Value
from rowwise.train.trackers import REMOTE


class UnusedRule(NamedTuple):
    """Keys of a section that have no effect if `applies`."""

    section: str
    keys: tuple[str, ...]
    applies: bool
    reason: str


def find_notes(resolved: ResolvedRecipe, topology: Topology) -> tuple[str, ...]:
    """A note for each setting that was replaced or has no effect."""
    hardware = resolved.recipe.hardware
    return (
        *resolved.notes,
        *_rule_notes(resolved, topology),
        *_schedule_notes(resolved),
        *_table_notes(resolved),
        *_column_notes(resolved),
        *_transform_notes(resolved),
        *(() if hardware is None else profile_warnings(load_hardware(hardware))),
    )


def _rule_notes(resolved: ResolvedRecipe, topology: Topology) -> Iterator[str]:
    recipe, wire = resolved.recipe, resolved.recipe.wire_types
    sections: dict[str, Value] = {
        "data": recipe.data, "columns": resolved.columns, "train": recipe.train, "evaluate": recipe.evaluate,
        "log": recipe.log,
        "wire": wire, "wire.host": wire.host, "wire.network": wire.network, "": recipe,
    }  # fmt: skip
    if wire.uplink is not None:
        sections["wire.uplink"] = wire.uplink
    if isinstance(recipe.data.workers, Workers):
        sections["data.workers"] = recipe.data.workers
    if not isinstance(recipe.model, str):
        sections["model"] = recipe.model
    rules = (*_data_rules(resolved), *_training_rules(resolved, topology), *_wire_rules(resolved, topology))
    for section, keys, applies, reason in rules:
        for key in keys if applies and section in sections else ():
            value = getattr(sections[section], key)
            if value != _default(sections[section], key):
                yield _note(f"{section}.{key}".lstrip("."), value, reason)


def _data_rules(resolved: ResolvedRecipe) -> tuple[UnusedRule, ...]:
    data, dataset = resolved.recipe.data, resolved.rows.dataset
    valid, test = data.valid or dataset.valid, data.test or dataset.test
    shares = (0.0 if valid else data.valid_share, 0.0 if test else data.test_share)
    by_time = isinstance(data.share, TimeShare)
    workers = data.workers if isinstance(data.workers, Workers) else Workers()
    names = [name for name in (data.dataset, data.valid, data.test) if name is not None]
    at_store = any(f":{scheme}://" in name or name.startswith("iceberg:") for name in names for scheme in SCHEMES)
    has_own_rows = "the recipe or the dataset has rows of its own for this use"
    return (
        UnusedRule(
            "data", ("folder",), data.dataset not in STORED, f"{data.dataset} is not a dataset of `rowwise data get`"
        ),
        UnusedRule("data", ("cache",), not at_store, "no data is at s3://, gs:// or az://"),
        UnusedRule("data", ("valid_share",), valid is not None, has_own_rows),
        UnusedRule("data", ("test_share",), test is not None, f"{has_own_rows}; set data.test for other rows"),
        UnusedRule("data", ("valid_share", "test_share"), by_time and not (valid or test), "data.share gives times"),
        UnusedRule("data", ("share", "group"), not by_time and not any(shares), "no share of training rows is used"),
        UnusedRule("data", ("test_rows",), data.test is not None, "data.test names the test rows"),
        UnusedRule("data", ("together",), not resolved.recipe.train.shuffle, "rows are not shuffled"),
        UnusedRule("data.workers", ("cpus",), workers.on != "ray", "workers on this machine are processes"),
        UnusedRule("data.workers", ("most",), workers.count is not None, "data.workers.count fixes their number"),
    )


def _training_rules(resolved: ResolvedRecipe, topology: Topology) -> tuple[UnusedRule, ...]:
    recipe, columns, alone = resolved.recipe, resolved.columns, topology.world == 1
    retrieves, train = family_of(recipe.model).retrieves == "towers", recipe.train
    encoder = getattr(recipe.model, "encoder", None)
    reads_all = encoder is not None and getattr(recipe.model, "sampled", None) is None
    no_bottom = not columns.dense and getattr(recipe.model, "bottom", ()) != ()
    of_histories = tuple(key for key in ("attention", "auxiliary") if hasattr(recipe.model, key))
    no_histories = not getattr(recipe.model, "histories", True)
    ranks_items, ranking = family_of(recipe.model).ranks_items, "the model is measured by ranking all items"
    validates, no_rows = resolved.rows.valid is not None, "there are no validation rows"
    return (
        UnusedRule("model", of_histories, no_histories, "model.histories is empty"),
        UnusedRule("model", ("bottom",), no_bottom, "there are no dense columns"),
        *_interaction_rules(recipe.model),
        UnusedRule("model", ("layers",), encoder == "graphsage", "model.sizes are the layers of graphsage"),
        UnusedRule("model", ("sampled_by",), reads_all, "model.sampled is null"),
        UnusedRule("model", ("sizes",), encoder == "lightgcn", "layers of lightgcn have no weights"),
        UnusedRule("columns", ("weight",), retrieves, "the in-batch loss weights all pairs equally"),
        UnusedRule("columns", ("time",), not family_of(recipe.model).reads_times, "only user models read it"),
        UnusedRule("train", ("virtual_shards",), train.determinism != "elastic", "train.determinism is not elastic"),
        UnusedRule("train", ("merge_shared",), not columns.shared, "columns.shared is empty"),
        UnusedRule("train", ("task_weights",), ranks_items, "models that rank items have one loss"),
        UnusedRule(
            "train", ("objective", "label_smoothing"), ranks_items, "the model learns from items, not from labels"
        ),
        UnusedRule("evaluate", ("every", "metric", "patience", "min_gain", "task"), not validates, no_rows),
        UnusedRule("evaluate", ("task", "slices", "slice_ids"), ranks_items and validates, ranking),
        UnusedRule("evaluate", ("slice_ids",), not (recipe.evaluate.slices or ranks_items), "evaluate.slices is empty"),
        UnusedRule(
            "train", ("compile",), not family_of(recipe.model).is_compiled, "layers over lists are not compiled"
        ),
        UnusedRule("train", ("dense_parallel",), alone and not train.dense_parallel.recompute, "there is one rank"),
        UnusedRule("log", ("group",), not recipe.log.is_remote, f"{' and '.join(REMOTE)} are null"),
        UnusedRule("", ("hardware",), recipe.plan is not None, "the plan file has its own forecast"),
        UnusedRule("", ("memory",), recipe.plan is not None, "the plan file places the tables"),
    )


def _interaction_rules(model: object) -> Iterator[UnusedRule]:
    for key in sorted({key for keys in INTERACTION_KEYS.values() for key in keys}):
        kinds = [kind for kind, keys in INTERACTION_KEYS.items() if key in keys]
        interactions = getattr(model, "interactions", None)
        unused = interactions is not None and not set(kinds) & set(interactions)
        yield UnusedRule("model", (key,), unused, f"model.interactions has no {' and no '.join(kinds)}")


def _wire_rules(resolved: ResolvedRecipe, topology: Topology) -> tuple[UnusedRule, ...]:
    wire, alone, directions = resolved.recipe.wire_types, topology.world == 1, ("forward", "backward")
    near = "all ranks are on one host" if topology.hosts == 1 else "no two hosts share a group"
    far = "there is one rank" if alone else "all ranks are near each other: on one host"
    elastic = resolved.recipe.train.determinism == "elastic"
    exact = not alone and wire.has_exact_sums
    return (
        UnusedRule("", ("network",), topology.hosts == 1, "there is one host, and nothing to order"),
        UnusedRule("wire.host", directions, topology.devices == 1, "each host has one rank"),
        UnusedRule("wire.network", directions, "network" not in topology.links and wire.uplink is not None, near),
        UnusedRule("wire.network", directions, topology.hosts == 1 and wire.uplink is None, near),
        UnusedRule("wire.uplink", directions, "uplink" not in topology.links, "all hosts are one group"),
        UnusedRule("wire", ("dense", "error_feedback"), alone, "there is one rank"),
        UnusedRule("wire", ("far",), len(topology.near_ranks) == 1, far),
        UnusedRule("wire", ("far",), elastic and not alone, "train.determinism=elastic fixes the order of sums"),
        UnusedRule("wire", ("error_feedback",), exact, "sums of dense gradients are exact"),
    )


def _schedule_notes(resolved: ResolvedRecipe) -> Iterator[str]:
    """Notes on decay settings of schedules without decay."""
    schedules = {"train.schedule": resolved.recipe.train.schedule}
    for table in resolved.tables:
        schedules[f"table {table.name!r}: optimizer.schedule"] = getattr(table.optimizer, "schedule", None)
    for name, schedule in schedules.items():
        if schedule is None or schedule.decay_steps:
            continue
        for key in ("decay_start", "shape", "end"):
            value = getattr(schedule, key)
            if value != _default(schedule, key):
                yield _note(f"{name}.{key}", value, "decay_steps is 0")


def _table_notes(resolved: ResolvedRecipe) -> Iterator[str]:
    hashed = {sparse.feature_name for sparse in resolved.columns.sparse if sparse.ids == "hash"}
    for table in resolved.tables:
        if table.unknown != "raise" and set(table.feature_names) <= hashed:
            yield _note(f"table {table.name!r}: unknown", table.unknown, "its ids are hashed, so all are in range")


def _column_notes(resolved: ResolvedRecipe) -> Iterator[str]:
    schema = resolved.rows.train.reader.schema
    for sparse in resolved.columns.sparse:
        if sparse.first is not None and sparse.column in schema.names and not is_list(schema.field(sparse.column).type):
            reason = f"the column has type {schema.field(sparse.column).type}, not a list"
            yield _note(f"columns.sparse: {sparse.column!r}: first", sparse.first, reason)


def _transform_notes(resolved: ResolvedRecipe) -> Iterator[str]:
    for step in unread(resolved.transforms, resolved.columns.names):
        output = ", ".join(map(repr, step.transform.makes))
        yield f"{step} is not used, because nothing reads its output: {output}"


def _note(key: str, value: Any, reason: str) -> str:
    return f"{key}={msgspec.to_builtins(value)!r} is not used, because {reason}"


def _default(section: Value, key: str) -> Any:
    (field,) = (field for field in msgspec.structs.fields(section) if field.name == key)
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()

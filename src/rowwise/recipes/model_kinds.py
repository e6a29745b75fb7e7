"""Capabilities of each model family, and the error for uses that a family does not support."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from rowwise.base.errors import SpecError
from rowwise.recipes.model_configs import (
    GraphConfig,
    HstuConfig,
    Model,
    RetrievalConfig,
    SasRecConfig,
    UserModel,
    kind_of,
)

Use = Literal["baseline", "compress", "cuda", "elastic", "ensemble", "explain", "ne", "slices"]


class ModelKind(NamedTuple):
    """A family of models."""

    name: Literal["clicks", "own", "sequences", "towers", "graph"]
    refused: Mapping[Use, str] = MappingProxyType({})  # unsupported uses, each with the reason and a way out
    task: str | None = None  # of models without labels
    ranks_items: bool = False  # and is measured by the ranks of items
    retrieves: Literal["towers", "lists"] | None = None  # kind of the query: user columns, or a list of items
    mixes_a_graph: bool = False  # convolves over a graph of the training rows
    reads_whole_tables: bool = False  # in a step or an evaluation, more than a cache has slots for
    is_compiled: bool = True
    reads_times: bool = False  # of samples


RANKING: dict[Use, str] = {
    "baseline": "ranks items, and trees do not: expected a run of another model",
    "compress": "ranks items, and has no log loss to choose maps by: expected a recipe of another kind",
    "ensemble": "ranks items, and has no probabilities: expected one run",
    "explain": "ranks items, and has no loss of a row: expected a run of another model",
    "ne": "has no ne: expected another evaluate.metric, such as recall@10",
    "slices": "ranks all items: expected no slices",
}
IN_BATCH: dict[Use, str] = {
    "elastic": "compares users with all items of a batch, and a virtual shard holds a part: expected determinism=run",
}
LISTS: dict[Use, str] = {
    "elastic": "has sequence lookups that are not aligned to 256-sample blocks: expected determinism=run",
}
CLICKS = ModelKind("clicks")
OWN = ModelKind("own", reads_times=True)
TOWERS = ModelKind("towers", RANKING | IN_BATCH, ranks_items=True, retrieves="towers")
GRAPH = ModelKind(
    "graph",
    RANKING | IN_BATCH | {"cuda": "sums over edges on a CPU: expected train.device=cpu"},
    ranks_items=True,
    retrieves="towers",  # by the exported vectors
    mixes_a_graph=True,
    reads_whole_tables=True,
)
SEQUENCES = ModelKind(
    "sequences",
    RANKING | LISTS,
    task="next_item",
    ranks_items=True,
    retrieves="lists",
    reads_whole_tables=True,
    is_compiled=False,
)


def family_of(model: Model | str) -> ModelKind:
    """The capabilities of a model; a string names a user class."""
    match model:
        case SasRecConfig() | HstuConfig():
            return SEQUENCES
        case GraphConfig():
            return GRAPH
        case RetrievalConfig():
            return TOWERS
        case UserModel() | str():
            return OWN
        case _:
            return CLICKS


def check_use(model: Model | str, use: Use, where: object = "") -> None:
    """Raise unless the family of the model supports `use`; `where` begins the message."""
    reason = family_of(model).refused.get(use)
    if reason is not None and not isinstance(model, str):
        raise SpecError(f"{f'{where}: ' if where else ''}model.kind={kind_of(model)} {reason}")

"""What models of each family are made of: columns, model, loss and evaluation. `model_kinds` says what they can do.

`parts_of` is where a model's settings become a family; all else asks what it returns.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

from msgspec import structs
from torch import nn

from rowwise.batch import Batch
from rowwise.comm.interface import Comm
from rowwise.errors import SpecError
from rowwise.hashing.make import AnyTables, make_embeddings
from rowwise.ingest.columns import Columns
from rowwise.models.next_item import NextItem
from rowwise.models.retrieval import in_batch_bpr, in_batch_softmax
from rowwise.recipes.device_tables import move_to_device
from rowwise.recipes.id_names import name_ids
from rowwise.recipes.model_configs import (
    GraphConfig,
    HstuConfig,
    Model,
    SasRecConfig,
    SequenceModel,
    TwoTowerConfig,
    UserModel,
    kind_of,
)
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.recipe import check_amounts
from rowwise.recipes.resolved import ModelParts, QuarantineFolder, ResolvedRecipe, batch_shard_of, evaluation_batches
from rowwise.recipes.retrieval import (
    Pairs,
    RetrievalModel,
    TowerParts,
    check_pictures,
    make_graph_tower,
    make_two_tower,
)
from rowwise.recipes.rows import RowSelection
from rowwise.recipes.user_model import load_class
from rowwise.recipes.zoo import make_click_model, make_sequence_model
from rowwise.spec import Table
from rowwise.train.amounts import metric_names
from rowwise.train.evaluate import ClickEvaluator, Evaluator, Slicing
from rowwise.train.loss_settings import AMOUNT_METRICS, AmountLoss, AnyLoss, CoTeaching
from rowwise.train.objective import Clicks, InBatch, NextItems, Objective, TwoCopies
from rowwise.train.retrieve import NextItemEvaluator, RetrievalEvaluator, ranking_metrics

CLICK_METRICS = ("ne", "loss", "auc")  # metrics that can choose the best checkpoint


class Building(NamedTuple):
    """How a model is built: see `compose.build_model`."""

    on_meta: bool = False
    pairs: Pairs | None = None
    memory_bytes: int | None = None
    samples: int = 0

    @property
    def device(self) -> str:
        return "meta" if self.on_meta else "cpu"

    def place(self, model: nn.Module, parts: ModelParts) -> nn.Module:
        """The model on its device, unless it is only described."""
        whole = family_of(parts.model).reads_whole_tables
        return (
            model if self.on_meta else move_to_device(model, parts.device, self.memory_bytes, self.samples, whole=whole)
        )


class Asked(NamedTuple):
    """What an evaluator measures, and where: see `compose.make_evaluator`."""

    resolved: ResolvedRecipe
    rows: RowSelection
    slices: tuple[str, ...] | None
    comm: Comm | None
    quarantine: QuarantineFolder

    def batches(self, rows: RowSelection | None = None) -> Iterable[Batch]:
        shard = batch_shard_of(self.comm)
        return evaluation_batches(self.resolved, self.rows if rows is None else rows, shard, self.quarantine())


class Family:
    """The parts of models whose rows have labels; other families replace some of them."""

    def __init__(self, config: Model) -> None:
        self.config: Any = config

    def fit(self, columns: Columns, *, named: bool) -> tuple[Columns, tuple[str, ...]]:
        """The columns as the model takes them, and notes on those that it does not use; `named`: by the recipe."""
        if not columns.labels:
            raise SpecError("columns.labels is empty", "at least one label column")
        return columns, ()

    def check(self, columns: Columns, tables: Sequence[Table]) -> tuple[str, ...]:
        """Look at files that the model reads beside the rows; returns notes."""
        return ()

    def metrics(self, loss: AnyLoss) -> Sequence[str]:
        """Metrics that can choose the best checkpoint."""
        if isinstance(loss, AmountLoss):
            return [name for name in AMOUNT_METRICS if name in metric_names(loss)]
        return CLICK_METRICS

    def pairs(self, resolved: ResolvedRecipe) -> Pairs | None:
        """Pairs of users and items of the training rows, of which a graph is made."""
        return None

    def build(self, parts: ModelParts, how: Building) -> nn.Module:
        return how.place(make_click_model(self.config, *_inputs(parts, how)), parts)

    def objective(self, resolved: ResolvedRecipe, model: nn.Module, comm: Comm | None) -> Objective:
        train, tasks = resolved.recipe.train, resolved.tasks
        weights = train.task_weights
        if weights and len(weights) != len(tasks):
            raise SpecError(f"train.task_weights has {len(weights)} values", f"one for each of {', '.join(tasks)}")
        if isinstance(train.objective, CoTeaching):
            return TwoCopies(model, train.objective, weights, train.label_smoothing, comm=comm)
        return Clicks(model, weights, train.label_smoothing, train.objective)

    def evaluator(self, model: nn.Module, asked: Asked) -> Evaluator:
        resolved, slices = asked.resolved, asked.slices
        recipe = resolved.recipe
        if slices:
            check_amounts(recipe, slices=slices)
        slicing = Slicing(recipe.evaluate.slices if slices is None else slices, recipe.evaluate.slice_ids)
        name = partial(name_ids, asked.rows, resolved.columns, resolved.tables, resolved.transforms)
        return ClickEvaluator(
            model, asked.batches, resolved.tasks, recipe.train, slicing, comm=asked.comm, name_ids=name
        )


@final
class OwnFamily(Family):
    """A class of the user's, which may have a loss, metrics and an evaluator of its own."""

    config: UserModel

    def metrics(self, loss: AnyLoss) -> Sequence[str]:
        return (*super().metrics(loss), *getattr(load_class(self.config.module), "metrics", ()))

    def build(self, parts: ModelParts, how: Building) -> nn.Module:
        name = self.config.module
        try:
            model = load_class(name)(*_inputs(parts, how), **self.config.args)
        except TypeError as error:
            raise SpecError(
                f"model: {name}: {error}", "a class that takes (embeddings, dense_features, tasks, **args)"
            ) from error
        return how.place(model, parts)

    def objective(self, resolved: ResolvedRecipe, model: nn.Module, comm: Comm | None) -> Objective:
        make = getattr(model, "make_objective", None)
        return super().objective(resolved, model, comm) if make is None else make(resolved.recipe.train, comm)

    def evaluator(self, model: nn.Module, asked: Asked) -> Evaluator:
        make = getattr(model, "make_evaluator", None)
        if make is None:
            return super().evaluator(model, asked)
        return make(asked.batches, asked.resolved.tasks, asked.comm)


@final
class SequenceFamily(Family):
    """Models of lists of items."""

    config: SequenceModel

    def fit(self, columns: Columns, *, named: bool) -> tuple[Columns, tuple[str, ...]]:
        features = [sparse.feature_name for sparse in columns.sparse]
        others = [*columns.labels, *(dense.column for dense in columns.dense)]
        if len(features) != 1 or others:
            raise SpecError(
                f"model.kind={kind_of(self.config)}: columns {', '.join((*features, *others))}",
                "one sparse column, the lists of items, and labels: []",
            )
        return columns, ()

    def metrics(self, loss: AnyLoss) -> Sequence[str]:
        return ranking_metrics(self.config.ks)

    def build(self, parts: ModelParts, how: Building) -> nn.Module:
        return how.place(make_sequence_model(self.config, _inputs(parts, how)[0]), parts)

    def objective(self, resolved: ResolvedRecipe, model: nn.Module, comm: Comm | None) -> Objective:
        assert isinstance(model, NextItem)
        return NextItems(model, self.config.negatives)

    def evaluator(self, model: nn.Module, asked: Asked) -> Evaluator:
        assert isinstance(model, NextItem)
        resolved, config = asked.resolved, self.config
        return NextItemEvaluator(
            model,
            asked.batches,
            resolved.tasks[0],
            resolved.recipe.train,
            ks=config.ks,
            leave_out_history=config.leave_out_history,
            comm=asked.comm,
        )


class TowerFamily(Family):
    """Models with vectors of users and items."""

    def fit(self, columns: Columns, *, named: bool) -> tuple[Columns, tuple[str, ...]]:
        super().fit(columns, named=named)
        users, items, dense = self._sides()
        _check_towers(columns, kind_of(self.config), users, items)
        fitted = _sort_dense(columns, kind_of(self.config), dense)
        return fitted, _unused_columns(columns, (*users, *items, *dense)) if named else ()

    def check(self, columns: Columns, tables: Sequence[Table]) -> tuple[str, ...]:
        return check_pictures(self.config, columns, tables)

    def metrics(self, loss: AnyLoss) -> Sequence[str]:
        return ranking_metrics(self.config.ks)

    def build(self, parts: ModelParts, how: Building) -> nn.Module:
        return how.place(make_two_tower(_tower_parts(parts, how), self.config), parts)

    def objective(self, resolved: ResolvedRecipe, model: nn.Module, comm: Comm | None) -> Objective:
        assert isinstance(model, RetrievalModel)
        loss = in_batch_softmax if self.config.loss == "softmax" else in_batch_bpr
        return InBatch(model, self.config.item, model.frequency, loss, hardest=self.config.hardest, comm=comm)

    def evaluator(self, model: nn.Module, asked: Asked) -> Evaluator:
        assert isinstance(model, RetrievalModel)
        train, config = asked.resolved.rows.train, self.config
        return RetrievalEvaluator(
            model,
            config.item,
            known=lambda: asked.batches(train),
            asked=asked.batches,
            task=asked.resolved.tasks[0],
            ks=config.ks,
            comm=asked.comm,
        )

    def _sides(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Features of users, features of items, and dense columns in the order of the towers."""
        config = self.config
        return config.user_features, (config.item, *config.item_features), (*config.user_dense, *config.item_dense)


@final
class GraphFamily(TowerFamily):
    """Vectors that a graph of the training rows mixes."""

    def check(self, columns: Columns, tables: Sequence[Table]) -> tuple[str, ...]:
        return ()

    def pairs(self, resolved: ResolvedRecipe) -> Pairs | None:
        batches = evaluation_batches(resolved, resolved.rows.train)
        return Pairs.of_batches(batches, self.config.user, self.config.item)

    def build(self, parts: ModelParts, how: Building) -> nn.Module:
        return make_graph_tower(_tower_parts(parts, how), self.config, how.pairs or Pairs.none())

    def _sides(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        return (self.config.user,), (self.config.item,), ()


def parts_of(model: Model | str) -> Family:
    """The family of a model's settings."""
    match model:
        case SasRecConfig() | HstuConfig():
            return SequenceFamily(model)
        case GraphConfig():
            return GraphFamily(model)
        case TwoTowerConfig():
            return TowerFamily(model)
        case UserModel():
            return OwnFamily(model)
        case str():
            return OwnFamily(UserModel(module=model))
        case _:
            return Family(model)


def _inputs(parts: ModelParts, how: Building) -> tuple[AnyTables, int, int]:
    """The tables of a model, its dense features and its labels."""
    embeddings = make_embeddings(parts.tables, seed=parts.seed, device=how.device, merge_shared=parts.merge_shared)
    return embeddings, len(parts.columns.dense), len(parts.tasks)


def _tower_parts(parts: ModelParts, how: Building) -> TowerParts:
    return TowerParts(parts.tables, parts.seed, how.device, parts.merge_shared)


def _check_towers(columns: Columns, kind: str, users: Sequence[str], items: Sequence[str]) -> None:
    """Raise unless each named feature exists and is in one tower, and there is one label."""
    if len(columns.labels) != 1:
        raise SpecError(f"{kind}: labels {', '.join(columns.labels)}", "one label: whether user and item match")
    features = [sparse.feature_name for sparse in columns.sparse]
    missing = [name for name in (*users, *items) if name not in features]
    if missing:
        raise SpecError(f"{kind}: no feature {', '.join(missing)}; there are {', '.join(features)}")
    both = [name for name in users if name in items]
    if both:
        raise SpecError(f"{kind}: feature {', '.join(both)} is in both towers", "each feature in one tower")


def _sort_dense(columns: Columns, kind: str, wanted: Sequence[str]) -> Columns:
    """Dense columns of the user before those of the item, as the towers take them."""
    by_name = {dense.column: dense for dense in columns.dense}
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise SpecError(f"{kind}: no dense column {', '.join(missing)}; there are {', '.join(by_name) or 'none'}")
    return structs.replace(columns, dense=tuple(by_name[name] for name in wanted))


def _unused_columns(columns: Columns, used: Sequence[str]) -> tuple[str, ...]:
    names = (*(s.feature_name for s in columns.sparse), *(d.column for d in columns.dense))
    unused = [name for name in names if name not in used]
    return (f"columns {', '.join(unused)}: not used, because neither tower names them",) if unused else ()

"""The parts of models by family: columns, model, loss and evaluation. `model_kinds` lists their capabilities.

This module has click models, sequence models and user classes; `retrieval` has two-tower and graph models.
`compose.parts_of` chooses.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

from msgspec import structs
from torch import nn

from rowwise.base.errors import SpecError
from rowwise.ingest.columns import Columns
from rowwise.models.autoint import AutoInt
from rowwise.models.dcn import DCN
from rowwise.models.deepfm import DeepFM
from rowwise.models.dhen import DHEN
from rowwise.models.dien import DIEN
from rowwise.models.din import DIN
from rowwise.models.dlrm import DLRM
from rowwise.models.experts import PLE, MMoE
from rowwise.models.final_mlp import FinalMLP
from rowwise.models.graph_tower import Pairs
from rowwise.models.hstu import HSTU
from rowwise.models.masknet import MaskNet
from rowwise.models.next_item import NextItem
from rowwise.models.sasrec import SASRec
from rowwise.models.wide import wide_tables
from rowwise.models.wide_deep import WideDeep
from rowwise.models.wukong import Wukong
from rowwise.models.xdeepfm import XDeepFM
from rowwise.parallel.comm.interface import Comm
from rowwise.recipes.device_tables import move_to_device
from rowwise.recipes.id_names import name_ids
from rowwise.recipes.model_configs import (
    INTERACTION_KEYS,
    AutoIntConfig,
    ClickModel,
    DcnConfig,
    DeepFmConfig,
    DhenConfig,
    DienConfig,
    DinConfig,
    DlrmConfig,
    FinalMlpConfig,
    HstuConfig,
    MaskNetConfig,
    MmoeConfig,
    Model,
    PleConfig,
    SasRecConfig,
    SequenceModel,
    UserModel,
    WideDeepConfig,
    WukongConfig,
    XDeepFmConfig,
    kind_of,
)
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.recipe import check_amounts
from rowwise.recipes.resolved import ModelParts, QuarantineFolder, ResolvedRecipe, batch_shard_of, evaluation_batches
from rowwise.recipes.rows import RowSelection
from rowwise.recipes.user_model import load_class
from rowwise.tables.batch import Batch
from rowwise.tables.ids.make import AnyTables, make_embeddings
from rowwise.tables.spec import Table
from rowwise.train.amounts import metric_names
from rowwise.train.evaluate import ClickEvaluator, Evaluator, Slicing
from rowwise.train.loss_settings import AMOUNT_METRICS, AmountLoss, AnyLoss, CoTeaching
from rowwise.train.objective import Clicks, NextItems, Objective, TwoCopies
from rowwise.train.retrieve import NextItemEvaluator, ranking_metrics

CLICK_METRICS = ("ne", "loss", "auc")  # metrics that can choose the best checkpoint
MODELS: dict[type, type[nn.Module]] = {
    AutoIntConfig: AutoInt,
    DcnConfig: DCN,
    DeepFmConfig: DeepFM,
    DhenConfig: DHEN,
    DienConfig: DIEN,
    DinConfig: DIN,
    DlrmConfig: DLRM,
    FinalMlpConfig: FinalMLP,
    MaskNetConfig: MaskNet,
    MmoeConfig: MMoE,
    PleConfig: PLE,
    WideDeepConfig: WideDeep,
    WukongConfig: Wukong,
    XDeepFmConfig: XDeepFM,
}
ENCODERS: dict[type, type[SASRec] | type[HSTU]] = {SasRecConfig: SASRec, HstuConfig: HSTU}


class BuildOptions(NamedTuple):
    """How a model is built: see `compose.build_model`."""

    on_meta: bool = False
    pairs: Pairs | None = None
    memory_bytes: int | None = None
    samples: int = 0

    def embeddings(self, parts: ModelParts, tables: Sequence[Table]) -> AnyTables:
        """Embeddings of some of the model's tables."""
        device = "meta" if self.on_meta else "cpu"
        return make_embeddings(tables, seed=parts.seed, device=device, merge_shared=parts.merge_shared)

    def place(self, model: nn.Module, parts: ModelParts) -> nn.Module:
        """Move the model to its device, unless its tables are on the meta device."""
        if self.on_meta:
            return model
        whole = family_of(parts.model).reads_whole_tables
        return move_to_device(model, parts.device, self.memory_bytes, self.samples, whole=whole)


class EvaluationScope(NamedTuple):
    """The rows of an evaluation, and how they are read: see `compose.make_evaluator`."""

    resolved: ResolvedRecipe
    rows: RowSelection
    slices: tuple[str, ...] | None
    comm: Comm | None
    quarantine: QuarantineFolder

    def batches(self, rows: RowSelection | None = None) -> Iterable[Batch]:
        shard = batch_shard_of(self.comm)
        return evaluation_batches(self.resolved, self.rows if rows is None else rows, shard, self.quarantine())


class Family:
    """The parts of click models; other families override some of them.

    `model` is always a result of `build`.
    """

    def __init__(self, config: Model) -> None:
        self.config: Any = config

    def fit(self, columns: Columns, *, named: bool) -> tuple[Columns, tuple[str, ...]]:
        """The columns as the model takes them, and notes on unused ones; `named`: the recipe lists them."""
        if not columns.labels:
            raise SpecError("columns.labels is empty", "at least one label column")
        return columns, ()

    def check(self, columns: Columns, tables: Sequence[Table]) -> tuple[str, ...]:
        """Check the files that the model reads beside the rows; returns notes."""
        return ()

    def metrics(self, loss: AnyLoss) -> Iterable[str]:
        """Metrics that can choose the best checkpoint."""
        if isinstance(loss, AmountLoss):
            return [name for name in AMOUNT_METRICS if name in metric_names(loss)]
        return CLICK_METRICS

    def pairs(self, resolved: ResolvedRecipe) -> Pairs | None:
        """Pairs of users and items of the training rows: the edges of a graph."""
        return None

    def share(self, model: Any, comm: Comm) -> None:
        """Divide work over whole tables, such as graph convolutions, among ranks."""

    def facts(self, model: Any, *, chosen: bool) -> dict[str, Any] | None:
        """Statistics of a graph or of pictures for the report, with the sizes if `chosen`; None for other models."""
        return None

    def build(self, parts: ModelParts, options: BuildOptions) -> nn.Module:
        return options.place(make_click_model(self.config, *_inputs(parts, options)), parts)

    def objective(self, resolved: ResolvedRecipe, model: Any, comm: Comm | None) -> Objective:
        train, tasks = resolved.recipe.train, resolved.tasks
        weights = train.task_weights
        if weights and len(weights) != len(tasks):
            raise SpecError(f"train.task_weights has {len(weights)} values", f"one for each of {', '.join(tasks)}")
        if isinstance(train.objective, CoTeaching):
            return TwoCopies(model, train.objective, weights, train.label_smoothing, comm=comm)
        return Clicks(model, weights, train.label_smoothing, train.objective)

    def evaluator(self, model: Any, scope: EvaluationScope) -> Evaluator:
        resolved, slices = scope.resolved, scope.slices
        recipe = resolved.recipe
        if slices:
            check_amounts(recipe, slices=slices)
        slicing = Slicing(recipe.evaluate.slices if slices is None else slices, recipe.evaluate.slice_ids)
        name = partial(name_ids, scope.rows, resolved.columns, resolved.tables, resolved.transforms)
        return ClickEvaluator(
            model, scope.batches, resolved.tasks, recipe.train, slicing, comm=scope.comm, name_ids=name
        )


@final
class OwnFamily(Family):
    """A user class, with an optional loss, metrics and evaluator."""

    config: UserModel

    def metrics(self, loss: AnyLoss) -> Iterable[str]:
        yield from super().metrics(loss)
        # The user's class is imported only if no metric above matches.
        yield from getattr(load_class(self.config.module), "metrics", ())

    def build(self, parts: ModelParts, options: BuildOptions) -> nn.Module:
        name = self.config.module
        try:
            model = load_class(name)(*_inputs(parts, options), **self.config.args)
        except TypeError as error:
            raise SpecError(
                f"model: {name}: {error}", "a class that takes (embeddings, dense_features, tasks, **args)"
            ) from error
        return options.place(model, parts)

    def objective(self, resolved: ResolvedRecipe, model: nn.Module, comm: Comm | None) -> Objective:
        make = getattr(model, "make_objective", None)
        return super().objective(resolved, model, comm) if make is None else make(resolved.recipe.train, comm)

    def evaluator(self, model: nn.Module, scope: EvaluationScope) -> Evaluator:
        make = getattr(model, "make_evaluator", None)
        if make is None:
            return super().evaluator(model, scope)
        return make(scope.batches, scope.resolved.tasks, scope.comm)


@final
class SequenceFamily(Family):
    """Models of lists of items."""

    config: SequenceModel

    def fit(self, columns: Columns, *, named: bool) -> tuple[Columns, tuple[str, ...]]:
        features = [sparse.feature_name for sparse in columns.sparse]
        extra = [*columns.labels, *(dense.column for dense in columns.dense)]
        if len(features) != 1 or extra:
            raise SpecError(
                f"model.kind={kind_of(self.config)}: columns {', '.join((*features, *extra))}",
                "one sparse column, the lists of items, and labels: []",
            )
        return columns, ()

    def metrics(self, loss: AnyLoss) -> Sequence[str]:
        return ranking_metrics(self.config.ks)

    def build(self, parts: ModelParts, options: BuildOptions) -> nn.Module:
        config, (embeddings, *_) = self.config, _inputs(parts, options)
        settings = {key: getattr(config, key) for key in ("length", "layers", "heads", "dropout")}
        try:
            model = NextItem(embeddings, ENCODERS[type(config)](embeddings.tables[0].dim, **settings))
        except SpecError as error:
            raise SpecError(f"model.kind={kind_of(config)}: {error}") from None
        return options.place(model, parts)

    def objective(self, resolved: ResolvedRecipe, model: NextItem, comm: Comm | None) -> Objective:
        return NextItems(model, self.config.negatives)

    def evaluator(self, model: NextItem, scope: EvaluationScope) -> Evaluator:
        resolved, config = scope.resolved, self.config
        return NextItemEvaluator(
            model,
            scope.batches,
            resolved.tasks[0],
            resolved.recipe.train,
            ks=config.ks,
            leave_out_history=config.leave_out_history,
            comm=scope.comm,
        )


def _inputs(parts: ModelParts, options: BuildOptions) -> tuple[AnyTables, int, int]:
    """The tables of a model, its dense features and its labels."""
    return options.embeddings(parts, parts.tables), len(parts.columns.dense), len(parts.tasks)


def make_click_model(config: ClickModel, embeddings: AnyTables, dense_features: int, tasks: int) -> nn.Module:
    """The model of these settings; their keys are its arguments."""
    options: dict[str, Any] = structs.asdict(config)
    output_key = next((key for key in ("top", "deep") if key in options), None)
    if output_key is None:
        options["tasks"] = tasks
    else:
        options[output_key] = (*options[output_key], tasks)
    if isinstance(config, DlrmConfig):
        options["bottom"] = (*config.bottom, embeddings.tables[0].dim)
    if isinstance(config, DhenConfig):
        grouped = {kind: {key: options[key] for key in keys} for kind, keys in INTERACTION_KEYS.items()}
        options = {key: value for key, value in options.items() if not any(key in keys for keys in grouped.values())}
        options["options"] = grouped
    if isinstance(config, WideDeepConfig):
        options["wide"] = None if config.wide is None else wide_tables(embeddings.tables, tasks, config.wide)
    try:
        return MODELS[type(config)](embeddings, dense_features, **options)
    except SpecError as error:
        raise SpecError(f"model.kind={kind_of(config)}: {error}") from None

"""Builds the parts of a training job from a recipe: rows, tables, model, loss and evaluation.

Nothing is trained or written here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn

from rowwise.batch import Batch
from rowwise.comm.interface import Comm
from rowwise.errors import SpecError
from rowwise.hashing.make import AnyTables, make_embeddings
from rowwise.ingest.batch_shard import BatchShard
from rowwise.ingest.batcher import Batcher, Batching, Position
from rowwise.ingest.columns import Columns
from rowwise.ingest.service.local import Workers
from rowwise.ingest.transform import AnyKind, LoadedTransforms, MapId, UserFunction, serving
from rowwise.ingest.transform import load as load_transforms
from rowwise.models.frequency import ItemFrequency
from rowwise.models.next_item import NextItem
from rowwise.models.retrieval import in_batch_bpr, in_batch_softmax
from rowwise.models.two_tower import Tower, TwoTower, VectorModel
from rowwise.perf.wire_choice import WireChoice
from rowwise.plan import Forecast
from rowwise.processor import read_processor
from rowwise.recipes.column_tables import add_column_tables, replace_vocabularies
from rowwise.recipes.id_maps import pin_map, stored_tables_of
from rowwise.recipes.model_configs import (
    HstuConfig,
    Model,
    RankingModel,
    SasRecConfig,
    SequenceModel,
    TwoTowerConfig,
    UserModel,
    kind_of,
)
from rowwise.recipes.processor_limits import replace_unsupported
from rowwise.recipes.recipe import PROBE, Recipe, Tables
from rowwise.recipes.rows import RecipeRows, RowSelection, open_data, use_absolute_paths
from rowwise.recipes.threads import choose_threads
from rowwise.recipes.user_model import load_class
from rowwise.recipes.user_model_name import split_name
from rowwise.recipes.zoo import make_click_model, make_sequence_model
from rowwise.spec import Table
from rowwise.train.evaluate import ClickEvaluator, Evaluator, Slicing
from rowwise.train.objective import Clicks, InBatch, NextItems, Objective
from rowwise.train.retrieve import NextItemEvaluator, RetrievalEvaluator, ranking_metrics
from rowwise.train.settings import Evaluation
from rowwise.train.trainer import Settings, TrainingJob

OpenBatches = Callable[[Position | None], Batcher]
QuarantineFolder = Callable[[], Path | None]  # None until the run has a folder
CLICK_METRICS = ("ne", "loss", "auc")  # metrics that can choose the best checkpoint
NEXT_ITEM = "next_item"  # the task of sequence models, which have no labels


def no_quarantine() -> None:
    """The quarantine folder of code without one, where bad rows are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRecipe:
    """A recipe with every default filled in, and its opened data."""

    recipe: Recipe
    rows: RecipeRows
    transforms: LoadedTransforms
    notes: tuple[str, ...] = ()  # settings that were replaced or have no effect, and why
    wire_choice: WireChoice | None = None  # where the run has chosen its wire itself

    @property
    def columns(self) -> Columns:
        assert self.recipe.columns is not None
        return self.recipe.columns

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.recipe.tables.list

    @property
    def stored_tables(self) -> tuple[Table, ...]:
        """The tables in memory: a table with an id map is replaced by those of its parts."""
        return tuple(stored for table in self.tables for stored in stored_tables_of(table))

    @property
    def tasks(self) -> tuple[str, ...]:
        return (NEXT_ITEM,) if isinstance(self.recipe.model, SequenceModel) else self.columns.labels


def resolve(recipe: Recipe) -> ResolvedRecipe:
    """Open the data and fill in every default, so that the recipe makes the same run again."""
    data, transforms = use_absolute_paths(recipe.data), tuple(map(_use_absolute_files, recipe.transforms))
    if isinstance(data.workers, int):
        data = structs.replace(data, workers=Workers(count=data.workers) if data.workers else None)
    rows = open_data(data, recipe.columns, recipe.tables.list)
    # Vocabularies become transforms first, because they fix the number of rows of their tables.
    columns, lookups = replace_vocabularies(recipe.columns or rows.dataset.columns)
    loaded = load_transforms(transforms := (*transforms, *lookups))
    table_settings = recipe.tables
    if recipe.columns is not None:
        columns, table_settings = add_column_tables(columns, table_settings, rows.dataset.tables, loaded)
    tables = tuple(map(pin_map, table_settings.resolve(rows.dataset.tables)))
    columns, notes = _fit_columns(columns, recipe.model, named=recipe.columns is not None)
    if data.label is not None and data.label not in columns.labels:
        want = "want one of them, or no data.label"
        raise SpecError(f"data.label={data.label!r}: the labels are {', '.join(columns.labels) or 'none'}: {want}")
    columns.check_tables(tables)
    # Paths become absolute, so that a run can be resumed from another working directory.
    model = recipe.model
    if isinstance(model, str):
        model = UserModel(module=model)
    if isinstance(model, UserModel):
        path, name = split_name(model.module)
        model = UserModel(module=f"{path.absolute()}:{name}", args=model.args)
    _check_device(recipe.train.device)
    train, processor_notes = replace_unsupported(recipe.train, processor := read_processor())
    if train.threads is None:
        available = torch.get_num_threads()
        threads = choose_threads(model, tables, len(columns.dense), train.batch, processor, available)
        train = structs.replace(train, threads=threads)
    paths = {"init_from": recipe.init_from, "plan": recipe.plan}
    if recipe.hardware is not None and recipe.hardware.endswith(".json"):  # else it is a preset
        paths["hardware"] = recipe.hardware
    if recipe.network != PROBE:
        paths["network"] = recipe.network
    absolute_paths = {name: path and str(Path(path).absolute()) for name, path in paths.items()}
    _check_evaluation(recipe.evaluate, columns, model, validates=rows.valid is not None)
    changes = {
        "data": data,
        "transforms": transforms,
        "columns": columns,
        "tables": Tables(list=tables),
        "model": model,
        "train": train,
    }
    resolved = structs.replace(recipe, **changes, **absolute_paths)
    return ResolvedRecipe(recipe=resolved, rows=rows, transforms=loaded, notes=(*processor_notes, *notes))


def make_model(resolved: ResolvedRecipe, *, on_meta: bool = False) -> nn.Module:
    """The model with initial weights from the seed; with `on_meta` its tables are on the meta device.

    Meta tables take no memory and get their rows when the model is sharded.
    """
    recipe, tasks, dense = resolved.recipe, len(resolved.tasks), len(resolved.columns.dense)
    torch.manual_seed(recipe.seed)
    model = recipe.model
    device, merge_shared = "meta" if on_meta else "cpu", recipe.train.merge_shared
    if isinstance(model, TwoTowerConfig):
        towers = _make_two_tower(resolved, model, device)
        return towers if on_meta else towers.to(recipe.train.device)
    embeddings = make_embeddings(resolved.tables, seed=recipe.seed, device=device, merge_shared=merge_shared)
    match model:
        case UserModel(module=name, args=args):
            module = _make_user_model(name, embeddings, dense, tasks, args)
        case SasRecConfig() | HstuConfig():
            module = make_sequence_model(model, embeddings)
        case str():
            raise AssertionError(f"resolve left the model as {model!r}")
        case _:
            module = make_click_model(model, embeddings, dense, tasks)
    return module if on_meta else module.to(recipe.train.device)


def make_small_model(resolved: ResolvedRecipe) -> nn.Module:
    """The model with tables of one row."""
    one_row = Tables(list=tuple(structs.replace(table, rows=1) for table in resolved.tables))
    return make_model(replace(resolved, recipe=structs.replace(resolved.recipe, tables=one_row)))


def make_job(
    resolved: ResolvedRecipe,
    model: nn.Module,
    batches: OpenBatches,
    comm: Comm | None = None,
    forecast: Forecast | None = None,
    quarantine: QuarantineFolder = no_quarantine,
) -> TrainingJob:
    """The training job of one rank."""
    valid = resolved.rows.valid
    evaluate = None if valid is None else make_evaluator(resolved, model, valid, comm=comm, quarantine=quarantine)
    return TrainingJob(
        model=model,
        objective=make_objective(resolved, model, comm),
        batches=batches,
        tasks=resolved.tasks,
        evaluate=evaluate,
        forecast=forecast,
    )


def batch_shard_of(comm: Comm | None) -> BatchShard:
    return BatchShard() if comm is None else BatchShard(rank=comm.rank, world=len(comm.ranks))


def make_objective(resolved: ResolvedRecipe, model: nn.Module, comm: Comm | None = None) -> Objective:
    recipe = resolved.recipe
    if isinstance(recipe.model, TwoTowerConfig):
        assert isinstance(model, RetrievalModel)
        loss = in_batch_softmax if recipe.model.loss == "softmax" else in_batch_bpr
        return InBatch(model, recipe.model.item, model.frequency, loss, hardest=recipe.model.hardest, comm=comm)
    if isinstance(recipe.model, SequenceModel):
        assert isinstance(model, NextItem)
        return NextItems(model, recipe.model.negatives)
    weights = recipe.train.task_weights
    if weights and len(weights) != len(resolved.tasks):
        raise SpecError(
            f"train.task_weights has {len(weights)} values: want one for each of {', '.join(resolved.tasks)}"
        )
    return Clicks(model, weights, recipe.train.label_smoothing)


def make_batcher(
    resolved: ResolvedRecipe,
    rows: RowSelection,
    position: Position | None = None,
    shard: BatchShard | None = None,
    quarantine: Path | None = None,
) -> Batcher:
    """The training batches, or a rank's shard of each; the recipe says whether bad rows go to the quarantine folder."""
    data, train, seed = resolved.recipe.data, resolved.recipe.train, resolved.recipe.seed
    batching = Batching(
        size=train.batch,
        seed=seed,
        shuffle=train.shuffle,
        ahead=train.ahead,
        share=rows.share,
        where=rows.where,
        together=data.together,
        shard=shard or BatchShard(),
        quarantine=str(quarantine) if quarantine is not None and data.on_bad_rows == "quarantine" else None,
    )
    return Batcher(rows.reader, resolved.columns, resolved.tables, batching, position, resolved.transforms)


def evaluation_batches(
    resolved: ResolvedRecipe, rows: RowSelection, shard: BatchShard | None = None, quarantine: Path | None = None
) -> Iterable[Batch]:
    """All rows once, in their order, in batches for evaluation, or a rank's shard of each.

    If the recipe quarantines bad rows, they go to the folder; without a folder they are dropped.
    """
    recipe = resolved.recipe
    batching = Batching(
        size=recipe.evaluate.batch,
        shuffle=False,
        ahead=recipe.train.ahead,
        share=rows.share,
        where=rows.where,
        shard=shard or BatchShard(),
        quarantine=str(quarantine or "") if recipe.data.on_bad_rows == "quarantine" else None,
    )
    # `serving` drops transforms that sample rows: evaluation measures all of them.
    return Batcher(rows.reader, resolved.columns, resolved.tables, batching, None, serving(resolved.transforms))


def make_evaluator(
    resolved: ResolvedRecipe,
    model: nn.Module,
    rows: RowSelection,
    slices: tuple[str, ...] | None = None,
    comm: Comm | None = None,
    quarantine: QuarantineFolder = no_quarantine,
) -> Evaluator:
    """An evaluator over some rows; `slices` replace the recipe's."""
    recipe, shard = resolved.recipe, batch_shard_of(comm)
    if isinstance(recipe.model, RankingModel) and slices:
        want = "all items are ranked: want no slices"
        raise SpecError(f"slices {', '.join(slices)} with model.kind={kind_of(recipe.model)}: {want}")
    if isinstance(recipe.model, TwoTowerConfig):
        assert isinstance(model, RetrievalModel)
        train = resolved.rows.train
        return RetrievalEvaluator(
            model,
            recipe.model.item,
            known=lambda: evaluation_batches(resolved, train, shard, quarantine()),
            asked=lambda: evaluation_batches(resolved, rows, shard, quarantine()),
            task=resolved.tasks[0],
            ks=recipe.model.ks,
            comm=comm,
        )

    def batches() -> Iterable[Batch]:
        return evaluation_batches(resolved, rows, shard, quarantine())

    if isinstance(recipe.model, SequenceModel):
        assert isinstance(model, NextItem)
        options = {"ks": recipe.model.ks, "leave_out_history": recipe.model.leave_out_history}
        return NextItemEvaluator(model, batches, NEXT_ITEM, recipe.train, **options, comm=comm)
    slicing = Slicing(recipe.evaluate.slices if slices is None else slices, recipe.evaluate.slice_ids)
    return ClickEvaluator(model, batches, resolved.tasks, recipe.train, slicing, comm=comm)


def set_threads(recipe: Recipe) -> None:
    """Set the recipe's threads: torch splits sums in matrix products by thread, so they change the bits."""
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)


def make_settings(recipe: Recipe) -> Settings:
    return Settings(train=recipe.train, evaluate=recipe.evaluate, save=recipe.save, log=recipe.log)


class RetrievalModel(VectorModel):
    """Two towers and the item frequencies, so that a checkpoint holds both."""

    def __init__(self, towers: TwoTower, frequency: ItemFrequency | None) -> None:
        super().__init__()
        self.towers, self.frequency = towers, frequency

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [B, 1] of each sample's user and item."""
        return self.towers(batch)

    def vectors(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.towers.vectors(batch)

    def scores(self, users_UD: torch.Tensor, items_ID: torch.Tensor) -> torch.Tensor:
        return self.towers.scores(users_UD, items_ID)


def _use_absolute_files(transform: AnyKind | str) -> AnyKind | str:
    if isinstance(transform, str):
        path, colon, name = transform.rpartition(":")
        return f"{Path(path).absolute()}{colon}{name}" if colon else transform
    if isinstance(transform, UserFunction):
        return structs.replace(transform, function=f"{Path(transform.file).absolute()}:{transform.name}")
    if isinstance(transform, MapId) and transform.file:
        return structs.replace(transform, file=str(Path(transform.file).absolute()))
    return transform


def _check_device(name: str) -> None:
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise SpecError(f"train.device={name!r}: want cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise SpecError(f"train.device={name!r}: torch finds no GPU: want cpu; see rowwise doctor")


def _check_evaluation(settings: Evaluation, columns: Columns, model: object, *, validates: bool) -> None:
    """Raise now for names that would fail at the first evaluation."""
    tasks = (NEXT_ITEM,) if isinstance(model, SequenceModel) else columns.labels
    if settings.task and settings.task not in tasks:
        raise SpecError(f"evaluate.task={settings.task!r} is not a label: want one of {', '.join(tasks)}")
    features = [sparse.feature_name for sparse in columns.sparse]
    missing = [name for name in settings.slices if name not in features]
    if missing:
        raise SpecError(f"evaluate.slices: no feature {', '.join(missing)}: want some of {', '.join(features)}")
    metrics = ranking_metrics(model.ks) if isinstance(model, RankingModel) else CLICK_METRICS
    if (validates or settings.metric != Evaluation().metric) and settings.metric not in metrics:
        raise SpecError(f"evaluate.metric={settings.metric!r} is not measured: want one of {', '.join(metrics)}")


def _make_two_tower(resolved: ResolvedRecipe, config: TwoTowerConfig, device: str) -> RetrievalModel:
    towers: list[Tower] = []
    user, item = (config.user_features, config.user_dense), ((config.item, *config.item_features), config.item_dense)
    for features, dense in (user, item):
        tables = tuple(t for t in resolved.tables if set(t.feature_names) & set(features))
        mixed = [t.name for t in tables if not set(t.feature_names) <= set(features)]
        if mixed or not tables:
            got = f"table {', '.join(mixed)} has features of both" if mixed else "no table"
            raise SpecError(f"two_tower: {got}: want tables with features {', '.join(features)} only, for one tower")
        seed, merge_shared = resolved.recipe.seed, resolved.recipe.train.merge_shared
        embeddings = make_embeddings(tables, seed=seed, device=device, merge_shared=merge_shared)
        towers.append(Tower(embeddings, len(dense), config.sizes))
    towers_model = TwoTower(towers[0], towers[1], config.temperature)
    return RetrievalModel(towers_model, ItemFrequency() if config.correct else None)


def _fit_columns(columns: Columns, model: Model | str, *, named: bool) -> tuple[Columns, tuple[str, ...]]:
    """The columns as the model takes them, and a note on those that it does not use; `named`: by the recipe."""
    if isinstance(model, SequenceModel):
        _check_lists(columns, model)
        return columns, ()
    if not columns.labels:
        raise SpecError("columns.labels is empty: want at least one label column")
    if not isinstance(model, TwoTowerConfig):
        return columns, ()
    _check_towers(columns, model)
    return _sort_dense(columns, model), _unused_columns(columns, model) if named else ()


def _check_lists(columns: Columns, config: SequenceModel) -> None:
    """Raise unless a row is one list of items, and nothing else."""
    features = [sparse.feature_name for sparse in columns.sparse]
    others = [*columns.labels, *(dense.column for dense in columns.dense)]
    if len(features) != 1 or others:
        got = f"model.kind={kind_of(config)}: columns {', '.join((*features, *others))}"
        raise SpecError(f"{got}: want one sparse column, the lists of items, and labels: []")


def _check_towers(columns: Columns, config: TwoTowerConfig) -> None:
    """Raise unless each named feature exists and is in one tower, and there is one label."""
    if len(columns.labels) != 1:
        raise SpecError(f"two_tower: labels {', '.join(columns.labels)}: want one: whether user and item match")
    features = [sparse.feature_name for sparse in columns.sparse]
    item_features = (config.item, *config.item_features)
    missing = [name for name in (*config.user_features, *item_features) if name not in features]
    if missing:
        raise SpecError(f"two_tower: no feature {', '.join(missing)}; there are {', '.join(features)}")
    both = [name for name in config.user_features if name in item_features]
    if both:
        raise SpecError(f"two_tower: feature {', '.join(both)} is in both towers: want it in one")


def _sort_dense(columns: Columns, config: TwoTowerConfig) -> Columns:
    """Dense columns of the user before those of the item, as the towers take them."""
    by_name = {dense.column: dense for dense in columns.dense}
    wanted = (*config.user_dense, *config.item_dense)
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise SpecError(f"two_tower: no dense column {', '.join(missing)}; there are {', '.join(by_name) or 'none'}")
    return structs.replace(columns, dense=tuple(by_name[name] for name in wanted))


def _unused_columns(columns: Columns, config: TwoTowerConfig) -> tuple[str, ...]:
    used = {config.item, *config.item_features, *config.user_features, *config.user_dense, *config.item_dense}
    names = (*(s.feature_name for s in columns.sparse), *(d.column for d in columns.dense))
    unused = [name for name in names if name not in used]
    return (f"columns {', '.join(unused)}: not used, because neither tower names them",) if unused else ()


def _make_user_model(name: str, embeddings: AnyTables, dense: int, tasks: int, args: dict[str, Any]) -> nn.Module:
    try:
        return load_class(name)(embeddings, dense, tasks, **args)
    except TypeError as error:
        want = "want a class that takes (embeddings, dense_features, tasks, **args)"
        raise SpecError(f"model: {name}: {error}; {want}") from error

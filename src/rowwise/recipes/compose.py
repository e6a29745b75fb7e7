"""Builds the parts of a training job from a recipe: rows, tables, model, loss and evaluation.

Nothing is trained or written here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from rowwise.ingest.labels import LabelValues
from rowwise.ingest.service.local import Workers
from rowwise.ingest.transform import AnyKind, LoadedTransforms, MapId, UserFunction, serving
from rowwise.ingest.transform import load as load_transforms
from rowwise.models.link import AmountLink
from rowwise.models.next_item import NextItem
from rowwise.models.retrieval import in_batch_bpr, in_batch_softmax
from rowwise.models.second_copy import add_second_copy, second_tables
from rowwise.perf.wire_choice import WireChoice
from rowwise.plan import Forecast
from rowwise.processor import read_processor
from rowwise.recipes.column_tables import add_column_tables, replace_vocabularies
from rowwise.recipes.device_tables import move_to_device
from rowwise.recipes.id_maps import pin_map, stored_tables_of
from rowwise.recipes.id_names import name_ids
from rowwise.recipes.label_facts import LabelFacts, is_complete, look_at_labels, with_facts
from rowwise.recipes.model_configs import (
    GraphConfig,
    HstuConfig,
    Model,
    RankingModel,
    RetrievalConfig,
    SasRecConfig,
    SequenceModel,
    TwoTowerConfig,
    UserModel,
    kind_of,
)
from rowwise.recipes.model_kinds import check_use, family_of
from rowwise.recipes.processor_limits import replace_unsupported
from rowwise.recipes.recipe import PROBE, Recipe, Tables, check_amounts
from rowwise.recipes.retrieval import (
    Pairs,
    RetrievalModel,
    TowerParts,
    check_pictures,
    make_graph_tower,
    make_two_tower,
)
from rowwise.recipes.rows import RecipeRows, RowSelection, open_data, use_absolute_paths
from rowwise.recipes.threads import choose_threads
from rowwise.recipes.user_model import load_class
from rowwise.recipes.user_model_name import split_name
from rowwise.recipes.zoo import make_click_model, make_sequence_model
from rowwise.spec import Table, Value
from rowwise.storage.folder import StorageFolder, parse_folder
from rowwise.train.amounts import metric_names
from rowwise.train.evaluate import ClickEvaluator, Evaluator, Slicing
from rowwise.train.loss_settings import AMOUNT_METRICS, AmountLoss, AnyLoss, CoTeaching, Poisson, wanted_values
from rowwise.train.objective import Clicks, InBatch, NextItems, Objective, TwoCopies
from rowwise.train.retrieve import NextItemEvaluator, RetrievalEvaluator, ranking_metrics
from rowwise.train.settings import Evaluation, Training
from rowwise.train.trainer import Settings, TrainingJob

OpenBatches = Callable[[Position | None], Batcher]
QuarantineFolder = Callable[[], Path | None]  # None until the run has a folder
CLICK_METRICS = ("ne", "loss", "auc")  # metrics that can choose the best checkpoint
SECOND_SEED = 1 << 62  # a bit of the seed that a second copy's initial weights have changed


def no_quarantine() -> None:
    """The quarantine folder of code without one, where bad rows are dropped."""


class ModelParts(Value, frozen=True, kw_only=True):
    """What a model is built from: settings, columns and tables, but no data."""

    model: Model
    columns: Columns
    tables: tuple[Table, ...]
    tasks: tuple[str, ...]
    seed: int = 0
    merge_shared: bool = False
    device: str = "cpu"
    link: AmountLink | None = None  # of outputs to amounts; None: they are logits


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
        return tuple(stored for table in self.trained_tables for stored in stored_tables_of(table))

    @property
    def trained_tables(self) -> tuple[Table, ...]:
        """The tables of the model, and those of its second copy."""
        return (*self.tables, *second_tables(self.tables)) if self.has_second_copy else self.tables

    @property
    def has_second_copy(self) -> bool:
        """Whether two copies of the model train each other."""
        train, model = self.recipe.train, self.recipe.model
        return isinstance(train.objective, CoTeaching) and not family_of(model).ranks_items

    @property
    def parts(self) -> ModelParts:
        recipe, model = self.recipe, self.recipe.model
        assert not isinstance(model, str)  # `resolve` replaces the name of a class
        return ModelParts(
            model=model,
            columns=self.columns,
            tables=self.tables,
            tasks=self.tasks,
            seed=recipe.seed,
            merge_shared=recipe.train.merge_shared,
            device=recipe.train.device,
            link=self.link,
        )

    @property
    def link(self) -> AmountLink | None:
        """How outputs are read as amounts; None: they are logits."""
        loss = self.recipe.train.objective
        return loss.link if isinstance(loss, AmountLoss) else None

    @property
    def tasks(self) -> tuple[str, ...]:
        return tasks_of(self.recipe.model, self.columns)


def tasks_of(model: Model | str, columns: Columns) -> tuple[str, ...]:
    task = family_of(model).task
    return columns.tasks if task is None else (task,)


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
    if data.label is not None and recipe.columns is not None and data.label not in columns.labels:
        raise SpecError(
            f"data.label={data.label!r}: the labels are {', '.join(columns.labels) or 'none'}",
            "one of the labels, or no data.label",
        )
    columns.check_tables(tables)
    columns = structs.replace(columns, label_values=_label_values(recipe, columns))
    # Paths become absolute, so that a run can be resumed from another working directory.
    model = _use_absolute_model(recipe.model)
    if isinstance(model, TwoTowerConfig):
        notes = (*notes, *check_pictures(model, columns, tables))
    _check_device(recipe.train.device, model)
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
    absolute_paths = {name: path and _absolute(path) for name, path in paths.items()}
    evaluate = recipe.evaluate
    if isinstance(train.objective, AmountLoss):
        look = partial(look_at_labels, rows.train, columns, tables, loaded)
        train, evaluate = _complete_amounts(train.objective, train, evaluate, look, columns)
    _check_evaluation(evaluate, columns, model, train.objective, validates=rows.valid is not None)
    changes = {
        "data": data,
        "transforms": transforms,
        "columns": columns,
        "tables": Tables(list=tables),
        "model": model,
        "train": train,
        "evaluate": evaluate,
    }
    resolved = structs.replace(recipe, **changes, **absolute_paths)
    return ResolvedRecipe(recipe=resolved, rows=rows, transforms=loaded, notes=(*processor_notes, *notes))


def _complete_amounts(
    loss: AmountLoss, train: Training, evaluate: Evaluation, look: Callable[[], LabelFacts], columns: Columns
) -> tuple[Training, Evaluation]:
    """The settings with the facts of the labels, and a metric of amounts."""
    if not is_complete(loss):
        train = structs.replace(train, objective=with_facts(loss, look(), columns))
    if evaluate.metric == Evaluation().metric:
        evaluate = structs.replace(evaluate, metric="poisson_deviance" if isinstance(loss, Poisson) else "rmse")
    return train, evaluate


def _label_values(recipe: Recipe, columns: Columns) -> LabelValues:
    """What the loss needs labels to be."""
    loss = recipe.train.objective
    wanted = wanted_values(loss)
    if recipe.columns is not None and columns.label_values not in ("clicks", wanted):
        kind = loss.__struct_config__.tag
        raise SpecError(
            f"columns.label_values={columns.label_values} with train.objective.kind={kind}",
            f"{wanted}, or no columns.label_values",
        )
    if wanted == "clicks" and columns.label_values != "clicks" and recipe.columns is None:
        kind = "poisson" if columns.label_values == "amounts" else "squared"
        raise SpecError(
            f"label {', '.join(columns.labels)} is an amount, and train.objective is a loss of 0 and 1",
            f"train.objective.kind: {kind}, or a condition such as {columns.labels[0]} >= 4",
        )
    return wanted


def _absolute(path: str) -> str:
    return path if isinstance(parse_folder(path), StorageFolder) else str(Path(path).absolute())


def make_model(resolved: ResolvedRecipe, *, on_meta: bool = False, reads: bool = True) -> nn.Module:
    """The model of a recipe; see `build_model`. A graph is read from the training rows, on each rank, if it `reads`."""
    config, pairs = resolved.recipe.model, None
    if isinstance(config, GraphConfig) and reads:
        pairs = Pairs.of_batches(evaluation_batches(resolved, resolved.rows.train), config.user, config.item)
    recipe = resolved.recipe
    memory = (
        recipe.memory_bytes if recipe.memory_bytes is None else recipe.memory_bytes // (1 + resolved.has_second_copy)
    )
    build = partial(build_model, on_meta=on_meta, pairs=pairs, memory_bytes=memory, samples=recipe.most_samples)
    return _with_second_copy(resolved, build)


def build_model(
    parts: ModelParts, *, on_meta: bool = False, pairs: Pairs | None = None, memory_bytes: int | None = None,
    samples: int = 0,
) -> nn.Module:  # fmt: skip
    """The model with initial weights from the seed; with `on_meta` its tables are on the meta device.

    Meta tables take no memory and get their rows when the model is sharded. `pairs`: of a model's graph; None: none.
    `memory_bytes`: of a GPU, for tables; None: most of what is free. `samples`: of a batch.
    """
    torch.manual_seed(parts.seed)
    model, device = parts.model, "meta" if on_meta else "cpu"
    if isinstance(model, RetrievalConfig):
        tower_parts = TowerParts(parts.tables, parts.seed, device, parts.merge_shared)
        if isinstance(model, GraphConfig):
            return make_graph_tower(tower_parts, model, pairs or Pairs.none())
        towers = make_two_tower(tower_parts, model)
        return towers if on_meta else move_to_device(towers, parts.device, memory_bytes, samples)
    embeddings = make_embeddings(parts.tables, seed=parts.seed, device=device, merge_shared=parts.merge_shared)
    dense, tasks = len(parts.columns.dense), len(parts.tasks)
    match model:
        case UserModel(module=name, args=args):
            module = _make_user_model(name, embeddings, dense, tasks, args)
        case SasRecConfig() | HstuConfig():
            module = make_sequence_model(model, embeddings)
        case _:
            module = make_click_model(model, embeddings, dense, tasks)
    whole = family_of(model).reads_whole_tables
    return module if on_meta else move_to_device(module, parts.device, memory_bytes, samples, whole=whole)


def make_small_model(resolved: ResolvedRecipe) -> nn.Module:
    """The model with tables of one row."""
    one_row = Tables(list=tuple(structs.replace(table, rows=1) for table in resolved.tables))
    return _with_second_copy(replace(resolved, recipe=structs.replace(resolved.recipe, tables=one_row)), build_model)


def _with_second_copy(resolved: ResolvedRecipe, build: Callable[[ModelParts], nn.Module]) -> nn.Module:
    """The model, and its second copy if the objective trains two."""
    parts = resolved.parts
    if not resolved.has_second_copy:
        return build(parts)
    # Built first, so that random numbers go on from the seed of the recipe, as they do for a model alone.
    second = build(structs.replace(parts, tables=second_tables(parts.tables), seed=parts.seed ^ SECOND_SEED))
    return add_second_copy(build(parts), second)


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
    if isinstance(recipe.model, RetrievalConfig):
        assert isinstance(model, RetrievalModel)
        loss = in_batch_softmax if recipe.model.loss == "softmax" else in_batch_bpr
        return InBatch(model, recipe.model.item, model.frequency, loss, hardest=recipe.model.hardest, comm=comm)
    if isinstance(recipe.model, SequenceModel):
        assert isinstance(model, NextItem)
        return NextItems(model, recipe.model.negatives)
    weights = recipe.train.task_weights
    if weights and len(weights) != len(resolved.tasks):
        raise SpecError(f"train.task_weights has {len(weights)} values", f"one for each of {', '.join(resolved.tasks)}")
    if isinstance(recipe.train.objective, CoTeaching):
        return TwoCopies(model, recipe.train.objective, weights, recipe.train.label_smoothing, comm=comm)
    return Clicks(model, weights, recipe.train.label_smoothing, recipe.train.objective)


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
    if slices:
        check_use(recipe.model, "slices", f"slices {', '.join(slices)}")
    if isinstance(recipe.model, RetrievalConfig):
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
        return NextItemEvaluator(model, batches, resolved.tasks[0], recipe.train, **options, comm=comm)
    if slices:
        check_amounts(recipe, slices=slices)
    slicing = Slicing(recipe.evaluate.slices if slices is None else slices, recipe.evaluate.slice_ids)
    name = partial(name_ids, rows, resolved.columns, resolved.tables, resolved.transforms)
    return ClickEvaluator(model, batches, resolved.tasks, recipe.train, slicing, comm=comm, name_ids=name)


def set_threads(recipe: Recipe) -> None:
    """Set the recipe's threads: torch splits sums in matrix products by thread, so they change the bits."""
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)


def make_settings(recipe: Recipe) -> Settings:
    return Settings(train=recipe.train, evaluate=recipe.evaluate, save=recipe.save, log=recipe.log)


def _use_absolute_files(transform: AnyKind | str) -> AnyKind | str:
    if isinstance(transform, str):
        path, colon, name = transform.rpartition(":")
        return f"{Path(path).absolute()}{colon}{name}" if colon else transform
    if isinstance(transform, UserFunction):
        return structs.replace(transform, function=f"{Path(transform.file).absolute()}:{transform.name}")
    if isinstance(transform, MapId) and transform.file:
        return structs.replace(transform, file=str(Path(transform.file).absolute()))
    return transform


def _use_absolute_model(model: Model | str) -> Model:
    if isinstance(model, str):
        model = UserModel(module=model)
    if isinstance(model, UserModel):
        path, name = split_name(model.module)
        return UserModel(module=f"{path.absolute()}:{name}", args=model.args)
    if isinstance(model, TwoTowerConfig) and model.item_pictures is not None:
        folder = str(Path(model.item_pictures.folder).absolute())
        return structs.replace(model, item_pictures=structs.replace(model.item_pictures, folder=folder))
    return model


def _check_device(name: str, model: Model) -> None:
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise SpecError(f"train.device={name!r}", "cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise SpecError(f"train.device={name!r}: torch finds no GPU", "cpu", hint="see rowwise doctor")
    if kind == "cuda":
        check_use(model, "cuda", f"train.device={name}")


def _check_evaluation(settings: Evaluation, columns: Columns, model: Model, loss: AnyLoss, *, validates: bool) -> None:
    """Raise now for names that would fail at the first evaluation."""
    tasks = tasks_of(model, columns)
    if settings.task and settings.task not in tasks:
        raise SpecError(f"evaluate.task={settings.task!r} is not a label", f"one of {', '.join(tasks)}")
    features = [sparse.feature_name for sparse in columns.sparse]
    missing = [name for name in settings.slices if name not in features]
    if missing:
        raise SpecError(f"evaluate.slices: no feature {', '.join(missing)}", f"some of {', '.join(features)}")
    metrics = ranking_metrics(model.ks) if isinstance(model, RankingModel) else CLICK_METRICS
    if isinstance(loss, AmountLoss):
        metrics = [name for name in AMOUNT_METRICS if name in metric_names(loss)]
    if (validates or settings.metric != Evaluation().metric) and settings.metric not in metrics:
        raise SpecError(f"evaluate.metric={settings.metric!r} is not measured", f"one of {', '.join(metrics)}")


def _fit_columns(columns: Columns, model: Model | str, *, named: bool) -> tuple[Columns, tuple[str, ...]]:
    """The columns as the model takes them, and a note on those that it does not use; `named`: by the recipe."""
    if isinstance(model, SequenceModel):
        _check_lists(columns, model)
        return columns, ()
    if not columns.labels:
        raise SpecError("columns.labels is empty", "at least one label column")
    if not isinstance(model, RetrievalConfig):
        return columns, ()
    users, items, dense = _sides(model)
    _check_towers(columns, kind_of(model), users, items)
    fitted = _sort_dense(columns, kind_of(model), dense)
    return fitted, _unused_columns(columns, (*users, *items, *dense)) if named else ()


def _sides(model: TwoTowerConfig | GraphConfig) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Features of users, features of items, and dense columns in the order of the towers."""
    if isinstance(model, GraphConfig):
        return (model.user,), (model.item,), ()
    return model.user_features, (model.item, *model.item_features), (*model.user_dense, *model.item_dense)


def _check_lists(columns: Columns, config: SequenceModel) -> None:
    """Raise unless a row is one list of items, and nothing else."""
    features = [sparse.feature_name for sparse in columns.sparse]
    others = [*columns.labels, *(dense.column for dense in columns.dense)]
    if len(features) != 1 or others:
        raise SpecError(
            f"model.kind={kind_of(config)}: columns {', '.join((*features, *others))}",
            "one sparse column, the lists of items, and labels: []",
        )


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


def _make_user_model(name: str, embeddings: AnyTables, dense: int, tasks: int, args: dict[str, Any]) -> nn.Module:
    try:
        return load_class(name)(embeddings, dense, tasks, **args)
    except TypeError as error:
        raise SpecError(
            f"model: {name}: {error}", "a class that takes (embeddings, dense_features, tasks, **args)"
        ) from error

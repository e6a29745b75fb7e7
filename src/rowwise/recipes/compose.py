"""From a recipe to what a trainer needs: rows, tables, model, loss and evaluation, each made by one function.

The only code that knows all the parts. Nothing is trained here, and nothing is written.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn

from rowwise.batch import Batch
from rowwise.comm.seam import Comm
from rowwise.errors import SpecError
from rowwise.hashing.embeddings import AnyTables, make_embeddings
from rowwise.ingest.batch_shard import BatchShard
from rowwise.ingest.batcher import Batcher, Batching, Position
from rowwise.ingest.columns import Columns
from rowwise.ingest.service.local import Workers
from rowwise.ingest.transform import AnyKind, LoadedTransforms, MapId, serving
from rowwise.ingest.transform import UserFunction as OwnTransform
from rowwise.ingest.transform import load as load_transforms
from rowwise.models.dcn import DCN
from rowwise.models.deepfm import DeepFM
from rowwise.models.dlrm import DLRM
from rowwise.models.frequency import ItemFrequency
from rowwise.models.two_tower import Tower, TwoTower
from rowwise.models.wide import wide_tables
from rowwise.models.wide_deep import WideDeep
from rowwise.plan import Forecast
from rowwise.processor import read_processor
from rowwise.recipes.id_maps import pin_map, tables_as_stored
from rowwise.recipes.processor_limits import adapt_to_processor
from rowwise.recipes.recipe import (
    DcnConfig,
    DeepFmConfig,
    DlrmConfig,
    Recipe,
    Tables,
    TwoTowerConfig,
    UserModel,
    WideDeepConfig,
)
from rowwise.recipes.rows import DataSplits, RowSelection, absolute, open_parts
from rowwise.recipes.user_model import load_class
from rowwise.recipes.user_model_name import split_name
from rowwise.spec import Table
from rowwise.train.evaluate import ClickEvaluator, Evaluator, Slicing
from rowwise.train.objective import Clicks, InBatch, Objective
from rowwise.train.retrieve import RetrievalEvaluator, ranking_metrics
from rowwise.train.settings import Evaluation
from rowwise.train.trainer import Settings, TrainingJob

OpenBatches = Callable[[Position | None], Batcher]
Aside = Callable[[], Path | None]  # where bad rows go, which is known once there is a folder
CLICK_METRICS = ("ne", "loss", "auc")  # those that a checkpoint can be chosen by


def drop_rows() -> None:
    """Bad rows are left out, and not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRecipe:
    """A recipe in which nothing is left to defaults, and the rows that it names."""

    recipe: Recipe
    parts: DataSplits
    transforms: LoadedTransforms
    notes: tuple[str, ...] = ()  # what is done otherwise than the recipe said, and why

    @property
    def columns(self) -> Columns:
        assert self.recipe.columns is not None
        return self.recipe.columns

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.recipe.tables.list

    @property
    def stored_tables(self) -> tuple[Table, ...]:
        """What they are held as, where ids share rows."""
        return tuple(one for table in self.tables for one in tables_as_stored(table))

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.columns.labels


def resolve(recipe: Recipe) -> ResolvedRecipe:
    """Open the data, and write into the recipe what follows from it."""
    data, transforms = absolute(recipe.data), tuple(map(_absolute, recipe.transforms))
    if isinstance(data.workers, int):
        data = structs.replace(data, workers=Workers(count=data.workers) if data.workers else None)
    parts = open_parts(data, recipe.columns, recipe.tables.list)
    columns = recipe.columns or parts.dataset.columns
    tables = tuple(map(pin_map, recipe.tables.resolve(parts.dataset.tables)))
    if not columns.labels:
        raise SpecError("columns.labels is empty: want at least one column to learn")
    if data.label is not None and data.label not in columns.labels:
        want = "want one of them, or no data.label, as columns.labels says it"
        raise SpecError(f"data.label={data.label!r}: the labels are {', '.join(columns.labels)}: {want}")
    columns.check_tables(tables)
    model, notes = recipe.model, ()
    if isinstance(model, str):
        model = UserModel(module=model)
    if isinstance(model, UserModel):
        path, name = split_name(model.module)
        model = UserModel(module=f"{path.absolute()}:{name}", args=model.args)
    if isinstance(model, TwoTowerConfig):
        _check_towers(columns, model)
        given, columns = columns, _in_order(columns, model)
        notes = _outside(given, model) if recipe.columns is not None else ()
    _check_device(recipe.train.device)
    train, replaced = adapt_to_processor(recipe.train, read_processor())
    train = structs.replace(train, threads=train.threads or torch.get_num_threads())
    paths = {"init_from": recipe.init_from, "plan": recipe.plan}
    if recipe.hardware is not None and recipe.hardware.endswith(".json"):  # else it is a preset
        paths["hardware"] = recipe.hardware
    absolute_paths = {name: path and str(Path(path).absolute()) for name, path in paths.items()}
    _check_evaluation(recipe.evaluate, columns, model, validates=parts.valid is not None)
    changed = {
        "data": data,
        "transforms": transforms,
        "columns": columns,
        "tables": Tables(list=tables),
        "model": model,
        "train": train,
    }
    resolved = structs.replace(recipe, **changed, **absolute_paths)
    return ResolvedRecipe(
        recipe=resolved, parts=parts, transforms=load_transforms(transforms), notes=(*replaced, *notes)
    )


def make_model(resolved: ResolvedRecipe, *, described: bool = False) -> nn.Module:
    """The model with its initial weights, which follow from the seed; or with tables that are only described.

    Those take no memory, and get their rows when the model is sharded.
    """
    recipe, tasks, dense = resolved.recipe, len(resolved.tasks), len(resolved.columns.dense)
    torch.manual_seed(recipe.seed)
    model = recipe.model
    if isinstance(model, TwoTowerConfig):
        return _two_tower(resolved, model).to(recipe.train.device)
    where, merge_shared = "meta" if described else "cpu", recipe.train.merge_shared
    embeddings = make_embeddings(resolved.tables, seed=recipe.seed, device=where, merge_shared=merge_shared)
    match model:
        case DlrmConfig(bottom=bottom, top=top):
            made: nn.Module = DLRM(embeddings, dense, (*bottom, resolved.tables[0].dim), (*top, tasks))
        case DeepFmConfig(deep=deep):
            made = DeepFM(embeddings, dense, (*deep, tasks))
        case DcnConfig(deep=deep, crosses=crosses, rank=rank, structure=structure):
            made = DCN(embeddings, dense, (*deep, tasks), crosses=crosses, rank=rank, structure=structure)
        case WideDeepConfig(deep=deep, wide=wide):
            weights = None if wide is None else wide_tables(resolved.tables, tasks, wide)
            made = WideDeep(embeddings, dense, (*deep, tasks), wide=weights)
        case UserModel(module=name, args=args):
            made = _own(name, embeddings, dense, tasks, args)
        case str():
            raise AssertionError(f"resolve left the model as {model!r}")
    return made if described else made.to(recipe.train.device)


def make_job(
    resolved: ResolvedRecipe,
    model: nn.Module,
    batches: OpenBatches,
    comm: Comm | None = None,
    forecast: Forecast | None = None,
    aside: Aside = drop_rows,
) -> TrainingJob:
    """What a trainer trains on these batches, on one of several ranks."""
    parts = resolved.parts
    return TrainingJob(
        model=model,
        objective=make_objective(resolved, model),
        batches=batches,
        tasks=resolved.tasks,
        evaluate=None if parts.valid is None else make_evaluator(resolved, model, parts.valid, comm=comm, aside=aside),
        forecast=forecast,
    )


def deal_of(comm: Comm | None) -> BatchShard:
    """This rank's part of batches."""
    return BatchShard() if comm is None else BatchShard(rank=comm.rank, world=len(comm.ranks))


def make_objective(resolved: ResolvedRecipe, model: nn.Module) -> Objective:
    how = resolved.recipe
    if isinstance(how.model, TwoTowerConfig):
        assert isinstance(model, RetrievalModel)
        return InBatch(model.towers, how.model.item, model.frequency)
    weights = how.train.task_weights
    if weights and len(weights) != len(resolved.tasks):
        raise SpecError(f"train.task_weights has {len(weights)} numbers for the labels {', '.join(resolved.tasks)}")
    return Clicks(model, weights)


def make_batcher(
    resolved: ResolvedRecipe,
    rows: RowSelection,
    position: Position | None = None,
    deal: BatchShard | None = None,
    aside: Path | None = None,
) -> Batcher:
    """The training batches, or a rank's part of each; bad rows go to the folder `aside`, if the recipe says so."""
    data, train, seed = resolved.recipe.data, resolved.recipe.train, resolved.recipe.seed
    how = Batching(
        size=train.batch,
        seed=seed,
        shuffle=train.shuffle,
        ahead=train.ahead,
        share=rows.share,
        where=rows.where,
        together=data.together,
        deal=deal or BatchShard(),
        aside=str(aside) if aside is not None and data.on_bad_rows == "quarantine" else None,
    )
    return Batcher(rows.reader, resolved.columns, resolved.tables, how, position, resolved.transforms)


def ordered_batches(
    resolved: ResolvedRecipe, rows: RowSelection, deal: BatchShard | None = None, aside: Path | None = None
) -> Iterable[Batch]:
    """All rows once, as they come, in batches for evaluation, or a rank's part of each.

    Bad rows are left out where training leaves them out, and go to the folder `aside`, if there is one.
    """
    recipe = resolved.recipe
    how = Batching(
        size=recipe.evaluate.batch,
        shuffle=False,
        ahead=recipe.train.ahead,
        share=rows.share,
        where=rows.where,
        deal=deal or BatchShard(),
        aside=str(aside or "") if recipe.data.on_bad_rows == "quarantine" else None,
    )
    # Nothing is measured on fewer rows because training takes fewer.
    return Batcher(rows.reader, resolved.columns, resolved.tables, how, None, serving(resolved.transforms))


def make_evaluator(
    resolved: ResolvedRecipe,
    model: nn.Module,
    rows: RowSelection,
    slices: tuple[str, ...] | None = None,
    comm: Comm | None = None,
    aside: Aside = drop_rows,
) -> Evaluator:
    """Measures the model on rows; `slices` replace those of the recipe, `aside` is as for `ordered_batches`."""
    recipe = resolved.recipe
    if isinstance(recipe.model, TwoTowerConfig):
        assert isinstance(model, RetrievalModel)
        if slices:
            raise SpecError(f"slices {', '.join(slices)}: a model of two towers is measured over all items: want none")
        train = resolved.parts.train
        return RetrievalEvaluator(
            model.towers,
            recipe.model.item,
            known=lambda: ordered_batches(resolved, train, None, aside()),
            asked=lambda: ordered_batches(resolved, rows, None, aside()),
            task=resolved.tasks[0],
            ks=recipe.model.ks,
        )
    chosen = recipe.evaluate.slices if slices is None else slices
    slicing = Slicing(chosen, recipe.evaluate.slice_ids)
    deal = deal_of(comm)

    def batches() -> Iterable[Batch]:
        return ordered_batches(resolved, rows, deal, aside())

    return ClickEvaluator(model, batches, resolved.tasks, recipe.train, slicing, comm=comm)


def make_settings(recipe: Recipe) -> Settings:
    """How the run goes."""
    return Settings(train=recipe.train, evaluate=recipe.evaluate, save=recipe.save, log=recipe.log)


class RetrievalModel(nn.Module):
    """Two towers and how often items come, so that a checkpoint holds both."""

    def __init__(self, towers: TwoTower, frequency: ItemFrequency | None) -> None:
        super().__init__()
        self.towers, self.frequency = towers, frequency

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [B, 1] of each sample's user with its item."""
        return self.towers(batch)


def _absolute(one: AnyKind | str) -> AnyKind | str:
    """A transform whose files are found from any folder."""
    if isinstance(one, str):
        path, colon, name = one.rpartition(":")
        return f"{Path(path).absolute()}{colon}{name}" if colon else one
    if isinstance(one, OwnTransform):
        return structs.replace(one, function=f"{Path(one.file).absolute()}:{one.name}")
    if isinstance(one, MapId) and one.file:
        return structs.replace(one, file=str(Path(one.file).absolute()))
    return one


def _check_device(name: str) -> None:
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise SpecError(f"train.device={name!r}: want cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise SpecError(f"train.device={name!r}: torch finds no such device here: want cpu (rowwise doctor says more)")


def _check_evaluation(how: Evaluation, columns: Columns, model: object, *, validates: bool) -> None:
    """What would only be missed at the first evaluation is missed now."""
    if how.task and how.task not in columns.labels:
        raise SpecError(f"evaluate.task={how.task!r} is no label; the labels are {', '.join(columns.labels)}")
    features = [sparse.feature_name for sparse in columns.sparse]
    missing = [name for name in how.slices if name not in features]
    if missing:
        raise SpecError(f"evaluate.slices names {', '.join(missing)}; the features are {', '.join(features)}")
    measured = ranking_metrics(model.ks) if isinstance(model, TwoTowerConfig) else CLICK_METRICS
    if (validates or how.metric != Evaluation().metric) and how.metric not in measured:
        raise SpecError(f"evaluate.metric={how.metric!r} is not measured here; there are {', '.join(measured)}")


def _two_tower(resolved: ResolvedRecipe, how: TwoTowerConfig) -> RetrievalModel:
    sides: list[Tower] = []
    for features, dense in ((how.user_features, how.user_dense), ((how.item, *how.item_features), how.item_dense)):
        tables = tuple(t for t in resolved.tables if set(t.feature_names) & set(features))
        mixed = [t.name for t in tables if not set(t.feature_names) <= set(features)]
        if mixed or not tables:
            raise SpecError(
                f"two_tower: tables {', '.join(mixed) or 'none'} of {', '.join(features)}: want one tower's only"
            )
        seed, merge_shared = resolved.recipe.seed, resolved.recipe.train.merge_shared
        sides.append(Tower(make_embeddings(tables, seed=seed, merge_shared=merge_shared), len(dense), how.sizes))
    return RetrievalModel(TwoTower(sides[0], sides[1], how.temperature), ItemFrequency() if how.correct else None)


def _check_towers(columns: Columns, how: TwoTowerConfig) -> None:
    """Each feature that is named is there, and in one tower; there is one label, which says whether they met."""
    if len(columns.labels) != 1:
        raise SpecError(f"two_tower: labels {', '.join(columns.labels)}: want one, whether the two belong together")
    there = [sparse.feature_name for sparse in columns.sparse]
    item_side = (how.item, *how.item_features)
    missing = [name for name in (*how.user_features, *item_side) if name not in there]
    if missing:
        raise SpecError(f"two_tower: no feature {', '.join(missing)}; there are {', '.join(there)}")
    both = [name for name in how.user_features if name in item_side]
    if both:
        raise SpecError(f"two_tower: feature {', '.join(both)} is in both towers: want it in one")


def _in_order(columns: Columns, how: TwoTowerConfig) -> Columns:
    """The user's numbers before the item's, as the towers take them."""
    by_name = {dense.column: dense for dense in columns.dense}
    wanted = (*how.user_dense, *how.item_dense)
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise SpecError(f"two_tower: no dense column {', '.join(missing)}; there are {', '.join(by_name) or 'none'}")
    return structs.replace(columns, dense=tuple(by_name[name] for name in wanted))


def _outside(columns: Columns, how: TwoTowerConfig) -> tuple[str, ...]:
    """A line for what is in neither tower."""
    named = {how.item, *how.item_features, *how.user_features, *how.user_dense, *how.item_dense}
    names = (*(s.feature_name for s in columns.sparse), *(d.column for d in columns.dense))
    left = [name for name in names if name not in named]
    return (f"columns {', '.join(left)}: not used, because neither tower names them",) if left else ()


def _own(name: str, embeddings: AnyTables, dense: int, tasks: int, args: dict[str, Any]) -> nn.Module:
    try:
        return load_class(name)(embeddings, dense, tasks, **args)
    except TypeError as error:
        want = "want a class that takes (embeddings, dense_features, tasks, **args)"
        raise SpecError(f"model: {name}: {error}; {want}") from error

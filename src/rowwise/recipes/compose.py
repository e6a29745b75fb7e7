"""Builds the parts of a training job from a recipe: rows, tables, model, loss and evaluation.

Nothing is trained or written here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from msgspec import structs
from torch import nn

from rowwise.base.errors import SpecError
from rowwise.base.processor import read_processor
from rowwise.base.storage.folder import StorageFolder, parse_folder
from rowwise.ingest.columns import Columns
from rowwise.ingest.labels import LabelValues
from rowwise.ingest.service.local import Workers
from rowwise.ingest.transform import AnyKind, MapId, UserFunction
from rowwise.ingest.transform import load as load_transforms
from rowwise.models.graph_tower import Pairs
from rowwise.models.second_copy import add_second_copy, second_tables
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.plan import Forecast
from rowwise.recipes.code import split_name
from rowwise.recipes.column_tables import add_column_tables, replace_vocabularies
from rowwise.recipes.families import BuildOptions, EvaluationScope, Family, OwnFamily, SequenceFamily
from rowwise.recipes.id_maps import pin_map
from rowwise.recipes.label_facts import LabelFacts, inspect_labels, is_complete, with_facts
from rowwise.recipes.model_configs import Model, UserModel, map_files
from rowwise.recipes.model_kinds import check_use, family_of
from rowwise.recipes.processor import choose_threads, replace_unsupported
from rowwise.recipes.recipe import PROBE, Recipe, Tables
from rowwise.recipes.resolved import ModelParts, OpenBatches, QuarantineFolder, ResolvedRecipe, no_quarantine, tasks_of
from rowwise.recipes.retrieval import GraphFamily, TowerFamily
from rowwise.recipes.rows import RowSelection, open_data, use_absolute_paths
from rowwise.train.evaluate import Evaluator
from rowwise.train.loss_settings import AmountLoss, AnyLoss, Poisson, wanted_values
from rowwise.train.objective import Objective
from rowwise.train.settings import Evaluation, Training
from rowwise.train.trainer import Settings, TrainingJob

SECOND_SEED = 1 << 62  # flips a bit of the seed for the initial weights of a second copy
FAMILIES: dict[str, type[Family]] = {  # by `ModelKind.name`
    "clicks": Family,
    "own": OwnFamily,
    "sequences": SequenceFamily,
    "towers": TowerFamily,
    "graph": GraphFamily,
}


def parts_of(model: Model | str) -> Family:
    """The family of a model's settings; a string names a user class."""
    config = UserModel(module=model) if isinstance(model, str) else model
    return FAMILIES[family_of(config).name](config)


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
    columns, notes = parts_of(recipe.model).fit(columns, named=recipe.columns is not None)
    if data.label is not None and recipe.columns is not None and data.label not in columns.labels:
        raise SpecError(
            f"data.label={data.label!r}: the labels are {', '.join(columns.labels) or 'none'}",
            "one of the labels, or no data.label",
        )
    columns.check_tables(tables)
    columns = structs.replace(columns, label_values=_label_values(recipe, columns))
    # Paths become absolute, so that a run can be resumed from another working directory.
    model = _use_absolute_model(recipe.model)
    notes = (*notes, *parts_of(model).check(columns, tables))
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
        statistics = partial(inspect_labels, rows.train, columns, tables, loaded)
        train, evaluate = _complete_amounts(train.objective, train, evaluate, statistics, columns)
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
    loss: AmountLoss, train: Training, evaluate: Evaluation, statistics: Callable[[], LabelFacts], columns: Columns
) -> tuple[Training, Evaluation]:
    """The settings completed by label statistics, and with a metric of amounts."""
    if not is_complete(loss):
        train = structs.replace(train, objective=with_facts(loss, statistics(), columns))
    if evaluate.metric == Evaluation().metric:
        evaluate = structs.replace(evaluate, metric="poisson_deviance" if isinstance(loss, Poisson) else "rmse")
    return train, evaluate


def _label_values(recipe: Recipe, columns: Columns) -> LabelValues:
    """The kind of labels that the loss requires."""
    loss = recipe.train.objective
    required = wanted_values(loss)
    if recipe.columns is not None and columns.label_values not in ("clicks", required):
        kind = loss.__struct_config__.tag
        raise SpecError(
            f"columns.label_values={columns.label_values} with train.objective.kind={kind}",
            f"{required}, or no columns.label_values",
        )
    if required == "clicks" and columns.label_values != "clicks" and recipe.columns is None:
        kind = "poisson" if columns.label_values == "amounts" else "squared"
        raise SpecError(
            f"label {', '.join(columns.labels)} is an amount, and train.objective is a loss of 0 and 1",
            f"train.objective.kind: {kind}, or a condition such as {columns.labels[0]} >= 4",
        )
    return required


def _absolute(path: str) -> str:
    return path if isinstance(parse_folder(path), StorageFolder) else str(Path(path).absolute())


def make_model(resolved: ResolvedRecipe, *, on_meta: bool = False, reads: bool = True) -> nn.Module:
    """The model of a recipe; see `build_model`. `reads`: each rank reads a model's graph from the training rows."""
    recipe = resolved.recipe
    pairs = parts_of(recipe.model).pairs(resolved) if reads else None
    memory = (
        recipe.memory_bytes if recipe.memory_bytes is None else recipe.memory_bytes // (1 + resolved.has_second_copy)
    )
    build = partial(build_model, on_meta=on_meta, pairs=pairs, memory_bytes=memory, samples=recipe.max_samples)
    return _with_second_copy(resolved, build)


def build_model(
    parts: ModelParts, *, on_meta: bool = False, pairs: Pairs | None = None, memory_bytes: int | None = None,
    samples: int = 0,
) -> nn.Module:  # fmt: skip
    """The model with initial weights from the seed; with `on_meta` its tables are on the meta device.

    Meta tables take no memory and get their rows when the model is sharded. `pairs`: edges of a model's graph.
    `memory_bytes`: budget for tables on a GPU; None: most of its free memory. `samples`: batch size.
    """
    torch.manual_seed(parts.seed)
    return parts_of(parts.model).build(parts, BuildOptions(on_meta, pairs, memory_bytes, samples))


def make_small_model(resolved: ResolvedRecipe) -> nn.Module:
    """The model with tables of one row."""
    one_row = Tables(list=tuple(structs.replace(table, rows=1) for table in resolved.tables))
    return _with_second_copy(replace(resolved, recipe=structs.replace(resolved.recipe, tables=one_row)), build_model)


def _with_second_copy(resolved: ResolvedRecipe, build: Callable[[ModelParts], nn.Module]) -> nn.Module:
    """The model, and its second copy if the objective trains two."""
    parts = resolved.parts
    if not resolved.has_second_copy:
        return build(parts)
    # Built first: afterwards the random state is that of a model without a copy.
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


def make_objective(resolved: ResolvedRecipe, model: nn.Module, comm: Comm | None = None) -> Objective:
    return parts_of(resolved.recipe.model).objective(resolved, model, comm)


def make_evaluator(
    resolved: ResolvedRecipe,
    model: nn.Module,
    rows: RowSelection,
    slices: tuple[str, ...] | None = None,
    comm: Comm | None = None,
    quarantine: QuarantineFolder = no_quarantine,
) -> Evaluator:
    """An evaluator over some rows; `slices` replace the recipe's."""
    if slices:
        check_use(resolved.recipe.model, "slices", f"slices {', '.join(slices)}")
    return parts_of(resolved.recipe.model).evaluator(model, EvaluationScope(resolved, rows, slices, comm, quarantine))


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
    def absolute_class(name: str) -> str:
        path, class_name = split_name(name)
        return f"{path.absolute()}:{class_name}"

    model = UserModel(module=model) if isinstance(model, str) else model
    return map_files(model, absolute_class, lambda folder: str(Path(folder).absolute()))


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
    family = parts_of(model)
    if (validates or settings.metric != Evaluation().metric) and settings.metric not in family.metrics(loss):
        metrics = ", ".join(family.metrics(loss))
        raise SpecError(f"evaluate.metric={settings.metric!r} is not measured", f"one of {metrics}")

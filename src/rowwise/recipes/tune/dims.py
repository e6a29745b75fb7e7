"""`tune_dims`: dims of tables under a budget of parameters, by the pruning curves of one trained model.

1. The recipe is trained as it is.
2. Curves: for each table and each smaller dim, the rise of the log loss of validation rows when the table's vectors are
   projected onto their first principal directions, and all other tables stay.
3. The dims of the least sum of rises within the budget.
4. The recipe is trained with these dims from scratch, and with one dim for all tables that fits the same budget.

All runs are measured on validation rows; test rows are not read. Finished runs are kept: the same command continues.

Known limits: rises are added, although each was measured alone; retraining may make up for a part of each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import structs
from torch import Tensor, nn

from rowwise.base.errors import DataError, SpecError
from rowwise.base.records import DimsOutcome, PrunedTable
from rowwise.base.textfile import decode_json, read_bytes, replace_file
from rowwise.models.inference import evaluation_mode
from rowwise.recipes.compose import make_small_model, resolve
from rowwise.recipes.explain.importance import Scorer
from rowwise.recipes.explain.rows import HeldRows, pieces
from rowwise.recipes.model_configs import kind_of
from rowwise.recipes.model_kinds import CLICKS, family_of
from rowwise.recipes.recipe import About, Recipe, Tables, check_amounts
from rowwise.recipes.resolved import ResolvedRecipe, evaluation_batches
from rowwise.recipes.run_result import RESULT, RunResult
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import write
from rowwise.recipes.trained import load_trained
from rowwise.recipes.tune.study import COMMAND, IN_USE, StudyPlan, check_recipe, claim, locked
from rowwise.tables.embedding import Vectors
from rowwise.tables.ids.allocate import SizeOption, allocate
from rowwise.tables.spec import Pooling, Table
from rowwise.train.on_device import to_device

ROWS = 20_000  # of a sample, to find directions and to measure curves
SECONDS = 60.0  # of reading a sample
DIMS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
RECIPE, OUTCOME, WHOLE, CURVES = "dims-{}.yaml", "dims-{}.json", "whole", "curves.json"
AnyDims = Mapping[str, int]
Tell = Callable[[str], None]


class Directions(NamedTuple):
    """The mean of a table's vectors, and their principal directions, the strongest first."""

    mean_D: Tensor
    basis_DD: Tensor

    def project(self, x_BD: Tensor, dim: int) -> Tensor:
        basis_DK = self.basis_DD[:, :dim]
        return self.mean_D + (x_BD - self.mean_D) @ basis_DK @ basis_DK.t()


def tune_dims(
    recipe: str, folder: Path, ratio: float, *, changes: Sequence[str] = (), tell: Tell = lambda line: None
) -> DimsOutcome:
    """Choose the dims that make all tables together `ratio` times smaller, and write the recipe with them.

    Args:
        recipe: name or path of a recipe with validation rows, whose model takes tables of any dims.
        folder: folder of the runs, the recipe and the outcome.
        ratio: parameters of all tables over those of the chosen ones.
        changes: --set changes of the recipe.
        tell: called with a line before each step.
    """
    plan = StudyPlan(recipe=recipe, changes=tuple(changes), folder=folder, trials=0, until_s=0.0)
    loaded = plan.load()
    check_recipe(loaded)
    claim(plan)
    with locked(folder / COMMAND, IN_USE):
        return _choose(loaded, folder, ratio, tell)


def _choose(recipe: Recipe, folder: Path, ratio: float, tell: Tell) -> DimsOutcome:
    resolved = resolve(recipe)
    tables = pruned_tables(resolved)
    parameters = _count(resolved.tables, {})
    budget, kept = int(parameters / ratio), parameters - _count(tables, {})
    uniform = uniform_dims(tables, budget - kept)
    runs = partial(_train, recipe, resolved, folder, tell)
    whole = runs(WHOLE, {})
    path = folder / CURVES
    if not path.is_file():  # kept, as a sample that took too long to read is another one the next time
        tell("measures each table at smaller dims")
        replace_file(path, msgspec.json.encode(measure_curves(folder / WHOLE / "1", tables)))
    curves = decode_json(read_bytes(path), dict[str, dict[int, float]])
    options = {table.name: _options(table, curves[table.name]) for table in tables}
    chosen = {name: int(option.method) for name, option in allocate(options, budget, kept).chosen.items()}
    outcome = DimsOutcome(
        recipe=recipe.name,
        metric=recipe.evaluate.metric,
        parameters=parameters,
        budget=budget,
        chosen=_count(resolved.tables, chosen),
        uniform=_count(resolved.tables, uniform),
        values={
            WHOLE: whole,
            "chosen": runs(f"chosen-{ratio:g}", chosen),
            "uniform": runs(f"uniform-{ratio:g}", uniform),
        },
        tables=tuple(
            PrunedTable(
                name=table.name,
                rows=table.rows,
                dim=table.dim,
                chosen=chosen[table.name],
                uniform=uniform[table.name],
                curve=curves[table.name],
            )
            for table in tables
        ),
    )
    path, encoded = folder / RECIPE.format(f"{ratio:g}"), msgspec.json.encode(outcome)
    about = About(what=f"{recipe.name} with 1/{ratio:g} of its tables' parameters", run=f"rowwise train {path}")
    small = structs.replace(_with_dims(recipe, resolved, chosen, f"{recipe.name}-dims"), about=about)
    path.write_text(write(small), "utf-8")
    (folder / OUTCOME.format(f"{ratio:g}")).write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    return outcome


def _options(table: Table, curve: Mapping[int, float]) -> list[SizeOption]:
    """The dims of a table; a dim counts with the largest rise of its own and of larger dims, as less is noise."""
    options: list[SizeOption] = []
    for dim, rise in sorted(curve.items(), reverse=True):
        loss = max(rise, options[-1].loss if options else 0.0)
        options.append(SizeOption(method=str(dim), size_bytes=table.rows * dim, loss=loss))
    return options


def pruned_tables(resolved: ResolvedRecipe) -> tuple[Table, ...]:
    """The tables whose dims are chosen; raises for recipes without such tables."""
    recipe = resolved.recipe
    check_amounts(recipe, "rowwise tune --ratio")
    model: Any = recipe.model
    if family_of(model) is not CLICKS:
        raise SpecError(f"--ratio: model.kind={kind_of(model)}", "a click model with tables of any dims, such as dcn")
    tables = tuple(t for t in resolved.tables if t.pooling is not Pooling.SEQUENCE and t.id_map is None and t.dim > 1)
    if not tables:
        raise SpecError("--ratio: no table has a dim to choose", "pooled tables without id_map, of a dim above 1")
    for table in resolved.tables:
        others = tuple(structs.replace(t, dim=t.dim + (t is table)) for t in resolved.tables)
        try:
            make_small_model(replace(resolved, recipe=structs.replace(recipe, tables=Tables(list=others))))
        except SpecError as error:
            raise SpecError(
                f"--ratio: the model takes tables of one dim ({error})", "one of any dims, such as dcn or wide_deep"
            ) from None
    return tables


def uniform_dims(tables: Sequence[Table], budget: int) -> dict[str, int]:
    """The largest fraction of all dims within a budget of parameters."""
    for most in range(max(table.dim for table in tables), 0, -1):
        dims = {table.name: min(table.dim, most) for table in tables}
        if _count(tables, dims) <= budget:
            return dims
    least = _count(tables, {table.name: 1 for table in tables})
    raise SpecError(f"--ratio: a budget of {budget:,} parameters", f"at least {least:,}, one for each row of a table")


def measure_curves(run: Path, tables: Sequence[Table]) -> dict[str, dict[int, float]]:
    """The rise of the validation log loss by table and dim, ascending; 0 at the own dim."""
    resolved, model = load_trained(run)
    recipe = resolved.recipe
    assert resolved.rows.valid is not None
    train, valid = (
        HeldRows.sample(evaluation_batches(resolved, rows), ROWS, recipe.seed, SECONDS)
        for rows in (resolved.rows.train, resolved.rows.valid)
    )
    task = resolved.tasks.index(recipe.evaluate.task or resolved.tasks[0])
    scorer = Scorer(model=model, task=task, batch=recipe.evaluate.batch, training=recipe.train)
    directions = find_directions(scorer, train, tables)
    base = scorer.loss(valid, scorer.logits(valid.batch))
    curves: dict[str, dict[int, float]] = {}
    for table in tables:
        curve = curves.setdefault(table.name, {})
        for dim in (d for d in DIMS if d < table.dim):
            hook = _embeddings(model).register_forward_hook(partial(_project, table, directions[table.name], dim))
            try:
                curve[dim] = scorer.loss(valid, scorer.logits(valid.batch)) - base
            finally:
                hook.remove()
        curve[table.dim] = 0.0
    return curves


def find_directions(scorer: Scorer, rows: HeldRows, tables: Sequence[Table]) -> dict[str, Directions]:
    """Principal directions of the pooled vectors that the model reads, by table."""
    sums = {
        table.name: (0, torch.zeros(table.dim).double(), torch.zeros(table.dim, table.dim).double()) for table in tables
    }
    with evaluation_mode(scorer.model):
        for piece in pieces(rows.batch, scorer.batch):
            vectors = _embeddings(scorer.model)(to_device(piece, scorer.model, scorer.training.device).sparse)
            for table in tables:
                for name in table.feature_names:
                    x_BD = vectors[name].double().cpu()
                    count, sum_D, squares_DD = sums[table.name]
                    sums[table.name] = count + len(x_BD), sum_D + x_BD.sum(0), squares_DD + x_BD.t() @ x_BD
    directions: dict[str, Directions] = {}
    for name, (count, sum_D, squares_DD) in sums.items():
        mean_D = sum_D / count
        _, basis_DD = torch.linalg.eigh(squares_DD / count - mean_D.outer(mean_D))  # ascending
        directions[name] = Directions(mean_D.float(), basis_DD.flip(1).float())
    return directions


def _project(table: Table, directions: Directions, dim: int, _: nn.Module, __: Any, vectors: Vectors) -> Vectors:
    matrix_BS = vectors.values().clone()
    directions = Directions(*(x.to(matrix_BS) for x in directions))
    for name in table.feature_names:
        columns = vectors.columns[name]
        matrix_BS[:, columns] = directions.project(matrix_BS[:, columns], dim)
    return Vectors.of(matrix_BS, vectors.columns, vectors.sequences)


def _embeddings(model: nn.Module) -> nn.Module:
    """The tables of a click model, without the weights of single ids beside them."""
    module = model.embeddings
    assert isinstance(module, nn.Module)
    return module


def _count(tables: Sequence[Table], dims: AnyDims) -> int:
    return sum(table.rows * dims.get(table.name, table.dim) for table in tables)


def _with_dims(recipe: Recipe, resolved: ResolvedRecipe, dims: AnyDims, name: str) -> Recipe:
    tables = tuple(structs.replace(table, dim=dims.get(table.name, table.dim)) for table in resolved.tables)
    # Threads stay those of the recipe, as they depend on the machine.
    return structs.replace(resolved.recipe, train=recipe.train, name=name, tables=Tables(list=tables), tune={})


def _train(recipe: Recipe, resolved: ResolvedRecipe, folder: Path, tell: Tell, name: str, dims: AnyDims) -> float:
    """The best value on validation rows of a run with these dims; a finished run is read."""
    path = folder / name / "1"
    if not (path / RESULT).is_file() or _read_result(path).status != "finished":
        tell(f"trains {name}")
        begun = (path / "recipe.yaml").is_file()
        run = TrainingRun.resume(path) if begun else TrainingRun.start(_with_dims(recipe, resolved, dims, name), folder)
        run.go(test=False)
    best = _read_result(path).best
    if best is None:
        raise DataError(f"{path} was not evaluated", "validation rows, and evaluate.every in its steps")
    return best.value


def _read_result(path: Path) -> RunResult:
    try:
        return decode_json(read_bytes(path / RESULT), RunResult)
    except msgspec.DecodeError as error:
        raise SpecError(f"{path / RESULT}: {error}", hint="remove the folder, or give another --out") from None

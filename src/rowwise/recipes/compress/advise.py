"""Runs all steps of `rowwise compress`: probe, trials, allocation, maps and the recipe with them.

A killed command continues: the folder keeps the results of long steps.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.base.records import CompressionAdvice, TableAdvice
from rowwise.ingest.transform.mapping import MapId
from rowwise.recipes.compose import set_threads
from rowwise.recipes.compress import schedule
from rowwise.recipes.compress.estimate import TimeLimit
from rowwise.recipes.compress.folder import PROBE, TrialFolder, TrialFolderSpec
from rowwise.recipes.compress.id_order import find_id_order
from rowwise.recipes.compress.probe import probe
from rowwise.recipes.compress.progress import Tell, WorkProgress
from rowwise.recipes.compress.selection import CompressionGoal, TableSelection
from rowwise.recipes.compress.trial_runner import TrialRunner, make_chosen_maps, save_map
from rowwise.recipes.compress.window import DataWindow
from rowwise.recipes.model_kinds import check_use
from rowwise.recipes.recipe import About, Recipe, Tables, check_amounts
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.text import RECIPE, write
from rowwise.tables.idmaps import StoredIds
from rowwise.tables.ids.allocate import Allocation, SizeOption, allocate, list_options
from rowwise.tables.ids.idmap import IdMap
from rowwise.tables.ids.methods import IdHistory, table_bytes
from rowwise.tables.spec import Table

ADVICE = "advice.json"
PROBE_ALL = "probe-all.safetensors"
Maps = Mapping[str, tuple[IdMap, StoredIds]]  # by table: the map, and its entry in a recipe


def check_recipe(recipe: Recipe) -> None:
    """Raise for recipes whose trials cannot be compared."""
    check_use(recipe.model, "compress")
    check_amounts(recipe, "rowwise compress")
    if recipe.init_from is not None:
        raise SpecError(
            f"init_from={recipe.init_from!r}: trials start from initial weights, as compressed tables have other rows",
            "--set init_from=null",
        )


def advise(  # noqa: PLR0913 - one call per command
    window: DataWindow,
    selection: TableSelection,
    goal: CompressionGoal,
    spec: TrialFolderSpec,
    folder: TrialFolder,
    tell: Tell,
    limit: TimeLimit | None = None,
) -> CompressionAdvice:
    """Run the missing trials, choose methods and sizes, and write maps and advice.json.

    If `limit` leaves no time for all sizes, the choice is among the measured ones.
    """
    set_threads(window.earlier.recipe)
    ratios = schedule.ratios_around(selection.ratio)
    progress = WorkProgress(tell, _count_trainings(selection, goal, len(ratios)))
    with progress.step("small model of the history") as report:
        histories = probe(window.earlier, selection.names, folder.path / PROBE, report)
    runner = TrialRunner(
        window=window,
        selection=selection,
        methods=goal.methods,
        spec=spec,
        folder=folder,
        progress=progress,
        histories=histories,
        trials=folder.read(),
        limit=limit or TimeLimit(),
    )
    runner.run_schedule(ratios)
    allocation = _allocate(runner)
    together = runner.compress_together(allocation)
    with progress.step("maps of the whole history") as report:
        if window.whole is not None:
            histories = probe(window.whole, selection.names, folder.path / PROBE_ALL, report)
        maps = _write_maps(folder, selection, make_chosen_maps(selection, allocation, histories, spec.seed))
    results = runner.results
    tables = tuple(
        _table_advice(runner, table, allocation.chosen[table.name], maps, histories[table.name])
        for table in selection.chosen
    )
    advice = CompressionAdvice(
        recipe=window.earlier.recipe.name,
        history=spec.history,
        later=window.description,
        rows=spec.rows,
        full=results.full,
        noise=results.noise,
        seeds=schedule.SEEDS,
        full_bytes=selection.full_bytes,
        budget_bytes=selection.budget_bytes,
        size_bytes=selection.kept_bytes + sum(table.size_bytes for table in tables),
        ne=allocation.loss,
        error=allocation.error,
        together=None if together is None else results.subtract_full(together),
        tables=tables,
        left=selection.kept,
        warnings=_warnings(tables, window, results.noise, len(runner.left_out)),
    )
    folder.write(ADVICE, msgspec.json.format(msgspec.json.encode(advice), indent=1) + b"\n")
    return advice


def write_recipe(recipe: Recipe, resolved: ResolvedRecipe, advice: CompressionAdvice, folder: TrialFolder) -> Path:
    """Write the resolved recipe with the maps; threads stay those of `recipe`, as they depend on the machine."""
    maps = {table.name: StoredIds(file=table.file, digest=table.digest) for table in advice.tables if table.file}
    tables = tuple(structs.replace(t, id_map=maps.get(t.name, t.id_map)) for t in resolved.tables)
    about = About(
        what=f"{recipe.name} with tables in 1/{advice.full_bytes / advice.size_bytes:.3g} of their bytes",
        run=f"rowwise train {folder.path / RECIPE}",
    )
    changes = {"name": f"{recipe.name}-compressed", "about": about, "tables": Tables(list=tables)}
    return folder.write(RECIPE, write(structs.replace(resolved.recipe, train=recipe.train, **changes)))


def _count_trainings(selection: TableSelection, goal: CompressionGoal, ratios: int) -> int:
    """The approximate number of trainings: small model, full model, each table, all together, maps."""
    at_other_ratios = min(schedule.BEST, len(goal.methods)) * (ratios - 1)
    return 3 + schedule.SEEDS + len(selection.chosen) * (len(goal.methods) + at_other_ratios)


def _allocate(runner: TrialRunner) -> Allocation:
    """The best allocation of the budget over all measurements."""
    selection, results = runner.selection, runner.results
    options = {t.name: list_options(results.options(t.name), table_bytes(t, None)) for t in selection.chosen}
    return allocate(options, selection.budget_bytes, selection.kept_bytes)


def _write_maps(folder: TrialFolder, selection: TableSelection, id_maps: Mapping[str, IdMap]) -> Maps:
    folder.maps.mkdir(exist_ok=True)
    paths = {name: folder.maps / f"{name}.idmap" for name in id_maps}
    for path in set(folder.maps.glob("*.idmap")) - set(paths.values()):
        path.unlink()  # left from another budget
    return {name: (id_map, save_map(paths[name], selection.table(name), id_map)) for name, id_map in id_maps.items()}


def _table_advice(runner: TrialRunner, table: Table, option: SizeOption, maps: Maps, history: IdHistory) -> TableAdvice:
    id_map, stored = maps.get(table.name, (None, StoredIds(file="")))
    window = runner.window.earlier
    numbered = {transform.to for transform in window.recipe.transforms if isinstance(transform, MapId)}
    # Hashed ids have no order, and a vocabulary's is its own: `direct` ids are the numbers in the data.
    is_direct = any(
        column.ids == "direct" and column.column not in numbered
        for column in window.columns.sparse
        if column.feature_name in table.feature_names
    )
    return TableAdvice(
        name=table.name,
        ids=table.rows,
        full_bytes=table_bytes(table, None),
        points=runner.results.points(table.name),
        method=option.method,
        size_bytes=table_bytes(table, id_map),
        map_bytes=id_map.map_bytes if id_map else 0,
        ne=option.loss,
        measured=option.measured,
        file=stored.file,
        digest=stored.digest,
        ordered=find_id_order(history.counts_N, history.vectors_ND) if is_direct else None,
    )


def _warnings(tables: tuple[TableAdvice, ...], window: DataWindow, noise: float, left_out: int) -> tuple[str, ...]:
    lines = []
    if left_out:
        lines.append(f"no time for {left_out} trials of other sizes; give more --minutes for a better allocation")
    correlations = {table.name: table.ordered for table in tables if table.ordered is not None}
    if correlations:
        names = f"table{'s' * (len(correlations) > 1)} {', '.join(correlations)}"
        correlation = f"(correlation up to {max(correlations.values()):.2f}), as if numbered by popularity or time"
        lines.append(
            f"{names}: neighbouring ids are alike {correlation}. All methods scramble ids first, so none benefits"
        )
    if not window.is_later:
        lines.append(f"measured on {window.description}: the quality on ids that appear later is unknown")
    if all(abs(point.ne) <= 2 * noise for table in tables for point in table.points):
        problem = f"no size differs from the full model by more than its noise (two standard deviations of {noise:.5f})"
        lines.append(f"{problem}; take more rows to train and to measure on")
    return tuple(lines)

"""Runs all steps of `rowwise compress`: probe, trials, allocation, maps and the recipe with them.

The results of long steps are kept in the folder and are not computed again.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import structs

from rowwise.errors import SpecError
from rowwise.hashing.allocate import Allocation, SizeOption, allocate, options_of
from rowwise.hashing.idmap import IdMap
from rowwise.hashing.methods import IdHistory, table_bytes
from rowwise.idmaps import StoredIds
from rowwise.recipes.compose import ResolvedRecipe
from rowwise.recipes.compress import schedule
from rowwise.recipes.compress.advice import CompressionAdvice, TableAdvice
from rowwise.recipes.compress.attempts import Attempts, make_chosen_maps, save_map
from rowwise.recipes.compress.division import CompressionGoal, TableDivision
from rowwise.recipes.compress.estimate import TimeLimit
from rowwise.recipes.compress.folder import PROBE, TrialFolder, TrialFolderSpec
from rowwise.recipes.compress.ordered import find_order
from rowwise.recipes.compress.probe import probe
from rowwise.recipes.compress.trials import use_threads
from rowwise.recipes.compress.window import DataWindow
from rowwise.recipes.compress.work import Tell, WorkQueue
from rowwise.recipes.recipe import About, Recipe, Tables, TwoTowerConfig
from rowwise.recipes.text import RECIPE, write
from rowwise.spec import Table

ADVICE = "advice.json"
PROBE_ALL = "probe-all.safetensors"
Maps = Mapping[str, tuple[IdMap, StoredIds]]


def check_recipe(recipe: Recipe) -> None:
    """Raise for recipes whose trials cannot be compared."""
    if isinstance(recipe.model, TwoTowerConfig):
        why = "maps are chosen by log loss, which two-tower models do not have"
        raise SpecError(f"model.kind=two_tower: {why}: want a recipe of another kind")
    if recipe.init_from is not None:
        want = "want --set init_from=null: trials start from initial weights, as compressed tables have other rows"
        raise SpecError(f"init_from={recipe.init_from!r}: {want}")


def advise(  # noqa: PLR0913 - what the work follows from
    window: DataWindow,
    division: TableDivision,
    goal: CompressionGoal,
    order: TrialFolderSpec,
    folder: TrialFolder,
    tell: Tell,
    limit: TimeLimit | None = None,
) -> CompressionAdvice:
    """Run the missing trials, choose methods and sizes, and write maps and advice.json.

    Where `limit` leaves no time for all sizes, the choice is among those that were measured.
    """
    use_threads(window.earlier)
    ratios = schedule.ratios_around(division.ratio)
    work = WorkQueue(tell, _count_trainings(division, goal, len(ratios)))
    with work.part("small model of the history") as report:
        histories = probe(window.earlier, division.names, folder.path / PROBE, report)
    attempts = Attempts(
        window=window,
        division=division,
        methods=goal.methods,
        order=order,
        folder=folder,
        work=work,
        histories=histories,
        trials=folder.read(),
        limit=limit or TimeLimit(),
    )
    attempts.make_all(ratios)
    allocation = _allocate(attempts)
    together = attempts.measure_together(allocation)
    with work.part("maps of the whole history") as report:
        whole = histories
        if window.whole is not None:
            whole = probe(window.whole, division.names, folder.path / PROBE_ALL, report)
        maps = _write_maps(folder, division, make_chosen_maps(division, allocation, whole, order.seed))
    measured = attempts.measured
    tables = tuple(
        _table_advice(attempts, table, allocation.chosen[table.name], maps, whole[table.name])
        for table in division.chosen
    )
    advice = CompressionAdvice(
        recipe=window.earlier.recipe.name,
        history=order.history,
        later=window.description,
        rows=order.rows,
        full=measured.full,
        noise=measured.noise,
        seeds=schedule.SEEDS,
        full_bytes=division.full_bytes,
        budget_bytes=division.budget_bytes,
        size_bytes=division.left_bytes + sum(one.size_bytes for one in tables),
        ne=allocation.loss,
        error=allocation.error,
        together=None if together is None else measured.over_full(together),
        tables=tables,
        left=division.left,
        warnings=_warnings(tables, window, measured.noise, len(attempts.left_out)),
    )
    folder.write(ADVICE, msgspec.json.format(msgspec.json.encode(advice), indent=1) + b"\n")
    return advice


def write_recipe(recipe: Recipe, resolved: ResolvedRecipe, advice: CompressionAdvice, folder: TrialFolder) -> Path:
    """Write the recipe with the maps; its data and threads are those of the given one."""
    maps = {one.name: StoredIds(file=one.file, digest=one.digest) for one in advice.tables if one.file}
    tables = tuple(structs.replace(t, id_map=maps.get(t.name, t.id_map)) for t in resolved.tables)
    about = About(
        what=f"{recipe.name} with tables in 1/{advice.full_bytes / advice.size_bytes:.3g} of their bytes",
        run=f"rowwise train {folder.path / RECIPE}",
    )
    changed = {"name": f"{recipe.name}-compressed", "about": about, "tables": Tables(list=tables)}
    return folder.write(RECIPE, write(structs.replace(resolved.recipe, train=recipe.train, **changed)))


def _count_trainings(division: TableDivision, goal: CompressionGoal, ratios: int) -> int:
    """The approximate number of trainings: small model, full model, each table, all together, maps."""
    others = min(schedule.BEST, len(goal.methods)) * (ratios - 1)
    return 3 + schedule.SEEDS + len(division.chosen) * (len(goal.methods) + others)


def _allocate(attempts: Attempts) -> Allocation:
    """The best allocation of the budget over all measurements."""
    division, measured = attempts.division, attempts.measured
    options = {t.name: options_of(measured.options(t.name), table_bytes(t, None)) for t in division.chosen}
    return allocate(options, division.budget_bytes, division.left_bytes)


def _write_maps(folder: TrialFolder, division: TableDivision, made: Mapping[str, IdMap]) -> Maps:
    folder.maps.mkdir(exist_ok=True)
    names = {name: folder.maps / f"{name}.idmap" for name in made}
    for path in set(folder.maps.glob("*.idmap")) - set(names.values()):
        path.unlink()  # left from another budget
    return {name: (one, save_map(names[name], division.table(name), one)) for name, one in made.items()}


def _table_advice(attempts: Attempts, table: Table, option: SizeOption, maps: Maps, history: IdHistory) -> TableAdvice:
    id_map, stored = maps.get(table.name, (None, StoredIds(file="")))
    columns = attempts.window.earlier.columns.sparse
    direct = any(one.ids == "direct" for one in columns if one.feature_name in table.feature_names)
    return TableAdvice(
        name=table.name,
        ids=table.rows,
        full_bytes=table_bytes(table, None),
        points=attempts.measured.points(table.name),
        method=option.method,
        size_bytes=table_bytes(table, id_map),
        map_bytes=id_map.map_bytes if id_map else 0,
        ne=option.loss,
        measured=option.measured,
        file=stored.file,
        digest=stored.digest,
        ordered=find_order(history.counts_N, history.vectors_ND) if direct else None,
    )


def _warnings(tables: tuple[TableAdvice, ...], window: DataWindow, noise: float, left_out: int) -> tuple[str, ...]:
    lines = []
    if left_out:
        lines.append(f"no time for {left_out} trials of other sizes: want more --minutes for a better division")
    ordered = {one.name: one.ordered for one in tables if one.ordered is not None}
    if ordered:
        names = f"table{'s' * (len(ordered) > 1)} {', '.join(ordered)}"
        how = f"correlation up to {max(ordered.values()):.2f}), as if numbered by popularity or time"
        why = "All methods scramble ids first, so none benefits"
        lines.append(f"{names}: neighbouring ids are alike ({how}. {why}")
    if not window.is_later:
        lines.append(f"measured on {window.description}: the quality on ids that appear later is unknown")
    if all(abs(point.ne) <= 2 * noise for one in tables for point in one.points):
        got = f"no size differs from the full model by more than its noise (two standard deviations of {noise:.5f})"
        lines.append(f"{got}: want more rows to train and to measure on")
    return tuple(lines)

"""From a recipe and a history to tables within a budget: probe, trials, allocation, maps, and a recipe with them.

Everything that takes long is kept in the folder, and is not done again.
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
from rowwise.recipes.compress.attempts import Attempts, chosen_maps, save_map
from rowwise.recipes.compress.division import CompressionGoal, TableDivision
from rowwise.recipes.compress.folder import TrialFolder, TrialFolderSpec
from rowwise.recipes.compress.ordered import is_ordered
from rowwise.recipes.compress.probe import probe
from rowwise.recipes.compress.trials import use_threads
from rowwise.recipes.compress.window import DataWindow
from rowwise.recipes.compress.work import Tell, WorkQueue
from rowwise.recipes.recipe import About, Recipe, Tables, TwoTowerConfig
from rowwise.recipes.text import RECIPE, write
from rowwise.spec import Table

ADVICE = "advice.json"
PROBE, PROBE_ALL = "probe.safetensors", "probe-all.safetensors"
Maps = Mapping[str, tuple[IdMap, StoredIds]]


def check_recipe(recipe: Recipe) -> None:
    """Refuse recipes whose trials could not stand side by side."""
    if isinstance(recipe.model, TwoTowerConfig):
        why = "maps are chosen by the log loss of clicks, which two towers do not have"
        raise SpecError(f"model.kind=two_tower: {why}: want a recipe of another kind")
    if recipe.init_from is not None:
        want = "want --set init_from=null: trials begin anew, as rows that are shared fit no others"
        raise SpecError(f"init_from={recipe.init_from!r}: {want}")


def advise(
    window: DataWindow,
    division: TableDivision,
    goal: CompressionGoal,
    order: TrialFolderSpec,
    folder: TrialFolder,
    tell: Tell,
) -> CompressionAdvice:
    """Measure what is not measured yet, choose, and write maps and what was found."""
    use_threads(window.earlier)
    ratios = schedule.ratios_around(division.ratio)
    work = WorkQueue(tell, _pieces(division, goal, len(ratios)))
    with work.piece("a small model of the history") as told:
        histories = probe(window.earlier, division.names, folder.path / PROBE, told)
    attempts = Attempts(
        window=window,
        division=division,
        methods=goal.methods,
        order=order,
        folder=folder,
        work=work,
        histories=histories,
        trials=folder.read(),
    )
    attempts.make_all(ratios)
    allocation = _allocate(attempts)
    together = attempts.together(allocation)
    with work.piece("maps of all of the history") as told:
        whole = histories
        if window.whole is not None:
            whole = probe(window.whole, division.names, folder.path / PROBE_ALL, told)
        maps = _write_maps(folder, division, chosen_maps(division, allocation, whole, order.seed))
    measured = attempts.measured
    tables = tuple(
        _table_advice(attempts, table, allocation.chosen[table.name], maps, whole[table.name])
        for table in division.chosen
    )
    advice = CompressionAdvice(
        recipe=window.earlier.recipe.name,
        history=order.history,
        later=window.said,
        rows=order.rows,
        full=measured.full,
        noise=measured.noise,
        seeds=schedule.SEEDS,
        full_bytes=division.full_bytes,
        budget_bytes=division.budget_bytes,
        size_bytes=division.left_bytes + sum(one.size_bytes for one in tables),
        ne=allocation.loss,
        error=allocation.error,
        together=None if together is None else measured.above(together),
        tables=tables,
        left=division.left,
        warnings=_warnings(tables, window, measured.noise),
    )
    folder.write(ADVICE, msgspec.json.format(msgspec.json.encode(advice), indent=1) + b"\n")
    return advice


def write_recipe(recipe: Recipe, resolved: ResolvedRecipe, advice: CompressionAdvice, folder: TrialFolder) -> Path:
    """A recipe that trains with the maps: on the rows, and as many threads, as the one that was given."""
    maps = {one.name: StoredIds(file=one.file, digest=one.digest) for one in advice.tables if one.file}
    tables = tuple(structs.replace(t, id_map=maps.get(t.name, t.id_map)) for t in resolved.tables)
    about = About(
        what=f"{recipe.name} with tables in 1/{advice.full_bytes / advice.size_bytes:.3g} of their bytes",
        run=f"rowwise train {folder.path / RECIPE}",
    )
    changed = {"name": f"{recipe.name}-compressed", "about": about, "tables": Tables(list=tables)}
    return folder.write(RECIPE, write(structs.replace(resolved.recipe, train=recipe.train, **changed)))


def _pieces(division: TableDivision, goal: CompressionGoal, ratios: int) -> int:
    """How many trainings there are about: the small model, the whole one, each table, all together, the maps."""
    others = min(schedule.BEST, len(goal.methods)) * (ratios - 1)
    return 3 + schedule.SEEDS + len(division.chosen) * (len(goal.methods) + others)


def _allocate(attempts: Attempts) -> Allocation:
    """The best of everything that was measured here."""
    division, measured = attempts.division, attempts.measured
    options = {t.name: options_of(measured.options(t.name), table_bytes(t, None)) for t in division.chosen}
    return allocate(options, division.budget_bytes, division.left_bytes)


def _write_maps(folder: TrialFolder, division: TableDivision, made: Mapping[str, IdMap]) -> Maps:
    folder.maps.mkdir(exist_ok=True)
    names = {name: folder.maps / f"{name}.idmap" for name in made}
    for path in set(folder.maps.glob("*.idmap")) - set(names.values()):
        path.unlink()  # of another budget
    return {name: (one, save_map(names[name], division.table(name), one)) for name, one in made.items()}


def _table_advice(attempts: Attempts, table: Table, option: SizeOption, maps: Maps, history: IdHistory) -> TableAdvice:
    made, stored = maps.get(table.name, (None, StoredIds(file="")))
    columns = attempts.window.earlier.columns.sparse
    direct = any(one.ids == "direct" for one in columns if one.feature_name in table.feature_names)
    return TableAdvice(
        name=table.name,
        ids=table.rows,
        full_bytes=table_bytes(table, None),
        points=attempts.measured.points(table.name),
        method=option.method,
        size_bytes=table_bytes(table, made),
        map_bytes=made.map_bytes if made else 0,
        ne=option.loss,
        measured=option.measured,
        file=stored.file,
        digest=stored.digest,
        ordered=is_ordered(history.counts_N, history.vectors_ND) if direct else None,
    )


def _warnings(tables: tuple[TableAdvice, ...], window: DataWindow, noise: float) -> tuple[str, ...]:
    said = []
    ordered = {one.name: one.ordered for one in tables if one.ordered is not None}
    if ordered:
        names = f"table{'s' * (len(ordered) > 1)} {', '.join(ordered)}"
        how = f"correlation up to {max(ordered.values()):.2f}), as if numbered by popularity or time"
        why = "Every method here scrambles ids first, so that none gains by it"
        said.append(f"{names}: neighbouring ids are alike ({how}. {why}")
    if not window.is_later:
        said.append(f"measured on {window.said}: how well maps do with ids that come up later is not seen")
    if all(abs(point.ne) <= 2 * noise for one in tables for point in one.points):
        got = f"no size differs from the whole model by more than chance may (two times {noise:.5f})"
        said.append(f"{got}: want more rows to train and to measure on to tell methods apart")
    return tuple(said)

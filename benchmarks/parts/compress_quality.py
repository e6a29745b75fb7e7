"""What tables in few bytes cost in AUC: every method on the same rows, maps of half of the time, films, and advice."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.progress import Progress

from parts.compress_work import FIRST, LAST, Sales, as_it_is, fetch, trained
from parts.report import show
from rowwise.recipes.compose import resolve
from rowwise.recipes.compress.advise import advise, write_recipe
from rowwise.recipes.compress.folder import TrialFolderSpec, lock_folder, open_folder
from rowwise.recipes.compress.probe import learn
from rowwise.recipes.compress.selection import CompressionGoal, select_tables
from rowwise.recipes.compress.window import open_window
from rowwise.recipes.find import load
from rowwise.recipes.text import read
from rowwise.tables.ids.idmap import IdMap
from rowwise.tables.ids.methods import METHODS, make_map, table_bytes

HALF = 24  # the last week of the first half
FILMS, FILMS_RATIO = ("user_id", "movie_id"), 8.0
FILMS_METHODS = ("full", "hash", "frequency", "mixed", "learned", "learned_head_tail")
Row = dict


def quality(sales: Sales, ratios: Sequence[float], seeds: int, methods: Sequence[str] = ()) -> list[Row]:
    """Full tables, then every method at every ratio; or some methods alone."""
    histories, _ = sales.histories()
    rows: list[Row] = []
    if not methods:
        rows.append(_row("full", 1.0, sales, {}, 0.0, [trained(sales.resolved, {}, seed) for seed in range(seeds)]))
    with Progress() as progress:
        asked = [(method, ratio) for ratio in ratios for method in methods or METHODS]
        for method, ratio in progress.track(asked, description="methods"):
            begin_s = time.perf_counter()
            maps = sales.maps(method, ratio, histories)
            build_s = time.perf_counter() - begin_s
            if any(one is None for name, one in maps.items() if name in ("product_id", "product_store")):
                continue
            scores = [trained(sales.resolved, maps, seed) for seed in range(seeds)]
            rows.append(_row(method, ratio, sales, maps, build_s, scores))
            show(rows[-1])
    return rows


def half_of_time(sales: Sales, seeds: int) -> list[Row]:
    """Trained on the second half of the weeks, by maps of the first half and of the second."""
    late = sales.weeks(HALF + 1, LAST)
    rows: list[Row] = []
    maps: dict[str, Mapping[str, IdMap | None]] = {"full": {}}
    for name, source in (("first half", sales.weeks(FIRST, HALF)), ("second half", late)):
        histories, _ = source.histories()
        if name == "first half":  # rows that a map is used for are not those that it was learned of: no folds
            histories = {table: replace(history, folded=None) for table, history in histories.items()}
        maps[f"learned, {name}"] = late.maps("learned", 100.0, histories)
    maps["hash"] = late.maps("hash", 100.0, histories)
    for name, one in maps.items():
        rows.append(_row(name, 100.0, late, one, 0.0, [trained(late.resolved, one, seed) for seed in range(seeds)]))
        show(rows[-1])
    return rows


def films(data: Path, seeds: int, methods: Sequence[str]) -> list[Row]:
    """MovieLens: users and films in an eighth of their bytes."""
    fetch("movielens-100k", data)
    resolved = resolve(load("movielens-dlrm", [f"data.folder={data}"]))
    large = [table for table in resolved.tables if table.name in FILMS]
    begin_s = time.perf_counter()
    histories = learn(resolved, list(FILMS), lambda _: None)
    probe_s = time.perf_counter() - begin_s
    rows: list[Row] = []
    for method in methods:
        maps: dict[str, IdMap | None] = {}
        for table in large if method != "full" else ():
            budget = int(table_bytes(table, None) / FILMS_RATIO)
            maps[table.name] = make_map(method, table, budget, histories[table.name])
        scores = [trained(resolved, maps, seed) for seed in range(seeds)]
        size = sum(table_bytes(table, maps.get(table.name)) for table in large)
        auc = [score["auc"] for score in scores]
        rows.append({"method": method, "bytes": size, "auc": auc, "ne": [s["ne"] for s in scores], "probe_s": probe_s})
        show(rows[-1])
    return rows


def advice(sales: Sales, ratio: float, seeds: int, at: Path) -> Row:
    """The advisor's tables, chosen on training weeks alone and trained on all of them."""
    goal = CompressionGoal(ratio=ratio, methods=("hash", "mixed", "learned", "learned_many", "learned_own"))
    order = TrialFolderSpec.of(sales.resolved.recipe, (), None, 0)
    selection, window = select_tables(sales.resolved.tables, goal), open_window(sales.resolved, ())
    begin_s = time.perf_counter()
    folder = open_folder(at, order)
    with Progress() as progress, lock_folder(folder):
        task = progress.add_task("advice", total=1.0)
        found = advise(window, selection, goal, order, folder, lambda _, share: progress.update(task, completed=share))
        recipe = read(write_recipe(sales.resolved.recipe, sales.resolved, found, folder))
    took_s = time.perf_counter() - begin_s
    scores = [as_it_is(recipe, seed) for seed in range(seeds)]
    tables = {one.name: {"method": one.method, "bytes": one.size_bytes} for one in found.tables}
    about = {"method": "advice", "ratio": ratio, "bytes": found.size_bytes, "tables": tables, "took_s": took_s}
    about |= {"auc": [score["auc"] for score in scores], "ne": [score["ne"] for score in scores]}
    show(about)
    return about


def _row(
    method: str, ratio: float, sales: Sales, maps: Mapping[str, IdMap | None], build_s: float, scores: list
) -> Row:
    return {
        "method": method,
        "ratio": ratio,
        **sales.size(maps),
        "build_s": round(build_s, 2),
        "whole": [name for name, one in maps.items() if one is None],  # where the method cannot be that small
        "auc": [score["auc"] for score in scores],
        "ne": [score["ne"] for score in scores],
    }

"""Id map files of a recipe: pinned by digest, and copied into the run's folder so that a run keeps its maps."""

import shutil
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from rowwise.hashing.open import open_map, stored_tables
from rowwise.idmaps import StoredIds
from rowwise.recipes.recipe import Recipe, Tables
from rowwise.spec import Table

MAPS = "maps"  # the folder of a run


def pin_map(table: Table) -> Table:
    """The table with the absolute path and the digest of its map file; a changed file is refused later."""
    how = table.id_map
    if not isinstance(how, StoredIds):
        return table
    how = structs.replace(how, file=str(Path(how.file).absolute()))
    opened = open_map(structs.replace(table, id_map=how))
    assert opened is not None
    return structs.replace(table, id_map=structs.replace(how, digest=opened.digest))


def stored_tables_of(table: Table) -> tuple[Table, ...]:
    """The tables in memory for a table: itself without an id map, else those of its parts."""
    opened = open_map(table)
    return (table,) if opened is None else stored_tables(table, opened)


def copy_maps(recipe: Recipe, run: Path) -> Recipe:
    """Copy the map files into the folder of a run; returns the recipe with the copies."""
    return _replace_files(recipe, lambda table, file: _copy_map(table, file, run))


def relocate_maps(recipe: Recipe, run: Path) -> Recipe:
    """A run's recipe with the map files in its folder, which may have been moved."""

    def find(table: Table, file: Path) -> Path:
        here = run.absolute() / MAPS / file.name
        return here if here.is_file() else file

    return _replace_files(recipe, find)


def _copy_map(table: Table, file: Path, run: Path) -> Path:
    to = run.absolute() / MAPS / f"{table.name}{file.suffix}"
    to.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, to)
    return to


def _replace_files(recipe: Recipe, find: Callable[[Table, Path], Path]) -> Recipe:
    def moved(table: Table) -> Table:
        how = table.id_map
        if not isinstance(how, StoredIds):
            return table
        return structs.replace(table, id_map=structs.replace(how, file=str(find(table, Path(how.file)))))

    tables = recipe.tables
    return structs.replace(recipe, tables=Tables(all=tables.all, each=tables.each, list=tuple(map(moved, tables.list))))

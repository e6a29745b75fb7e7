"""The files of id maps that a recipe names: found from any folder, pinned to what they hold, kept in a run's folder."""

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
    """The table, whose map is found from any folder, and refused once its file holds another one."""
    how = table.id_map
    if not isinstance(how, StoredIds):
        return table
    how = structs.replace(how, file=str(Path(how.file).absolute()))
    opened = open_map(structs.replace(table, id_map=how))
    assert opened is not None
    return structs.replace(table, id_map=structs.replace(how, digest=opened.digest))


def tables_as_stored(table: Table) -> tuple[Table, ...]:
    """The tables that a table is held as: itself, where each id has a row."""
    opened = open_map(table)
    return (table,) if opened is None else stored_tables(table, opened)


def keep_maps(recipe: Recipe, run: Path) -> Recipe:
    """Copy the files into the folder of a run; the recipe names these."""
    return _with_files(recipe, lambda table, file: _copied(table, file, run))


def with_kept_maps(recipe: Recipe, run: Path) -> Recipe:
    """A run's recipe, with the files in its folder, wherever that is now."""

    def find(table: Table, file: Path) -> Path:
        here = run.absolute() / MAPS / file.name
        return here if here.is_file() else file

    return _with_files(recipe, find)


def _copied(table: Table, file: Path, run: Path) -> Path:
    to = run.absolute() / MAPS / f"{table.name}{file.suffix}"
    to.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, to)
    return to


def _with_files(recipe: Recipe, find: Callable[[Table, Path], Path]) -> Recipe:
    def moved(table: Table) -> Table:
        how = table.id_map
        if not isinstance(how, StoredIds):
            return table
        return structs.replace(table, id_map=structs.replace(how, file=str(find(table, Path(how.file)))))

    tables = recipe.tables
    return structs.replace(recipe, tables=Tables(all=tables.all, each=tables.each, list=tuple(map(moved, tables.list))))

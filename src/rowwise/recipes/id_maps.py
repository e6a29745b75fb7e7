"""Copies the id maps and vocabularies of a recipe into the run's folder, so that a run keeps its files."""

import shutil
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from rowwise.ingest.transform import AnyKind, MapId
from rowwise.recipes.recipe import Recipe
from rowwise.tables.idmaps import StoredIds
from rowwise.tables.ids.open import open_map, stored_tables
from rowwise.tables.spec import Table

MAPS = "maps"  # the folder of a run


def move_map(table: Table, find: Callable[[str], object]) -> Table:
    """The table with another path of its map file, if it has one."""
    stored = table.id_map
    if not isinstance(stored, StoredIds):
        return table
    return structs.replace(table, id_map=structs.replace(stored, file=str(find(stored.file))))


def pin_map(table: Table) -> Table:
    """The table with the absolute path and the digest of its map file, so that a changed file is refused later."""
    table = move_map(table, lambda file: Path(file).absolute())
    if not isinstance(table.id_map, StoredIds):
        return table
    id_map = open_map(table)
    assert id_map is not None
    return structs.replace(table, id_map=structs.replace(table.id_map, digest=id_map.digest))


def stored_tables_of(table: Table) -> tuple[Table, ...]:
    """The tables in memory for a table: the parts of its id map, or the table itself."""
    id_map = open_map(table)
    return (table,) if id_map is None else stored_tables(table, id_map)


def copy_maps(recipe: Recipe, run: Path) -> Recipe:
    """Copy the files of id maps and vocabularies into the folder of a run; returns the recipe with the copies."""
    return _replace_files(recipe, lambda name, file: _copy_map(name, file, run))


def relocate_maps(recipe: Recipe, run: Path) -> Recipe:
    """A run's recipe with the map files in its folder, which may have been moved."""

    def find(name: str, file: Path) -> Path:
        in_run = run.absolute() / MAPS / file.name
        return in_run if in_run.is_file() else file

    return _replace_files(recipe, find)


def _copy_map(name: str, file: Path, run: Path) -> Path:
    target = run.absolute() / MAPS / f"{name}{file.suffix}"
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, target)
    return target


def _replace_files(recipe: Recipe, find: Callable[[str, Path], Path]) -> Recipe:
    """The recipe with `find(name, file)` for each file of an id map or a vocabulary; names are unique."""

    def change_table(table: Table) -> Table:
        return move_map(table, lambda file: find(table.name, Path(file)))

    def change_transform(number: int, transform: AnyKind | str) -> AnyKind | str:
        if not isinstance(transform, MapId) or not transform.file:
            return transform
        return structs.replace(transform, file=str(find(f"transforms.{number}", Path(transform.file))))

    tables = structs.replace(recipe.tables, list=tuple(map(change_table, recipe.tables.list)))
    transforms = tuple(change_transform(number, transform) for number, transform in enumerate(recipe.transforms))
    return structs.replace(recipe, tables=tables, transforms=transforms)

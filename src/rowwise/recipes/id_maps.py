"""Id map and vocabulary files of a recipe, copied into the run's folder so that a run keeps its maps."""

import shutil
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from rowwise.hashing.open import open_map, stored_tables
from rowwise.idmaps import StoredIds
from rowwise.ingest.transform import AnyKind, MapId
from rowwise.recipes.recipe import Recipe
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
    """Copy the files of id maps and vocabularies into the folder of a run; returns the recipe with the copies."""
    return _replace_files(recipe, lambda name, file: _copy_map(name, file, run))


def relocate_maps(recipe: Recipe, run: Path) -> Recipe:
    """A run's recipe with the map files in its folder, which may have been moved."""

    def find(name: str, file: Path) -> Path:
        here = run.absolute() / MAPS / file.name
        return here if here.is_file() else file

    return _replace_files(recipe, find)


def _copy_map(name: str, file: Path, run: Path) -> Path:
    to = run.absolute() / MAPS / f"{name}{file.suffix}"
    to.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, to)
    return to


def _replace_files(recipe: Recipe, find: Callable[[str, Path], Path]) -> Recipe:
    """The recipe with `find(name, file)` for each file of an id map or a vocabulary; names are unique."""

    def moved_table(table: Table) -> Table:
        how = table.id_map
        if not isinstance(how, StoredIds):
            return table
        return structs.replace(table, id_map=structs.replace(how, file=str(find(table.name, Path(how.file)))))

    def moved_transform(number: int, transform: AnyKind | str) -> AnyKind | str:
        if not isinstance(transform, MapId) or not transform.file:
            return transform
        return structs.replace(transform, file=str(find(f"transforms.{number}", Path(transform.file))))

    tables = structs.replace(recipe.tables, list=tuple(map(moved_table, recipe.tables.list)))
    transforms = tuple(moved_transform(number, one) for number, one in enumerate(recipe.transforms))
    return structs.replace(recipe, tables=tables, transforms=transforms)

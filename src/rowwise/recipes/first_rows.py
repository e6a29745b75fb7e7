"""Whether a recipe reads its own data: its transforms and columns on first rows, without a model and without torch."""

import pyarrow as pa
from msgspec import structs

from rowwise.errors import DataError
from rowwise.ingest import transform
from rowwise.ingest.encode import encode
from rowwise.ingest.labels import parse_label, unlabelled
from rowwise.ingest.reader import Reader, Split
from rowwise.recipes.column_tables import replace_vocabularies
from rowwise.recipes.recipe import Recipe
from rowwise.train.loss_settings import wanted_values

ROWS = 4096


def check_first_rows(recipe: Recipe, reader: Reader) -> None:
    """Raise if the first rows cannot be encoded."""
    assert recipe.columns is not None
    columns, lookups = replace_vocabularies(recipe.columns)
    columns = structs.replace(columns, label_values=wanted_values(recipe.train.objective))
    loaded = transform.load((*recipe.transforms, *lookups))
    names = transform.sources(loaded, columns.names)
    split, table = _first_rows(reader, names)
    unlabelled_R = unlabelled(table, [parse_label(text) for text in columns.labels])
    if unlabelled_R is not None:
        table = table.filter(pa.array(~unlabelled_R))
    columns.check(transform.schema_after(reader.schema, loaded, split.source), split.source)
    made, _ = transform.apply(table, loaded, columns.names, transform.RowPosition(split=split))
    rows = {s.table_name: s.rows for s in columns.sparse if s.rows is not None}
    encode(made, columns, rows, split)


def _first_rows(reader: Reader, names: tuple[str, ...]) -> tuple[Split, pa.Table]:
    for split in reader.splits():
        table = reader.read(split, names).slice(0, ROWS)
        if table.num_rows:
            return split, table
    raise DataError("no split has rows", "files with rows")

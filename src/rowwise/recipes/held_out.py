"""Raw rows of a recipe: a few that a run was not trained on, to test a model with, or all of a selection."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rowwise.errors import DataError
from rowwise.ingest.batcher import table_rows_for_ids
from rowwise.ingest.block import Ints
from rowwise.ingest.bound import BoundPreparation
from rowwise.ingest.prepare import Preparation, PreparationTask
from rowwise.ingest.reader import Reader, Split
from rowwise.ingest.transform import serving, to_json
from rowwise.recipes.compose import ResolvedRecipe
from rowwise.recipes.rows import RowSelection

HELD_OUT_ROWS = 64


class SelectedRows(NamedTuple):
    """Rows of a split that are in a selection."""

    reader: Reader
    split: Split
    names: tuple[str, ...]  # columns that a prediction reads
    order_R: Ints  # ascending

    def read(self, places_R: Ints | None = None) -> pa.Table:
        """These of the rows; None: all."""
        order_R = self.order_R if places_R is None else self.order_R[places_R]
        return self.reader.read(self.split, self.names).take(pa.array(order_R)).combine_chunks()


def held_out_of(resolved: ResolvedRecipe) -> RowSelection:
    """Test rows of the recipe, else validation rows, else training rows."""
    return resolved.rows.test or resolved.rows.valid or resolved.rows.train


def held_out_rows(resolved: ResolvedRecipe, count: int = HELD_OUT_ROWS) -> pa.Table:
    """Test rows of the recipe, else validation rows, else training rows; the columns that a prediction reads.

    They are spread over the first split that has rows. There may be fewer.
    """
    for selected in selected_rows(resolved, held_out_of(resolved)):
        rows = len(selected.order_R)
        return selected.read(np.linspace(0, rows - 1, min(count, rows)).astype(np.int64))
    raise DataError(f"{resolved.recipe.data.dataset}: no row to test the model with: want data with at least one row")


def selected_rows(resolved: ResolvedRecipe, rows: RowSelection) -> Iterator[SelectedRows]:
    """The good rows of a selection, split by split; splits without any are left out."""
    columns, splits = bind_preparation(resolved, rows.reader.schema).columns, rows.reader.splits()
    preparation = Preparation(
        columns=columns,
        table_rows=table_rows_for_ids(columns, resolved.tables),
        share=rows.share,
        shuffle=False,
        transforms=to_json(serving(resolved.transforms)),
        where=rows.where,
        quarantine="",  # bad rows are left out
    )
    task = PreparationTask(reader=rows.reader, splits=splits, preparation=preparation)
    for index, split in enumerate(splits):
        opened = task.open(index, 0)
        if opened.rows:
            order_R = np.arange(opened.rows) if opened.order_R is None else opened.order_R
            yield SelectedRows(rows.reader, split, tuple(preparation.names), order_R)


def bind_preparation(resolved: ResolvedRecipe, schema: pa.Schema) -> BoundPreparation:
    """The recipe's preparation of rows with these columns."""
    table_rows = table_rows_for_ids(resolved.columns, resolved.tables)
    return BoundPreparation(schema, resolved.transforms, resolved.columns, table_rows)

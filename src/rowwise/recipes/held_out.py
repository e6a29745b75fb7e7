"""A few raw rows that a run was not trained on, to test a model with and to keep beside its weights."""

import numpy as np
import pyarrow as pa

from rowwise.errors import DataError
from rowwise.ingest.batcher import table_rows_for_ids
from rowwise.ingest.bound import BoundPreparation
from rowwise.ingest.prepare import Preparation, PreparationTask
from rowwise.ingest.transform import serving, to_json
from rowwise.recipes.compose import ResolvedRecipe

HELD_OUT_ROWS = 64


def held_out_rows(resolved: ResolvedRecipe, count: int = HELD_OUT_ROWS) -> pa.Table:
    """Test rows of the recipe, else validation rows, else training rows; the columns that a prediction reads.

    They are spread over the first split that has rows. There may be fewer.
    """
    rows = resolved.rows.test or resolved.rows.valid or resolved.rows.train
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
            chosen = order_R[np.linspace(0, len(order_R) - 1, min(count, len(order_R))).astype(np.int64)]
            return rows.reader.read(split, preparation.names).take(pa.array(chosen)).combine_chunks()
    raise DataError(f"{resolved.recipe.data.dataset}: no row to test the model with: want data with at least one row")


def bind_preparation(resolved: ResolvedRecipe, schema: pa.Schema) -> BoundPreparation:
    """The recipe's preparation of rows with these columns."""
    table_rows = table_rows_for_ids(resolved.columns, resolved.tables)
    return BoundPreparation(schema, resolved.transforms, resolved.columns, table_rows)

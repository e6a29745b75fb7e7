"""Raw rows of a recipe: a few held-out ones, to test a model with, or all of a selection."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from rowwise.base.errors import DataError
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.rows import RowSelection, SelectedRows, good_rows

HELD_OUT_ROWS = 64


def held_out_of(resolved: ResolvedRecipe) -> RowSelection:
    """Test rows of the recipe, else validation rows, else training rows."""
    return resolved.rows.test or resolved.rows.valid or resolved.rows.train


def held_out_rows(resolved: ResolvedRecipe, count: int = HELD_OUT_ROWS) -> pa.Table:
    """Test rows of the recipe, else validation rows, else training rows; the columns that a prediction reads.

    They are evenly spaced in the first split with good rows, and at most `count`.
    """
    for selected in selected_rows(resolved, held_out_of(resolved)):
        rows = len(selected.order_R)
        return selected.read(np.linspace(0, rows - 1, min(count, rows)).astype(np.int64))
    raise DataError(f"{resolved.recipe.data.dataset}: no row to test the model with", "data with at least one row")


def selected_rows(resolved: ResolvedRecipe, rows: RowSelection) -> Iterator[SelectedRows]:
    """The good rows of a selection, by split; skips splits without good rows."""
    columns = resolved.parts.bind(rows.reader.schema, resolved.transforms).columns
    return good_rows(rows, columns, resolved.tables, resolved.transforms)

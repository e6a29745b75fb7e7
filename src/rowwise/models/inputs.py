"""Input of every model: splits a `Batch` into its parts, and checks the tables."""

from collections.abc import Sequence

from torch import Tensor

from rowwise.base.errors import BatchError, SpecError
from rowwise.tables.batch import Batch, Jagged, KeyedJagged
from rowwise.tables.spec import Pooling, Table

Ids = Jagged | KeyedJagged


def unpack(batch: Batch | Tensor, sparse: Ids | None, dense_features: int) -> tuple[Tensor, Ids]:
    """The dense numbers [B, dense_features] and the ids of a batch, or of its two parts."""
    if isinstance(batch, Batch):
        dense_BF, ids = batch.dense_BF, batch.sparse
    elif sparse is None:
        raise BatchError("got dense numbers without ids", "a Batch, or dense numbers and sparse ids")
    else:
        dense_BF, ids = batch, sparse
    if dense_BF.dim() != 2 or dense_BF.shape[1] != dense_features:
        raise BatchError(f"got dense numbers {tuple(dense_BF.shape)}", f"[B, {dense_features}]")
    return dense_BF, ids


def input_columns(tables: Sequence[Table], dense_features: int) -> int:
    """Width of the dense numbers and all pooled features side by side; raises for sequence tables."""
    if dense_features < 0:
        raise SpecError(f"dense_features={dense_features}", "the number of dense features, at least 0")
    for table in tables:
        if table.pooling is Pooling.SEQUENCE:
            raise SpecError(f"table {table.name!r} keeps sequences", "tables that pool, one vector a feature")
    return dense_features + sum(table.dim * len(table.feature_names) for table in tables)


def check_dims(tables: Sequence[Table], dim: int, reason: str) -> None:
    """Raise unless all tables have this dim; `reason` ends the sentence "expected `dim`, ..."."""
    for table in tables:
        if table.dim != dim:
            raise SpecError(f"table {table.name!r} has dim {table.dim}", f"{dim}, {reason}")

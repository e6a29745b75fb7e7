"""Maps unknown ids to the last row, for tables with `unknown='last_row'`.

A lookup raises for unknown ids; only then is the batch mapped here and looked up again, so other batches pay nothing.
"""

import dataclasses
import warnings

import torch
from torch import Tensor

from rowwise.errors import UnknownIdWarning
from rowwise.ops import check
from rowwise.ops.lookup import LookupCall
from rowwise.spec import Table

UnknownIds = tuple[Table, str, int]  # table, feature, number of ids of a batch outside the table


def map_unknown(call: LookupCall, counts: dict[str, int]) -> LookupCall:
    """The call with unknown ids replaced where their table allows it; adds them to `counts`, by feature."""
    values: Tensor | None = None
    for index, positions in check.find_unknown_ids(call.group, call.features_FC, call.jagged):
        table, feature = call.group.table_of(index), call.group.feature_names[index]
        if table.unknown != "last_row":
            continue
        # A copy, so that the caller's ids stay; the update uses it too. int64, as a last row may not fit 32 bits.
        values = call.jagged.values_N.to(torch.int64, copy=True) if values is None else values
        values[positions] = table.rows - 1
        count_unknown(counts, table, feature, len(positions))
    if values is None:
        return call  # no table allows it: the next lookup raises with names
    return dataclasses.replace(call, jagged=dataclasses.replace(call.jagged, values_N=values))


def count_unknown(counts: dict[str, int], table: Table, feature: str, new: int) -> None:
    """Count, and warn each time the count reaches another power of ten."""
    before = counts.get(feature, 0)
    after = counts[feature] = before + new
    if len(str(after)) > len(str(before)) or not before:
        message = f"table {table.name!r}: {after} ids of feature {feature!r} so far were outside 0..{table.rows - 1}"
        warnings.warn(f"{message} and read its last row", UnknownIdWarning, stacklevel=2)

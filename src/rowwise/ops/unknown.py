"""Ids outside a table that was told to let its last row stand for them.

Apart from the lookup, which refuses such ids and so keeps the common batch free of any of this: only a batch that
was refused comes here, and is then looked up once more.
"""

import dataclasses
import warnings

import torch
from torch import Tensor

from rowwise.errors import UnknownIdWarning
from rowwise.ops import check
from rowwise.ops.lookup import LookupCall
from rowwise.spec import Table


def map_unknown(call: LookupCall, counts: dict[str, int]) -> LookupCall:
    """The call with unknown ids replaced where their table allows it; they are added to `counts` by feature."""
    values: Tensor | None = None
    for index, positions in check.bad_ids(call.group, call.features_FC, call.jagged):
        table, feature = call.group.table_of(index), call.group.feature_names[index]
        if table.unknown != "last_row":
            continue
        # The caller's ids stay as they are; the copy is what the update will see too. Wide: a last row may be far out.
        values = call.jagged.values_N.to(torch.int64, copy=True) if values is None else values
        values[positions] = table.rows - 1
        count_unknown(counts, table, feature, len(positions))
    if values is None:
        return call  # not allowed: looking up again raises again
    return dataclasses.replace(call, jagged=dataclasses.replace(call.jagged, values_N=values))


def count_unknown(counts: dict[str, int], table: Table, feature: str, found: int) -> None:
    """Count, and warn each time the count reaches another power of ten."""
    # Every batch may have some: one warning each would drown the rest of a log.
    before = counts.get(feature, 0)
    after = counts[feature] = before + found
    if len(str(after)) > len(str(before)) or not before:
        message = f"table {table.name!r}: {after} ids of feature {feature!r} so far were outside 0..{table.rows - 1}"
        warnings.warn(f"{message} and read its last row", UnknownIdWarning, stacklevel=2)

"""Maps unknown ids to the last row, for tables with `unknown='last_row'`.

A lookup raises for unknown ids; only then is the batch mapped here and looked up again, so other batches pay nothing.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.errors import UnknownIdWarning
from rowwise.ops import check
from rowwise.ops.lookup import LookupCall
from rowwise.spec import Table

UnknownIds = tuple[Table, str, int]  # table, feature, number of ids of a batch outside the table


def map_unknown(call: LookupCall, counts: dict[str, int]) -> LookupCall:
    """The call with unknown ids replaced where their table allows it; adds them to `counts`, by feature."""
    found = [
        UnknownPositions(call.group.table_of(index), call.group.feature_names[index], positions, counts)
        for index, positions in check.find_unknown_ids(call.group, call.features_FC, call.jagged)
    ]
    allowed = [one for one in found if one.table.unknown == "last_row"]
    if not allowed:
        return call  # the next lookup raises with names
    return dataclasses.replace(call, jagged=with_last_rows(call.jagged, allowed))


class UnknownPositions(NamedTuple):
    """Where a feature of a batch has ids outside its table, and the counts that get their number."""

    table: Table
    feature: str
    positions: Tensor
    counts: dict[str, int]


def with_last_rows(jagged: Jagged, unknown: Sequence[UnknownPositions]) -> Jagged:
    """The batch with the last row of its table in place of each unknown id; counts them."""
    if not unknown:
        return jagged
    # A copy, so that the caller's ids stay; the update uses it too. int64, as a last row may not fit 32 bits.
    values_N = jagged.values_N.to(torch.int64, copy=True)
    for one in unknown:
        values_N[one.positions] = one.table.rows - 1
        count_unknown(one.counts, one.table, one.feature, len(one.positions))
    return dataclasses.replace(jagged, values_N=values_N)


def count_unknown(counts: dict[str, int], table: Table, feature: str, new: int) -> None:
    """Count, and warn each time the count reaches another power of ten."""
    before = counts.get(feature, 0)
    after = counts[feature] = before + new
    if len(str(after)) > len(str(before)) or not before:
        message = f"table {table.name!r}: {after} ids of feature {feature!r} so far were outside 0..{table.rows - 1}"
        warnings.warn(f"{message} and read its last row", UnknownIdWarning, stacklevel=2)

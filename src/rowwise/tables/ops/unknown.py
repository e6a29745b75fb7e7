"""Maps unknown ids to the last row, for tables with `unknown='last_row'`.

A lookup raises for unknown ids; only then is the batch mapped here and looked up again, so other batches pay nothing.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from rowwise.base.errors import UnknownIdWarning
from rowwise.tables.batch import Jagged
from rowwise.tables.ops import check
from rowwise.tables.spec import Table

UnknownIds = tuple[Table, str, int]  # table, feature, number of ids of a batch outside the table


def map_unknown(jagged: Jagged, tables: Mapping[str, Table]) -> tuple[Jagged, list[UnknownIds]]:
    """The batch with the last row of its table in place of each unknown id; raises where the table does not allow it.

    `tables`: by feature; other features keep their ids.
    """
    unknown: list[UnknownIds] = []
    limits = [(jagged.features.index(feature), table.rows) for feature, table in tables.items()]
    lookups, values_N = list(tables.items()), jagged.values_N
    for index, positions in check.find_out_of_range(jagged, limits):
        feature, table = lookups[index]
        if table.unknown != "last_row":
            raise check.unknown_id_error(table, feature, jagged, positions)
        if not unknown:  # a copy, so that the caller's ids stay; int64, as a last row may not fit 32 bits
            values_N = values_N.to(torch.int64, copy=True)
        values_N[positions] = table.rows - 1
        unknown.append((table, feature, len(positions)))
    return replace(jagged, values_N=values_N) if unknown else jagged, unknown


def count_unknown(counts: dict[str, int], unknown: Iterable[UnknownIds]) -> None:
    """Count by feature, and warn each time a count reaches another power of ten."""
    for table, feature, new in unknown:
        before = counts.get(feature, 0)
        after = counts[feature] = before + new
        if len(str(after)) > len(str(before)) or not before:
            ids = f"{after} ids of feature {feature!r} so far were outside 0..{table.rows - 1}"
            warnings.warn(f"table {table.name!r}: {ids} and read its last row", UnknownIdWarning, stacklevel=2)

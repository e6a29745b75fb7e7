"""Locates invalid lengths and ids of a batch, after a kernel has detected one: table, feature, sample, position, id.

Kernels check every id as they read it, at almost no cost, and skip bad ones; this slower search only words the error.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rowwise.base.errors import BatchError, IdError
from rowwise.tables.batch import Jagged
from rowwise.tables.ops.layout import FeatureDescriptor, TableGroup
from rowwise.tables.spec import Table


def check_features(features: Sequence[str], needed: Iterable[str]) -> None:
    """Raise for needed features that a batch lacks."""
    missing = sorted(set(needed) - set(features))
    if missing:
        raise BatchError(f"the batch lacks {', '.join(missing)}; it holds {', '.join(features)}")


def check_lengths(jagged: Jagged) -> None:
    """Raise if a length is negative or the lengths do not add up to the ids."""
    lengths, batch = jagged.lengths_FB, max(1, jagged.lengths_FB.numel() // max(1, len(jagged.features)))
    # A negative length first: it can make a wrong sum look right.
    negative = torch.nonzero(lengths < 0)
    if len(negative):
        at = int(negative[0])
        name = jagged.features[at // batch]
        raise BatchError(f"feature {name!r}, sample {at % batch}: length {int(lengths[at])}", "0 or more")
    total = int(lengths.sum())
    if total != jagged.values_N.numel():
        by_feature = [int(part.sum()) for part in lengths.split(batch)]  # empty without features
        sums = ", ".join(f"{name}: {n}" for name, n in zip(jagged.features, by_feature, strict=False))
        raise BatchError(f"lengths add up to {total}", f"{jagged.values_N.numel()}, the number of ids ({sums})")


def find_out_of_range(jagged: Jagged, limits: Sequence[tuple[int, int]]) -> list[tuple[int, Tensor]]:
    """(index into `limits`, positions) for each limit (feature of the batch, rows) with ids outside 0..rows-1."""
    limits_L2 = torch.tensor(limits, dtype=torch.int64).view(-1, 2)
    try:
        if torch.ops.rowwise.in_range(jagged.values_N, jagged.lengths_FB, limits_L2, jagged.batch_size):
            return []
    except RuntimeError:
        check_lengths(jagged)
        raise
    ranges_F = list(jagged.id_ranges().values())
    unknown: list[tuple[int, Tensor]] = []
    for index, (source, rows) in enumerate(limits):
        begin, end = ranges_F[source]
        ids = jagged.values_N[begin:end]
        last = min(rows - 1, torch.iinfo(ids.dtype).max)  # torch compares in the type of the ids, and wraps
        low, high = ids.aminmax() if len(ids) else (0, 0)
        if int(low) >= 0 and int(high) <= last:
            continue
        at = torch.nonzero((ids < 0) | (ids > last)).flatten()
        if len(at):
            unknown.append((index, at + begin))
    return unknown


def check_rows(jagged: Jagged, rows: Sequence[int]) -> None:
    """Raise for the first id that is not in 0..rows-1; `rows` has the rows of each feature's table."""
    for index, positions in find_out_of_range(jagged, list(enumerate(rows))):
        raise IdError(
            f"feature {jagged.features[index]!r}, {_name_first(jagged, positions, rows[index])}. Hash or map the ids "
            f"before they are routed, or give the table more rows"
        )


def check_ids(group: TableGroup, features_FC: Tensor, jagged: Jagged) -> None:
    """Raise for the first id outside its table."""
    # Rows of the table, as the descriptor counts slots if the table is on disk.
    limits = [(row.source, group.tables[row.table].rows) for row in FeatureDescriptor.read(features_FC)]
    for index, positions in find_out_of_range(jagged, limits):
        raise unknown_id_error(group.table_of(index), group.feature_names[index], jagged, positions)


def unknown_id_error(table: Table, feature: str, jagged: Jagged, positions: Tensor) -> IdError:
    """The error for the ids at `positions`, which are outside their table; it names the first."""
    return IdError(
        f"table {table.name!r}: feature {feature!r}, {_name_first(jagged, positions, table.rows)}. Hash or map the "
        f"ids, give the table more rows, or set unknown='last_row' to let its last row stand for all of them"
    )


def _name_first(jagged: Jagged, positions: Tensor, rows: int) -> str:
    """Sample, position and value of the first id, and the number of such ids."""
    first = int(positions[0])
    sample, position = locate_id(jagged, first)
    text = f"sample {sample}, position {position}: id {int(jagged.values_N[first])} is not in 0..{rows - 1}"
    return f"{text} ({len(positions)} such ids in the batch)"


def locate_id(jagged: Jagged, at: int) -> tuple[int, int]:
    """The sample of id `at` of the batch, and the id's position in its bag."""
    # The last bag that begins at or before the id; right=True passes over empty bags that begin there too.
    offsets = jagged.offsets()
    bag = int(torch.searchsorted(offsets, at, right=True)) - 1
    return bag % jagged.batch_size, at - int(offsets[bag])

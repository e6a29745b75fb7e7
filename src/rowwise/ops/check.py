"""Finds what was wrong with a batch, after a kernel has said that something was.

Kernels check every id and every merged row as they go, at almost no cost, and touch nothing that is bad; only
then does this slower search give it a name: table, feature, sample, position, id.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.errors import BatchError, GradientError, IdError
from rowwise.ops.layout import FeatureRow, Group
from rowwise.spec import Pooling, Table


def check_lengths(jagged: Jagged) -> None:
    """Raise if a length is negative or the lengths do not add up to the ids."""
    lengths, batch = jagged.lengths_FB, jagged.batch_size
    # A negative length first: it can make a wrong sum look right.
    negative = torch.nonzero(lengths < 0)
    if len(negative):
        at = int(negative[0])
        name = jagged.features[at // batch]
        raise BatchError(f"feature {name!r}, sample {at % batch}: length {int(lengths[at])}; want 0 or more")
    total = int(lengths.sum())
    if total != jagged.values_N.numel():
        by_feature = lengths.view(len(jagged.features), -1).sum(1).tolist()
        sums = ", ".join(f"{name}: {n}" for name, n in zip(jagged.features, by_feature, strict=True))
        raise BatchError(f"lengths add up to {total} and there are {jagged.values_N.numel()} ids ({sums})")


def bad_ids(group: Group, features_F9: Tensor, jagged: Jagged) -> list[tuple[int, Tensor]]:
    """For each feature with ids outside its table: the feature's number and the ids' positions in the batch."""
    rows = FeatureRow.read(features_F9)
    return outside(jagged, [(row.source, row.rows) for row in rows])


def outside(jagged: Jagged, limits: Sequence[tuple[int, int]]) -> list[tuple[int, Tensor]]:
    """For each (feature of the batch, rows) with ids outside 0..rows-1: its number, and where they are."""
    # Every batch_size-th offset is where a feature begins.
    bounds = jagged.offsets()[:: max(1, jagged.batch_size)]
    found: list[tuple[int, Tensor]] = []
    for index, (source, rows) in enumerate(limits):
        begin, end = (int(bounds[source + k]) if jagged.batch_size else 0 for k in (0, 1))
        ids = jagged.values_N[begin:end]
        at = torch.nonzero((ids < 0) | (ids >= rows)).flatten()
        if len(at):
            found.append((index, at + begin))
    return found


def check_rows(jagged: Jagged, rows: Sequence[int]) -> None:
    """Raise for the first id that is not in 0..rows-1, with the rows of each feature's table given."""
    for index, positions in outside(jagged, list(enumerate(rows))):
        raise IdError(
            f"feature {jagged.features[index]!r}, {_outsider(jagged, positions, rows[index])}. Hash or map the ids "
            f"before they are routed, or give the table more rows"
        )


def check_ids(group: Group, features_F9: Tensor, jagged: Jagged) -> None:
    """Raise for the first id outside its table."""
    for index, positions in bad_ids(group, features_F9, jagged):
        raise unknown_id(group.table_of(index), group.feature_names[index], jagged, positions)


def unknown_id(table: Table, feature: str, jagged: Jagged, positions: Tensor) -> IdError:
    """The error for the first of the ids at these positions, which are outside their table."""
    return IdError(
        f"table {table.name!r}: feature {feature!r}, {_outsider(jagged, positions, table.rows)}. Hash or map the ids, "
        f"give the table more rows, or set unknown='last_row' to let its last row stand for all of them"
    )


def _outsider(jagged: Jagged, positions: Tensor, rows: int) -> str:
    """The first of the ids at these positions, which are outside 0..rows-1, and how many there are."""
    first = int(positions[0])
    sample, position = _locate(jagged, first)
    what = f"sample {sample}, position {position}: id {int(jagged.values_N[first])} is not in 0..{rows - 1}"
    return f"{what} ({len(positions)} such ids in the batch)"


KEPT = "Rows it would have reached were left as they were; all others are updated"


def name_bad_gradient(group: Group, jagged: Jagged, grad: Tensor, per_id: bool) -> GradientError:
    """The error for a gradient that is not finite."""
    found = find_bad_gradient(group, jagged, grad, per_id)
    if found is not None:
        return GradientError(f"{found}. {KEPT}")
    # Every contribution is finite and their sum is not.
    return GradientError(f"the gradients of a row add up past the range of float32; lower the learning rate. {KEPT}")


def find_bad_gradient(group: Group, jagged: Jagged, grad: Tensor, per_id: bool) -> str | None:
    """The first number that is not finite and makes the gradient of a row so, with names; None if there is none."""
    if per_id:
        return _bad_sequence(group, jagged, grad)
    return _bad_bag(group, jagged, grad) or _bad_weight(group, jagged)


def _bad_bag(group: Group, jagged: Jagged, grad: Tensor) -> str | None:
    """The first gradient that is not finite and belongs to a bag with ids: others reach no row."""
    lengths = jagged.lengths_FB.view(len(jagged.features), -1)
    for index, (name, columns) in enumerate(zip(group.feature_names, group.columns_F, strict=True)):
        filled = lengths[jagged.features.index(name)] > 0
        bad = torch.nonzero(~torch.isfinite(grad[:, columns]) & filled.unsqueeze(1))
        if len(bad):
            sample, column = (int(x) for x in bad[0])
            ids = _bag(jagged, name, sample).tolist()
            shown = f"ids {ids[:8]}{' ...' if len(ids) > 8 else ''}"
            value = float(grad[sample, columns][column])
            return f"{value} in the gradient of {_named(group, index)}, sample {sample}, column {column}, {shown}"
    return None


def _bad_weight(group: Group, jagged: Jagged) -> str | None:
    """A per-id weight that is not finite makes a gradient so."""
    if jagged.weights_N is None:
        return None
    offsets = jagged.offsets()
    for index, name in enumerate(group.feature_names):
        if group.table_of(index).pooling is not Pooling.WEIGHTED:
            continue
        first = jagged.features.index(name) * jagged.batch_size
        begin, end = int(offsets[first]), int(offsets[first + jagged.batch_size])
        bad = torch.nonzero(~torch.isfinite(jagged.weights_N[begin:end]))
        if len(bad):
            at = begin + int(bad[0])
            sample, position = _locate(jagged, at)
            where = f"{_named(group, index)}, sample {sample}, position {position}"
            return f"weight {float(jagged.weights_N[at])} of {where}, id {int(jagged.values_N[at])}"
    return None


def _bad_sequence(group: Group, jagged: Jagged, grad: Tensor) -> str | None:
    bad = torch.nonzero(~torch.isfinite(grad))
    if not len(bad):
        return None
    index, sample, at = _place_in_sequence(group, jagged, int(bad[0, 0]))
    return f"{float(grad[bad[0, 0]])} in the gradient of {_named(group, index)}, sample {sample}, {at}"


def _locate(jagged: Jagged, at: int) -> tuple[int, int]:
    """The sample of an id, and its position inside the bag."""
    # The last bag that begins at or before the id; right=True passes over empty bags that begin there too.
    offsets = jagged.offsets()
    bag = int(torch.searchsorted(offsets, at, right=True)) - 1
    return bag % jagged.batch_size, at - int(offsets[bag])


def _named(group: Group, index: int) -> str:
    return f"table {group.table_of(index).name!r}, feature {group.feature_names[index]!r}"


def _bag(jagged: Jagged, feature: str, sample: int) -> Tensor:
    offsets = jagged.offsets()
    bag = jagged.features.index(feature) * jagged.batch_size + sample
    return jagged.values_N[int(offsets[bag]) : int(offsets[bag + 1])]


def _place_in_sequence(group: Group, jagged: Jagged, flat: int) -> tuple[int, int, str]:
    """Feature, sample and id of an element of the flat gradient of sequences."""
    offsets, batch = jagged.offsets(), jagged.batch_size
    for index, name in enumerate(group.feature_names):
        first = jagged.features.index(name) * batch
        begin, end = int(offsets[first]), int(offsets[first + batch])
        # The flat gradient holds feature after feature; walk until the element's feature is reached.
        floats = (end - begin) * group.table_of(index).dim
        if flat < floats:
            at = begin + flat // group.table_of(index).dim
            sample, position = _locate(jagged, at)
            return index, sample, f"position {position}, id {int(jagged.values_N[at])}"
        flat -= floats
    raise AssertionError("every element of the gradient belongs to an id")

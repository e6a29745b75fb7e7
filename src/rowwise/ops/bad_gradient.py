"""Finds what was wrong with a gradient, after a kernel or a check has said that something was.

Its own file beside `check`, which knows batches only: this one knows what was looked up for whom. Slow, and only met
by those who have a bad number: gives it a name, that of its table, feature, sample and ids.
"""

import re

import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.errors import GradientError
from rowwise.ops.check import locate_id
from rowwise.ops.layout import TableGroup, TableRow
from rowwise.ops.lookup import LookupCall
from rowwise.spec import Pooling

KEPT = "Rows it would have reached were left as they were; all others are updated"


def name_bad_gradient(call: LookupCall, grad: Tensor, said: str) -> GradientError:
    """The error for a gradient that is not finite; `said`: what the kernel told of it."""
    found = find_bad_gradient(call, grad)
    if found is not None:
        return GradientError(f"{found}. {KEPT}")
    # Every contribution is finite and their sum is not.
    named = re.search(r"row (\d+) of table (\d+)", said)
    assert named is not None
    row, index = map(int, named.groups())
    row += TableRow.read(call.group.tables_TC)[index].first_row
    name = call.group.tables[index].name
    return GradientError(
        f"table {name!r}, row {row}: its gradients add up past the range of float32; lower the learning rate. {KEPT}"
    )


def find_bad_gradient(call: LookupCall, grad: Tensor) -> str | None:
    """The first number that is not finite and makes the gradient of a row so, with names; None if there is none."""
    if call.per_id:
        return _bad_sequence(call, grad)
    return _bad_bag(call, grad) or _bad_weight(call)


def _bad_bag(call: LookupCall, grad: Tensor) -> str | None:
    """The first gradient that is not finite and belongs to a bag with ids: others reach no row."""
    group, jagged = call.group, call.jagged
    lengths = jagged.lengths_FB.view(len(jagged.features), -1)
    for index, (name, columns) in enumerate(zip(group.feature_names, group.columns_F, strict=True)):
        filled = lengths[jagged.features.index(name)] > 0
        bad = torch.nonzero(~torch.isfinite(grad[:, columns]) & filled.unsqueeze(1))
        if len(bad):
            sample, column = (int(x) for x in bad[0])
            ids = _bag(jagged, name, sample).tolist()
            shown = f"ids {ids[:8]}{' ...' if len(ids) > 8 else ''}"
            value = float(grad[sample, columns][column])
            return (
                f"{value} in the gradient of {_named(group, index)}, {_sample(call, sample)}, column {column}, {shown}"
            )
    return None


def _bad_weight(call: LookupCall) -> str | None:
    """A per-id weight that is not finite makes a gradient so."""
    group, jagged = call.group, call.jagged
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
            sample, position = locate_id(jagged, at)
            where = f"{_named(group, index)}, {_sample(call, sample)}, position {position}"
            return f"weight {float(jagged.weights_N[at])} of {where}, id {int(jagged.values_N[at])}"
    return None


def _bad_sequence(call: LookupCall, grad: Tensor) -> str | None:
    group, jagged = call.group, call.jagged
    bad = torch.nonzero(~torch.isfinite(grad))
    if not len(bad):
        return None
    index, sample, at = _place_in_sequence(group, jagged, int(bad[0, 0]))
    return f"{float(grad[bad[0, 0]])} in the gradient of {_named(group, index)}, {_sample(call, sample)}, {at}"


def _sample(call: LookupCall, sample: int) -> str:
    """A sample, where it came from."""
    rank = 0
    while rank < len(call.parts) and sample >= call.parts[rank]:
        sample -= call.parts[rank]
        rank += 1
    return f"sample {sample} of rank {rank}" if call.parts else f"sample {sample}"


def _named(group: TableGroup, index: int) -> str:
    return f"table {group.table_of(index).name!r}, feature {group.feature_names[index]!r}"


def _bag(jagged: Jagged, feature: str, sample: int) -> Tensor:
    offsets = jagged.offsets()
    bag = jagged.features.index(feature) * jagged.batch_size + sample
    return jagged.values_N[int(offsets[bag]) : int(offsets[bag + 1])]


def _place_in_sequence(group: TableGroup, jagged: Jagged, flat: int) -> tuple[int, int, str]:
    """Feature, sample and id of an element of the flat gradient of sequences."""
    offsets, batch = jagged.offsets(), jagged.batch_size
    for index, name in enumerate(group.feature_names):
        first = jagged.features.index(name) * batch
        begin, end = int(offsets[first]), int(offsets[first + batch])
        # The flat gradient holds feature after feature; walk until the element's feature is reached.
        floats = (end - begin) * group.table_of(index).dim
        if flat < floats:
            at = begin + flat // group.table_of(index).dim
            sample, position = locate_id(jagged, at)
            return index, sample, f"position {position}, id {int(jagged.values_N[at])}"
        flat -= floats
    raise AssertionError("every element of the gradient belongs to an id")

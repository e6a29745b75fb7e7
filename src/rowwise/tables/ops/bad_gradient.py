"""Locates a gradient that is not finite, after a kernel or a check has detected one: table, feature, sample, ids.

Slow, and only run to write the error message.
"""

import re

import torch
from torch import Tensor

from rowwise.base.errors import GradientError
from rowwise.tables.batch import Jagged
from rowwise.tables.ops.check import locate_id
from rowwise.tables.ops.layout import TableDescriptor, TableGroup
from rowwise.tables.ops.lookup import LookupCall
from rowwise.tables.spec import Pooling

UNCHANGED = "Rows that it would have reached are unchanged; all others are updated"


def name_bad_gradient(call: LookupCall, grad: Tensor, message: str) -> GradientError:
    """The error for a gradient that is not finite; `message`: the kernel's."""
    fault = find_bad_gradient(call, grad)
    if fault is not None:
        return GradientError(f"{fault}. {UNCHANGED}")
    # Every contribution is finite, so their sum has overflowed; the kernel names the row.
    match = re.search(r"row (\d+) of table (\d+)", message)
    assert match is not None
    row, index = map(int, match.groups())
    row += TableDescriptor.read(call.group.tables_TC)[index].first_row
    name = call.group.tables[index].name
    return GradientError(
        f"table {name!r}, row {row}: the sum of its gradients overflows float32",
        hint=f"lower the learning rate. {UNCHANGED}",
    )


def find_bad_gradient(call: LookupCall, grad: Tensor) -> str | None:
    """Describes the first number that makes a row's gradient not finite; None if all are finite."""
    if call.per_id:
        return _find_bad_sequence(call, grad)
    return _find_bad_bag(call, grad) or _find_bad_weight(call)


def _find_bad_bag(call: LookupCall, grad: Tensor) -> str | None:
    """The first gradient of a bag that is not finite; gradients of empty bags reach no row and are skipped."""
    group, jagged = call.group, call.jagged
    for index, (name, columns) in enumerate(zip(group.feature_names, group.columns_F, strict=True)):
        lengths_B = jagged.lengths_of(name)
        bad = torch.nonzero(~torch.isfinite(grad[:, columns]) & (lengths_B > 0).unsqueeze(1))
        if len(bad):
            sample, column = (int(x) for x in bad[0])
            ids = jagged.ids_of(name).split(lengths_B.tolist())[sample].tolist()
            ids_text = f"ids {ids[:8]}{' ...' if len(ids) > 8 else ''}"
            value = float(grad[sample, columns][column])
            where = f"{_feature_name(group, index)}, {_sample_name(call, sample)}, column {column}"
            return f"{value} in the gradient of {where}, {ids_text}"
    return None


def _find_bad_weight(call: LookupCall) -> str | None:
    """The first per-id weight that is not finite, as it multiplies a gradient."""
    group, jagged = call.group, call.jagged
    if jagged.weights_N is None:
        return None
    ranges = jagged.id_ranges()
    for index, name in enumerate(group.feature_names):
        if group.table_of(index).pooling is not Pooling.WEIGHTED:
            continue
        begin, end = ranges[name]
        bad = torch.nonzero(~torch.isfinite(jagged.weights_N[begin:end]))
        if len(bad):
            at = begin + int(bad[0])
            sample, position = locate_id(jagged, at)
            where = f"{_feature_name(group, index)}, {_sample_name(call, sample)}, position {position}"
            return f"weight {float(jagged.weights_N[at])} of {where}, id {int(jagged.values_N[at])}"
    return None


def _find_bad_sequence(call: LookupCall, grad: Tensor) -> str | None:
    group, jagged = call.group, call.jagged
    bad = torch.nonzero(~torch.isfinite(grad))
    if not len(bad):
        return None
    index, sample, at = _locate_in_sequences(group, jagged, int(bad[0, 0]))
    return (
        f"{float(grad[bad[0, 0]])} in the gradient of {_feature_name(group, index)}, {_sample_name(call, sample)}, {at}"
    )


def _sample_name(call: LookupCall, sample: int) -> str:
    """The sample's number in its own rank's batch, with the rank if there are several."""
    rank = 0
    while rank < len(call.samples_W) and sample >= call.samples_W[rank]:
        sample -= call.samples_W[rank]
        rank += 1
    return f"sample {sample} of rank {rank}" if call.samples_W else f"sample {sample}"


def _feature_name(group: TableGroup, index: int) -> str:
    return f"table {group.table_of(index).name!r}, feature {group.feature_names[index]!r}"


def _locate_in_sequences(group: TableGroup, jagged: Jagged, flat: int) -> tuple[int, int, str]:
    """Feature, sample and description of the id that element `flat` of the gradient of sequences belongs to."""
    ranges = jagged.id_ranges()
    for index, name in enumerate(group.feature_names):
        begin, end = ranges[name]
        # The flat gradient holds feature after feature; walk until the element's feature is reached.
        floats = (end - begin) * group.table_of(index).dim
        if flat < floats:
            at = begin + flat // group.table_of(index).dim
            sample, position = locate_id(jagged, at)
            return index, sample, f"position {position}, id {int(jagged.values_N[at])}"
        flat -= floats
    raise AssertionError("every element of the gradient belongs to an id")

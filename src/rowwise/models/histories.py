"""Histories without padding: the newest items of each list, and attention over groups of lists of similar lengths.

Layers over single items (linear layers, norms, feed-forward) run on [N, D], the items of all lists. Only attention
needs a matrix per list: `Groups.map` pads the lists of a group to the longest of the group.

[Note: Groups] On a CPU one product for each list is slow for short lists, and padding all lists to the longest is slow
for uneven ones. Forward and backward of softmax attention of 64 numbers in two heads, on one core of an AMD EPYC
(Zen 4), the best of 15, in ms:

    lists            items   padded to the longest   list by list   groups
    128, 19 to 50    6,280                      13             23       14
    128, 18 to 200  12,581                     127             60       56
    256, 2 to 201    8,542                     240             44       34

`torch.nested` has no causal attention on a CPU (torch 2.13).

[Note: Fixed lengths] The bits of attention depend on the length that a list is padded to, and so on the longest list of
its group. Outside of training a list is padded to a length that depends on its own only: 16, 24, 40, 64 and so on. With
these, products and SiLUs of a list had the same bits beside any others; with 8 they did not (MKL, AVX-512, torch 2.13).
"""

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowwise.base.errors import BatchError, SpecError
from rowwise.tables.batch import Jagged

GROWTH = 1.5  # a group's longest list has at most GROWTH * shortest + SLACK items
SLACK = 4
MIN_LENGTH, MULTIPLE = 16, 8  # fixed lengths: the smallest, and a common divisor


class Histories(NamedTuple):
    """Lists cut to their newest items: the last item of each list is the target, those before it are its history."""

    items_M: Tensor  # history and target of each list
    lists_B: Tensor  # their number, by list
    places_N: Tensor  # index in items_M of each history item; the next item is at the following index
    lengths_B: Tensor  # lengths of the histories


def items_of(sparse: Jagged, feature: str) -> tuple[Tensor, Tensor]:
    """The ids of a feature, list after list, and the length [B] of each list."""
    if feature not in sparse.all_features:
        raise BatchError(f"no feature {feature!r}; there are {', '.join(sparse.all_features)}")
    plain = sparse.expand_features((feature,))
    return plain.ids_of(feature), plain.lengths_of(feature).long()


def single_ids(sparse: Jagged, feature: str) -> Tensor:
    """The ids [B] of a feature; raises unless each sample has exactly one."""
    ids_B, lengths_B = items_of(sparse, feature)
    if not bool((lengths_B == 1).all()):
        at = int((lengths_B != 1).nonzero()[0])
        raise BatchError(f"feature {feature!r} has {int(lengths_B[at])} ids in sample {at}", "one id in each sample")
    return ids_B


def newest(items_N: Tensor, lengths_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The last `count` items of each list, and the new lengths [B]."""
    after_N = _items_after(lengths_B)
    return items_N[after_N < count], lengths_B.clamp(max=count)


def histories_of(items_N: Tensor, lengths_B: Tensor, count: int) -> Histories:
    """The last item of each list, and the last `count` before it."""
    items_M, lists_B = newest(items_N, lengths_B, count + 1)
    places_N = (_items_after(lists_B) > 0).nonzero().squeeze(1)
    return Histories(items_M, lists_B, places_N, (lists_B - 1).clamp(min=0))


def sample_of_each(lengths_B: Tensor) -> Tensor:
    """The index of each item's list [N]."""
    return torch.arange(len(lengths_B), device=lengths_B.device).repeat_interleave(lengths_B)


def positions_of(lengths_B: Tensor) -> Tensor:
    """The place of each item [N] in its list."""
    return lengths_B.repeat_interleave(lengths_B) - 1 - _items_after(lengths_B)


def _items_after(lengths_B: Tensor) -> Tensor:
    """The number of items of its list after each item [N]."""
    ends_N = lengths_B.cumsum(0).repeat_interleave(lengths_B)
    return ends_N - 1 - torch.arange(len(ends_N), device=lengths_B.device)


@final
class Groups:
    """Groups of lists of similar lengths, padded at their ends to one length; see [Note: Groups].

    Causal attention needs no mask of the padding, as it comes after all items.

    Args:
        lengths_B: of the lists.
        max_items: of a list; a longer list raises.
        fixed: pad each list to a length independent of other lists; see [Note: Fixed lengths].
    """

    def __init__(self, lengths_B: Tensor, max_items: int, *, fixed: bool = False) -> None:
        """Sort the lists by their lengths."""
        device = lengths_B.device
        self.positions_N = positions_of(lengths_B)
        order, begin_B = lengths_B.argsort(stable=True), torch.zeros_like(lengths_B)
        sizes = lengths_B[order].tolist()
        if sizes and sizes[-1] > max_items:
            raise BatchError(f"history {int(order[-1])} has {sizes[-1]} items", f"at most length={max_items}")
        self._shapes: list[tuple[int, int]] = []  # lists and items of each group
        self._rows, first, starts = 0, 0, list[int]()
        while first < len(sizes):  # greedy in order of length: a group takes lists up to its limit
            last, limit = first, _fixed_length(sizes[first]) if fixed else GROWTH * sizes[first] + SLACK
            while last < len(sizes) and sizes[last] <= limit:
                last += 1
            lists, longest = last - first, int(limit) if fixed else max(1, sizes[last - 1])
            starts += range(self._rows, self._rows + lists * longest, longest)
            self._shapes.append((lists, longest))
            self._rows, first = self._rows + lists * longest, last
        begin_B[order] = torch.tensor(starts, dtype=torch.int64, device=device)
        self._places_N = begin_B.repeat_interleave(lengths_B) + self.positions_N

    def map(self, change: Callable[[Tensor], Tensor], x_NC: Tensor) -> Tensor:
        """Pad [N, C] to [lists, items, C] in each group, change it to [lists, items, D], and drop the padding."""
        padded_RC = x_NC.new_zeros(self._rows, x_NC.shape[1]).index_copy(0, self._places_N, x_NC)
        parts = padded_RC.split([lists * longest for lists, longest in self._shapes])
        changed = [change(part.unflatten(0, shape)) for part, shape in zip(parts, self._shapes, strict=True)]
        if not changed:
            return change(padded_RC.unsqueeze(1)).flatten(0, 1)
        return torch.cat([part.flatten(0, 1) for part in changed]).index_select(0, self._places_N)


def _fixed_length(items: int) -> int:
    length = MIN_LENGTH
    while length < items:
        length = -(-3 * length // (2 * MULTIPLE)) * MULTIPLE
    return length


class HistoryEncoder(nn.Module):
    """Base of encoders: vectors of items times sqrt(dim), layers called with (x_ND, groups), and a norm.

    A subclass sets `layers`.

    Args:
        dim: of the item vectors.
        length: max. items of a history; `NextItem` reads its newest.
        layers: number of layers.
        heads: attention heads, each with an equal part of a vector.
        dropout: rate in all layers.
    """

    layers: nn.ModuleList

    def __init__(self, dim: int, *, length: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        for name, count in (("dim", dim), ("length", length), ("layers", layers)):
            if count < 1:
                raise SpecError(f"{name}={count}", "at least 1")
        if heads < 1 or dim % heads:
            raise SpecError(f"heads={heads}", f"a divisor of {dim}, the size of a vector")
        if not 0 <= dropout < 1:
            raise SpecError(f"dropout={dropout}", "at least 0 and less than 1")
        self.dim, self.length, self.dropout = dim, length, dropout
        self.norm = nn.LayerNorm(dim)

    def forward(self, x_ND: Tensor, lengths_B: Tensor) -> Tensor:
        """The vectors [N, D] of each place, from the item vectors [N, D] of all histories and their lengths [B]."""
        groups = Groups(lengths_B, self.length, fixed=not self.training)
        x_ND = F.dropout(self.placed(x_ND * self.dim**0.5, groups), self.dropout, self.training)
        for layer in self.layers:
            x_ND = layer(x_ND, groups)
        return self.norm(x_ND)

    def placed(self, x_ND: Tensor, groups: Groups) -> Tensor:
        """The vectors with position encodings, if the encoder has any; before all layers."""
        return x_ND

"""One order of adding up for parts that different ranks hold: a pairwise tree over leaves, cut into whole nodes.

Leaves 0, 1, 2, ... are added as neighbours, then neighbours of those, up to one root; a node whose sibling is absent
passes up unchanged, as in [Note: Merge order]. A rank that has the leaves of an interval can add only inside nodes
that lie in it whole; those travel, and `complete_sum` adds the rest. So the bits of the sum are the same however leaves
were dealt out, as long as each rank has neighbours. Pure, elementwise, for tensors of any one shape: a sum over
columns of rows and one over the virtual shards of a batch are the same tree. Known limits: sending one tensor a rank
(there are up to two nodes a level).
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Node(NamedTuple):
    """A node of the tree: the leaves from index << level up to, but not including, (index + 1) << level."""

    level: int
    index: int


def nodes_of(first: int, last: int) -> list[Node]:
    """The largest nodes that make up the leaves first, ..., last - 1, in order."""
    nodes: list[Node] = []
    while first < last:
        # A node begins at a multiple of its size, and ends in time.
        level = (last - first).bit_length() - 1
        if first:
            level = min(level, (first & -first).bit_length() - 1)
        nodes.append(Node(level, first >> level))
        first += 1 << level
    return nodes


def add_leaf(sums: list[Tensor], first: int, index: int, leaf: Tensor) -> None:
    """Make the sums of nodes_of(first, index) those of nodes_of(first, index + 1), in place; the leaf is used up."""
    sums.append(leaf)
    # As a binary counter carries: only the last nodes can have become halves of one.
    for _ in range(len(sums) - len(nodes_of(first, index + 1))):
        right = sums.pop()
        sums[-1] += right


def complete_sum(nodes: Sequence[Node], sums: Sequence[Tensor]) -> Tensor:
    """The root, from nodes that do not overlap, in any order; leaves that they do not cover are absent."""
    found, level = dict(zip(nodes, sums, strict=True)), 0
    while len(found) > 1:
        for node in sorted(node for node in found if node.level == level):  # the left of two comes first
            part, parent = found.pop(node), Node(level + 1, node.index // 2)
            found[parent] = found[parent] + part if parent in found else part
        level += 1
    return next(iter(found.values()))

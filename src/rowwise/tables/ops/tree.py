"""A fixed summation order for terms that several ranks hold: a pairwise tree over leaves, cut into whole nodes.

Leaves 0, 1, 2, ... are added in pairs of neighbours, then the pairs, up to one root; a node without a sibling passes up
unchanged, as in [Note: Merge order]. A rank that has an interval of leaves sums the nodes inside it and sends
these sums; `sum_nodes` adds the rest. So the sum has the same bits however the leaves are distributed, as long as each
rank has neighbours. Pure and elementwise: a sum over columns of rows and one over the virtual shards of a batch use the
same tree. A rank sends up to two nodes per level.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Node(NamedTuple):
    """A node of the tree: the leaves from index << level up to, but not including, (index + 1) << level."""

    level: int
    index: int


def nodes_of(first: int, last: int) -> list[Node]:
    """The largest nodes whose leaves are first, ..., last - 1, in order."""
    nodes: list[Node] = []
    while first < last:
        # The largest power of two that fits and divides `first`, as a node begins at a multiple of its size.
        level = (last - first).bit_length() - 1
        if first:
            level = min(level, (first & -first).bit_length() - 1)
        nodes.append(Node(level, first >> level))
        first += 1 << level
    return nodes


def add_leaf(sums: list[Tensor], first: int, index: int, leaf: Tensor) -> None:
    """Turn the sums of nodes_of(first, index) into those of nodes_of(first, index + 1), in place; overwrites `leaf`."""
    sums.append(leaf)
    # Like a carry in a binary counter: only the last nodes can have become the two halves of a larger one.
    for _ in range(len(sums) - len(nodes_of(first, index + 1))):
        right = sums.pop()
        sums[-1] += right


def sum_nodes(nodes: Sequence[Node], sums: Sequence[Tensor]) -> Tensor:
    """The root's sum, from nodes that do not overlap, in any order; leaves outside of them are absent."""
    by_node, level = dict(zip(nodes, sums, strict=True)), 0
    while len(by_node) > 1:
        for node in sorted(node for node in by_node if node.level == level):  # the left of two comes first
            part, parent = by_node.pop(node), Node(level + 1, node.index // 2)
            by_node[parent] = by_node[parent] + part if parent in by_node else part
        level += 1
    return next(iter(by_node.values()))

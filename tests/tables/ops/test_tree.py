"""The sum of a tree is that of its leaves, in one order, whoever held which of them."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise.tables.ops.reference.sums import column_sum
from rowwise.tables.ops.tree import Node, add_leaf, nodes_of, sum_nodes

COUNTS = st.integers(1, 40)


def root_of(leaves):
    """The definition: neighbours are added until one is left; the last one, if alone, passes up."""
    leaves = list(leaves)
    while len(leaves) > 1:
        pairs = [leaves[k : k + 2] for k in range(0, len(leaves), 2)]
        leaves = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


def make_leaves(count, shape=(3,), seed=0):
    """Numbers of very different sizes: any other order shows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-4, 5, (count, *shape), generator=generator)
    return list(torch.randn(count, *shape, generator=generator) * sizes)


def partial_sums(leaves, first):
    sums = []
    for index, leaf in enumerate(leaves, first):
        add_leaf(sums, first, index, leaf.clone())
    return sums


@given(st.integers(0, 70), st.integers(0, 70))
def test_nodes_cover_an_interval_in_order_with_as_few_as_can_be(first, count):
    nodes = nodes_of(first, first + count)
    leaves = [leaf for level, index in nodes for leaf in range(index << level, (index + 1) << level)]
    assert leaves == list(range(first, first + count))
    for left, right in pairwise(nodes):
        assert not (left.level == right.level and left.index ^ 1 == right.index > left.index), "two halves of one node"
    assert len(nodes) <= max(1, 2 * count.bit_length())


@given(COUNTS, st.lists(st.integers(0, 40), max_size=6), st.sampled_from([(), (3,), (2, 2)]), st.randoms())
def test_the_sum_does_not_depend_on_who_held_the_leaves(count, cuts, shape, random):
    leaves = make_leaves(count, shape)
    kept = [leaf.clone() for leaf in leaves]
    bounds = [0, *sorted(min(cut, count) for cut in cuts), count]
    parts = []
    for first, last in pairwise(bounds):
        nodes = nodes_of(first, last)
        parts += list(zip(nodes, partial_sums(leaves[first:last], first), strict=True))
    random.shuffle(parts)
    assert torch.equal(sum_nodes([node for node, _ in parts], [part for _, part in parts]), root_of(leaves))
    assert all(torch.equal(a, b) for a, b in zip(leaves, kept, strict=True)), "leaves were changed"


@given(COUNTS)
def test_it_is_the_tree_over_columns(columns):
    x_ND = torch.stack(make_leaves(columns, (5,)), 1)
    nodes = [Node(0, column) for column in range(columns)]
    assert torch.equal(sum_nodes(nodes, x_ND.unbind(1)), column_sum(x_ND))


@given(st.integers(0, 40), st.integers(1, 64))
def test_few_tensors_are_held(first, count):
    sums, most = [], 0
    for index, leaf in enumerate(make_leaves(count), first):
        add_leaf(sums, first, index, leaf)
        assert len(sums) == len(nodes_of(first, index + 1))
        most = max(most, len(sums))
    assert most <= 2 * count.bit_length()


def test_absent_leaves_in_the_middle_add_nothing():
    leaves = make_leaves(8)
    found = sum_nodes([Node(0, 1), Node(0, 6), Node(0, 4)], [leaves[1], leaves[6], leaves[4]])
    assert torch.equal(found, leaves[1] + (leaves[4] + leaves[6]))

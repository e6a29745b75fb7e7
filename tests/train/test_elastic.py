"""The gradients of virtual shards add up to the same bits, whoever computed them."""

import pytest
import torch
from tables.ops.test_tree import make_leaves, root_of
from torch import nn

from rowwise import SpecError
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.thread import run_threads
from rowwise.train.elastic import ElasticGradients

SHAPES = [(5, 3), (), (11,), (2,), (4,)]


@pytest.mark.parametrize(
    ("shards", "world"), [(8, w) for w in (1, 2, 4, 8)] + [(6, w) for w in (1, 2, 3, 6)] + [(7, 7)]
)
def test_sums_are_those_of_the_tree_over_all_shards(shards, world):
    """The last parameter has no gradient anywhere, the last but one in a few shards only."""
    leaves_PV = [make_leaves(shards, shape, seed) for seed, shape in enumerate(SHAPES)]

    def rank(comm):
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        reducer = ElasticGradients(parameters, comm, shards)
        each = shards // world
        for _ in range(2):
            for place, shard in enumerate(range(comm.rank * each, (comm.rank + 1) * each)):
                used = parameters[:3] if shard % 3 else parameters[:4]
                loss = sum((p * leaves[shard]).sum() for p, leaves in zip(used, leaves_PV, strict=False))
                reducer.backward(loss, last=place == each - 1)
                assert all(p.grad is None for p in parameters)
            reducer.finish()
            found = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
        return found

    some_V = [torch.zeros(2) if shard % 3 else leaf for shard, leaf in enumerate(leaves_PV[3])]
    want = [root_of(leaves) for leaves in [*leaves_PV[:3], some_V]]
    for *found, missing in run_threads(world, rank, timeout_s=20):
        assert missing is None
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_a_model_of_tables_only_has_nothing_to_add():
    reducer = ElasticGradients([], solo(), 2)
    for last in (False, True):
        reducer.backward(torch.zeros((), requires_grad=True).sum(), last=last)
    reducer.finish()


def test_ranks_that_cannot_share_the_shards():
    def rank(comm):
        with pytest.raises(SpecError, match="size of 1, 2"):
            ElasticGradients([], comm, 8)

    run_threads(3, rank)

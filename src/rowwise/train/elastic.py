"""Sums the gradients of dense parameters to the same bits for any number of ranks: a fixed tree over virtual shards.

A step's batch is cut into V virtual shards for any number of ranks; rank r computes the r-th run of them, one by one.
Their gradients are the leaves of the tree in `tables/ops/tree.py`. A rank adds the nodes whose leaves it has, so it
holds at most two copies of the dense gradients per level of the tree. The nodes above are added by a reduce-scatter and
an all-gather: each rank adds one share of the numbers. The methods are those of `DenseGradients`. Not supported:
overlap with the backward, lossy wires.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.parallel.comm.interface import Comm
from rowwise.tables.ops.tree import add_leaf, nodes_of, sum_nodes
from rowwise.train.dense import flatten, reduce_present, unflatten


@final
class ElasticGradients:
    """Sums over all virtual shards: call `backward` for each shard of this rank, in order, then `finish`.

    Args:
        parameters: the trained parameters, in the same order on all ranks.
        comm: a group without other collectives.
        virtual_shards: number of shards of all ranks together.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Comm, virtual_shards: int) -> None:
        world = len(comm.ranks)
        if virtual_shards % world:
            divisors = ", ".join(str(w) for w in range(1, virtual_shards + 1) if virtual_shards % w == 0)
            raise SpecError(f"{virtual_shards} virtual shards on {world} ranks", f"a world size of {divisors}")
        self._comm, self._parameters, self._per_rank = comm, tuple(parameters), virtual_shards // world
        self._first = comm.rank * self._per_rank
        self.discard()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of the next virtual shard to the tree; `last` is for `DenseGradients` only."""
        loss.backward()
        if self._parameters:
            with torch.no_grad():
                add_leaf(self._sums, self._first, self._first + self._done, flatten(self._parameters))
        for index, parameter in enumerate(self._parameters):
            self._present[index] |= parameter.grad is not None
            parameter.grad = None
        self._done += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Replace the gradients by their sums over all virtual shards."""
        assert self._done == self._per_rank
        if not self._parameters:
            return
        present = reduce_present(self._comm, self._present)
        total = self._add_up(torch.stack(self._sums))
        unflatten(self._parameters, total, [bool(ranks) for ranks in present.wait().tolist()])
        self.discard()

    def discard(self) -> None:
        """Drop the gradients of a failed step."""
        self._done = 0
        self._sums: list[Tensor] = []
        self._present = [False] * len(self._parameters)

    def _add_up(self, sums_MN: Tensor) -> Tensor:
        """The root of the tree, from the nodes of all ranks."""
        comm, world, size = self._comm, len(self._comm.ranks), sums_MN.shape[1]
        bounds = [size * w // world for w in range(world + 1)]
        shares_W = [bounds[w + 1] - bounds[w] for w in range(world)]
        nodes_W = [nodes_of(w * self._per_rank, (w + 1) * self._per_rank) for w in range(world)]
        # Each rank adds one share of the numbers: it receives that share of every node, in the order of ranks.
        packed = torch.cat([part_MN.reshape(-1) for part_MN in sums_MN.split(shares_W, 1)])
        local = shares_W[comm.rank]
        received = comm.all_to_all(
            packed, [len(sums_MN) * share for share in shares_W], [len(nodes) * local for nodes in nodes_W], "dense"
        ).wait()
        nodes = [node for nodes in nodes_W for node in nodes]
        root = sum_nodes(nodes, received.view(len(nodes), local).unbind())
        return comm.all_gather(root, shares_W, "dense").wait()

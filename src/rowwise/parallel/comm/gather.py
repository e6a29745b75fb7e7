"""`all_gather_rows`: an all-gather with a gradient, as in `torch.distributed.nn`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rowwise.parallel.comm.interface import Comm


class _GatherRowsFunction(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, x_BD, comm, counts_W, purpose = args
        ctx.comm, ctx.purpose, ctx.splits_W = comm, purpose, [n * x_BD.shape[1] for n in counts_W]
        return comm.all_gather(x_BD.reshape(-1), ctx.splits_W, purpose).wait().view(-1, x_BD.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        gradient_ND = gradients[0]
        total = ctx.comm.reduce_scatter(gradient_ND.reshape(-1), ctx.splits_W, ctx.purpose).wait()
        return total.view(-1, gradient_ND.shape[1]), None, None, None


def all_gather_rows(comm: Comm, x_BD: Tensor, counts_W: Sequence[int], purpose: str) -> Tensor:
    """The rows of all ranks, in rank order; a row's gradient is the sum over all ranks.

    Args:
        comm: a collective in the forward, and one in the backward.
        x_BD: this rank's rows.
        counts_W: rows of each rank.
        purpose: key under which the bytes are counted.
    """
    if len(comm.ranks) == 1:
        return x_BD
    gathered_ND: Tensor = _GatherRowsFunction.apply(x_BD, comm, counts_W, purpose)  # type: ignore[no-untyped-call]
    return gathered_ND

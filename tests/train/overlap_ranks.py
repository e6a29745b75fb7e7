"""Backwards whose layers take a known time, on ranks that are processes behind a slow link."""

import time

import torch
from torch import nn

from rowwise.parallel.comm.fsdp import FsdpOptions, reset_after_error, shard_parameters
from rowwise.train.dense_parallel import local_part

WIDTH = 64


class SlowBackward(torch.autograd.Function):
    """Does nothing, and sleeps in the backward: computation that needs no processor."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.begin_s = time.perf_counter()
        time.sleep(ctx.layer.seconds)
        ctx.layer.end_s = time.perf_counter()
        return gradient, None


class SlowLayer(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x):
        return SlowBackward.apply(self.linear(x).tanh(), self)


def run(comm, shards, layers, layer_s, backwards=1, *, overlap=True):
    """Transfers of sums and backwards of layers in one step, its seconds, and the gradients of this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(SlowLayer(layer_s) for _ in range(layers)))
    units = list(model)
    shard_parameters(model, units, comm, FsdpOptions(shards=shards, overlap=overlap), set())
    transfers, draws = [], torch.Generator().manual_seed(comm.rank)
    for step in range(2):  # the first one connects
        model.zero_grad()
        comm.observer.report = transfers.append if step else None
        begin_s = time.perf_counter()
        for _ in range(backwards):
            model(torch.randn(8, WIDTH, generator=draws)).square().sum().backward()
        seconds = time.perf_counter() - begin_s
    sums = [(t.collective, t.begin_s, t.end_s) for t in transfers if t.collective in ("reduce_scatter", "all_reduce")]
    return {
        "sums": sorted(sums, key=lambda transfer: transfer[1]),
        "backwards": [(unit.begin_s, unit.end_s) for unit in reversed(units)],
        "seconds": seconds,
        "gradients": [local_part(p.grad).clone() for p in model.parameters()],
    }


class FailingLayer(SlowLayer):
    fails = False

    def forward(self, x):
        out = super().forward(x).clone()  # FSDP warns of views
        out.register_hook(self.check)
        return out

    def check(self, _gradient):
        if self.fails:
            raise ArithmeticError("the backward of a layer")


def after_an_error(comm, *, fails):
    """The gradients of this rank after a step, before which the second backward of another step has raised."""
    torch.manual_seed(0)
    model = nn.Sequential(*(FailingLayer(0.0) for _ in range(5)))
    shard_parameters(model, list(model), comm, FsdpOptions(shards=2), set())
    first, second, last = torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(comm.rank))
    if fails:
        model(first).square().sum().backward()
        model[1].fails = True
        try:
            model(second).square().sum().backward()
        except ArithmeticError:
            model[1].fails = False
        assert not model[1].fails
        reset_after_error(model)
    model(last).square().sum().backward()
    return [local_part(p.grad).clone() for p in model.parameters()]

"""What ranks do in the tests of waiting; apart, as processes find functions by their module."""

import time

import torch


def meet(comm):
    """For each collective: how long this rank has waited, and how long all of it took."""
    w, n = len(comm.ranks), 1000
    calls = (
        lambda x: comm.all_to_all(x, [n // w] * w, [n // w] * w, "x"),
        lambda x: comm.all_gather(x, [len(x)] * w, "x"),
        lambda x: comm.reduce_scatter(x, [n // w] * w, "x"),
        lambda x: comm.all_reduce(x, "x"),
    )
    waited, took = [], []
    for call in calls:
        begin, before = time.perf_counter(), comm.waited.seconds
        call(torch.ones(n // w * w)).wait()
        waited.append(comm.waited.seconds - before)
        took.append(time.perf_counter() - begin)
    return waited, took

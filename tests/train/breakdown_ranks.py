"""What ranks do in the tests of the breakdown; apart, as processes find functions by their module."""

import time
from time import perf_counter

import torch
from clicks import make_clicks, make_tables

from rowwise import DLRM, Embeddings, Plan
from rowwise.parallel.shard import shard
from rowwise.planning.planner import row_wise
from rowwise.train.breakdown import Breakdown
from rowwise.train.objective import Clicks
from rowwise.train.settings import Training
from rowwise.train.step import StepContext, step


def steps(comm, count, late_s):
    """Of each step: a bound from below, seconds by phase, a bound from above. Rank 1 begins each so much later."""
    torch.manual_seed(0)
    tables = make_tables(64)
    plan = Plan(world=2, tiles=tuple(tile for t in tables for tile in row_wise(t, [0, 1])))
    model = shard(DLRM(Embeddings(tables), 3, bottom=(8, 64), top=(8, 1)), plan, comm)
    clock, found = Breakdown(waited=comm.waited), []
    work = StepContext.create(model, Clicks(model), Training(), clock, comm)
    clock.watch(work.tables)
    for number in range(1, count + 1):
        outside = perf_counter()
        before = clock.seconds()
        begin = perf_counter()
        if comm.rank:
            time.sleep(late_s)
        step(work, [make_clicks(64, seed=comm.rank)], number)
        inside = perf_counter() - begin
        spent = {phase: seconds - before[phase] for phase, seconds in clock.seconds().items()}
        found.append((inside, spent, perf_counter() - outside))
    return found

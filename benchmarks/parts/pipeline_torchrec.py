"""What each process of `pipeline.py` does in its section torchrec: both sides over links of the same latency."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed

from parts.pipeline_c10d import BACKEND, Latency, register
from parts.pipeline_ranks import FREE, Group, Order, sequential_s
from parts.pipeline_work import Block
from parts.shard_ranks import AHEAD, THEIRS, check_same
from parts.shard_rowwise import Rowwise
from parts.shard_torchrec import TorchRec, join, meet
from parts.shard_work import Turn, whole_model
from rowwise.parallel.comm.simulated_link import SimulatedLink

SHARES = {"none": 0.0, "1/4": 0.25, "1": 1.0}  # of the time that our sequential step computes: a collective's latency
TRIES = 5


def against(comm: Any, order: Order) -> list[dict]:
    """The same model, plan, weights and batches on both sides, over gloo, by latency."""
    latency = Latency()
    register(latency)
    join(comm, BACKEND)
    group = Group(comm, order)
    ours = Rowwise(whole_model(order.shape), order.layout, group.comm)
    theirs = TorchRec(whole_model(order.shape), order.shape, order.layout)
    check_same([ours, theirs], group.parts[0])
    group.block(ours.model, pipeline_depth=1)
    compute_s = sequential_s(group, ours.model)
    turns = group.depths(ours.model) | turns_of(theirs, group)
    rows = []
    for name, share in SHARES.items():
        latency.seconds = share * compute_s
        group.set_link(SimulatedLink(latency.seconds) if share else FREE)
        about = {"section": "torchrec", "link": name, "latency_ms": latency.seconds * 1e3, **exchange_times(group)}
        rows += group.rows(about | {"compute_ms": compute_s * 1e3}, turns)
    return rows


def turns_of(theirs: TorchRec, group: Group) -> dict[str, Callable[[], Block]]:
    """As it is, and under TrainPipelineSparseDist."""
    parts, updates = group.parts, group.order.updates
    plain = Turn(run=lambda k: theirs.step(parts[k % len(parts)]))
    both = {THEIRS: plain, AHEAD: theirs.pipelined(parts)}
    return {name: partial(block_of, turn, updates) for name, turn in both.items()}


def block_of(turn: Turn, updates: int) -> Block:
    begin = time.process_time()
    seconds = turn.block(meet, 0, updates)
    return Block(seconds, (time.process_time() - begin) / updates)


def exchange_times(group: Group) -> dict[str, float]:
    """The time of a small all-to-all on each side, which has to be the same: the link's latency and little more."""
    sent, received = torch.ones(2), torch.empty(2)
    exchanges = {
        "our_exchange_ms": lambda: group.comm.all_to_all(sent, [1, 1], [1, 1], "benchmark").wait(),
        "their_exchange_ms": lambda: distributed.all_to_all_single(received, sent),
    }
    found = {}
    for name, exchange in exchanges.items():
        spent: list[float] = []
        for _ in range(TRIES):
            meet(0.0)
            begin = time.perf_counter()
            exchange()
            spent.append(time.perf_counter() - begin)
        found[name] = meet(min(spent)) * 1e3
    return found

"""What each process of `pipeline.py` does in its sections delay, busy and torchrec: a DLRM's steps, turn by turn.

Apart because these functions run in processes of their own, which import them by name.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from parts.pipeline_work import Block, batch_of, time_block
from parts.shard_rowwise import plan_of
from parts.shard_work import Load, Shape, parts_of, whole_model
from rowwise.parallel.comm.delayed import DelayedTransport, delay
from rowwise.parallel.comm.simulated_link import SimulatedLink
from rowwise.parallel.shard.apply import shard

BATCHES = 8  # that the steps go through
PROBE_s = 30e-3  # latency by which the latencies of a step are counted: long beside other differences
FREE = SimulatedLink(0.0)
STALE = "depth 2, stale"  # rows may be one step old
Turns = Mapping[str, Callable[[], Block]]  # of each side; sampled are seconds of this rank's processor


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a group of processes is asked for."""

    shape: Shape
    load: Load
    transport: str
    blocks: int
    updates: int  # of a block
    layout: str = "table-wise"
    depths: tuple[int, ...] = (1, 2, 3)


class Group:
    """This process among those that got the order; its link is as fast as the machine at first."""

    def __init__(self, comm: Any, order: Order, *, simulated: bool = True) -> None:
        self.order, self.plain = order, comm
        self.comm: Any = delay(comm, FREE) if simulated else comm
        self.parts = [parts_of(order.shape, order.load, seed, comm.rank, len(comm.ranks)) for seed in range(BATCHES)]
        self.batches = [batch_of(parts) for parts in self.parts]

    def set_link(self, link: SimulatedLink) -> None:
        assert isinstance(self.comm.transport, DelayedTransport)
        self.comm.transport.queue.link = link

    def model(self) -> nn.Module:
        """The same weights each time."""
        start = whole_model(self.order.shape)
        return shard(start, plan_of(start.embeddings.tables, self.order.layout, self.comm.topology), self.comm)

    def largest(self, value: float) -> float:
        """Of all ranks."""
        told = torch.tensor([value], dtype=torch.float64)
        return float(self.plain.all_gather(told, [1] * len(self.plain.ranks), "benchmark").wait().max())

    def block(self, model: nn.Module, **train: Any) -> Block:
        """Seconds an update, alike on all ranks."""
        load = self.order.load
        how = {"sample": time.process_time, "batch": load.batch, **train}
        block = time_block(model, self.comm, self.batches, self.order.updates, **how)
        return Block(self.largest(block.seconds), block.sampled)

    def depths(self, model: nn.Module) -> dict[str, Callable[[], Block]]:
        turns = {f"depth {depth}": partial(self.block, model, pipeline_depth=depth) for depth in self.order.depths}
        return turns | {STALE: partial(self.block, model, pipeline_depth=2, staleness=1)}

    def rows(self, about: dict, turns: Turns) -> list[dict]:
        """Sides take turns in blocks (A B A B); a row each."""
        for turn in turns.values():
            turn()
        blocks: dict[str, list[Block]] = {name: [] for name in turns}
        for _ in range(self.order.blocks):
            for name, turn in turns.items():
                blocks[name].append(turn())
        return [about | self._row(name, found) for name, found in blocks.items()]

    def _row(self, side: str, blocks: Sequence[Block]) -> dict:
        """Quantiles of 20 %; of the processor's time, which other processes change less, too."""
        ordered, cpu = (sorted(values) for values in zip(*blocks, strict=True))
        low, low_cpu = ordered[len(ordered) // 5], cpu[len(cpu) // 5]
        load, layout = self.order.load, self.order.layout
        about = {"side": side, "layout": layout, "transport": self.order.transport, **load._asdict()}
        noise = ordered[len(ordered) // 2] / low - 1
        about |= {"ms": low * 1e3, "cpu_ms": low_cpu * 1e3, "samples_s": load.batch / low}
        return about | {"noise": noise, "blocks": len(ordered)}


def busy(comm: Any, order: Order) -> list[dict]:
    """By depth, without a simulated link."""
    group = Group(comm, order, simulated=False)
    return group.rows({"section": "busy", "link": "none"}, group.depths(group.model()))


def delayed(comm: Any, order: Order) -> list[dict]:
    """By depth, over a link whose latencies take as long as computing does in a sequential step, then its bytes."""
    group = Group(comm, order)
    model = group.model()
    compute_s, chain = count_latencies(group, model)
    rows = []
    for name, link in links_of(group, model, compute_s, chain).items():
        group.set_link(link)
        about = {"section": "delay", "link": name, "compute_ms": compute_s * 1e3, "latencies": chain}
        rows += group.rows(about | {"latency_ms": link.latency_s * 1e3, "bytes_s": link.bytes_s}, group.depths(model))
    return rows


def count_latencies(group: Group, model: nn.Module) -> tuple[float, float]:
    """Seconds of a sequential step without latency, and how many latencies it has one after the other."""
    group.block(model, pipeline_depth=1)
    compute_s = sequential_s(group, model)
    group.set_link(SimulatedLink(PROBE_s))
    slower_s = sequential_s(group, model)
    group.set_link(FREE)
    return compute_s, max(1.0, (slower_s - compute_s) / PROBE_s)


def sequential_s(group: Group, model: nn.Module) -> float:
    """Seconds of a sequential update: of two blocks the faster one's."""
    return min(group.block(model, pipeline_depth=1).seconds for _ in range(2))


def links_of(group: Group, model: nn.Module, compute_s: float, chain: float) -> dict[str, SimulatedLink]:
    """Latency-bound and bandwidth-bound, either with as much waiting in a sequential step as it computes."""
    before = group.comm.sent.total()
    group.block(model, pipeline_depth=1)
    step_bytes = group.largest((group.comm.sent.total() - before) / group.order.updates)
    latency = SimulatedLink(compute_s / chain)
    return {"latency": latency, "bandwidth": SimulatedLink(0.0, step_bytes / compute_s)}

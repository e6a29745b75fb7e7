"""What each process of `shard_step.py` does: build the sides, check that they agree, and time them turn by turn.

Apart because these functions run in processes of their own, which import them by name.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from parts.dlrm import DENSE, DIM, FEATURES, WIDTH
from parts.limits import PEAK_SIZE, SMOKE_SIZE, Rows, dlrm_flops, limit_of, peak_flops_s, rows_s
from parts.shard_torchrec import TorchRec, join, meet
from parts.shard_work import Load, Parts, Shape, Side, Turn, interleave, parts_of, whole_model

BATCHES = 4  # that the steps go through
SHARE = "share"
OURS, THEIRS, AHEAD = "rowwise", "TorchRec", "TorchRec pipelined"


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a group of processes is asked for."""

    shape: Shape
    layout: str
    loads: tuple[Load, ...]
    seconds: float  # for each load, about
    sides: tuple[str, ...]
    transport: str = "gloo"  # of rowwise


class Group:
    """This process among those that got the order."""

    def __init__(self, comm: Any, order: Order):
        join(comm)
        self.comm, self.order, self.rank, self.world = comm, order, comm.rank, len(comm.ranks)

    def side(self, name: str, layout: str | None) -> Side:
        """Each starts from the same weights."""
        start = whole_model(self.order.shape)
        if name == THEIRS:
            return TorchRec(start, self.order.shape, layout)
        from parts.shard_rowwise import Rowwise

        return Rowwise(start, layout, self.comm)

    def batches(self, load: Load) -> list[Parts]:
        return [parts_of(self.order.shape, load, seed, self.rank, self.world) for seed in range(BATCHES)]

    def whole_batches(self, load: Load) -> list[Parts]:
        return [parts_of(self.order.shape, load, seed, 0, 1) for seed in range(BATCHES)]

    def rows(self, kind: str, load: Load, turns: dict[str, Turn]) -> list[dict]:
        """Time the sides; a row each."""
        times = interleave(turns, meet, self.order.seconds)
        return [self.row(kind, name, load, found, self.world) for name, found in times.items()]

    def row(self, kind: str, name: str, load: Load, times: Sequence[float], ranks: int) -> dict:
        ordered = sorted(times)
        low = ordered[len(ordered) // 5]
        return {
            "kind": kind,
            "side": name,
            "layout": self.order.layout,
            "transport": self.order.transport,
            "ranks": ranks,
            **load._asdict(),
            "ms": low * 1e3,
            "samples_s": load.batch / low,
            "noise": ordered[len(ordered) // 2] / low - 1,
            "blocks": len(ordered),
        }


def turn_of(step: Callable[[Parts], object], batches: Sequence[Parts]) -> Turn:
    return Turn(run=lambda k: step(batches[k % len(batches)]))


@torch.no_grad()
def check_same(sides: Sequence[Side], parts: Parts) -> None:
    """What the first computes, all do: of the tables, and of the model."""
    for how in ("pooled", "logits"):
        first, *others = (getattr(side, how)(parts) for side in sides)
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-5)


def speed(comm: Any, order: Order) -> list[dict]:
    """A and B: whole steps, then tables alone."""
    group = Group(comm, order)
    limits = limits_of(group)
    sides = {name: group.side(name, order.layout) for name in order.sides}
    gc.collect()
    for load in order.loads:
        check_same(list(sides.values()), group.batches(load)[0])
    rows: list[dict] = []
    for load in order.loads:
        batches = group.batches(load)
        turns = {name: turn_of(side.step, batches) for name, side in sides.items()}
        if THEIRS in sides:
            turns[AHEAD] = sides[THEIRS].pipelined(batches)
        rows += group.rows("step", load, turns)
        grad_BS = torch.randn(load.batch // group.world, FEATURES * DIM) * 0.01
        tables = {name: turn_of(partial(side.embed, grad_BS=grad_BS), batches) for name, side in sides.items()}
        rows += group.rows("tables", load, tables)
    for row in rows:
        if row["side"] == OURS:
            row |= limits[row["kind"], row["batch"], row["pooling"]]
            row["limit_share"] = row["limit_ms"] / row["ms"]
    return rows


def limits_of(group: Group) -> dict[tuple[str, int, int], dict[str, float]]:
    """Of whole steps and of tables alone, for each load: the slowest rank's, while all of them are at it."""
    shape, found = group.order.shape, {}
    model = whole_model(shape)
    meet(0.0)
    flops_s = -meet(-peak_flops_s(PEAK_SIZE if group.order.seconds >= 1 else SMOKE_SIZE))
    for load in group.order.loads:
        rows = [Rows(model.embeddings, parts.jagged()) for parts in group.batches(load)]
        meet(0.0)
        took_s = meet(rows_s(rows, 3))
        flops = dlrm_flops(load.batch // group.world, (DENSE, *shape.bottom), (WIDTH, *shape.top), FEATURES + 1)
        found["step", load.batch, load.pooling] = limit_of(flops, flops_s, took_s)
        found["tables", load.batch, load.pooling] = limit_of(0, flops_s, took_s)
    return found


def scaling(comm: Any, order: Order) -> list[dict]:
    """C: one process, while the others sleep, with all samples and with its share of them; and all of them."""
    group, rows = Group(comm, order), []
    for name in order.sides:
        whole = group.side(name, None) if group.rank == 0 else None
        sharded = group.side(name, order.layout)
        for load in order.loads:
            batches = group.batches(load)
            idle = Turn(run=lambda k: None)
            turns = {1: idle, SHARE: idle, group.world: turn_of(sharded.step, batches)}
            if whole is not None:
                turns |= {1: turn_of(whole.step, group.whole_batches(load)), SHARE: turn_of(whole.step, batches)}
            if name == THEIRS:
                turns[AHEAD] = sharded.pipelined(batches)
            for key, found in interleave(turns, meet, group.order.seconds).items():
                if key == SHARE:
                    rows.append(group.row("scaling", name, Load(load.batch // group.world, load.pooling), found, 1))
                    continue
                side, ranks = (key, group.world) if key == AHEAD else (name, key)
                rows.append(group.row("scaling", side, load, found, ranks))
        del whole, sharded
        gc.collect()
    return rows


def everything(comm: Any, order: Order) -> list[dict]:
    """All that is timed, by one group of processes."""
    return [*speed(comm, order), *scaling(comm, order)]

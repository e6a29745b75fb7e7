"""How fast is rearranging a batch beside FBGEMM and torch: permute, concatenate, bucketize, distinct ids?

    python benchmarks/jagged.py [--quick | --smoke] [--save]

A batch has 26 features. Both sides get the same tensors; results are first checked to be equal, then the two run
interleaved (A B A B), each giving its memory back before the other starts. A time is the 20 % quantile of the repeats.
FBGEMM has no joining of batches and no distinct ids on a CPU: it joins as TorchRec does, by torch.cat and a
permutation, and distinct ids are torch.unique's, one call for each feature. The last printed line is one JSON object.

Takes: 4 minutes; --quick 1 minute
Needs: the extra `peers`
"""

import argparse
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from parts.ops_work import Work, ids_for, rows_for
from parts.report import at_least, exactly, finish, geomean, has_peer, options, parsed, show
from parts.timer import beside

import rowwise.tables.ops  # noqa: F401 - registers ours

ours, fbgemm = torch.ops.rowwise, torch.ops.fbgemm
TABLES = 26
PARTS = 4  # batches that are joined


class Cell(NamedTuple):
    op: str
    dtype: str
    batch: int
    pooling: int
    threads: int
    buckets: int = 0
    segments: int = TABLES


class Pair(NamedTuple):
    """One question to both sides; `same` says whether two answers agree."""

    ours: Callable[[], object]
    peer: Callable[[], object]
    peer_name: str
    same: Callable[[object, object], bool]


class Data:
    """The batch of a cell: Zipf ids, and bags of 1 id or of pooling/2 .. 3/2 pooling."""

    def __init__(self, cell: Cell):
        self.rows = rows_for(cell.segments, 1_000, 4_000_000) if cell.segments > 1 else [4_000_000]
        work = Work(64, cell.batch, cell.pooling, "zipf", cell.threads, "sgd")
        dtype = getattr(torch, cell.dtype)
        self.ids_N = ids_for(self.rows, work, 0).to(dtype)
        spread = torch.randint(0, cell.pooling // 2 + 1, (cell.segments, cell.batch // 2))
        # Pairs of bags keep the sum, so that every feature has batch * pooling ids.
        self.lengths_FB = torch.cat([cell.pooling + spread, cell.pooling - spread], 1).to(dtype)
        self.segments_S1 = torch.arange(cell.segments + 1) * cell.batch * cell.pooling


def permute(cell: Cell) -> Pair:
    data = Data(cell)
    order = torch.randperm(TABLES)
    runs = torch.stack([order * 0, order * cell.batch, order * 0 + cell.batch], 1)
    lengths = data.lengths_FB.flatten()
    return Pair(
        lambda: ours.take([data.ids_N], [lengths], [], runs),
        lambda: fbgemm.permute_2D_sparse_data(order.int(), data.lengths_FB, data.ids_N, None, data.ids_N.numel()),
        "fbgemm",
        lambda a, b: torch.equal(a[0], b[1]) and torch.equal(a[1], b[0].flatten()),
    )


def concatenate(cell: Cell) -> Pair:
    data = Data(cell)
    size = cell.batch // PARTS
    cuts = [(p, f * cell.batch + p * size) for p in range(PARTS) for f in range(TABLES)]
    parts = [
        ours.take(
            [data.ids_N], [data.lengths_FB.flatten()], [], torch.tensor([[0, at, size] for q, at in cuts if q == p])
        )
        for p in range(PARTS)
    ]
    values, lengths = [p[0] for p in parts], [p[1] for p in parts]
    runs = torch.tensor([[p, f * size, size] for f in range(TABLES) for p in range(PARTS)])
    order = torch.arange(PARTS * TABLES).view(PARTS, TABLES).T.flatten().int()

    def join() -> object:
        rows = torch.cat(lengths).view(PARTS * TABLES, size)
        return fbgemm.permute_2D_sparse_data(order, rows, torch.cat(values), None, data.ids_N.numel())

    return Pair(
        lambda: ours.take(values, lengths, [], runs),
        join,
        "torch.cat + fbgemm",
        lambda a, b: torch.equal(a[0], b[1]) and torch.equal(a[1], b[0].flatten()) and torch.equal(a[0], data.ids_N),
    )


def bucketize(cell: Cell) -> Pair:
    data = Data(cell)
    sizes = torch.tensor([-(-rows // cell.buckets) for rows in data.rows])
    bounds = torch.minimum(torch.arange(cell.buckets + 1) * sizes.unsqueeze(1), torch.tensor(data.rows).unsqueeze(1))
    lengths, blocks = data.lengths_FB.flatten(), sizes.to(data.ids_N.dtype)

    def same(a: tuple, b: tuple) -> bool:
        places = torch.empty_like(a[3])
        places[a[3]] = torch.arange(len(places))  # the peer says where each id went, ours where it came from
        return torch.equal(a[0], b[1]) and torch.equal(a[1], b[0]) and torch.equal(places, b[4].long())

    return Pair(
        lambda: ours.bucketize(data.ids_N, lengths, None, bounds),
        lambda: fbgemm.block_bucketize_sparse_features(lengths, data.ids_N, False, True, blocks, cell.buckets, None),
        "fbgemm",
        same,
    )


def deduplicate(cell: Cell) -> Pair:
    data = Data(cell)
    parts = [data.ids_N[begin:end] for begin, end in pairwise(data.segments_S1.tolist())]

    def same(a: tuple, b: list) -> bool:
        inverse = torch.cat([where + first for (_, where), first in zip(b, a[1].tolist()[:-1], strict=True)])
        return torch.equal(a[0], torch.cat([ids for ids, _ in b])) and torch.equal(a[2], inverse)

    return Pair(
        lambda: ours.deduplicate(data.ids_N, data.segments_S1),
        lambda: [torch.unique(part, return_inverse=True) for part in parts],
        "torch.unique",
        same,
    )


PAIRS = {"permute": permute, "concatenate": concatenate, "bucketize": bucketize, "deduplicate": deduplicate}


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    batch = 64 if args.smoke else 4096 if args.quick else 16384
    for threads in (1, 2):
        for dtype in ("int64", "int32"):
            for pooling in (1, 20):
                yield Cell("permute", dtype, batch, pooling, threads)
                yield Cell("concatenate", dtype, batch, pooling, threads)
                yield Cell("bucketize", dtype, batch, pooling, threads, buckets=8)
                yield Cell("deduplicate", dtype, batch, pooling, threads)
            yield Cell("bucketize", dtype, batch, 20, threads, buckets=128)
            yield Cell("deduplicate", dtype, 64 * batch, 1, threads, segments=1)


def measure(cell: Cell, quick: bool) -> dict:
    torch.manual_seed(0)
    torch.set_num_threads(cell.threads)
    pair = PAIRS[cell.op](cell)
    if not pair.same(pair.ours(), pair.peer()):
        raise AssertionError(f"{cell}: the two sides do not agree")
    times = beside(pair.ours, pair.peer, 40, 0.5 if quick else 3)
    mine, theirs = (float(np.quantile(times[side], 0.2)) for side in ("ours", "peer"))
    return {
        **cell._asdict(),
        "peer": pair.peer_name,
        "ours_ms": mine * 1e3,
        "peer_ms": theirs * 1e3,
        "ratio": theirs / mine,
        "noise": float(np.quantile(times["ours"], 0.5)) / mine - 1,
    }


FLOORS = {"permute": 1.5, "concatenate": 2.0, "bucketize": 3.0, "deduplicate": 3.0}


def floors_of(rows: list[dict]) -> list[dict]:
    named = [("worst cell of all", min, [r["ratio"] for r in rows], 1.0)]
    for op, floor in FLOORS.items():
        ratios = [r["ratio"] for r in rows if r["op"] == op]
        named.append((f"{op}, geometric mean", geomean, ratios, floor))
    return [at_least(name, how(values), floor) for name, how, values, floor in named]


def main() -> None:
    args = parsed(options("jagged", __doc__))
    wanted = list(cells(args))
    if has_peer("fbgemm-gpu-cpu", args):
        import fbgemm_gpu  # noqa: F401 - registers the peer's operators
    else:
        wanted = [cell for cell in wanted if cell.op == "deduplicate"]
    rows = []
    for cell in wanted:
        rows.append(measure(cell, args.quick))
        show(rows[-1])
    # `measure` raises where the sides do not agree.
    floors = [exactly("cells in which both sides agree", len(rows), len(wanted))] if args.smoke else floors_of(rows)
    finish("jagged", rows, floors, args)


if __name__ == "__main__":
    main()

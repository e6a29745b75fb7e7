"""Sums over a sample of the edges into each node, chosen while they are read: see [Note: Sampled edges].

A program has whole rows of the output, so it reads each chosen edge once, into registers: no other program needs it,
and nothing is shared.
"""

import triton
import triton.language as tl

from rowwise.tables.ops._triton.sums import neutral
from rowwise.tables.ops.layout import STRIDE_PRIME
from rowwise.tables.ops.layout import Choice as Choices

SPREAD, STRIDE = tl.constexpr(int(Choices.SPREAD)), tl.constexpr(int(Choices.STRIDE))
PRIME = tl.constexpr(STRIDE_PRIME)


@triton.jit
def place_of(choice, degree, WIDTH: tl.constexpr, CHOICE: tl.constexpr):
    """The edge of each choice, which is below the degree."""
    place = choice
    if CHOICE == SPREAD:
        place = (choice.to(tl.int64) * degree // WIDTH).to(tl.int32)
    if CHOICE == STRIDE:
        some = tl.maximum(degree, 1).to(tl.uint32)
        jump = choice.to(tl.uint32) * PRIME
        place = ((jump + tl.where(some % PRIME == 0, jump // some, 0)) % some).to(tl.int32)
    return tl.where(degree > WIDTH, place, choice)


@triton.jit(do_not_specialize=["nodes", "rows"])
def sum_sampled(
    vectors,
    out,
    ids,
    starts,
    weights,
    fault,
    nodes,
    rows,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    IDS: tl.constexpr,  # of a node, whose vectors are loaded together
    WIDTH: tl.constexpr,
    CHOICE: tl.constexpr,
    RESCALED: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * NODES + tl.arange(0, NODES)
    d = tl.arange(0, BLOCK)
    begin = tl.load(starts + n, mask=n < nodes, other=0)
    degree = (tl.load(starts + n + 1, mask=n < nodes, other=0) - begin).to(tl.int32)
    count = tl.minimum(degree, WIDTH)
    scale = count * 0 + 1.0
    if RESCALED:
        scale = tl.maximum(tl.div_rn(degree.to(tl.float32), WIDTH * 1.0), 1.0)
    longest = tl.max(count, 0)
    total = neutral((NODES, BLOCK))
    bad = tl.zeros((NODES,), tl.int1)
    i = longest * 0
    while i < longest:
        for u in tl.static_range(IDS):
            has = i + u < count
            at = begin + place_of(i + u, degree, WIDTH, CHOICE)
            row = tl.load(ids + at, mask=has, other=0).to(tl.int64)
            good = (row >= 0) & (row < rows)
            bad = bad | (has & ~good)
            weight = tl.load(weights + at, mask=has, other=0.0) * scale
            inside = (has & good)[:, None] & (d < DIM)[None, :]
            x = tl.load(vectors + (row * DIM)[:, None] + d[None, :], mask=inside)
            total = tl.where(inside, total + x * weight[:, None], total)
        i += IDS
    tl.store(fault + n * 0, 1, mask=bad)  # every program that finds a bad id stores 1
    total = tl.where((count > 0)[:, None], total, 0.0)
    tl.store(out + (n * DIM)[:, None] + d[None, :], total, mask=(n < nodes)[:, None] & (d < DIM)[None, :])

"""Parts of kernels: the sums whose order defines the bits of results."""

import triton
import triton.language as tl


@triton.jit
def neutral(shape: tl.constexpr):
    """-0.0: x + -0.0 is x for every x. Made from its bits, as the compiler takes the constant -0.0 for 0."""
    return tl.full(shape, 0x80000000, tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def column_sum(x, BLOCK: tl.constexpr):
    """The sum of a row's columns by [Note: Column sums]: halves neighbours until one is left."""
    if BLOCK >= 2:
        return column_sum(tl.sum(tl.reshape(x, (BLOCK // 2, 2)), 1), BLOCK // 2)
    else:
        return tl.sum(x, 0)


@triton.jit
def column_sums(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """`column_sum` of each row."""
    if BLOCK >= 2:
        return column_sums(tl.sum(tl.reshape(x, (ROWS, BLOCK // 2, 2)), 2), ROWS, BLOCK // 2)
    else:
        return tl.sum(x, 1)


@triton.jit
def bits(x):
    """The number of bits of a number below 2**24."""
    return tl.where(x > 0, (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def lowest_bit(x):
    """The position of the lowest set bit."""
    return bits(x & -x) - 1


@triton.jit
def load_places(places, k, last, TERMS: tl.constexpr, ALIGN: tl.constexpr):
    """Places of terms in units of ALIGN floats: they fit 32 bits, and the compiler sees their alignment in a loop."""
    found = ()
    for u in tl.static_range(TERMS):
        place = tl.load(places + k + u, mask=k + u < last, other=0)
        found = found + ((place // ALIGN).to(tl.int32),)
    return found


@triton.jit
def tree_sum(
    terms,  # floats
    following,  # `load_places` of the first terms, unless DENSE
    places,  # first float of each term; of terms one after the other if DENSE
    scales,
    joins,  # tree level at which a term joins those before it; 0: in the same block
    first,
    last,
    waiting,  # scratch of this program: a vector for each level; the lowest pending one is `last_held`
    dim,
    BLOCK: tl.constexpr,
    TERMS: tl.constexpr,  # loaded together
    ALIGN: tl.constexpr,  # floats that divide every place
    DENSE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The sum of the terms [first, last) in the order of [Note: Merge order]."""
    d = tl.arange(0, BLOCK)
    total = neutral((BLOCK,))
    last_held = total  # the pending sum of the lowest level; the others are in `waiting`
    held = 0  # bit l: a sum of level l waits for its right neighbour
    k = first
    while k < last:
        if not DENSE:
            current = following
            following = load_places(places, k + TERMS, last, TERMS, ALIGN)
        highest = 0
        xs = ()
        joins_of_round = ()
        for u in tl.static_range(TERMS):
            has = k + u < last
            if DENSE:
                place = (k + u).to(tl.int64) * BLOCK
            else:
                place = current[u].to(tl.int64) * ALIGN
            x = tl.load(terms + place + d, mask=has & (d < dim))
            if SCALED:
                x = x * tl.load(scales + k + u, mask=has, other=1.0)
            join = tl.load(joins + k + u, mask=has & (k + u > first), other=0).to(tl.int32)
            highest = highest | join
            xs = xs + (x,)
            joins_of_round = joins_of_round + (join,)
        for v in tl.static_range(TERMS):
            if highest != 0:
                join = joins_of_round[v]
                if join > 0:
                    # A carry, as in a binary counter: add the pending sums of the levels below `join`.
                    below = held & ((1 << (join - 1)) - 1)
                    while below != 0:
                        total = last_held + total
                        below &= below - 1
                        held &= held - 1
                        if held != 0:
                            last_held = tl.load(waiting + lowest_bit(held) * BLOCK + d)
                    if held != 0:
                        tl.store(waiting + lowest_bit(held) * BLOCK + d, last_held)
                    last_held = total
                    held |= 1 << (join - 1)
                    total = neutral((BLOCK,))
            total = tl.where(k + v < last, total + xs[v], total)
        k += TERMS
    while held != 0:
        total = last_held + total
        held &= held - 1
        if held != 0:
            last_held = tl.load(waiting + lowest_bit(held) * BLOCK + d)
    return total

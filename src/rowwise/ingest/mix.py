"""The hash of ids and of shuffling: 64 bits in, 64 bits out, the same on every machine and for ever.

numpy's own generators may change between versions, Python's hash between processes. This is the definition; `native`
has kernels that give the same bits faster, for the ids of whole splits.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
WORD = 8


def mix(x_N: Words) -> Words:
    """A one-to-one scramble of words in which each bit depends on all. Source: splitmix64, Steele et al. 2014."""
    z_N = x_N + np.uint64(GOLDEN)
    shifted_N = np.empty_like(z_N)  # one buffer for all steps: the words of a split stay in cache
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        np.right_shift(z_N, np.uint64(shift), out=shifted_N)
        z_N ^= shifted_N
        z_N *= np.uint64(factor)
    np.right_shift(z_N, np.uint64(31), out=shifted_N)
    z_N ^= shifted_N
    return z_N


def remainder(x_N: Words, rows: int) -> NDArray[np.int64]:
    """x % rows. numpy divides by a constant with vector instructions, but takes remainders one by one."""
    if rows & (rows - 1) == 0:
        return (x_N & np.uint64(rows - 1)).view(np.int64)
    quotient_N = x_N // np.uint64(rows)
    quotient_N *= np.uint64(rows)
    return np.subtract(x_N, quotient_N, out=quotient_N).view(np.int64)


def mix_bytes(data: NDArray[np.uint8], offsets_N1: NDArray[np.int64]) -> Words:
    """The hash of each run of bytes `data[offsets[i]:offsets[i + 1]]`: its words are mixed in one after another."""
    starts_N, lengths_N = offsets_N1[:-1], np.diff(offsets_N1)
    hash_N = mix(lengths_N.astype(np.uint64))
    # A word may be read past the end of the last run, and begins at any byte.
    padded = np.zeros(len(data) + WORD, np.uint8)
    padded[: len(data)] = data
    words = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))
    live_N = np.flatnonzero(lengths_N)
    at = 0
    while live_N.size:
        word_N = words[starts_N[live_N] + at]
        left_N = np.minimum(lengths_N[live_N] - at, WORD).astype(np.uint64)
        word_N &= np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - left_N * np.uint64(8))
        hash_N[live_N] = mix(hash_N[live_N] ^ word_N)
        at += WORD
        live_N = live_N[lengths_N[live_N] > at]
    return hash_N


def permutation(count: int, *key: int) -> NDArray[np.int64]:
    """An order of `count` things that depends on the key only."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = mix(state ^ np.array([part], np.uint64))
    # The scramble is one-to-one, so no two things tie.
    return np.argsort(mix(np.arange(count, dtype=np.uint64) ^ state)).astype(np.int64, copy=False)

"""The hash of ids and of shuffling: 64 bits to 64 bits, stable across machines and versions.

numpy's generators may change between versions, Python's hash changes between processes. This module is the reference;
the kernels of `native` compute the same bits faster.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
WORD = 8


def mix(x_N: Words) -> Words:
    """splitmix64 of each word: one-to-one, each bit depends on all bits. Source: Steele et al. 2014."""
    z_N = x_N + np.uint64(GOLDEN)
    shifted_N = np.empty_like(z_N)  # one buffer for all steps, so that it stays in cache
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        np.right_shift(z_N, np.uint64(shift), out=shifted_N)
        z_N ^= shifted_N
        z_N *= np.uint64(factor)
    np.right_shift(z_N, np.uint64(31), out=shifted_N)
    z_N ^= shifted_N
    return z_N


def unit(x_N: Words) -> NDArray[np.float64]:
    """Words as numbers in [0, 1), with the 53 bits of a double."""
    return (x_N >> np.uint64(11)).astype(np.float64) * 2.0**-53


def remainder(x_N: Words, rows: int) -> NDArray[np.int64]:
    """x % rows by a division, as numpy vectorises division by a constant, but not `%`."""
    if rows & (rows - 1) == 0:
        return (x_N & np.uint64(rows - 1)).view(np.int64)
    quotient_N = x_N // np.uint64(rows)
    quotient_N *= np.uint64(rows)
    return np.subtract(x_N, quotient_N, out=quotient_N).view(np.int64)


def mix_bytes(data: NDArray[np.uint8], offsets_N1: NDArray[np.int64]) -> Words:
    """The hash of each byte string `data[offsets[i]:offsets[i + 1]]`: the length, then each 8-byte word mixed in."""
    starts_N, lengths_N = offsets_N1[:-1], np.diff(offsets_N1)
    hash_N = mix(lengths_N.astype(np.uint64))
    # Overlapping views: word i is bytes i to i + 8. The padding lets the last string read a whole word.
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
    """A permutation of 0 to count - 1 that depends only on the key."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = mix(state ^ np.array([part], np.uint64))
    # The hash is one-to-one, so there are no ties and the sort need not be stable.
    return np.argsort(mix(np.arange(count, dtype=np.uint64) ^ state)).astype(np.int64, copy=False)

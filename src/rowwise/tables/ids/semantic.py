"""Semantic ids: codes of an item's vector by residual k-means, so that like items share a prefix of codes.

    r_1 = x,   code_l = argmin_k |r_l - c_lk|,   r_(l+1) = r_l - c_l,code_l

Level l clusters the residuals of the level before. Codes of the same vectors have the same bits for any number of
threads and on every processor; the caller gives the vectors in an order that depends on the items only.

Axes: N items, D numbers, L levels, K codes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.base.value import Value
from rowwise.tables.ids.cluster import MAX_DIMS, ClusterEffort, cluster
from rowwise.tables.ids.native import Floats, Ints
from rowwise.tables.ids.nearest import nearest
from rowwise.tables.ops.reference.sums import column_sum

MAX_LEVELS, MAX_CODES = 8, 1 << 16
SIGNS = 0x51D  # seed of the projection of wide vectors


class SemanticIds(NamedTuple):
    """The codebooks of a fit, and the codes of its items."""

    codebooks: tuple[Floats, ...]  # [K, D] of each level
    codes_NL: Ints


class LevelUse(Value, frozen=True):
    """How the items use the codes of a level."""

    codes: int
    used: int
    entropy: float  # of the shares of the codes, over that of equal shares
    largest: float  # share of the items with the most frequent code


def check_sizes(sizes: Sequence[int], items: int) -> None:
    """Raise for numbers of codes that cannot be."""
    if not 1 <= len(sizes) <= MAX_LEVELS or not all(2 <= size <= MAX_CODES for size in sizes):
        text = "x".join(map(str, sizes))
        raise SpecError(f"--codes {text}", f"1 to {MAX_LEVELS} levels of 2 to {MAX_CODES:,} codes, such as 256x256x256")
    if items < max(sizes):
        raise SpecError(
            f"{items:,} item{'s' * (items > 1)} for {max(sizes):,} codes", "no more codes a level than items"
        )


def fit(
    vectors_ND: Floats,
    sizes: Sequence[int],
    *,
    seed: int = 0,
    balance: float | None = None,
    effort: ClusterEffort | None = None,
) -> SemanticIds:
    """Fit codebooks, level by level.

    Args:
        vectors_ND: finite, of at most 64 numbers; see `narrow`.
        sizes: codes of each level.
        seed: of the first centroids.
        balance: most items of a code, in means of the level; None: no limit, and each item has the nearest codes.
        effort: limits of the work.
    """
    check_sizes(sizes, len(vectors_ND))
    if balance is not None and not balance >= 1:
        raise SpecError(f"--balance {balance}", "at least 1, such as 2: no code has twice the mean number of items")
    residual_ND = np.ascontiguousarray(vectors_ND, np.float32)
    ones_N = np.ones(len(residual_ND))
    codebooks, codes = list[Floats](), list[Ints]()
    for level, size in enumerate(sizes):
        cap = None if balance is None else max(1.0, np.ceil(balance * len(residual_ND) / size))
        clusters = cluster(residual_ND, ones_N, size, seed=seed + level, cap=cap, effort=effort)
        centroids_KD = clusters.centroids_KD
        code_N = nearest(residual_ND, centroids_KD) if balance is None else clusters.label_N
        residual_ND = residual_ND - centroids_KD[code_N]
        codebooks.append(centroids_KD)
        codes.append(code_N.astype(np.int64))
    return SemanticIds(tuple(codebooks), np.stack(codes, 1))


def encode(vectors_ND: Floats, codebooks: Sequence[Floats]) -> tuple[Ints, Floats]:
    """The nearest codes [N, L] of vectors, and what is left of the vectors."""
    residual_ND, codes = np.ascontiguousarray(vectors_ND, np.float32), list[Ints]()
    for centroids_KD in codebooks:
        code_N = nearest(residual_ND, centroids_KD) if len(residual_ND) else np.empty(0, np.int64)
        residual_ND = residual_ND - centroids_KD[code_N]
        codes.append(code_N.astype(np.int64))
    return np.stack(codes, 1), residual_ND


def left_over(vectors_ND: Floats, codes_NL: Ints, codebooks: Sequence[Floats]) -> Floats:
    """What is left of vectors without the centroids of their codes."""
    residual_ND = np.ascontiguousarray(vectors_ND, np.float32)
    for level, centroids_KD in enumerate(codebooks):
        residual_ND = residual_ND - centroids_KD[codes_NL[:, level]]
    return residual_ND


def narrow(vectors_ND: Floats) -> Floats:
    """Vectors of at most 64 numbers: wider ones are projected by random signs, each sum in one order.

    Distances are kept within about an eighth (Achlioptas 2003).
    """
    dim = vectors_ND.shape[1]
    if dim <= MAX_DIMS:
        return np.ascontiguousarray(vectors_ND, np.float32)
    draw = np.random.Generator(np.random.PCG64(SIGNS))
    signs_MD = draw.integers(0, 2, (MAX_DIMS, dim), np.int8).astype(np.float32) * 2 - 1
    rows_ND = torch.from_numpy(np.ascontiguousarray(vectors_ND, np.float32))
    columns = [torch.ops.rowwise.dots(torch.from_numpy(sign_D), rows_ND) for sign_D in signs_MD]
    return (torch.stack(columns, 1) / 8).numpy()  # by the root of MAX_DIMS


def to_unit(vectors_ND: Floats) -> Floats:
    """Vectors of length 1, each sum in one order; zeros stay."""
    rows_ND = torch.from_numpy(np.ascontiguousarray(vectors_ND, np.float32))
    length_N1 = column_sum(rows_ND * rows_ND).sqrt().unsqueeze(1)
    return torch.where(length_N1 > 0, rows_ND / length_N1, rows_ND).numpy()


def prefixes(codes_NL: Ints, level: int, sizes: Sequence[int]) -> Ints:
    """A number for the first `level` codes of each item."""
    number_N = np.zeros(len(codes_NL), np.int64)
    for code_N, size in zip(codes_NL.T[:level], sizes, strict=False):
        number_N = number_N * size + code_N
    return number_N


def number_alike(codes_NL: Ints, before_ML: Ints | None = None) -> Ints:
    """A number for each item among those of equal codes, in order; those of `before_ML` come first."""
    first = 0 if before_ML is None else len(before_ML)
    all_NL = codes_NL if before_ML is None else np.concatenate((before_ML, codes_NL))
    _, group_N = np.unique(all_NL, axis=0, return_inverse=True)
    order_N = np.argsort(group_N, kind="stable")
    sizes_G = np.bincount(group_N)
    number_N = np.empty(len(all_NL), np.int64)
    number_N[order_N] = np.arange(len(all_NL)) - np.repeat(np.cumsum(sizes_G) - sizes_G, sizes_G)
    return number_N[first:]


def use_of(codes_NL: Ints, sizes: Sequence[int]) -> list[LevelUse]:
    """How the items use the codes of each level."""
    uses = []
    for code_N, size in zip(codes_NL.T, sizes, strict=True):
        share_K = np.bincount(code_N, minlength=size) / len(code_N)
        used_K = share_K[share_K > 0]
        entropy = float((used_K * np.log(1 / used_K)).sum() / np.log(size))
        uses.append(LevelUse(size, len(used_K), entropy, float(share_K.max())))
    return uses


def unique_share(codes_NL: Ints) -> float:
    """The share of the items whose codes no other item has."""
    _, group_N, sizes_G = np.unique(codes_NL, axis=0, return_inverse=True, return_counts=True)
    return float((sizes_G[group_N] == 1).mean())


def agreement(vectors_ND: Floats, codes_NL: Ints, sample: int = 512) -> tuple[float, float]:
    """The share of sampled items that have the first code of their nearest other item, and that of random pairs."""
    count = len(vectors_ND)
    chosen_S = np.linspace(0, count - 1, min(sample, count)).astype(np.int64)
    squares_N = (vectors_ND**2).sum(1)
    nearest_S = np.empty_like(chosen_S)
    for place, item in enumerate(chosen_S):  # one row of distances at once
        distances_N = squares_N - 2 * (vectors_ND @ vectors_ND[item])
        distances_N[item] = np.inf
        nearest_S[place] = distances_N.argmin()
    share_K: NDArray[np.float64] = np.bincount(codes_NL[:, 0]) / count
    return float((codes_NL[chosen_S, 0] == codes_NL[nearest_S, 0]).mean()), float((share_K**2).sum())

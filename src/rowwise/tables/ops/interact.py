"""Dot products of every two vectors of a sample (`interact`), their sum (`pair_sums`), and those of rows (`dots`)."""

import torch
from torch import Tensor

import rowwise.tables.ops  # noqa: F401 - loads the operators
from rowwise.base.errors import BatchError
from rowwise.tables.ops import reference


def interact(dense_BD: Tensor, pooled_BS: Tensor) -> Tensor:
    """The dot products of every two vectors of a sample, behind its dense vector.

    Vector 0 of a sample is its row of `dense_BD`, the others are the F pieces of D columns of `pooled_BS`. The result
    is [B, D + F (F + 1) / 2]: the dense vector, then the dots of vectors (1, 0), (2, 0), (2, 1), (3, 0) and so on.
    16-bit vectors are multiplied in float32.
    """
    _check("interact", dense_BD, pooled_BS)
    if torch.float64 in (dense_BD.dtype, pooled_BS.dtype):
        return reference.interact(dense_BD.double(), pooled_BS.double())
    # Outside the operator, so that the casts have a gradient.
    return torch.ops.rowwise.interact(dense_BD.float().contiguous(), pooled_BS.float().contiguous())


def dots(query_D: Tensor, rows_RD: Tensor, places_N: Tensor | None = None) -> Tensor:
    """Dot products of a vector with rows [R], or those at places [N]; the bits of each do not depend on the others.

    With vectors [Q, D] and places [Q, N]: of each vector with rows of its own.
    """
    return torch.ops.rowwise.dots(query_D, rows_RD, places_N)


def pair_sums(offset_BD: Tensor, pooled_BS: Tensor) -> Tensor:
    """For each sample, the sum of the dot products of all pairs of vectors; a vector is D columns of `pooled_BS`.

    `offset_BD`, the sum of further vectors, is added to the sum of the vectors before it is squared. The caller
    subtracts the squares of the further vectors. 16-bit vectors are multiplied in float32.
    """
    _check("pair_sums", offset_BD, pooled_BS)
    if torch.float64 in (offset_BD.dtype, pooled_BS.dtype):
        return reference.pair_sums(offset_BD.double(), pooled_BS.double())
    return torch.ops.rowwise.pair_sums(offset_BD.float().contiguous(), pooled_BS.float().contiguous())


def _check(name: str, dense_BD: Tensor, pooled_BS: Tensor) -> None:
    got = f"{name} got dense vectors {tuple(dense_BD.shape)} and pooled vectors {tuple(pooled_BS.shape)}"
    if dense_BD.dim() != 2 or pooled_BS.dim() != 2:
        raise BatchError(got, "[B, D] and [B, F * D]")
    if dense_BD.shape[0] != pooled_BS.shape[0]:
        raise BatchError(f"{got}: {dense_BD.shape[0]} and {pooled_BS.shape[0]} samples", "the same number of both")
    dim, columns = dense_BD.shape[1], pooled_BS.shape[1]
    if dim == 0 or columns == 0 or columns % dim:
        raise BatchError(
            f"{got}: {columns} columns are not a multiple of dim {dim}", "tables and dense vector of the same dim"
        )
    if not (dense_BD.is_floating_point() and pooled_BS.is_floating_point()):
        raise BatchError(f"{name} got vectors of {dense_BD.dtype} and {pooled_BS.dtype}", "floating point")

"""CRC-32, as zlib computes it: what checkpoints are checked by."""

import zlib

import torch
from torch import Tensor


def crc32(bytes_N: Tensor, start: int = 0) -> int:
    """Of bytes on the CPU, one after the other in memory; goes on from `start`, that of what came before."""
    found = int(torch.ops.rowwise.crc32(bytes_N, start))
    return zlib.crc32(bytes_N.numpy().data, start) if found < 0 else found

"""`crc32`: zlib's CRC-32 by the native operator where the processor has the instructions, else by zlib."""

import zlib

import torch
from torch import Tensor


def crc32(bytes_N: Tensor, start: int = 0) -> int:
    """CRC-32 of contiguous bytes on the CPU; `start`: the CRC of the bytes before them."""
    crc = int(torch.ops.rowwise.crc32(bytes_N, start))
    return zlib.crc32(bytes_N.numpy().data, start) if crc < 0 else crc

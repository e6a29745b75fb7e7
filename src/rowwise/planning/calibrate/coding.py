"""Measures how fast floats are encoded for a wire and decoded, by wire type.

One process codes in a loop; ranks that code at the same time are not measured.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from rowwise.base.quantity import round_digits
from rowwise.planning.calibrate.kernels import low_quantile
from rowwise.planning.perf.hardware import CodecRates, Coding
from rowwise.tables.ops import rowtype
from rowwise.tables.ops.threads import torch_threads
from rowwise.tables.spec import RowType

ROWS, DIM = 16_384, 64
REPEATS = 9


def measure_coding(device: torch.device, threads: int) -> Coding:
    floats_ND = torch.randn(ROWS, DIM, device=device)
    with torch_threads(threads):
        fp16, bf16, int8 = (_measure_codec(floats_ND, kind) for kind in (RowType.FP16, RowType.BF16, RowType.INT8))
    return Coding(fp16=fp16, bf16=bf16, int8=int8)


def _measure_codec(floats_ND: Tensor, kind: RowType) -> CodecRates:
    encoded = rowtype.pack(floats_ND, kind).contiguous()
    return CodecRates(
        encode_Bps=_measure_Bps(floats_ND, lambda: rowtype.pack(floats_ND, kind).contiguous()),
        decode_Bps=_measure_Bps(floats_ND, lambda: rowtype.unpack(encoded.clone(), DIM, kind)),
    )


def _measure_Bps(floats_ND: Tensor, work: Callable[[], Tensor]) -> float:
    taken_s: list[float] = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        if floats_ND.is_cuda:
            torch.cuda.synchronize(floats_ND.device)
        taken_s.append(time.perf_counter() - begin)
    return round_digits(floats_ND.nbytes / low_quantile(taken_s))

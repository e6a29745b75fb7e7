"""How fast floats are encoded for a wire and decoded, by type: what a narrower wire costs beside what it saves.

A file of its own because it needs neither tables nor ranks, and a second is enough. Known limits: ranks that code at
once.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from rowwise.calibrate.kernels import low
from rowwise.ops import rowtype
from rowwise.ops.threads import torch_threads
from rowwise.perf.hardware import CodecRates, Coding
from rowwise.spec import RowType

ROWS, DIM = 16_384, 64
REPEATS = 9


def measure_coding(device: torch.device, threads: int) -> Coding:
    """On this many threads of a processor, or on a GPU."""
    floats_ND = torch.randn(ROWS, DIM, device=device)
    with torch_threads(threads):
        fp16, bf16, int8 = (_rates(floats_ND, kind) for kind in (RowType.FP16, RowType.BF16, RowType.INT8))
    return Coding(fp16=fp16, bf16=bf16, int8=int8)


def _rates(floats_ND: Tensor, kind: RowType) -> CodecRates:
    coded = rowtype.pack(floats_ND, kind).contiguous()
    return CodecRates(
        encode_Bps=_Bps(floats_ND, lambda: rowtype.pack(floats_ND, kind).contiguous()),
        decode_Bps=_Bps(floats_ND, lambda: rowtype.unpack(coded.clone(), DIM, kind)),
    )


def _Bps(floats_ND: Tensor, work: Callable[[], Tensor]) -> float:
    taken_s: list[float] = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        if floats_ND.is_cuda:
            torch.cuda.synchronize(floats_ND.device)
        taken_s.append(time.perf_counter() - begin)
    return float(f"{floats_ND.nbytes / low(taken_s):.4g}")

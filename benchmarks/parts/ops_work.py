"""The work that all sides of `ops.py` do, and FBGEMM's side of it.

Apart, because it also runs as a child process in an environment that has another FBGEMM and no rowwise:
it reads questions as JSON lines on stdin and answers on stdout.
"""

import json
import math
import sys
import time
from typing import NamedTuple

import numpy as np
import torch


class Work(NamedTuple):
    dim: int
    batch: int
    pooling: int
    ids: str
    threads: int
    optimizer: str
    row_type: str = "fp32"

    def grad(self, tables: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, tables * self.dim, generator=generator) * 0.01


def rows_for(tables: int, least: int, most: int) -> list[int]:
    """Log-uniform sizes."""
    return [int(n) for n in np.exp(np.linspace(math.log(least), math.log(most), tables))]


def ids_for(rows: list[int], work: Work, seed: int) -> torch.Tensor:
    """Ids table after table; Zipf ranks are scattered over the table, as hashed ids are."""
    rng = np.random.default_rng(seed)
    n = work.batch * work.pooling
    parts = []
    for size in rows:
        if work.ids == "uniform":
            parts.append(rng.integers(0, size, n))
            continue
        a, u = 1.05, rng.random(n)
        rank = (1 - u * (1 - (size + 1.0) ** (1 - a))) ** (1 / (1 - a))
        rank = np.minimum(rank.astype(np.int64) - 1, size - 1)
        parts.append((rank * scatter(size) + size // 3) % size)
    return torch.from_numpy(np.concatenate(parts))


def scatter(size: int) -> int:
    """A multiplier without a common factor with the size: rank * multiplier is a permutation."""
    multiplier = int(size * 0.6180339887) | 1
    while math.gcd(multiplier, size) > 1:
        multiplier += 2
    return multiplier


class FbgemmPeer:
    """FBGEMM's table-batched operator on a CPU."""

    def __init__(self, rows: list[int], dim: int, optimizer: str, row_type: str = "fp32"):
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kind = {
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "sgd": EmbOptimType.EXACT_SGD,
        }[optimizer]
        specs = [(n, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for n in rows]
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            specs,
            optimizer=kind,
            learning_rate=0.01,
            eps=1e-8,
            weights_precision=SparseType[row_type.upper()],
            stochastic_rounding=row_type == "fp16",
        )
        self.module.init_embedding_weights_uniform(-0.01, 0.01)
        self.rows, self.optimizer = rows, optimizer
        self.version = installed_version()

    def tables(self) -> list[torch.Tensor]:
        return [t.detach() for t in self.module.split_embedding_weights()]

    def copy_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        if self.optimizer == "sgd":
            return
        for mine, theirs in zip(self.module.split_optimizer_states(), state.values(), strict=True):
            mine[0].copy_(theirs["sum"])

    def offsets(self, work: Work) -> torch.Tensor:
        return torch.arange(len(self.rows) * work.batch + 1) * work.pooling

    def step(self, ids: torch.Tensor, offsets: torch.Tensor, grad: torch.Tensor) -> tuple[float, float]:
        begin = time.perf_counter()
        out = self.module(ids, offsets)
        middle = time.perf_counter()
        out.backward(grad)
        return middle - begin, time.perf_counter() - middle


def installed_version() -> str:
    from importlib.metadata import version

    return version("fbgemm-gpu-cpu")


def answer() -> None:
    rows, dim, optimizer = json.loads(sys.argv[1])
    peer = FbgemmPeer(rows, dim, optimizer)
    print(json.dumps(peer.version), flush=True)
    batches, offsets, grad = [], None, None
    for line in sys.stdin:
        question = json.loads(line)
        if isinstance(question, list):
            work = Work(*question)
            torch.set_num_threads(work.threads)
            batches = [ids_for(rows, work, seed) for seed in range(3)]
            offsets, grad = peer.offsets(work), work.grad(len(rows))
            print("[0]", flush=True)
        else:
            print(json.dumps(peer.step(batches[question], offsets, grad)), flush=True)


if __name__ == "__main__":
    answer()

"""How fast is a step of TorchRec's own model through `rowwise.torchrec`, beside TorchRec?

    python benchmarks/torchrec_door.py [--quick | --smoke] [--save]

`torchrec.models.dlrm.DLRMTrain` with 26 tables of 1,000 to 1,000,000 rows (log-uniform), batch 2,048, under
`DistributedModelParallel` of each side: the same module, plan of whole tables, batches of KeyedJaggedTensors and
dense optimizer (Adagrad), and row-wise Adagrad in the backward. Only the import differs. Three shapes: one id a
feature with large layers, one with small layers, and bags of 20 ids with small layers.
Both sides take the same steps in turn (A B A B) in one process, from the same weights; the losses of the first steps
are checked to agree. A time is the minimum of the repeats.

Takes: 6 minutes; --quick 2 minutes
Needs: the extra `peers`
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from parts.ops_work import Work, ids_for, rows_for
from parts.report import at_least, at_most, finish, has_peer, options, parsed, show
from parts.train_sides import quiet
from torch import nn

FEATURES, DENSE, BATCHES, LOSSES = 26, 13, 4, 3
CPU = torch.device("cpu")
OURS, THEIRS = "rowwise.torchrec", "TorchRec"


class Shape(NamedTuple):
    """Ids of a feature and sample, dimension, and layers."""

    name: str
    ids: int
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


SHAPES = (
    Shape("one id, large layers", 1, 64, (256, 128, 64), (512, 512, 256, 1)),
    Shape("one id, small layers", 1, 64, (64, 64), (64, 1)),
    Shape("20 ids, small layers", 20, 64, (64, 64), (64, 1)),
)


def make(side: str, shape: Shape, rows: list[int]) -> nn.Module:
    """The script of both sides; one import differs."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    if side == OURS:
        from rowwise.torchrec import DistributedModelParallel
    else:
        from torchrec.distributed import DistributedModelParallel

    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t{k}", embedding_dim=shape.dim, num_embeddings=r, feature_names=[f"f{k}"])
        for k, r in enumerate(rows)
    ]
    bags = EmbeddingBagCollection(tables, device=torch.device("meta"))
    model = DLRMTrain(DLRM(bags, DENSE, list(shape.bottom), list(shape.top)))
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.01, "eps": 1e-8})
    whole = {table.name: sharding_plan.table_wise(rank=0, compute_kernel="fused") for table in tables}
    plan = sharding_plan.construct_module_sharding_plan(
        bags, whole, EmbeddingBagCollectionSharder(), local_size=1, world_size=1, device_type="cpu"
    )
    path = next(path for path, child in model.named_modules() if child is bags)
    return DistributedModelParallel(model, device=CPU, plan=ShardingPlan(plan={path: plan}))


def stepper(model: nn.Module) -> Callable[[Any], float]:
    """One step, as TorchRec's examples write it."""
    from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(parameters, lambda params: torch.optim.Adagrad(params, lr=0.01))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])

    def step(batch: Any) -> float:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def batch_of(seed: int, shape: Shape, rows: list[int], size: int) -> Any:
    """A new object for each step, as of a new batch: a KeyedJaggedTensor keeps what it has computed."""
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(size, DENSE, generator=generator)
    ids = ids_for(rows, Work(shape.dim, size, shape.ids, "zipf", 1, ""), seed)
    lengths = torch.full((FEATURES * size,), shape.ids, dtype=torch.int32)
    labels = (dense[:, 0] + torch.randn(size, generator=generator) > 0).int()
    keys = [f"f{k}" for k in range(FEATURES)]
    return lambda: Batch(dense, KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths), labels)


def measure(shape: Shape, threads: int, rows: list[int], size: int, seconds: float) -> dict:
    torch.set_num_threads(threads)
    models = {side: make(side, shape, rows) for side in (OURS, THEIRS)}
    models[THEIRS].load_state_dict(models[OURS].state_dict())
    steps = {side: stepper(model) for side, model in models.items()}
    batches = [batch_of(seed, shape, rows, size) for seed in range(BATCHES)]
    losses = {side: [step(batches[k]()) for k in range(LOSSES)] for side, step in steps.items()}
    times: dict[str, list[float]] = {side: [] for side in steps}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[OURS]) < (5 if seconds else 1):
        for side, step in steps.items():
            batch = batches[len(times[side]) % BATCHES]()
            begin = time.perf_counter()
            step(batch)
            times[side].append(time.perf_counter() - begin)
    best = {side: min(found) for side, found in times.items()}
    return {
        "shape": shape.name,
        "threads": threads,
        "batch": size,
        "ms": best[OURS] * 1e3,
        "torchrec_ms": best[THEIRS] * 1e3,
        "ratio": best[THEIRS] / best[OURS],
        "noise": sorted(times[OURS])[len(times[OURS]) // 2] / best[OURS] - 1,
        "repeats": len(times[OURS]),
        "off": max(abs(a - b) for a, b in zip(losses[OURS], losses[THEIRS], strict=True)),
    }


def run(args: argparse.Namespace) -> list[dict]:
    quiet()
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    rows = rows_for(FEATURES, 10, 100) if args.smoke else rows_for(FEATURES, 1_000, 1_000_000)
    seconds = 0.0 if args.smoke else 8.0 if args.quick else 40.0
    found = []
    for shape in SHAPES:
        for threads in (1,) if args.quick else (1, 2):
            found.append(measure(shape, threads, rows, 16 if args.smoke else 2048, seconds))
            show(found[-1])
    distributed.destroy_process_group()
    return found


def main() -> None:
    args = parsed(options("torchrec_door", __doc__))
    rows = run(args) if has_peer("torchrec", args) else []
    floors = [at_most("difference of losses, most", max((row["off"] for row in rows), default=0.0), 1e-5)]
    if not args.smoke:
        floors += [at_least(f"{row['shape']}, threads: {row['threads']}", row["ratio"], 1.3) for row in rows]
    finish("torchrec_door", rows, floors, args)


if __name__ == "__main__":
    main()

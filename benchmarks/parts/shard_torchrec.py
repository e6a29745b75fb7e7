"""TorchRec's side of `shard_step.py`: its DLRM under DistributedModelParallel, in a gloo group of processes.

As its users write it: the optimizer of the rows fused into the backward, DDP around the dense layers, a plan given by
hand. It can also run under TrainPipelineSparseDist, which sends the ids of the next batch ahead. Whole, in one process,
it is its FusedEmbeddingBagCollection without any of that.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, distributed, nn

from parts.dlrm import DENSE, DIM, linears
from parts.shard_work import EPS, NAMES, Parts, Pieces, Shape, Turn
from parts.train_sides import quiet, sort_pairs
from rowwise import DLRM

LAYOUTS = ("table-wise", "row-wise", "column-wise", "data-parallel")
CPU = torch.device("cpu")


def join(comm: Any, backend: str = "gloo") -> None:
    """Make torch's default group, which is what TorchRec talks through."""
    if distributed.is_initialized():
        return
    world = len(comm.ranks)
    mine = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    port = torch.tensor([mine.port if mine else 0])
    ports_W = comm.all_gather(port, [1] * world, "port").wait().tolist()
    store = mine or distributed.TCPStore("127.0.0.1", ports_W[0])
    distributed.init_process_group(backend, store=store, rank=comm.rank, world_size=world)


def meet(value: float) -> float:
    """All ranks wait for each other; the largest of what they have."""
    largest = torch.tensor([value], dtype=torch.float64)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return float(largest)


class TorchRec:
    """`layout` None: whole, in this process alone. `wire`: the type its vectors travel in, if not fp32."""

    def __init__(self, start: DLRM, shape: Shape, layout: str | None, wire: str | None = None):
        quiet()
        from torchrec.models.dlrm import DLRM as TheirDlrm
        from torchrec.models.dlrm import DLRMTrain
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        bags = whole_bags(shape) if layout is None else bags_to_shard(shape)
        model = DLRMTrain(TheirDlrm(bags, DENSE, list(shape.bottom), list(shape.top)))
        with torch.no_grad():
            for mine, theirs in zip(linears(start), linears(model), strict=True):
                theirs.weight.copy_(mine.weight)
                theirs.bias.copy_(mine.bias)
            sort_pairs(linears(model))
        self.model = model if layout is None else distribute(model, bags, layout, wire)
        self.bags = next(m for m in self.model.modules() if type(m).__name__.endswith("EmbeddingBagCollection"))
        self.inner = next(m for m in self.model.modules() if isinstance(m, TheirDlrm))
        for table, pieces in self.tables().items():
            for rows, columns, piece in pieces:
                piece.copy_(start.embeddings.table(table)[rows, columns])
        # All that is not updated in the backward; of replicated tables that is the rows, too.
        parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        if layout is None:
            parameters = {name: p for name, p in parameters.items() if "embedding_bag" not in name}
        self.optimizer = torch.optim.Adam(parameters.values(), lr=shape.dense_lr, fused=True)

    def tables(self) -> dict[str, Pieces]:
        """What this rank holds of each table."""
        held: dict[str, Pieces] = {name: [] for name in NAMES}
        for key, value in self.model.state_dict().items():
            if "embedding_bags" in key:
                held[key.split(".")[-2]] = list(pieces_of(value))
        return held

    def keyed(self, parts: Parts) -> Any:
        """A new one each time, as of a new batch: it caches what it works out."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        return KeyedJaggedTensor(keys=list(NAMES), values=parts.ids_N, lengths=parts.lengths_FB)

    def batch(self, parts: Parts) -> Any:
        from torchrec.datasets.utils import Batch as TheirBatch

        return TheirBatch(parts.dense_BF, self.keyed(parts), parts.labels_BK.view(-1))

    def logits(self, parts: Parts) -> Tensor:
        return self.model(self.batch(parts))[1][1].view(-1, 1)

    def step(self, parts: Parts) -> float:
        self.optimizer.zero_grad()
        loss, _ = self.model(self.batch(parts))
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def pooled(self, parts: Parts) -> Tensor:
        found = self.bags(self.keyed(parts)).to_dict()  # as they come, features stand rank after rank
        return torch.cat([found[name] for name in NAMES], 1)

    def embed(self, parts: Parts, grad_BS: Tensor) -> None:
        self.bags(self.keyed(parts)).values().backward(grad_BS)

    def pipelined(self, batches: Sequence[Parts]) -> Turn:
        """Steps by its pipeline, which reads these batches by itself; outside of its turn the model is as ever."""
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        pipeline = TrainPipelineSparseDist(self.model, self.optimizer, CPU)
        endless = (self.batch(parts) for parts in cycle(batches))
        return Turn(
            run=lambda _: pipeline.progress(endless),
            before=lambda: pipeline.attach(sparse_dist=False),
            after=pipeline.detach,
        )


def configs(shape: Shape) -> list[Any]:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    sizes = zip(NAMES, shape.rows, strict=True)
    return [EmbeddingBagConfig(name=n, embedding_dim=DIM, num_embeddings=r, feature_names=[n]) for n, r in sizes]


def whole_bags(shape: Shape) -> nn.Module:
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad

    return FusedEmbeddingBagCollection(configs(shape), RowWiseAdagrad, {"lr": shape.lr, "eps": EPS}, device=CPU)


def bags_to_shard(shape: Shape) -> nn.Module:
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    bags = EmbeddingBagCollection(tables=configs(shape), device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": shape.lr, "eps": EPS})
    return bags


def distribute(model: nn.Module, bags: nn.Module, layout: str, wire: str | None) -> nn.Module:
    """The model over all processes of torch's default group."""
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan
    from torchrec.distributed.types import ShardingPlan

    world = distributed.get_world_size()
    codecs = None
    if wire:
        kind = CommType[wire.upper()]
        codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=kind, backward_precision=kind), device=CPU)
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
    choices = {name: choice(layout, index, world) for index, name in enumerate(NAMES)}
    plan = construct_module_sharding_plan(bags, choices, sharder, local_size=world, world_size=world, device_type="cpu")
    path = next(name for name, module in model.named_modules() if module is bags)
    return DistributedModelParallel(model, device=CPU, plan=ShardingPlan(plan={path: plan}), sharders=[sharder])


def choice(layout: str, index: int, world: int) -> Any:
    """Of one table; whole ones go to the ranks in turn."""
    from torchrec.distributed import sharding_plan

    match layout:
        case "table-wise":
            return sharding_plan.table_wise(rank=index % world)
        case "row-wise":
            return sharding_plan.row_wise()
        case "column-wise":
            return sharding_plan.column_wise(ranks=list(range(world)))
        case "data-parallel":
            return sharding_plan.data_parallel()
    raise ValueError(layout)


def pieces_of(value: Any) -> Iterator[tuple[slice, slice, Tensor]]:
    """What a rank holds of a table: rows, columns, and the memory."""
    if not hasattr(value, "local_shards"):
        yield slice(None), slice(None), value.detach()
        return
    for shard in value.local_shards():
        (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        yield slice(row, row + rows), slice(column, column + columns), shard.tensor.detach()

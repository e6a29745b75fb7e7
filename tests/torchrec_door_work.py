"""Models written with TorchRec's modules, trained by TorchRec and through `rowwise.torchrec` from the same weights."""

import logging
import warnings
from typing import Any

import torch
from torch import nn

CPU = torch.device("cpu")
BATCH, DENSE, DIM, STEPS = 16, 4, 8, 50
ROWS = {"f0": 40, "f1": 23, "f2": 9}
PACKAGED = ("DLRM", "DLRM_DCN", "DLRM_Projection", "SimpleDeepFMNN")
OTHERS = ("mixed", "towers")
# By name of the class in torchrec.optim; FBGEMM has no fused Adam on CPUs.
OPTIMIZERS = {
    "SGD": {"lr": 0.05},
    "Adagrad": {"lr": 0.05, "eps": 1e-6},
    "RowWiseAdagrad": {"lr": 0.05, "eps": 1e-6},
}


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)


class Clicks(nn.Module):
    """A model of TorchRec's batches with its loss, as DLRMTrain is one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch):
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


class Mixed(nn.Module):
    """Bags by sum, mean and weights, sequences, two collections that share features, and one inside another module."""

    def __init__(self, device) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
        from torchrec.modules.embedding_configs import PoolingType

        def bag(name, feature_names, **more):
            rows = max(ROWS[f] for f in feature_names)
            return EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=feature_names, **more
            )

        self.bags = EmbeddingBagCollection(
            [bag("a", ["f0", "f1"], pooling=PoolingType.MEAN), bag("b", ["f1", "f2"])], device=device
        )
        self.inner = nn.ModuleDict(
            {"weighted": EmbeddingBagCollection([bag("w", ["f2"])], is_weighted=True, device=device)}
        )
        rows = [EmbeddingConfig(name=n, num_embeddings=ROWS[f], embedding_dim=DIM, feature_names=[f])
                for n, f in (("a", "f0"), ("s", "f1"))]  # fmt: skip
        self.rows = EmbeddingCollection(rows, device=device)
        self.last = nn.Linear(4 * DIM + DIM + 2 * DIM + DENSE, 1)

    def forward(self, dense, sparse):
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        pooled, rows = self.bags(sparse), self.rows(sparse)
        weights = 1.0 / (1.0 + sparse.values().float())
        weighted = KeyedJaggedTensor(
            keys=sparse.keys(), values=sparse.values(), lengths=sparse.lengths(), weights=weights
        )
        parts = [pooled[key] for key in ("f0", "f1@a", "f1@b", "f2")]
        parts.append(self.inner["weighted"](weighted)["f2"])
        for key in ("f0", "f1"):
            values, lengths = rows[key].values(), rows[key].lengths()
            sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            parts.append(torch.zeros(len(lengths), DIM).index_add(0, sample, values))
        return self.last(torch.cat([*parts, dense], 1))


class Towers(nn.Module):
    """Two towers, with tables of one name."""

    def __init__(self, device) -> None:
        super().__init__()
        self.query, self.item = bags_of(["f0"], device, "t"), bags_of(["f1", "f2"], device, "t")
        self.left, self.right = nn.Linear(DIM, 4), nn.Linear(2 * DIM, 4)

    def forward(self, dense, sparse):
        item = self.item(sparse)
        left = self.left(self.query(sparse)["f0"])
        return (left * self.right(torch.cat([item["f1"], item["f2"]], 1))).sum(1, keepdim=True) + dense[:, :1]


def bags_of(features, device, name="t_f"):
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=f"{name}{f[1:]}", num_embeddings=ROWS[f], embedding_dim=DIM, feature_names=[f])
            for f in features
        ],
        device=device,
    )


def make_model(name: str, device=CPU) -> nn.Module:
    from torchrec.models import deepfm, dlrm

    torch.manual_seed(3)
    if name in OTHERS:
        return Clicks(Mixed(device) if name == "mixed" else Towers(device))
    bags = bags_of(list(ROWS), device)
    match name:
        case "DLRM":
            return dlrm.DLRMTrain(dlrm.DLRM(bags, DENSE, [16, DIM], [16, 1]))
        case "DLRM_DCN":
            return dlrm.DLRMTrain(dlrm.DLRM_DCN(bags, DENSE, [16, DIM], [16, 1], 2, 4))
        case "DLRM_Projection":
            return dlrm.DLRMTrain(dlrm.DLRM_Projection(bags, DENSE, [16, DIM], [16, 1], [2 * DIM], [2 * DIM]))
        case _:
            return Clicks(deepfm.SimpleDeepFMNN(DENSE, bags, 16, 3))


def fuse(model: nn.Module, optimizer: str, numbers: dict[str, float]) -> nn.Module:
    """Leave an optimizer on the tables, as TorchRec's scripts do."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    kind = kind_of(optimizer)
    tables = [p for name, p in model.named_parameters() if ".embedding_bags." in name or ".embeddings." in name]
    _apply_optimizer_in_backward(kind, tables, numbers)
    return model


def kind_of(optimizer: str):
    import torchrec.optim

    return getattr(torchrec.optim, optimizer, None) or getattr(torch.optim, optimizer)


def batch_of(seed: int, rank: int = 0):
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    g = torch.Generator().manual_seed(1000 * rank + seed)
    lengths = torch.randint(0, 4, (len(ROWS), BATCH), generator=g)
    ids = [torch.randint(0, rows, (int(n.sum()),), generator=g) for rows, n in zip(ROWS.values(), lengths, strict=True)]
    sparse = KeyedJaggedTensor(keys=list(ROWS), values=torch.cat(ids), lengths=lengths.flatten().int())
    dense = torch.randn(BATCH, DENSE, generator=g)
    return Batch(dense, sparse, (dense[:, 0] + torch.randn(BATCH, generator=g) > 0).int())


def plan_of(model: nn.Module, world: int, layouts=("table_wise",)):
    """A plan of TorchRec's, with these layouts in turn."""
    from torchrec import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan

    choices = {
        "table_wise": lambda k: sharding_plan.table_wise(rank=k % world, compute_kernel="fused"),
        "row_wise": lambda k: sharding_plan.row_wise(compute_kernel="fused"),
        "column_wise": lambda k: sharding_plan.column_wise(ranks=list(range(world)), compute_kernel="fused"),
    }
    plans: dict[str, Any] = {}
    for path, child in model.named_modules():
        if isinstance(child, EmbeddingBagCollection):
            configs, sharder = child.embedding_bag_configs(), EmbeddingBagCollectionSharder()
        elif isinstance(child, EmbeddingCollection):
            configs, sharder = child.embedding_configs(), EmbeddingCollectionSharder()
        else:
            continue
        chosen = {c.name: choices[layouts[k % len(layouts)]](k) for k, c in enumerate(configs)}
        plans[path] = sharding_plan.construct_module_sharding_plan(
            child, chosen, sharder, local_size=world, world_size=world, device_type="cpu"
        )
    return ShardingPlan(plan=plans)


def dense_optimizer(model: nn.Module) -> Any:
    """Of what is not updated in the backward, by TorchRec's pattern; it clips gradients."""
    from torchrec.optim import KeyedOptimizerWrapper
    from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
    from torchrec.optim.keyed import CombinedOptimizer
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(parameters, lambda params: torch.optim.Adagrad(params, lr=0.02))
    clipped = GradientClippingOptimizer(dense, clipping=GradientClipping.NORM, max_gradient=0.5)
    return CombinedOptimizer([model.fused_optimizer, clipped])


def steps_of(model: nn.Module, steps: int = STEPS, rank: int = 0, first: int = 0) -> list[float]:
    optimizer, losses = dense_optimizer(model), []
    for seed in range(first, first + steps):
        optimizer.zero_grad()
        loss, _ = model(batch_of(seed, rank))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def ours(model: nn.Module, **how: Any) -> Any:
    from rowwise.torchrec import DistributedModelParallel

    return DistributedModelParallel(model, device=CPU, **how)


def theirs(model: nn.Module, world: int, layouts=("table_wise",)) -> Any:
    from torchrec.distributed import DistributedModelParallel

    return DistributedModelParallel(model, device=CPU, plan=plan_of(model, world, layouts))


def apart(a: Any, b: Any) -> float:
    """The largest difference of two state dicts, on this rank's shards."""
    assert list(a) == list(b)
    largest = 0.0
    for name in a:
        for x, y in zip(shards_of(a[name]), shards_of(b[name]), strict=True):
            assert x.shape == y.shape
            largest = max(largest, float((x - y).abs().max()))
    return largest


def shards_of(value: Any) -> list[torch.Tensor]:
    return [s.tensor.detach() for s in value.local_shards()] if hasattr(value, "local_shards") else [value.detach()]


def join_world(comm) -> None:
    from torchrec_ranks import join

    quiet()
    torch.set_num_threads(1)
    join(comm)


def leave_world() -> None:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def against_torchrec(comm, optimizer: str, names, layouts=()) -> dict[str, tuple[float, float, float]]:
    """By model: differences of losses, of state, and of outputs of the weights in TorchRec's plain modules."""
    join_world(comm)
    found, world = {}, len(comm.ranks)
    for name in names:
        pair = [fuse(make_model(name), optimizer, OPTIMIZERS[optimizer]) for _ in range(2)]
        mine = ours(pair[0], plan=plan_of(pair[0], world, layouts) if layouts else None)
        peer = theirs(pair[1], world, layouts or ("table_wise",))
        peer.load_state_dict(make_model(name).state_dict())  # TorchRec draws new rows
        losses = zip(steps_of(mine, rank=comm.rank), steps_of(peer, rank=comm.rank), strict=True)
        state = apart(mine.state_dict(), peer.state_dict()) if layouts or world == 1 else 0.0
        back = theirs(fuse(make_model(name), optimizer, OPTIMIZERS[optimizer]), world, layouts or ("table_wise",))
        again = ours(make_model(name), plan=plan_of(make_model(name), world, layouts) if layouts else None)
        with torch.no_grad():
            outputs = []
            if layouts or world == 1:
                back.load_state_dict(mine.state_dict())
                again.load_state_dict(peer.state_dict())
                outputs = [m(batch_of(99, comm.rank))[1][1] for m in (mine, back, peer, again)]
        differences = [float((a - b).abs().max()) for a, b in zip(outputs[::2], outputs[1::2], strict=True)]
        found[name] = max(abs(a - b) for a, b in losses), state, max(differences, default=0.0)
    leave_world()
    return found

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
            sample = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths)
            parts.append((dense[:, :1] * torch.zeros(1, DIM)).index_add(0, sample, values))
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
    tables = [p for name, p in model.named_parameters() if "embedding_bags." in name or "embeddings." in name]
    _apply_optimizer_in_backward(kind, tables, numbers)
    return model


def kind_of(optimizer: str):
    import torchrec.optim

    return getattr(torchrec.optim, optimizer, None) or getattr(torch.optim, optimizer)


def batch_of(seed: int, rank: int = 0, samples: int = BATCH):
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    g = torch.Generator().manual_seed(1000 * rank + seed)
    lengths = torch.randint(0, 4, (len(ROWS), samples), generator=g)
    ids = [torch.randint(0, rows, (int(n.sum()),), generator=g) for rows, n in zip(ROWS.values(), lengths, strict=True)]
    sparse = KeyedJaggedTensor(keys=list(ROWS), values=torch.cat(ids), lengths=lengths.flatten().int())
    dense = torch.randn(samples, DENSE, generator=g)
    return Batch(dense, sparse, (dense[:, 0] + torch.randn(samples, generator=g) > 0).int())


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
    return theirs_by(model, plan=plan_of(model, world, layouts))


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


class SparseRows(torch.optim.Optimizer):
    """Adam of Kingma and Ba, algorithm 1, of the rows that have a gradient; the correction counts all steps."""

    def __init__(self, parameters, lr: float, eps: float) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps, "beta1": 0.9, "beta2": 0.999})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"t": 0, "m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}
                state["t"] += 1
                grad = parameter.grad.coalesce()
                (rows,), g = grad.indices(), grad.values()
                state["m"][rows] = group["beta1"] * state["m"][rows] + (1 - group["beta1"]) * g
                state["v"][rows] = group["beta2"] * state["v"][rows] + (1 - group["beta2"]) * g * g
                mean = state["m"][rows] / (1 - group["beta1"] ** state["t"])
                root = (state["v"][rows] / (1 - group["beta2"] ** state["t"])).sqrt()
                parameter[rows] -= group["lr"] * mean / (root + group["eps"])


def against_adam(comm, names) -> dict[str, tuple[float, int]]:
    """By model: the difference of losses from `SparseRows` over TorchRec's plain modules; its averages by name."""
    join_world(comm)
    found, ranks, numbers = {}, len(comm.ranks), {"lr": 0.01, "eps": 1e-6}
    for name in names:
        mine = ours(fuse(make_model(name), "Adam", numbers))
        optimizer, losses = dense_optimizer(mine), []
        plain = make_model(name)
        for module in plain.modules():
            if isinstance(module, (nn.EmbeddingBag, nn.Embedding)):
                module.sparse = True
        rows = [p for n, p in plain.named_parameters() if ".embedding_bags." in n or ".embeddings." in n]
        dense = [p for p in plain.parameters() if all(p is not row for row in rows)]
        optimizers = [SparseRows(rows, **numbers), torch.optim.Adagrad(dense, lr=0.02)]
        for seed in range(STEPS):
            optimizer.zero_grad()
            loss, _ = mine(batch_of(seed, comm.rank))
            loss.backward()
            optimizer.step()
            for each in optimizers:
                each.zero_grad()
            wanted = [plain(batch_of(seed, rank))[0] for rank in range(ranks)]
            (sum(wanted) / ranks).backward()
            nn.utils.clip_grad_norm_(dense, 0.5)
            for each in optimizers:
                each.step()
            losses.append(abs(float(loss) - float(wanted[comm.rank])))
        states = mine.fused_optimizer.state_dict()["state"].values()
        found[name] = max(losses), sum("exp_avg_sq" in key for state in states for key in state)
    leave_world()
    return found


def pipelined(comm, pipeline: str, execute_all_batches: bool) -> dict[str, Any]:
    """Losses of a train pipeline and of a loop, and how many batches each has trained."""
    join_world(comm)
    import rowwise.torchrec

    found, world = {}, len(comm.ranks)
    for name in ("DLRM", "DLRM_DCN", "mixed", "towers"):
        models = [fuse(make_model(name), "RowWiseAdagrad", OPTIMIZERS["RowWiseAdagrad"]) for _ in range(2)]
        looped, piped = (ours(m, plan=plan_of(m, world, ("row_wise", "table_wise"))) for m in models)
        wanted = steps_of(looped, 8, comm.rank)
        more = {"execute_all_batches": execute_all_batches} if pipeline == "TrainPipelineSparseDist" else {}
        train = getattr(rowwise.torchrec, pipeline)(piped, dense_optimizer(piped), CPU, **more)
        batches, losses = iter([batch_of(seed, comm.rank) for seed in range(8)]), []
        while True:
            try:
                losses.append(float(train.progress(batches)[0]))
            except StopIteration:
                break
        ahead = len(train.__dict__.get("_pipelined_modules", ()))
        found[name] = wanted, losses, apart(looped.state_dict(), piped.state_dict()), ahead
    leave_world()
    return found


def scheduled(comm) -> float:
    """The difference of losses from TorchRec's under a schedule of learning rates, warmed up from 0."""
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    join_world(comm)
    losses = []
    for make in (ours, lambda model: theirs(model, 1)):
        model = make(fuse(make_model("DLRM"), "RowWiseAdagrad", {"lr": 0.1, "eps": 1e-6}))
        model.load_state_dict(make_model("DLRM").state_dict())
        stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=5, value=0.1), WarmupStage(
            policy=WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS, max_iters=20, value=0.3, lr_scale=0.5)]  # fmt: skip
        optimizer = WarmupOptimizer(dense_optimizer(model), stages, lr=0.1)
        run = []
        for seed in range(20):
            optimizer.zero_grad()
            loss, _ = model(batch_of(seed))
            loss.backward()
            optimizer.step()
            run.append(float(loss))
        losses.append(run)
    leave_world()
    return max(abs(a - b) for a, b in zip(*losses, strict=True))


class Twice(nn.Module):
    """A model that calls a collection twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags_of(["f0"], CPU)

    def forward(self, sparse):
        return self.bags(sparse).values() + self.bags(sparse).values()


def one_table(weighted: bool = False, **more: Any) -> nn.Module:
    """A collection of a table of 9 rows, at the path 0."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    named = {"name": "t_f0", "num_embeddings": 9, "embedding_dim": DIM, "feature_names": ["f0"], **more}
    return nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(**named)], is_weighted=weighted))


def wrong_uses() -> dict[str, Any]:
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.embedding_configs import DataType, PoolingType
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    def renamed():
        model = one_table()
        plan = plan_of(model, 1)
        plan.plan["0"]["gone"] = plan.plan["0"].pop("t_f0")
        return ours(model, plan=plan)

    def fused():
        tables = [EmbeddingBagConfig(name="t_f0", num_embeddings=9, embedding_dim=DIM, feature_names=["f0"])]
        return ours(nn.Sequential(FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.1})))

    empty, none = torch.zeros(0, dtype=torch.int64), torch.zeros(2 * BATCH, dtype=torch.int64)
    others = KeyedJaggedTensor(keys=["f1", "f2"], values=empty, lengths=none)
    rows = {"0.embedding_bags.t_f0.weight": torch.zeros(8, DIM)}
    return {
        "twice": lambda: ours(fuse(Twice(), "SGD", {"lr": 0.1}))(batch_of(0).sparse_features),
        "no optimizer": lambda: ours(Twice())(batch_of(0).sparse_features),
        "unknown optimizer": lambda: ours(fuse(Twice(), "LarsSGD", {"lr": 0.1})),
        "torch optimizer": lambda: ours(fuse(Twice(), "RMSprop", {"lr": 0.1})),
        "momentum": lambda: ours(fuse(Twice(), "SGD", {"lr": 0.1, "momentum": 0.9})),
        "eps": lambda: ours(fuse(Twice(), "Adagrad", {"lr": 0.1, "eps": 0.0})),
        "missing": lambda: ours(fuse(Twice(), "SGD", {"lr": 0.1}))(others),
        "id": lambda: ours(fuse(one_table(), "SGD", {"lr": 0.1}))(batch_of(0).sparse_features),
        "plan": lambda: ours(one_table(), plan=plan_of(Twice(), 1)),
        "plan of another table": renamed,
        "plan of other rows": lambda: ours(one_table(), plan=plan_of(one_table(num_embeddings=40), 1)),
        "int8": lambda: ours(one_table(data_type=DataType.INT8)),
        "weighted mean": lambda: ours(one_table(weighted=True, pooling=PoolingType.MEAN)),
        "fused collection": fused,
        "state": lambda: ours(one_table()).load_state_dict(rows),
    }


def refusals(comm) -> dict[str, str]:
    """What each wrong use says."""
    join_world(comm)
    said = {}
    for name, use in wrong_uses().items():
        try:
            use()
        except Exception as error:  # that which the test looks at
            said[name] = f"{type(error).__name__}: {error}"
    leave_world()
    return said


def large_batches(comm) -> dict[str, tuple[float, float]]:
    """By model: differences of logits and of dense gradients from the plain module, where our kernels run."""
    join_world(comm)
    found = {}
    for name in PACKAGED:
        plain, batch = make_model(name), batch_of(1, samples=700)
        mine = ours(fuse(make_model(name), "SGD", {"lr": 0.1}))
        results = [model(batch) for model in (mine, plain)]
        for loss, _ in results:
            loss.backward()
        gradients = dict(plain.named_parameters())
        apart = [float((p.grad - gradients[n].grad).abs().max()) for n, p in mine.named_parameters() if p.requires_grad]
        found[name] = float((results[0][1][1] - results[1][1][1]).abs().max()), max(apart)
    leave_world()
    return found


def a_bad_batch(comm) -> tuple[str, tuple[int, ...]]:
    """What a rank says when the second rank's batch lacks a feature, and the next batch's vectors."""
    from torchrec import KeyedJaggedTensor

    join_world(comm)
    bags = nn.Sequential(bags_of(["f0", "f1"], CPU))
    model, sparse, said = ours(fuse(bags, "SGD", {"lr": 0.1})), batch_of(1).sparse_features, ""
    if comm.rank == 1:
        sparse = KeyedJaggedTensor(keys=["f1"], values=sparse.values()[:0], lengths=sparse.lengths()[:BATCH] * 0)
    try:
        model(sparse)
    except Exception as error:  # that which the test looks at
        said = f"{type(error).__name__}: {error}"
    shape = tuple(model(batch_of(2).sparse_features)["f0"].shape)
    leave_world()
    return said, shape


def train_and_die(folder: str, optimizer: str, until: int, die_at: int) -> None:
    """Train to step `until` from the last save, saving every third step; at `die_at`, kill this process."""
    import os
    import signal
    from pathlib import Path

    quiet()
    torch.set_num_threads(1)
    model = ours(fuse(make_model("mixed"), optimizer, {"lr": 0.02}))
    combined, saved = dense_optimizer(model), Path(folder) / "saved.pt"
    first = 0
    if saved.exists():
        state = torch.load(saved)
        for _, each in combined.optimizers:
            each.init_state()  # TorchRec's way to make the lazy state of a dense optimizer, to load into
        model.load_state_dict(state["model"])
        combined.load_state_dict(state["optimizer"])
        first = state["step"]
    for seed in range(first, until):
        combined.zero_grad()
        loss, _ = model(batch_of(seed))
        loss.backward()
        combined.step()
        if (seed + 1) % 3 == 0:
            state = {"model": model.state_dict(), "optimizer": combined.state_dict(), "step": seed + 1}
            torch.save(state, f"{saved}.new")
            os.replace(f"{saved}.new", saved)
        if seed + 1 == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    torch.save({"model": model.state_dict(), "optimizer": combined.state_dict()}, Path(folder) / "end.pt")


def saved_by_dcp(comm, folder: str) -> tuple[float, float]:
    """Weights of one plan in a model of another; and losses after a restart of the same plan, through files."""
    from torch.distributed import checkpoint

    join_world(comm)

    def make(layouts):
        model = fuse(make_model("mixed"), "Adagrad", OPTIMIZERS["Adagrad"])
        return ours(model, plan=plan_of(model, len(comm.ranks), layouts))

    model = make(("row_wise", "table_wise"))
    steps_of(model, 5, comm.rank)
    fused = model.fused_optimizer.state_dict()
    checkpoint.save({"model": model.state_dict(), "optimizer": fused}, checkpoint_id=folder)
    other = make(("table_wise", "column_wise"))
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    with torch.no_grad():
        outputs = [m(batch_of(99, comm.rank))[1][1] for m in (model, other)]
    again = make(("row_wise", "table_wise"))
    state = {"model": again.state_dict(), "optimizer": again.fused_optimizer.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    again.fused_optimizer.load_state_dict(state["optimizer"])
    losses = [steps_of(m, 5, comm.rank, first=5) for m in (model, again)]
    leave_world()
    return float((outputs[0] - outputs[1]).abs().max()), max(abs(a - b) for a, b in zip(*losses, strict=True))


def by_sharders(comm) -> tuple[float, float, float]:
    """Of sharders with fused_params, in fp32 and fp16: differences from TorchRec; bytes of vectors, fp32 over fp16."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

    join_world(comm)
    numbers = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05, "eps": 1e-6}
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    codecs, differences, sent = get_qcomm_codecs_registry(config, device=CPU), [], []
    for registry in (None, codecs):
        sharder, losses = EmbeddingBagCollectionSharder(numbers, registry), []
        counted = comm_of_door().sent.total("pooled")
        for side in (ours, theirs_by):
            model = make_model("DLRM")
            plan = plan_of(model, len(comm.ranks))
            made = side(model, plan=plan, sharders=[sharder])
            made.load_state_dict(make_model("DLRM").state_dict())
            losses.append(steps_of(made, 20, comm.rank))
        differences.append(max(abs(a - b) for a, b in zip(*losses, strict=True)))
        sent.append(comm_of_door().sent.total("pooled") - counted)
    leave_world()
    return *differences, sent[0] / sent[1]


def comm_of_door() -> Any:
    from rowwise.recipes.door.model import comm_of

    return comm_of(torch.distributed.group.WORLD)


def theirs_by(model: nn.Module, **how: Any) -> Any:
    from torchrec.distributed import DistributedModelParallel

    return DistributedModelParallel(model, device=CPU, **how)


def on_the_meta_device(comm) -> tuple[list[float], bool]:
    """Each table's largest initial weight over its bound; whether replicated tables agree on all ranks."""
    join_world(comm)
    torch.manual_seed(comm.rank)
    model = ours(fuse(make_model("mixed", torch.device("meta")), "SGD", {"lr": 0.1}))
    rows = {name: x for name, x in model.state_dict().items() if ".weight" in name and "last" not in name}
    bounds = [float(max(part.abs().max() for part in shards_of(x))) * x.size()[0] ** 0.5 for x in rows.values()]
    plain = torch.cat([x.flatten() for x in rows.values() if not hasattr(x, "local_shards")])
    sums = comm.all_gather(plain, [len(plain)] * len(comm.ranks), "test").wait().view(len(comm.ranks), -1)
    leave_world()
    return bounds, bool((sums == sums[0]).all())


if __name__ == "__main__":
    import sys

    train_and_die(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

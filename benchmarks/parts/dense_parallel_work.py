"""Steps of a large dense model on rank processes, by this package and by torch's own collectives over gloo."""

import statistics
import time

import torch
from torch import nn

from rowwise import Mlp
from rowwise.models.dhen import DhenLayer
from rowwise.models.interactions import CrossInteraction, LinearInteraction
from rowwise.models.mlp import stack
from rowwise.parallel.comm.fsdp import FsdpOptions, shard_parameters
from rowwise.parallel.comm.interface import Comm, Transfer
from rowwise.planning.perf.dense_parallel import DenseUnits
from rowwise.tables.spec import Wire
from rowwise.train.dense import DenseGradients
from rowwise.train.dense_parallel import ShardedConstruction, find_units, shard_dense, shards_of, unit_shapes
from rowwise.train.recorder import peak_memory_bytes
from rowwise.train.settings import DenseParallel

VECTORS = 5


class DenseStack(nn.Module):
    """The dense side of DHEN: cross and linear interactions, concatenated, and an MLP."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        kinds = [CrossInteraction, LinearInteraction]
        self.layers = stack(DhenLayer(VECTORS, VECTORS, dim, kinds) for _ in range(layers))
        self.top = Mlp((VECTORS * dim, 64, 1))

    def forward(self, x_BMD: torch.Tensor) -> torch.Tensor:
        return self.top(self.layers(x_BMD).flatten(1))


def measure(comm: Comm, parallel: DenseParallel, size: dict) -> dict:
    """Losses, bytes and seconds of steps, and how much memory the construction took at most."""
    world, shards = len(comm.ranks), shards_of(parallel, comm.topology)
    small = DenseStack(2, 16)
    shard_dense(small, parallel, comm)  # imports what sharding needs
    before = peak_memory_bytes()
    torch.manual_seed(0)
    construction = ShardedConstruction(comm, shards)
    with construction:
        model = DenseStack(size["layers"], size["dim"])
    units, own = unit_shapes(model)
    shard_dense(model, parallel, comm, construction)
    grown = peak_memory_bytes() - before
    gradients = DenseGradients(list(model.parameters()), comm.split([comm.ranks]), Wire()) if shards == 1 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y[:, None]).square().sum() / (len(x) * world)
        if gradients is None:
            loss.backward()
        else:
            gradients.backward(loss, last=True)
            gradients.finish()
        optimizer.step()
        return loss.detach()

    found = run(step, comm, size)
    return found | {"grown_bytes": grown, "units": units, "own": own}


def measure_torch(comm: Comm, parallel: DenseParallel, size: dict, store: str) -> dict:
    """The same steps by DDP or FSDP2, over a process group of torch's."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    world = len(comm.ranks)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=comm.rank, world_size=world)
    torch.manual_seed(0)
    model: nn.Module = DenseStack(size["layers"], size["dim"])
    if parallel.kind == "replicate":
        model = DistributedDataParallel(model)
    else:
        full = parallel.kind == "full"
        names = ("shard",) if full else ("replicate", "shard")
        shape = (world,) if full else (world // parallel.shards, parallel.shards)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for unit in find_units(model):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y[:, None]).square().mean()  # which torch averages over ranks
        loss.backward()
        optimizer.step()
        return loss.detach() / world

    found = run(step, comm, size)
    dist.destroy_process_group()
    return found


def run(step, comm: Comm, size: dict) -> dict:
    draws = torch.Generator().manual_seed(comm.rank)
    losses, seconds, sent = [], [], 0
    for _ in range(size["steps"]):
        x = torch.randn(size["batch"], VECTORS, size["dim"], generator=draws)
        y = x[:, 0].mean(1).sign()
        before, begin = comm.sent.total("dense"), time.perf_counter()
        loss = step(x, y)
        seconds.append(time.perf_counter() - begin)
        sent = comm.sent.total("dense") - before
        losses.append(float(comm.all_reduce(loss.reshape(1).clone(), "status").wait()))
    later = seconds[2:] or seconds
    return {"losses": losses, "step_s": statistics.median(later), "sent_bytes": sent}


def measure_overlap(comm: Comm, shards: int, size: dict) -> dict:
    """Steps of hybrid sharding with sums one after the other, and in turn with those that overlap the backward."""
    sides: dict[str, nn.Module] = {}
    for name in ("in_turn", "together"):
        torch.manual_seed(0)
        sides[name] = model = DenseStack(size["layers"], size["dim"])
        options = FsdpOptions(shards=shards, overlap=name == "together")
        shard_parameters(model, find_units(model), comm, options, set())
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in sides.items()}
    draws = torch.Generator().manual_seed(comm.rank)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(size["steps"]):
        x = torch.randn(size["batch"], VECTORS, size["dim"], generator=draws)
        y = x[:, :1].mean(2).sign()
        for name, model in sides.items():
            transfers: list[Transfer] = []
            comm.all_reduce(torch.zeros(1), "meet").wait()
            comm.observer.report = transfers.append
            begin_s = time.perf_counter()
            optimizers[name].zero_grad()
            loss = (model(x) - y).square().mean()
            backward_s = time.perf_counter()
            loss.backward()
            optimizers[name].step()
            seconds[name].append(time.perf_counter() - begin_s)
            comm.observer.report = None
            losses[name].append(float(loss.detach()))
    return {
        "losses": losses,
        **{f"{name}_s": statistics.median(taken[2:] or taken) for name, taken in seconds.items()},
        "events": events_of(transfers, backward_s),
    }


def events_of(transfers: list[Transfer], backward_s: float) -> list[dict[str, float]]:
    """Begin and end of each unit's sums, in milliseconds from the begin of the backward."""
    sums: dict[str, list[Transfer]] = {"reduce_scatter": [], "all_reduce": []}
    for transfer in sorted(transfers, key=lambda transfer: transfer.begin_s):
        if transfer.collective in sums and transfer.purpose == "dense":
            sums[transfer.collective].append(transfer)
    return [
        {
            f"{kind}_{end}_ms": round(1e3 * (getattr(transfer, f"{end}_s") - backward_s), 2)
            for kind, transfer in zip(sums, unit, strict=True)
            for end in ("begin", "end")
        }
        for unit in zip(*sums.values(), strict=True)
    ]


def units_of(found: dict) -> DenseUnits:
    return DenseUnits(tuple(map(tuple, found["units"])), tuple(found["own"]))

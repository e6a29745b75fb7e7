"""A model with tables in torch's DistributedDataParallel, on ranks that are processes with a default group."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rowwise import Adagrad, Embeddings, Jagged, Plan, Pooling, RowWiseAdagrad, Sgd, SpecError, Table
from rowwise.parallel.comm.status import broadcast_object
from rowwise.parallel.shard.apply import shard
from rowwise.planning.planner.layouts import row_wise, table_wise

TABLES = (
    Table(name="a", rows=20, dim=4, optimizer=Sgd(lr=0.1)),
    Table(name="b", rows=20, dim=4, pooling=Pooling.MEAN, optimizer=Adagrad(lr=0.1)),
    Table(name="c", rows=20, dim=4, optimizer=RowWiseAdagrad(lr=0.1)),
)
STEPS, SAMPLES = 5, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = Embeddings(TABLES, seed=1, update_in_backward=True)
        self.layers = nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, batch):
        return self.layers(self.embeddings(batch).matrix_BS).squeeze(1)


def make_batch(step, first=0, last=SAMPLES):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 20, (len(TABLES), SAMPLES, 2), generator=g)[:, first:last]
    lengths = torch.full((len(TABLES) * (last - first),), 2)
    return Jagged(features=tuple("abc"), values_N=ids.flatten(), lengths_FB=lengths)


def train(net, model, samples=(0, SAMPLES)):
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = ((model(make_batch(step, *samples)) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plan_of(world):
    a, b, c = TABLES
    return Plan(world=world, tiles=(*row_wise(a, range(world)), *table_wise(b, 0), *table_wise(c, world - 1)))


def start_group(comm):
    """The default group of torch, which rowwise does without."""
    world = len(comm.ranks)
    folder = broadcast_object(comm, tempfile.mkdtemp(), 0, "recipe")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=comm.rank, world_size=world)


def run(comm):
    """Losses of this rank's samples, and its rows, by tile."""
    start_group(comm)
    world = len(comm.ranks)
    net = shard(Net(), plan_of(world), comm)
    each = SAMPLES // world
    losses = train(net, DistributedDataParallel(net), (comm.rank * each, (comm.rank + 1) * each))
    rows = [(local.tile, local.rows.clone()) for local in net.embeddings.local_tiles()]
    dist.destroy_process_group()
    return losses, rows, [p.detach() for p in net.layers.parameters()]


def refused(comm):
    """The errors of a model that is not sharded, and of one that DistributedDataParallel has overwritten."""
    start_group(comm)
    net = Net()
    outer = nn.Sequential(shard(Net(), plan_of(len(comm.ranks)), comm))
    lines = []
    for model in (net, outer):
        try:
            DistributedDataParallel(model)(make_batch(0))
        except SpecError as error:
            lines.append(str(error))
    dist.destroy_process_group()
    return lines

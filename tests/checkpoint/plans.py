"""Models whose tables lie by any plan, trained a little, and what is in them as one device would have it."""

import random
from dataclasses import dataclass

import torch
from parallel.shard.jobs import OPTIMIZERS, ROWS
from parallel.shard.layout_cases import CASES
from problems import make_problem
from torch import nn

from rowwise import Embeddings, Jagged, Plan, Pooling, Table, Topology
from rowwise.checkpoint.read import Checkpoint
from rowwise.parallel.shard.apply import shard
from rowwise.parallel.shard.embeddings import ShardedEmbeddings
from rowwise.tables.ops import rowtype
from rowwise.train.optimizers import make_optimizer
from rowwise.train.settings import DenseAdam

SEED = 3
Contents = dict[str, torch.Tensor]  # rows as they are stored, or as floats, and state, by their names


class Net(nn.Module):
    """Tables and a layer."""

    def __init__(self, tables):
        super().__init__()
        torch.manual_seed(SEED)
        self.embeddings = Embeddings(tables, seed=SEED)
        self.top = nn.Linear(7, 5)


def make_tables(chance: random.Random, count: int = 5, rows: int = 200) -> tuple[Table, ...]:
    tables = []
    for number in range(count):
        row_type, group, dims = ROWS[chance.choice(list(ROWS))]
        tables.append(
            Table(
                name=f"t{number}",
                rows=chance.randint(8, rows),
                dim=chance.choice(dims),
                pooling=chance.choice(list(Pooling)),
                optimizer=OPTIMIZERS[chance.choice(list(OPTIMIZERS))],
                row_type=row_type,
                column_group=group,
            )
        )
    return tuple(tables)


def make_plan(chance: random.Random, tables, world: int) -> Plan:
    topology = Topology(devices=world)
    tiles = [tile for table in tables for tile in CASES[chance.choice(list(CASES))](table, topology)]
    return Plan(world=world, tiles=tuple(tiles))


def take_step(model, optimizer: torch.optim.Optimizer, jagged: Jagged, dense: torch.Tensor) -> None:
    vectors = model.embeddings(jagged)
    loss = vectors.matrix_BS.square().sum() + sum(x.square().sum() for x in vectors.sequences.values())
    (loss + model.top(dense).square().sum()).backward()
    model.embeddings.update()
    optimizer.step()


def track(model) -> None:
    """Mark the rows that change from now on."""
    for arena in model.embeddings.arenas:
        arena.track()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model that one device has trained."""

    tables: tuple[Table, ...]
    model: Net
    optimizer: torch.optim.Optimizer

    @classmethod
    def make(cls, tables, steps: int = 3, seed: int = 0) -> "Trained":
        model = Net(tables)
        optimizer = make_optimizer(DenseAdam(), list(model.top.parameters()))
        for step in range(steps):
            take_step(model, optimizer, make_problem(tables, 40, 4, seed + step).jagged, torch.randn(3, 7))
        return cls(tables=tables, model=model, optimizer=optimizer)

    def by(self, plan: Plan, comm) -> tuple[Net, dict[str, torch.optim.Optimizer]]:
        """The same by a plan: this rank's share."""
        model = Net(self.tables)
        model.load_state_dict(self.model.state_dict())
        model.embeddings.load_optimizer_state(self.model.embeddings.optimizer_state())
        optimizer = make_optimizer(DenseAdam(), list(model.top.parameters()))
        # Not load_state_dict, which loads torch's compiler.
        for mine, parameter in zip(model.top.parameters(), self.model.top.parameters(), strict=True):
            optimizer.state[mine] = {name: x.clone() for name, x in self.optimizer.state[parameter].items()}
        return shard(model, plan, comm), {"dense": optimizer}


def empty(tables, plan: Plan | None, comm) -> tuple[Net, dict[str, torch.optim.Optimizer]]:
    """One that knows nothing yet."""
    model = Net(tables)
    with torch.no_grad():
        model.embeddings.arena.rows.fill_(7)
        model.embeddings.arena.state.fill_(7.0)
        model.top.weight.fill_(7.0)
    optimizer = make_optimizer(DenseAdam(), list(model.top.parameters()))
    return model if plan is None else shard(model, plan, comm), {"dense": optimizer}


def differences(module: Embeddings | ShardedEmbeddings, whole: Embeddings) -> list[str]:
    """What a rank has that one device has otherwise, in rows, to the bit, or in their state."""
    states, found = whole.optimizer_state(), []
    tables = {table.name: table for table in whole.tables}
    for tile, rows, state in pieces(module):
        table, at, columns = tables[tile.table], slice(*tile.rows), slice(*tile.cols)
        mine = rowtype.unpack(rows, columns.stop - columns.start, table.row_type, table.column_group)
        want = whole.weights(table.name)[at, columns]
        if not torch.equal(mine.view(torch.int32), want.contiguous().view(torch.int32)):
            found.append(f"{tile}: {float((mine - want).abs().max())} apart")
        assert state.keys() == states[table.name].keys()
        for name, mine in state.items():
            full = states[table.name][name]
            want = full if not full.dim() else full[at] if full.dim() == 1 else full[at, columns]
            if not torch.equal(mine, want):
                found.append(f"{tile} {name}")
    return found


def pieces(module):
    if isinstance(module, ShardedEmbeddings):
        return [(held.tile, held.rows, held.state) for held in module.local_tiles()]
    places = [next(iter(CASES["table-wise"](table, Topology()))) for table in module.tables]
    return [(tile, module.arena.table(k), module.arena.table_state(k)) for k, tile in enumerate(places)]


def contents(checkpoint: Checkpoint) -> Contents:
    """Everything but random numbers, as saved."""
    return {name: checkpoint.load(name) for name in checkpoint.names() if not name.startswith("rng/")}

"""rowwise's side of `shard_step.py`, and how its processes are started.

The only one of these files that knows the interface of the runtime.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from parts.shard_work import NAMES, SLOW_LR, Parts, Pieces
from rowwise import DLRM, Batch
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.plan import Plan, Tile
from rowwise.parallel.shard.apply import shard
from rowwise.planning.planner import layouts
from rowwise.tables.spec import Codecs, RowType, Table, Topology, Wire
from rowwise.train.breakdown import Breakdown
from rowwise.train.objective import Clicks
from rowwise.train.settings import DenseAdam, Training
from rowwise.train.step import StepContext, step

LAYOUTS = ("table-wise", "row-wise", "column-wise", "replicated")
HOST_LAYOUTS = ("table-row-wise", "table-column-wise", "grid")  # which differ from those where there are several hosts


def on_threads(world: int | Topology, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What each rank gives: function(comm, *args)."""
    return run_threads(world, lambda comm: function(comm, *args))


def plan_of(tables: Sequence[Table], layout: str, topology: Topology) -> Plan:
    """All tables alike; what is whole goes to the ranks, or hosts, in turn."""
    tiles = [tile for index, table in enumerate(tables) for tile in tiles_of(table, index, layout, topology)]
    return Plan(world=topology.world, tiles=tuple(tiles))


def tiles_of(table: Table, index: int, layout: str, topology: Topology) -> tuple[Tile, ...]:
    ranks, hosts = range(topology.world), range(topology.hosts)
    ways: dict[str, Callable[[], tuple[Tile, ...]]] = {
        "table-wise": lambda: layouts.table_wise(table, ranks[index % len(ranks)]),
        "row-wise": lambda: layouts.row_wise(table, ranks),
        "column-wise": lambda: layouts.column_wise(table, ranks),
        "replicated": lambda: layouts.replicated(table, ranks),
        "table-row-wise": lambda: layouts.table_row_wise(table, topology, hosts[index % len(hosts)]),
        "table-column-wise": lambda: layouts.column_wise(table, topology.ranks_of(hosts[index % len(hosts)])),
        "grid": lambda: layouts.grid(table, topology, hosts),
    }
    return ways[layout]()


class Rowwise:
    """A whole model, sharded in place; `layout` None: left whole, in this process alone."""

    def __init__(
        self,
        start: DLRM,
        layout: str | None,
        comm: Comm | None,
        wire: str = "fp32",
        determinism: str = "run",
        dense_lr: float = SLOW_LR,
    ):
        self.model, self.comm, self.steps, self.plan = start, comm, 0, None
        codecs = Codecs(forward=RowType(wire), backward=RowType(wire))
        wires = Wire(host=codecs, network=codecs)
        if layout is not None:
            self.plan = plan_of(start.embeddings.tables, layout, comm.topology)
            self.model = shard(start, self.plan, comm, wire=wires, elastic=determinism == "elastic")
        settings = Training(optimizer=DenseAdam(lr=dense_lr), determinism=determinism)
        together = {} if layout is None else {"comm": comm, "wire": wires}
        self.work = StepContext.create(self.model, Clicks(self.model), settings, Breakdown(), **together)

    def tables(self) -> dict[str, Pieces]:
        embeddings = self.model.embeddings
        if self.plan is None:
            return {name: [(slice(None), slice(None), embeddings.table(name))] for name in NAMES}
        held: dict[str, Pieces] = {name: [] for name in NAMES}
        for piece in embeddings.local_tiles():
            held[piece.tile.table].append((slice(*piece.tile.rows), slice(*piece.tile.cols), piece.rows))
        return held

    def batch(self, parts: Parts) -> Batch:
        return Batch(dense_BF=parts.dense_BF, sparse=parts.jagged(), labels_BK=parts.labels_BK)

    def logits(self, parts: Parts) -> Tensor:
        return self.model(self.batch(parts))

    def step(self, parts: Parts) -> float:
        self.steps += 1
        return step(self.work, [self.batch(parts)], self.steps).loss

    def pooled(self, parts: Parts) -> Tensor:
        return self.model.embeddings(parts.jagged()).matrix_BS

    def embed(self, parts: Parts, grad_BS: Tensor) -> None:
        self.pooled(parts).backward(grad_BS)
        self.model.embeddings.update()

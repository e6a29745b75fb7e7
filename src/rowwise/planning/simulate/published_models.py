"""Models that papers describe, as JSON files: `rowwise simulate NAME` takes them by name, and others by path.

The tables are equal, with rows of 16 bits and without optimizer state; vectors travel in 16 bits.
"""

from pathlib import Path
from typing import Annotated

from msgspec import Meta, structs

from rowwise.base.records import PublishedRate
from rowwise.base.textfile import read_bytes
from rowwise.base.value import MAX_BATCH, MAX_DIM, MAX_LAYERS, parse_json
from rowwise.planning.perf.access import Access, Workload
from rowwise.planning.perf.dense_layers import DenseLayer, DenseLayers, parse_layers, side_of_layers
from rowwise.planning.perf.hardware import Machine
from rowwise.planning.planner.machines import machine_named
from rowwise.planning.simulate.simulation import SimulatedModel
from rowwise.tables.row_optimizers import Sgd
from rowwise.tables.spec import Codecs, RowType, Table, Value, Wire, WireType

FOLDER = Path(__file__).parent / "published"
Width = Annotated[int, Meta(ge=1, le=MAX_DIM)]
Count = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
HALVES = Codecs(forward=WireType.FP16, backward=WireType.FP16)


class EqualTables(Value, frozen=True):
    """Tables of one shape."""

    count: Annotated[int, Meta(ge=1, le=1 << 16)]
    rows: int
    dim: int
    pooling: float


class LayerBlocks(Value, frozen=True):
    """Blocks of layers, by their inputs and outputs, that are applied to vectors of a sample."""

    count: Count
    vectors: Width
    layers: tuple[tuple[Width, Width], ...]


class PublishedModel(Value, frozen=True, kw_only=True):
    """A published model: its machine, tables, layers and rates."""

    machine: str
    batch: Annotated[int, Meta(ge=1, le=MAX_BATCH)]
    tables: EqualTables
    dense: str  # widths of both MLPs, as for --dense
    experts: Count = 1  # of each layer after the vectors
    active: Count = 1  # experts that a sample uses
    blocks: LayerBlocks | None = None  # between the vectors and the second MLP
    published: tuple[PublishedRate, ...] = ()

    def layers(self) -> DenseLayers:
        plain, blocks = parse_layers(self.dense), self.blocks
        inner = () if blocks is None else blocks.layers * blocks.count
        between = tuple(
            DenseLayer(f"block.{k}", m, n, rows=blocks.vectors if blocks else 1, parameters=m * n)
            for k, (m, n) in enumerate(inner)
        )
        numbers = {"experts": self.experts, "active": self.active}
        after = [structs.replace(x, parameters=self.experts * x.parameters, **numbers) for x in plain.after]
        return DenseLayers(plain.before, (*between, *after))

    def simulated(self, name: str, machine: Machine | None = None) -> SimulatedModel:
        """The model; on ranks or hardware that it was not described on, without its published rates."""
        own = machine_named(self.machine)
        alike = machine is None or (machine.topology, machine.hardware.name) == (own.topology, own.hardware.name)
        shape, layers = self.tables, self.layers()
        tables = [
            Table(name=f"t{k}", rows=shape.rows, dim=shape.dim, row_type=RowType.FP16, optimizer=Sgd())
            for k in range(shape.count)
        ]
        return SimulatedModel(
            name=name,
            workloads=tuple(Workload(table=table, access=Access(pooling=shape.pooling)) for table in tables),
            layers=layers,
            side=side_of_layers(layers, state_slots=0),
            batch=self.batch,
            wire=Wire(host=HALVES, network=HALVES),
            published=self.published if alike else (),
        )


def published_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_published(name: str) -> PublishedModel | None:
    """A published model by its name, or from a JSON file; None for other names."""
    known = name in published_names()
    if not known and not name.endswith(".json"):
        return None
    path = FOLDER / f"{name}.json" if known else Path(name)
    return parse_json(read_bytes(path), PublishedModel, f"{name}: a published model")

"""A plan request, and the same as flat arrays for the search in C, the bounds and the published methods.

[Note: Items and options] An *item* is a table, or several that have to stay together. It has *options*, each a
`PlacementKind`. An option consists of one or more *pieces*, and each piece goes to a *unit*: units 0 to W - 1 are
ranks, then come hosts, then one unit for all ranks. A piece adds the same loads, link seconds and bytes to each rank of
its unit. A placement is an option for each item and a unit for each piece of that option; tiles and costs follow.

Not supported: hosts whose devices differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.parallel.plan import TIERS, Plan, Tier, Tile
from rowwise.planning.perf.access import Floats, Workload
from rowwise.planning.perf.cost import CostModel, Phi
from rowwise.planning.perf.dense_parallel import DenseSide
from rowwise.planning.perf.hardware import Machine
from rowwise.planning.planner.constraints import UNCONSTRAINED, Constraints
from rowwise.planning.planner.kinds import PlacementKind, tiles_of
from rowwise.planning.planner.layouts import UNIT_KINDS
from rowwise.tables.spec import Topology

Index = NDArray[np.int32]
NO_UNIT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Tables with their access statistics, a machine, a cost model, and limits."""

    workloads: tuple[Workload, ...]
    machine: Machine
    model: CostModel
    batch: int  # samples of a step, of all ranks together
    constraints: Constraints = UNCONSTRAINED
    buffers: bool = True  # whether ids and vectors of a step count as memory
    tiers: frozenset[Tier] = frozenset({"device"})  # that rows may live in, and be cached in
    dense: DenseSide | None = None  # its memory and link time count; None leaves both out

    def __post_init__(self) -> None:
        if "device" not in self.tiers:
            raise SpecError(f"tiers {', '.join(sorted(self.tiers))}", "tiers that include device, where steps run")

    @property
    def limits_bytes(self) -> tuple[int, ...]:
        """Bytes of each tier that tables may take on each rank; 0 for tiers that they may not use."""
        sizes = zip(TIERS, self.machine.memory_bytes, strict=True)
        limits = [int(size * (1 - self.constraints.reserve)) if tier in self.tiers else 0 for tier, size in sizes]
        dense_bytes = 0 if self.dense is None else self.dense.memory_bytes(self.machine.topology, self.batch)
        return (max(limits[0] - dense_bytes, 0), *limits[1:])

    @property
    def dense_s(self) -> float:
        """Seconds of a step in which the dense side uses the link."""
        return 0.0 if self.dense is None else self.dense.seconds(self.machine.topology, self.machine.hardware)

    def on(self, topology: Topology) -> "PlanRequest":
        """The same request on another number of hosts and devices."""
        machine = structs.replace(self.machine, topology=topology)
        return replace(self, machine=machine, model=self.model.on(topology))

    @property
    def unused(self) -> tuple[Tier, ...]:
        """Tiers of the machine that tables may not use."""
        sizes = zip(TIERS, self.machine.memory_bytes, strict=True)
        return tuple(tier for tier, size in sizes if size and tier not in self.tiers)

    def lower_tiers(self) -> "Iterator[PlanRequest]":
        """This request with one more unused tier after the other, from the top down."""
        request = self
        for tier in self.unused:
            request = replace(request, tiers=request.tiers | {tier})
            yield request


class Pieces(NamedTuple):
    """Costs that pieces add to each rank of their units, as arrays over pieces."""

    load_NK: Floats  # see [Note: Cost]
    link_N: Floats  # seconds
    bytes_NM: Floats  # by tier

    def take(self, index_N: NDArray[np.int64]) -> "Pieces":
        return Pieces(*(array[index_N] for array in self))

    def sum_of(self, tables: int) -> "Pieces":
        """Sums of `tables` consecutive runs of equally many pieces, which go to the same units."""
        return Pieces(*(reduce(np.add, np.split(array, tables)) for array in self))

    @staticmethod
    def concatenate(parts: Sequence["Pieces"]) -> "Pieces":
        return Pieces(*map(np.concatenate, zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class Placement:
    """An option for each item, and a unit for each piece of that option."""

    choice_I: Index
    unit_N: Index  # NO_UNIT for pieces of options that were not taken


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """A plan request as arrays. See [Note: Items and options]."""

    request: PlanRequest
    kinds: tuple[PlacementKind, ...]
    members: tuple[tuple[int, ...], ...]  # indices of the tables of each item
    item_begin: Index  # offsets of items + 1 into options
    option_kind: Index
    option_begin: Index  # offsets of options + 1 into pieces
    pieces: Pieces
    rule_I: Index  # the row of `allowed_RU` for each item; -1 allows all units
    allowed_RU: NDArray[np.uint8]  # 1 where a unit is allowed

    @property
    def topology(self) -> Topology:
        return self.request.machine.topology

    @property
    def phi(self) -> Phi:
        return self.request.model.phi

    @property
    def units(self) -> int:
        return self.topology.world + self.topology.hosts + 1

    @property
    def limit_M(self) -> Floats:
        """Bytes of each tier that tables may take on each rank."""
        return np.array(self.request.limits_bytes, dtype=float)

    @property
    def unit_kind_O(self) -> NDArray[np.uint8]:
        """Index into `UNIT_KINDS` of the units that each option's pieces go to."""
        unit_kinds = np.array([UNIT_KINDS.index(kind.unit_kind) for kind in self.kinds], dtype=np.uint8)
        return unit_kinds[self.option_kind]

    @property
    def has_lower_tiers(self) -> bool:
        """Whether options have rows below device memory."""
        return any(self.kinds[number].tier != "device" for number in np.unique(self.option_kind))

    @property
    def item_of_O(self) -> Index:
        return np.repeat(np.arange(len(self.members), dtype=np.int32), np.diff(self.item_begin))

    @property
    def option_of_N(self) -> Index:
        return np.repeat(np.arange(len(self.option_kind), dtype=np.int32), np.diff(self.option_begin))

    @property
    def ranks_of_O(self) -> Floats:
        """Ranks that hold each piece of an option."""
        return np.array([kind.layout.unit_ranks(self.topology) for kind in self.kinds], float)[self.option_kind]

    def kind_of(self, option: int) -> PlacementKind:
        return self.kinds[self.option_kind[option]]

    def options_of(self, item: int) -> range:
        return range(int(self.item_begin[item]), int(self.item_begin[item + 1]))

    def pieces_of(self, option: int) -> range:
        return range(int(self.option_begin[option]), int(self.option_begin[option + 1]))

    def allowed_units(self, item: int) -> NDArray[np.bool_]:
        """Whether an item may be on each unit."""
        rule = int(self.rule_I[item])
        return np.ones(self.units, dtype=bool) if rule < 0 else self.allowed_RU[rule].astype(bool)

    def units_of(self, option: int) -> list[int]:
        """The units that pieces of an option may be on."""
        allowed_U = self.allowed_units(int(self.item_of_O[option]))
        return [unit for unit in self.kind_of(option).layout.units(self.topology) if allowed_U[unit]]

    def name_of(self, item: int) -> str:
        return " + ".join(self.request.workloads[t].table.name for t in self.members[item])

    def ranks_of(self, unit: int) -> range:
        topology = self.topology
        if unit < topology.world:
            return range(unit, unit + 1)
        if unit < topology.world + topology.hosts:
            return topology.ranks_of(unit - topology.world)
        return range(topology.world)

    def sums(self, placement: Placement) -> Pieces:
        """Loads, link seconds and bytes of each rank."""
        world = self.topology.world
        totals = Pieces(
            load_NK=np.zeros((world, self.phi.width)),
            link_N=np.zeros(world),
            bytes_NM=np.zeros((world, len(self.limit_M))),
        )
        for piece in np.flatnonzero(placement.unit_N != NO_UNIT):
            ranks = self.ranks_of(int(placement.unit_N[piece]))
            totals.load_NK[ranks.start : ranks.stop] += self.pieces.load_NK[piece]
            totals.link_N[ranks.start : ranks.stop] += self.pieces.link_N[piece]
            totals.bytes_NM[ranks.start : ranks.stop] += self.pieces.bytes_NM[piece]
        return totals

    def cost(self, placement: Placement) -> float:
        """Seconds of a step of the tables. See [Note: Cost]."""
        sums = self.sums(placement)
        return float(self.phi(sums.load_NK).max() + sums.link_N.max())

    def over_bytes(self, placement: Placement) -> Floats:
        """Bytes beyond the limits, by rank and tier."""
        return np.maximum(self.sums(placement).bytes_NM - self.limit_M, 0)

    def fits(self, placement: Placement) -> bool:
        return not self.over_bytes(placement).any()

    def plan(self, placement: Placement) -> Plan:
        tiles: list[Tile] = []
        for item, option in enumerate(placement.choice_I):
            units = [int(placement.unit_N[piece]) for piece in self.pieces_of(int(option))]
            for table in self.members[item]:
                tiles += tiles_of(self.kind_of(int(option)), self.request.workloads[table].table, units, self.topology)
        return Plan(world=self.topology.world, tiles=tuple(sorted(tiles)))


def argmin_options(problem: PlacementProblem, value_O: Floats) -> Index:
    """Each item's option with the least value; ties go to the first."""
    begin = problem.item_begin[:-1]
    min_I = np.minimum.reduceat(value_O, begin)
    taken_O = np.where(value_O <= min_I[problem.item_of_O], np.arange(len(value_O)), len(value_O))
    return np.minimum.reduceat(taken_O, begin).astype(np.int32)

"""A question to the planner, and the same as flat arrays: what the search in C, the bounds and the baselines work on.

[Note: pieces] An *item* is a table, or several that stay together. It has *options*, each a `PlacementKind`; an option
is one or more *pieces*, and each piece goes to a *unit*: ranks 0 to W - 1, then hosts, then all ranks as one. A piece
adds the same loads, link seconds and bytes to each rank of its unit. A placement is an option for each item and a unit
for each of that option's pieces; all else is derived.

Known limits: hosts whose devices differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import SpecError
from rowwise.perf.access import Floats, Workload
from rowwise.perf.cost import CostModel, Phi
from rowwise.perf.hardware import Machine
from rowwise.plan import TIERS, Plan, Tier, Tile
from rowwise.planner.constraints import NOTHING, Constraints
from rowwise.planner.kinds import PlacementKind, tiles_of
from rowwise.planner.layouts import SPANS
from rowwise.spec import Topology

Index = NDArray[np.int32]
NO_UNIT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Tables, machine, cost model, batch and constraints of a plan."""

    workloads: tuple[Workload, ...]
    machine: Machine
    model: CostModel
    batch: int  # samples of a step, of all ranks together
    constraints: Constraints = NOTHING
    buffers: bool = True  # whether ids and vectors of a step count as memory
    tiers: frozenset[Tier] = frozenset({"device"})  # that rows may live in, and be cached in

    def __post_init__(self) -> None:
        """Refuse what has no room for a step."""
        if "device" not in self.tiers:
            raise SpecError(f"tiers {', '.join(sorted(self.tiers))}: want device among them, where steps run")

    @property
    def limits_bytes(self) -> tuple[int, ...]:
        """What tables may take of each tier, on each rank; nothing of tiers that they may not use."""
        sizes = zip(TIERS, self.machine.memory_bytes, strict=True)
        return tuple(int(size * (1 - self.constraints.reserve)) if tier in self.tiers else 0 for tier, size in sizes)

    @property
    def unused(self) -> tuple[Tier, ...]:
        """Tiers that the machine has and tables may not use."""
        sizes = zip(TIERS, self.machine.memory_bytes, strict=True)
        return tuple(tier for tier, size in sizes if size and tier not in self.tiers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Loads, link seconds and bytes of all pieces, as arrays."""

    load_NK: Floats
    link_N: Floats
    bytes_NM: Floats

    def take(self, index_N: NDArray[np.int64]) -> "Pieces":
        return Pieces(load_NK=self.load_NK[index_N], link_N=self.link_N[index_N], bytes_NM=self.bytes_NM[index_N])

    def __add__(self, other: "Pieces") -> "Pieces":
        """Pieces that lie on the same units."""
        return Pieces(
            load_NK=self.load_NK + other.load_NK,
            link_N=self.link_N + other.link_N,
            bytes_NM=self.bytes_NM + other.bytes_NM,
        )

    @staticmethod
    def concatenate(parts: Sequence["Pieces"]) -> "Pieces":
        return Pieces(
            load_NK=np.concatenate([part.load_NK for part in parts]),
            link_N=np.concatenate([part.link_N for part in parts]),
            bytes_NM=np.concatenate([part.bytes_NM for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """An answer: an option for each item, a unit for each of its pieces."""

    choice_I: Index
    unit_N: Index  # NO_UNIT for pieces of options that were not taken


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """A question as arrays. See [Note: pieces]."""

    question: PlanRequest
    kinds: tuple[PlacementKind, ...]
    members: tuple[tuple[int, ...], ...]  # of each item: indices of tables
    item_begin: Index  # items + 1, into options
    option_kind: Index
    option_begin: Index  # options + 1, into pieces
    pieces: Pieces
    rule_I: Index  # of each item: a row of `allowed_RU`, or -1
    allowed_RU: NDArray[np.uint8]

    @property
    def topology(self) -> Topology:
        return self.question.machine.topology

    @property
    def phi(self) -> Phi:
        return self.question.model.phi

    @property
    def units(self) -> int:
        """Ranks, hosts, and all."""
        return self.topology.world + self.topology.hosts + 1

    @property
    def limit_M(self) -> Floats:
        """Bytes of each tier, on each rank."""
        return np.array(self.question.limits_bytes, dtype=float)

    @property
    def span_O(self) -> NDArray[np.uint8]:
        """What pieces of each option go to."""
        spans = np.array([SPANS.index(kind.span) for kind in self.kinds], dtype=np.uint8)
        return spans[self.option_kind]

    @property
    def item_of_O(self) -> Index:
        """The item of each option."""
        return np.repeat(np.arange(len(self.members), dtype=np.int32), np.diff(self.item_begin))

    @property
    def option_of_N(self) -> Index:
        """The option of each piece."""
        return np.repeat(np.arange(len(self.option_kind), dtype=np.int32), np.diff(self.option_begin))

    @property
    def ranks_of_O(self) -> Floats:
        """On how many ranks each piece of an option lies."""
        sizes = np.array([1, self.topology.devices, self.topology.world], dtype=float)
        return sizes[self.span_O]

    def kind_of(self, option: int) -> PlacementKind:
        """How an option cuts tables."""
        return self.kinds[self.option_kind[option]]

    def pieces_of(self, option: int) -> range:
        """The pieces of an option."""
        return range(int(self.option_begin[option]), int(self.option_begin[option + 1]))

    def name_of(self, item: int) -> str:
        return " + ".join(self.question.workloads[t].table.name for t in self.members[item])

    def ranks_of(self, unit: int) -> range:
        """The ranks of a unit."""
        topology = self.topology
        if unit < topology.world:
            return range(unit, unit + 1)
        if unit < topology.world + topology.hosts:
            return topology.ranks_of(unit - topology.world)
        return range(topology.world)

    def sums(self, placement: Placement) -> Pieces:
        """What each rank has, all of it together."""
        world = self.topology.world
        made = Pieces(
            load_NK=np.zeros((world, self.phi.width)),
            link_N=np.zeros(world),
            bytes_NM=np.zeros((world, len(self.limit_M))),
        )
        for piece in np.flatnonzero(placement.unit_N != NO_UNIT):
            ranks = self.ranks_of(int(placement.unit_N[piece]))
            made.load_NK[ranks.start : ranks.stop] += self.pieces.load_NK[piece]
            made.link_N[ranks.start : ranks.stop] += self.pieces.link_N[piece]
            made.bytes_NM[ranks.start : ranks.stop] += self.pieces.bytes_NM[piece]
        return made

    def cost(self, placement: Placement) -> float:
        """Seconds of a step's tables. See [Note: cost]."""
        sums = self.sums(placement)
        return float(self.phi(sums.load_NK).max() + sums.link_N.max())

    def over_bytes(self, placement: Placement) -> Floats:
        """By rank and tier, what is beyond the limits."""
        return np.maximum(self.sums(placement).bytes_NM - self.limit_M, 0)

    def fits(self, placement: Placement) -> bool:
        """Whether memory is enough."""
        return not self.over_bytes(placement).any()

    def plan(self, placement: Placement) -> Plan:
        """The placement as tiles."""
        tiles: list[Tile] = []
        for item, option in enumerate(placement.choice_I):
            units = [int(placement.unit_N[piece]) for piece in self.pieces_of(int(option))]
            for table in self.members[item]:
                tiles += tiles_of(self.kind_of(int(option)), self.question.workloads[table].table, units, self.topology)
        return Plan(world=self.topology.world, tiles=tuple(sorted(tiles)))


def least_options(problem: PlacementProblem, value_O: Floats) -> Index:
    """The option of each item that has the least of a value; the first of equals."""
    begin = problem.item_begin[:-1]
    least_I = np.minimum.reduceat(value_O, begin)
    taken_O = np.where(value_O <= least_I[problem.item_of_O], np.arange(len(value_O)), len(value_O))
    return np.minimum.reduceat(taken_O, begin).astype(np.int32)

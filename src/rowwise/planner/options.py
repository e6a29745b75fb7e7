"""Every way to place every table, with what it costs and takes: a `PlanRequest` becomes a `PlacementProblem`.

All tables of one kind are computed at once.

Splits that cannot matter are left out: once every piece of a table is under a twentieth of what a rank must bear in
any plan (and of a rank's memory), it is not cut further. Bounds stay valid, as a finer cut never takes less work in
all. Known limits: tables whose pieces are cut unevenly, or differently row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import SpecError
from rowwise.perf.access import Curves, Floats
from rowwise.perf.cost import Ints, Shards
from rowwise.perf.memory import FLOAT_bytes, memory_bytes
from rowwise.plan import TIERS, Tier, column_block
from rowwise.planner.kinds import PlacementKind, kinds_for
from rowwise.planner.problem import Index, Pieces, PlacementProblem, PlanRequest
from rowwise.spec import Pooling, Table, check_names, state_slots

SMALL = 0.05  # of a rank's share
ROOMY = 0.9  # full to this share, lower tiers of memory are considered


@dataclass(frozen=True, slots=True)
class TableArrays:
    """Sizes of tables, as arrays over tables."""

    rows_T: Floats
    dim_T: Floats
    block_T: Ints
    blocks_T: Ints
    column_bytes_T: Floats  # of a column of a row
    wide_state_T: Floats  # floats of optimizer state for each weight
    row_state_T: Floats  # for each row
    bags_T: Floats

    @classmethod
    def of(cls, question: PlanRequest) -> "TableArrays":
        tables = [w.table for w in question.workloads]
        pooling = [w.access.pooling for w in question.workloads]
        dim_T, block_T = np.array([t.dim for t in tables]), np.array([column_block(t) for t in tables])
        wide = [sum(slot.width == t.dim for slot in state_slots(t).values()) for t in tables]
        return cls(
            rows_T=np.array([t.rows for t in tables], dtype=float),
            dim_T=dim_T.astype(float),
            block_T=block_T,
            blocks_T=-(-dim_T // block_T),
            column_bytes_T=np.array([t.row_bytes / t.dim for t in tables]),
            wide_state_T=np.array(wide, dtype=float),
            row_state_T=np.array([len(state_slots(t)) - w for t, w in zip(tables, wide, strict=True)], dtype=float),
            bags_T=np.array([_bags(t, n) for t, n in zip(tables, pooling, strict=True)]),
        )

    def shards(self, kind: PlacementKind, index_T: Ints, question: PlanRequest) -> Shards:
        """The pieces of some tables, each table's one after another."""
        topology, n = question.machine.topology, kind.column_parts
        table_N = np.repeat(index_T, kind.parts)
        piece_N = np.tile(np.arange(kind.parts) % n, len(index_T))
        begin_N, end_N = (self.blocks_T[table_N] * (piece_N + i) // n * self.block_T[table_N] for i in (0, 1))
        dim_N = (np.minimum(end_N, self.dim_T[table_N]) - begin_N).astype(float)
        row_parts = kind.row_parts(topology)
        return Shards(
            exchange=kind.layout.exchange,
            table_N=table_N,
            row_parts=row_parts,
            rows_N=np.ceil(self.rows_T[table_N] / row_parts),
            dim_N=dim_N,
            bags_N=self.bags_T[table_N],
            row_bytes_N=self.column_bytes_T[table_N] * dim_N,
            state_bytes_N=FLOAT_bytes * (self.wide_state_T[table_N] * dim_N + self.row_state_T[table_N]),
            share=1 / topology.world if kind.layout.is_copied else 1.0,
            tier=kind.tier,
            cached=kind.cached,
        )


def _bags(table: Table, pooling: float) -> float:
    return pooling if table.pooling is Pooling.SEQUENCE else float(len(table.feature_names))


@dataclass(frozen=True, slots=True)
class KindOptions:
    """The options of one kind: of which tables, and their pieces."""

    kind: int
    table_O: Ints
    pieces: Pieces


def make_problem(question: PlanRequest) -> PlacementProblem:
    """All options of all tables; raises where constraints leave a table none."""
    names = [w.table.name for w in question.workloads]
    check_names([w.table for w in question.workloads])
    question.constraints.check(names, question.machine.topology)
    columns = TableArrays.of(question)
    tiers = _tiers(question, columns)
    kinds = [
        kind for kind in kinds_for(question.machine, int(columns.blocks_T.max()), tiers) if kind.tiers <= question.tiers
    ]
    made = _made(question, columns, kinds)
    return _assembled(question, kinds, made)


def _tiers(question: PlanRequest, columns: TableArrays) -> Sequence[Tier]:
    width = columns.column_bytes_T + FLOAT_bytes * columns.wide_state_T
    size_T = columns.rows_T * (width * columns.dim_T + FLOAT_bytes * columns.row_state_T)
    total, largest = float(size_T.sum()), float(size_T.max())
    wanted: list[Tier] = ["device"]
    room = 0.0
    for tier, limit, below in zip(TIERS[1:], question.limits_bytes, question.limits_bytes[1:], strict=False):
        room += limit * question.machine.topology.world * ROOMY
        if below and (total > room or largest > limit):
            wanted.append(tier)
    return wanted


def _made(question: PlanRequest, columns: TableArrays, kinds: Sequence[PlacementKind]) -> list[KindOptions]:
    curves = Curves.of(question.workloads, question.batch)
    phi, limit_M = question.model.phi, np.maximum(np.array(question.limits_bytes, dtype=float), 1)
    legal = _Legal.of(question)
    worth_T = np.ones(len(question.workloads), dtype=bool)
    share: tuple[float, float] | None = None
    made: list[KindOptions] = []
    for number, kind in enumerate(kinds):
        ok_T = legal.of_kind(kind) & _has_enough(columns, kind, question)
        cut = kind.parts > 1
        index_T = np.flatnonzero(ok_T & worth_T if cut and kind.tier == "device" else ok_T)
        if not len(index_T):
            continue
        shards = columns.shards(kind, index_T, question)
        pieces = Pieces(
            load_NK=question.model.loads(shards, curves),
            link_N=question.model.links_s(shards, curves),
            bytes_NM=memory_bytes(shards, curves, question.buffers),
        )
        made.append(KindOptions(number, index_T, pieces))
        if kind.span == "rank" and kind.tier == "device":
            world = question.machine.topology.world
            if share is None:  # of whole tables, the first kind
                share = _least_share(phi.constant, phi(pieces.load_NK.sum(0) / world), pieces.link_N.sum() / world)
            big_N = (phi(pieces.load_NK) - phi.constant > SMALL * share[0]) | (pieces.link_N > SMALL * share[1])
            big_N |= (pieces.bytes_NM > SMALL * limit_M).any(1)
            worth_T[index_T] &= big_N.reshape(len(index_T), kind.parts).any(1)
    return made


def _least_share(constant: float, phi: Floats, link: float) -> tuple[float, float]:
    return float(phi) - constant, link


@dataclass(frozen=True, slots=True)
class _Legal:
    """The layouts that each table may have."""

    layouts_T: list[frozenset[str]]
    everywhere_T: NDArray[np.bool_]
    host_T: NDArray[np.bool_]

    @classmethod
    def of(cls, question: PlanRequest) -> "_Legal":
        constraints, topology = question.constraints, question.machine.topology
        names = [w.table.name for w in question.workloads]
        ranks = [constraints.ranks_of(name, topology) for name in names]
        hosts = [any(found.issuperset(topology.ranks_of(h)) for h in range(topology.hosts)) for found in ranks]
        return cls(
            [frozenset(constraints.layouts_of(name)) for name in names],
            np.array([len(found) == topology.world for found in ranks]),
            np.array(hosts),
        )

    def of_kind(self, kind: PlacementKind) -> NDArray[np.bool_]:
        named_T = np.array([kind.layout.name in layouts for layouts in self.layouts_T])
        if kind.span == "all":
            return named_T & self.everywhere_T
        return named_T & self.host_T if kind.span == "host" else named_T


def _has_enough(columns: TableArrays, kind: PlacementKind, question: PlanRequest) -> NDArray[np.bool_]:
    """Whether there are rows and columns to cut."""
    return (columns.blocks_T >= kind.column_parts) & (columns.rows_T >= kind.row_parts(question.machine.topology))


@dataclass(frozen=True, slots=True)
class _Options:
    """Options one after another, with their pieces in the same order."""

    item_O: Ints
    kind_O: Ints
    pieces: Pieces


def _assembled(question: PlanRequest, kinds: Sequence[PlacementKind], made: Sequence[KindOptions]) -> PlacementProblem:
    """The options of each item side by side."""
    placed = set(np.concatenate([m.table_O for m in made]).tolist()) if made else set()
    for table in range(len(question.workloads)):
        if table not in placed:
            raise _no_option(question, (table,))
    members, alone = _items(question)
    found = [_of_tables(kinds, made, members[:alone])]
    found += [_of_group(kinds, made, item, members[item]) for item in range(alone, len(members))]
    item_O, kind_O = (np.concatenate([getattr(one, name) for one in found]) for name in ("item_O", "kind_O"))
    count_I = np.bincount(item_O, minlength=len(members))
    for item in np.flatnonzero(count_I == 0):
        raise _no_option(question, members[item])
    rule_I, allowed_RU = _rules(question, members)
    return PlacementProblem(
        question=question,
        kinds=tuple(kinds),
        members=members,
        item_begin=_begins(count_I),
        option_kind=kind_O.astype(np.int32),
        option_begin=_begins(np.array([kind.parts for kind in kinds])[kind_O]),
        pieces=Pieces.concatenate([one.pieces for one in found]),
        rule_I=rule_I,
        allowed_RU=allowed_RU,
    )


def _items(question: PlanRequest) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The tables of each item, those that are alone first; and how many these are."""
    names = {w.table.name: index for index, w in enumerate(question.workloads)}
    groups = [tuple(names[name] for name in group) for group in question.constraints.together if len(group) > 1]
    grouped = {table for group in groups for table in group}
    alone = [(table,) for table in range(len(names)) if table not in grouped]
    return (*alone, *groups), len(alone)


def _of_tables(
    kinds: Sequence[PlacementKind], made: Sequence[KindOptions], members: Sequence[tuple[int, ...]]
) -> _Options:
    """Of items that are one table each: numbered as made by kind and then by table, wanted the other way round."""
    kind_O = np.concatenate([np.full(len(m.table_O), m.kind) for m in made])
    table_O = np.concatenate([m.table_O for m in made])
    parts_O = np.array([kind.parts for kind in kinds])[kind_O]
    begin_O = np.cumsum(parts_O) - parts_O
    item_T = np.full(int(table_O.max()) + 1, -1)
    for item, (table,) in enumerate(members):
        item_T[table] = item
    order = np.flatnonzero(item_T[table_O] >= 0)
    order = order[np.lexsort((kind_O[order], item_T[table_O[order]]))]
    pieces = Pieces.concatenate([m.pieces for m in made]).take(_ranges(begin_O[order], parts_O[order]))
    return _Options(item_T[table_O[order]], kind_O[order], pieces)


def _of_group(
    kinds: Sequence[PlacementKind], made: Sequence[KindOptions], item: int, group: tuple[int, ...]
) -> _Options:
    """Of tables that stay together: the kinds that all of them have, with the sums of their pieces."""
    parts = [made[0].pieces.take(np.zeros(0, dtype=np.int64))]
    found: list[int] = []
    for one in made:
        at = {int(table): number for number, table in enumerate(one.table_O)}
        if all(table in at for table in group):
            n = kinds[one.kind].parts
            whole = [one.pieces.take(np.arange(at[table] * n, (at[table] + 1) * n)) for table in group]
            parts.append(sum(whole[1:], whole[0]))
            found.append(one.kind)
    return _Options(np.full(len(found), item), np.array(found, dtype=np.int64), Pieces.concatenate(parts))


def _no_option(question: PlanRequest, group: tuple[int, ...]) -> SpecError:
    tables = [question.workloads[t].table for t in group]
    sized = " and ".join(f"{t.name!r} ({t.rows} x {t.dim})" for t in tables)
    layouts = sorted({layout for t in tables for layout in question.constraints.layouts_of(t.name)})
    topology = question.machine.topology
    return SpecError(
        f"table {sized}: no way to place it on {topology.hosts} hosts of {topology.devices} devices with the layouts"
        f" {', '.join(layouts)} and the ranks that it may be on: want another layout, or fewer limits"
    )


def _rules(question: PlanRequest, members: Sequence[tuple[int, ...]]) -> tuple[Index, NDArray[np.uint8]]:
    """For items that may not be everywhere: the units that they may be on."""
    topology, constraints = question.machine.topology, question.constraints
    rule_I = np.full(len(members), -1, dtype=np.int32)
    rows: list[list[int]] = []
    limited = constraints.pin.keys() | constraints.forbid.keys()
    for item, group in enumerate(members):
        names = [question.workloads[t].table.name for t in group]
        if limited.isdisjoint(names):
            continue
        ranks = frozenset.intersection(*(constraints.ranks_of(name, topology) for name in names))
        hosts = [int(ranks.issuperset(topology.ranks_of(h))) for h in range(topology.hosts)]
        rule_I[item] = len(rows)
        rows.append([*(int(r in ranks) for r in range(topology.world)), *hosts, int(len(ranks) == topology.world)])
    width = topology.world + topology.hosts + 1
    return rule_I, np.array(rows, dtype=np.uint8).reshape(len(rows), width)


def _begins(count: Ints) -> Index:
    return np.concatenate([[0], np.cumsum(count)]).astype(np.int32)


def _ranges(begin: Ints, length: Ints) -> Ints:
    """Of each: begin, begin + 1, ... as one array."""
    ends = np.cumsum(length)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - length - begin, length)

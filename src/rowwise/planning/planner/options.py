"""Turns a `PlanRequest` into a `PlacementProblem`: every way to place every table, with costs and bytes.

All tables of one kind are computed at once. Cuts that cannot matter are left out: once every piece of a table is under
a twentieth of a rank's least load in any plan (and of its memory), the table is not cut further. Rows below the device
have a rule of their own, for each share of them that is cached. Bounds stay valid, as a finer cut never takes less work
in sum. Not supported: uneven cuts, and cuts that differ from row to row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rowwise.base.errors import SpecError
from rowwise.parallel.plan import TIERS, Tier, column_block
from rowwise.planning.perf.access import Curves, Floats
from rowwise.planning.perf.cost import Ints, Shards
from rowwise.planning.perf.memory import FLOAT_bytes, memory_bytes
from rowwise.planning.planner.kinds import CACHED, PlacementKind, candidate_kinds
from rowwise.planning.planner.problem import Index, Pieces, PlacementProblem, PlanRequest
from rowwise.tables.spec import Table, check_names, state_bytes, state_slots
from rowwise.tables.store.sizes import MIN_OVERFLOW

SMALL_SHARE = 0.05  # of a rank's even share of all work; smaller pieces are not cut further
FULL_SHARE = 0.9  # of memory; lower tiers are options where tables would fill more


@dataclass(frozen=True, slots=True)
class TableArrays:
    """Facts of tables that cutting needs, as arrays."""

    rows_T: Floats
    row_units_T: Floats  # runs of rows that are never cut
    dim_T: Floats
    block_T: Ints
    blocks_T: Ints
    column_bytes_T: Floats  # of one column in one row
    wide_state_T: Floats  # floats of optimizer state per weight
    row_state_T: Floats  # floats of optimizer state per row
    bags_T: Floats  # vectors per sample

    @classmethod
    def of(cls, request: PlanRequest) -> "TableArrays":
        tables = [w.table for w in request.workloads]
        dim_T, block_T = np.array([t.dim for t in tables]), np.array([column_block(t) for t in tables])
        wide = [sum(slot.width == t.dim for slot in state_slots(t).values()) for t in tables]
        return cls(
            rows_T=np.array([t.rows for t in tables], dtype=float),
            row_units_T=np.array([t.rows // t.row_multiple for t in tables], dtype=float),
            dim_T=dim_T.astype(float),
            block_T=block_T,
            blocks_T=-(-dim_T // block_T),
            column_bytes_T=np.array([t.row_bytes / t.dim for t in tables]),
            wide_state_T=np.array(wide, dtype=float),
            row_state_T=np.array([_row_floats(t, w) for t, w in zip(tables, wide, strict=True)]),
            bags_T=np.array([w.vectors for w in request.workloads], dtype=float),
        )

    def shards(self, kind: PlacementKind, index_T: Ints, request: PlanRequest) -> Shards:
        """The pieces of these tables cut by a kind, each table's pieces one after another."""
        topology, n = request.machine.topology, kind.column_parts
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
            share=1 / topology.world if kind.layout.is_replicated else 1.0,
            tier=kind.tier,
            cached=kind.cached,
            cache_tier=kind.cache_tier,
        )


def _row_floats(table: Table, wide: int) -> float:
    """Floats of state per row, without the `wide` slots of a float per weight."""
    return (state_bytes(table) - FLOAT_bytes * wide * table.dim) / FLOAT_bytes


@dataclass(frozen=True, slots=True)
class KindOptions:
    """The options of one kind: their tables, and their pieces in the same order."""

    kind: int
    table_O: Ints
    pieces: Pieces


def make_problem(request: PlanRequest, cached: Sequence[float] = CACHED) -> PlacementProblem:
    """All options of all tables, with these shares of rows cached above lower tiers.

    Raises `SpecError` where constraints leave a table none.
    """
    names = [w.table.name for w in request.workloads]
    check_names([w.table for w in request.workloads])
    request.constraints.check(names, request.machine.topology)
    columns = TableArrays.of(request)
    tiers = _needed_tiers(request, columns)
    kinds = [
        kind
        for kind in candidate_kinds(request.machine, int(columns.blocks_T.max()), tiers, cached)
        if kind.tiers <= request.tiers
    ]
    units_TU = _units_of_tables(request)
    return _assemble_problem(request, kinds, _options_by_kind(request, columns, kinds, units_TU), units_TU)


def price_pieces(
    request: PlanRequest, columns: TableArrays, curves: Curves, kind: PlacementKind, index_T: Ints
) -> Pieces:
    """Loads, link seconds and bytes of the pieces of these tables, cut by a kind."""
    shards = columns.shards(kind, index_T, request)
    # Pieces of a table differ in their width alone, so a run of equally wide ones is priced once.
    is_new_N = np.ones(len(shards.table_N), dtype=bool)
    is_new_N[1:] = (np.diff(shards.table_N) != 0) | (np.diff(shards.dim_N) != 0)
    arrays = ("table_N", "rows_N", "dim_N", "bags_N", "row_bytes_N", "state_bytes_N")
    runs = replace(shards, **{name: getattr(shards, name)[is_new_N] for name in arrays})
    pieces = Pieces(
        load_NK=request.model.loads(runs, curves),
        link_N=request.model.links_s(runs, curves),
        bytes_NM=memory_bytes(runs, curves, request.buffers),
    )
    return pieces.take(np.cumsum(is_new_N) - 1)


def _needed_tiers(request: PlanRequest, columns: TableArrays) -> Sequence[Tier]:
    """Device memory, and each lower tier if the tiers above are nearly full or smaller than one table."""
    width = columns.column_bytes_T + FLOAT_bytes * columns.wide_state_T
    size_T = columns.rows_T * (width * columns.dim_T + FLOAT_bytes * columns.row_state_T)
    total, largest = float(size_T.sum()), float(size_T.max())
    needed: list[Tier] = ["device"]
    capacity = 0.0
    for tier, limit, below in zip(TIERS[1:], request.limits_bytes, request.limits_bytes[1:], strict=False):
        capacity += limit * request.machine.topology.world * FULL_SHARE
        if below and (total > capacity or largest > limit):
            needed.append(tier)
    return needed


def _units_of_tables(request: PlanRequest) -> NDArray[np.bool_]:
    """Whether constraints allow each table all ranks of each unit."""
    constraints, topology = request.constraints, request.machine.topology
    ranks_TW = np.ones((len(request.workloads), topology.world), dtype=bool)
    for workload, ranks_W in zip(request.workloads, ranks_TW, strict=True):
        name = workload.table.name
        if name in constraints.pin or name in constraints.forbid:
            ranks_W[:] = np.isin(np.arange(topology.world), list(constraints.ranks_of(name, topology)))
    hosts_TH = ranks_TW.reshape(-1, topology.hosts, topology.devices).all(2)
    return np.concatenate([ranks_TW, hosts_TH, ranks_TW.all(1, keepdims=True)], axis=1)


def _options_by_kind(
    request: PlanRequest, columns: TableArrays, kinds: Sequence[PlacementKind], units_TU: NDArray[np.bool_]
) -> list[KindOptions]:
    curves = Curves.of(request.workloads, request.batch)
    phi, limit_M = request.model.phi, np.maximum(np.array(request.limits_bytes, dtype=float), 1)
    layouts_T = [frozenset(request.constraints.layouts_of(w.table.name)) for w in request.workloads]
    managed_T = np.array([w.table.managed is not None for w in request.workloads])
    worth_cutting: dict[tuple[str, Tier, float, Tier], NDArray[np.bool_]] = {}
    share: tuple[float, float] | None = None
    by_kind: list[KindOptions] = []
    for number, kind in enumerate(kinds):
        units = kind.layout.units(request.machine.topology)
        allowed_T = units_TU[:, units.start : units.stop].any(1)
        allowed_T &= np.array([kind.layout.name in layouts for layouts in layouts_T])
        allowed_T &= _can_cut(columns, kind, request) & _can_cache(columns, kind, curves)
        if not kind.layout.keeps_rows or kind.tier == "disk":
            allowed_T &= ~managed_T
        # On the device, cuts of columns over ranks decide for all layouts.
        rule = ("" if kind.tier == "device" else kind.layout.name, kind.tier, kind.cached, kind.cache_tier)
        worth_cutting_T = worth_cutting.setdefault(rule, np.ones(len(layouts_T), dtype=bool))
        index_T = np.flatnonzero(allowed_T & worth_cutting_T if kind.parts > 1 else allowed_T)
        if not len(index_T):
            continue
        pieces = price_pieces(request, columns, curves, kind, index_T)
        by_kind.append(KindOptions(number, index_T, pieces))
        world = request.machine.topology.world
        if share is None and kind.unit_kind == "rank" and kind.tier == "device":
            # The first kind is whole tables: their mean over ranks bounds the busiest rank of any plan from below.
            mean_s = float(phi(pieces.load_NK.sum(0) / world)) - phi.constant
            share = mean_s, pieces.link_N.sum() / world
        if share is not None and (kind.unit_kind == "rank" or kind.tier != "device"):
            big_N = phi(pieces.load_NK) - phi.constant > SMALL_SHARE * share[0]
            big_N |= pieces.link_N > SMALL_SHARE * share[1]
            big_N |= (pieces.bytes_NM > SMALL_SHARE * limit_M).any(1)
            # Finer cuts of tables whose pieces are all small cannot matter: see the head.
            worth_cutting_T[index_T] &= big_N.reshape(len(index_T), kind.parts).any(1)
    return by_kind


def _can_cut(columns: TableArrays, kind: PlacementKind, request: PlanRequest) -> NDArray[np.bool_]:
    """Whether each table has enough rows and column blocks for a kind."""
    return (columns.blocks_T >= kind.column_parts) & (columns.row_units_T >= kind.row_parts(request.machine.topology))


def _can_cache(columns: TableArrays, kind: PlacementKind, curves: Curves) -> NDArray[np.bool_]:
    """Whether the cache of a table on disk holds the rows of a step, which stay in it until they are updated."""
    if kind.tier != "disk":
        return np.ones(len(columns.rows_T), dtype=bool)
    return curves.unique_T <= np.maximum(kind.cached * columns.rows_T, MIN_OVERFLOW)


@dataclass(frozen=True, slots=True)
class _Options:
    """Options one after another, with their pieces in the same order."""

    item_O: Ints
    kind_O: Ints
    pieces: Pieces


def _assemble_problem(
    request: PlanRequest,
    kinds: Sequence[PlacementKind],
    by_kind: Sequence[KindOptions],
    units_TU: NDArray[np.bool_],
) -> PlacementProblem:
    """Sorts options by item."""
    placed = set(np.concatenate([m.table_O for m in by_kind]).tolist()) if by_kind else set()
    for table in range(len(request.workloads)):
        if table not in placed:
            raise _no_option_error(request, (table,))
    members, singles = _group_items(request)
    blocks = [_options_of_tables(kinds, by_kind, members[:singles])]
    blocks += [_options_of_group(kinds, by_kind, item, members[item]) for item in range(singles, len(members))]
    item_O, kind_O = (np.concatenate([getattr(block, name) for block in blocks]) for name in ("item_O", "kind_O"))
    count_I = np.bincount(item_O, minlength=len(members))
    for item in np.flatnonzero(count_I == 0):
        raise _no_option_error(request, members[item])
    rule_I, allowed_RU = _unit_rules(request, members, units_TU)
    return PlacementProblem(
        request=request,
        kinds=tuple(kinds),
        members=members,
        item_begin=_offsets(count_I),
        option_kind=kind_O.astype(np.int32),
        option_begin=_offsets(np.array([kind.parts for kind in kinds])[kind_O]),
        pieces=Pieces.concatenate([block.pieces for block in blocks]),
        rule_I=rule_I,
        allowed_RU=allowed_RU,
    )


def _group_items(request: PlanRequest) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The tables of each item, single tables first; and the number of single tables."""
    names = {w.table.name: index for index, w in enumerate(request.workloads)}
    groups = [tuple(names[name] for name in group) for group in request.constraints.together if len(group) > 1]
    grouped = {table for group in groups for table in group}
    singles = [(table,) for table in range(len(names)) if table not in grouped]
    return (*singles, *groups), len(singles)


def _options_of_tables(
    kinds: Sequence[PlacementKind], by_kind: Sequence[KindOptions], members: Sequence[tuple[int, ...]]
) -> _Options:
    """Options of items with one table, sorted by kind and table in `by_kind`, by item and kind in the result."""
    kind_O = np.concatenate([np.full(len(m.table_O), m.kind) for m in by_kind])
    table_O = np.concatenate([m.table_O for m in by_kind])
    parts_O = np.array([kind.parts for kind in kinds])[kind_O]
    begin_O = np.cumsum(parts_O) - parts_O
    item_T = np.full(int(table_O.max()) + 1, -1)
    for item, (table,) in enumerate(members):
        item_T[table] = item
    order = np.flatnonzero(item_T[table_O] >= 0)
    order = order[np.lexsort((kind_O[order], item_T[table_O[order]]))]
    pieces = Pieces.concatenate([m.pieces for m in by_kind]).take(_concatenate_ranges(begin_O[order], parts_O[order]))
    return _Options(item_T[table_O[order]], kind_O[order], pieces)


def _options_of_group(
    kinds: Sequence[PlacementKind], by_kind: Sequence[KindOptions], item: int, group: tuple[int, ...]
) -> _Options:
    """Options of a group: the kinds common to all of its tables, with their pieces added up."""
    parts = [by_kind[0].pieces.take(np.zeros(0, dtype=np.int64))]
    kind_numbers: list[int] = []
    for options in by_kind:
        index_of = {int(table): number for number, table in enumerate(options.table_O)}
        if all(table in index_of for table in group):
            n = kinds[options.kind].parts
            pieces = np.concatenate([np.arange(index_of[table] * n, (index_of[table] + 1) * n) for table in group])
            parts.append(options.pieces.take(pieces).sum_of(len(group)))
            kind_numbers.append(options.kind)
    return _Options(np.full(len(kind_numbers), item), np.array(kind_numbers, dtype=np.int64), Pieces.concatenate(parts))


def _no_option_error(request: PlanRequest, group: tuple[int, ...]) -> SpecError:
    tables = [request.workloads[t].table for t in group]
    sized = " and ".join(f"{t.name!r} ({t.rows} x {t.dim})" for t in tables)
    layouts = sorted({layout for t in tables for layout in request.constraints.layouts_of(t.name)})
    topology = request.machine.topology
    managed = "; a managed table has whole rows in memory, once" if any(t.managed for t in tables) else ""
    return SpecError(
        f"table {sized}: no placement on {topology.hosts} hosts of {topology.devices} devices with layouts "
        f"{', '.join(layouts)} and the ranks allowed{managed}",
        hint="allow another layout, or use fewer constraints",
    )


def _unit_rules(
    request: PlanRequest, members: Sequence[tuple[int, ...]], units_TU: NDArray[np.bool_]
) -> tuple[Index, NDArray[np.uint8]]:
    """A row of allowed units for each item with constraints on its ranks."""
    limited = request.constraints.pin.keys() | request.constraints.forbid.keys()
    names = [w.table.name for w in request.workloads]
    ruled = [item for item, group in enumerate(members) if not limited.isdisjoint(names[t] for t in group)]
    rule_I = np.full(len(members), -1, dtype=np.int32)
    rule_I[ruled] = np.arange(len(ruled))
    rows = [units_TU[list(members[item])].all(0) for item in ruled]
    return rule_I, np.array(rows, dtype=np.uint8).reshape(len(rows), units_TU.shape[1])


def _offsets(count: Ints) -> Index:
    return np.concatenate([[0], np.cumsum(count)]).astype(np.int32)


def _concatenate_ranges(begin: Ints, length: Ints) -> Ints:
    """The ranges begin, begin + 1, ... of each length, one after another."""
    ends = np.cumsum(length)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - length - begin, length)

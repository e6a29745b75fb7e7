"""`ShardedEmbeddings`: the drop-in replacement of `Embeddings` whose tables are cut into tiles on several ranks.

To a model it is the same module: a batch goes in, `Vectors` come out, a backward stages gradients, `update` applies
them. `forward` below is all of the exchange: ids go to the ranks that hold their rows, each rank looks up for the
samples of all ranks, vectors come back. Methods that communicate are collective ([Note: Everyone joins] in
`exchange.py`).

Ids are routed on their own device, even if the rows are on a GPU: a batch on the host is routed there and then copied.
So sizes of collectives need no GPU synchronisation, and vectors never leave the GPUs.

The ids of later batches may be sent ahead (`prefetch`). Vectors are received at their first use, and gradients when the
update needs them ([Note: Vectors in flight] in `exchange.py`).
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self, final

import torch
from torch import Tensor, nn

from rowwise.base.errors import GradientError, PeerError, RowwiseError, SpecError, StateError
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import raise_if_any_rank_failed
from rowwise.parallel.plan import TIERS, Plan, Tile
from rowwise.parallel.shard.ahead import BatchesAhead
from rowwise.parallel.shard.exchange import BatchInFlight, EmbeddingExchange, Phase, no_timing
from rowwise.parallel.shard.full_rows import FullRowUpdate
from rowwise.parallel.shard.id_exchange import IdExchange
from rowwise.parallel.shard.ids import Router
from rowwise.parallel.shard.pack import RoutedBatch
from rowwise.parallel.shard.replicated import ReplicatedUpdate
from rowwise.parallel.shard.routes import RankPiece, Routes, make_routes
from rowwise.parallel.shard.tiers import runnable_tiers
from rowwise.tables.batch import Jagged, KeyedJagged
from rowwise.tables.embedding import (
    Embeddings,
    LookedUp,
    Vectors,
    apply_to_empty,
    break_graph,
    check_not_in_backward,
    convert,
    point_parameters,
)
from rowwise.tables.ids.managed.lookup import Evicted, LocalBuckets, LocalIds
from rowwise.tables.ops.arena import Arena
from rowwise.tables.ops.in_backward import BackwardEnd
from rowwise.tables.ops.in_ddp import running_ddp
from rowwise.tables.ops.layout import TablePiece
from rowwise.tables.ops.lookup import StagedGradients
from rowwise.tables.ops.tiles import Tiles
from rowwise.tables.ops.unknown import count_unknown
from rowwise.tables.ops.update import run_all
from rowwise.tables.spec import Pooling, Table, Wire
from rowwise.tables.store.disk import DiskRows
from rowwise.tables.store.policy import WAYS
from rowwise.tables.store.row_store import NO_HOT_ROWS, HotRows, OpenStore
from rowwise.tables.store.row_stream import RowStream


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTile:
    """A piece on this rank: stored rows, optimizer state by name, and marks of touched rows.

    Rows and state are views of memory, or streams if they are on disk; `step`, the count of updates, is a tensor.
    """

    tile: Tile
    rows: Tensor | RowStream
    state: dict[str, Tensor | RowStream]
    touched: Tensor | None  # [R] bytes, nonzero for rows changed since the last clear; None if not tracked


class HeldGradients(NamedTuple):
    """Staged gradients of a step, for a later update."""

    samples: int  # number of samples of all ranks
    staged: list[list[StagedGradients]]  # gradients by arena


@final
class ShardedEmbeddings(nn.Module):
    """This rank's tiles of embedding tables, as a plan assigns them.

    Args:
        tables: all tables, on every rank, in the order of the output.
        plan: the tiles of each rank.
        comm: the communicator of all ranks.
        wire: the types in which vectors and gradients travel.
        elastic: results have the same bits for any plan and any number of ranks.
        update_in_backward: see `Embeddings`; every rank has to run the same backwards.
        device: the device of this rank's rows.
        disk: the folder of rows on disk, or a function that opens another store.
        hot_rows: for tables whose tiles pin rows: their rows, the hottest first. See [Note: Pinned rows].

    `state_dict` has this rank's pieces: a full table as `name`, a part of one as `name[rows, columns]`. A piece is a
    tile; a tile whose rows another tile of its table cuts is two pieces or more. With rows on disk there is no state
    dict: use checkpoints.
    """

    def __init__(  # noqa: PLR0913 - all but the first three have defaults
        self,
        tables: Sequence[Table],
        plan: Plan,
        comm: Comm,
        *,
        wire: Wire | None = None,
        elastic: bool = False,
        update_in_backward: bool = False,
        device: torch.device | str = "cpu",
        disk: Path | OpenStore | None = None,
        hot_rows: HotRows = NO_HOT_ROWS,
    ) -> None:
        """Allocate zeroed memory for this rank's pieces; collective. `fill` or `copy_tables` gives them values."""
        super().__init__()
        wire = wire or Wire()
        check_sharding(plan, comm, wire, elastic=elastic)
        check_tiers(plan, torch.device(device), disk)
        check_pinned(plan, tables, hot_rows)
        open_store = DiskRows.opener(disk) if isinstance(disk, Path) else disk
        self.routes = routes = make_routes(tables, plan, comm.topology, elastic=elastic)
        self._comm, self.device = comm, torch.device(device)  # of rows and vectors, also where a rank has no rows
        self.update_in_backward, self.vector_type = update_in_backward, torch.float32
        self.mean_over_ranks = False  # gradients are means, as in DistributedDataParallel; else sums
        self._checked_ddp: int | None = None  # id of the wrapper that leaves the rows alone
        self._end = BackwardEnd()
        self.forwards_per_batch = 1  # set by a trainer that splits its batch into virtual shards
        self.phase: Phase = no_timing  # context manager around each phase of a step, for the step breakdown
        self._groups = [
            (
                group,
                Tiles(
                    [_table_piece(routes, piece, hot_rows) for piece in group.pieces],
                    self.device,
                    open_store=open_store,
                ),
            )
            for group in routes.groups_W[comm.rank]
        ]
        self.reads_ahead = any(
            store.reads_ahead for _, tiles in self._groups if (store := tiles.arena.store) is not None
        )
        self._replicated = replicated = Tiles(routes.replicated, self.device) if routes.replicated else None
        self._router = Router(routes, comm)
        self._exchange = EmbeddingExchange(routes, comm, wire, self._groups, replicated)
        self._plan = plan
        cut = [local for local in self._groups if local[0].needs_full_rows]
        self._full_row_update = FullRowUpdate(routes, comm, cut) if routes.column_owners else None
        self._replicated_update = ReplicatedUpdate(replicated, comm, elastic=elastic) if replicated else None
        self._samples = 0  # samples of all ranks since the last update
        self.unknown_ids: dict[str, int] = {}  # of this rank's batches, mapped to the last row of a table, by feature
        self._ahead = BatchesAhead()
        self._in_flight: Vectors | None = None  # the last lookup, until its vectors are received
        self.register_load_state_dict_pre_hook(_before_load)
        self._make_parameters()

    @torch.no_grad()
    def cache_on(self, device: torch.device | str, samples: int) -> Self:
        """Move to a GPU, but leave tiles of the tier `host` in host memory, and cache `cache_rows` of each there.

        The GPU reads missed rows from host memory and writes changed ones back, with their optimizer state. Results
        have the same bits as without a cache. `samples`: batch size over all ranks; reserves an overflow slot per
        sample and feature. A batch that overflows a tile's cache and its overflow slots is an error.
        """
        check_cached(self._plan, self.tables)
        for arena in self.arenas:
            arena.check_in_host_memory()
        self.device = torch.empty(0, device=device).device  # "cuda" with the number of the device
        for number, (group, tiles) in enumerate(self._groups):
            if all(piece.tile.tier == "device" for piece in group.pieces):
                tiles.arena.to(self.device)
                continue
            pieces = [
                stored.cached(piece.tile.cache_rows, samples) if piece.tile.tier == "host" else stored
                for piece, stored in zip(group.pieces, tiles.arena.pieces, strict=True)
            ]
            self._groups[number] = group, tiles.cached_on(self.device, pieces)
        if self._replicated is not None:
            self._replicated.arena.to(self.device)
        self._make_parameters()
        return self

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables, on every rank."""
        return self.routes.tables

    @property
    def comm(self) -> Comm:
        return self._comm

    def make_id_lookup(self, tables: Sequence[LocalBuckets], evicted: Evicted) -> LocalIds | IdExchange:
        """The lookup from ids of managed tables to rows, across ranks if there are several."""
        if len(self.comm.ranks) == 1:
            return LocalIds(tables, evicted)
        return IdExchange(self.comm, tables, [self._bucket_ranks(table.table) for table in tables], evicted)

    def _bucket_ranks(self, table: Table) -> Tensor:
        """The rank of each bucket of a managed table."""
        rank_B = torch.zeros(table.buckets, dtype=torch.int64)
        for groups in self.routes.groups_W:
            for tile in (piece.tile for group in groups for piece in group.pieces if piece.tile.table == table.name):
                rank_B[tile.rows[0] // table.row_multiple : tile.rows[1] // table.row_multiple] = tile.rank
        return rank_B

    @property
    def merge_shared(self) -> bool:
        """Whether gradients of shared bags are summed first: [Note: Merged bags] in `tables/ops/shared.py`."""
        return self._exchange.merge_shared

    @merge_shared.setter
    def merge_shared(self, merge_shared: bool) -> None:
        check_merge_shared(merge_shared, elastic=self.routes.elastic)
        self._exchange.merge_shared = merge_shared
        if self._replicated is not None:
            self._replicated.merge_shared = merge_shared

    @property
    def staged(self) -> Sequence[StagedGradients]:
        """Gradients that the next update applies to this rank's pieces; collective, as it receives them."""
        self._exchange.receive_gradients()
        return tuple(s for tiles in self._all_tiles() for s in tiles.staged)

    def local_tiles(self) -> list[LocalTile]:
        """The pieces of this rank; tensors are views of its memory."""
        local: list[LocalTile] = []
        for tiles, rectangles in self._tiles_by_arena():
            for index, tile in enumerate(rectangles):
                arena = tiles.arena
                touched = None if arena.touched is None else arena.touched.table(index)
                state: dict[str, Tensor | RowStream] = {**arena.state_streams(index)}
                local.append(LocalTile(tile=tile, rows=arena.rows_stream(index), state=state, touched=touched))
        return local

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The memory of this rank's pieces."""
        return tuple(tiles.arena for tiles in self._all_tiles())

    def fill(self, seed: int) -> None:
        """Initialise the rows with their values in the full table."""
        for arena in self.arenas:
            arena.fill(seed)

    @break_graph
    def forward(self, sparse: Jagged | KeyedJagged) -> Vectors:
        """Look a batch up; collective. A rank's batch may be empty."""
        self._receive_vectors()
        if torch.is_grad_enabled():
            self._end.begin_forward(self.discard)
        ahead = self._ahead.take(sparse)
        with self.phase("route"):
            routed = (self._router.start(sparse) if ahead is None else ahead.routes).finish()
        count_unknown(self.unknown_ids, routed.unknown)
        self._samples += sum(routed.samples_W) if torch.is_grad_enabled() else 0
        batch = self._look_up(routed) if ahead is None or ahead.looked_up is None else ahead.looked_up
        if self.mean_over_ranks or self._is_in_ddp():
            batch.scale = 1 / len(self._comm.ranks)
        self._in_flight = vectors = Vectors(self.routes.columns, partial(self._receive, batch))
        return vectors

    def abort_forward(self, error: RowwiseError) -> NoReturn:
        """Collective replacement for `forward` on a rank that has no batch: raises on every rank.

        See [Note: Malformed batches] in `ids.py`.
        """
        ahead = self._ahead.take(error)
        (self._router.start_failed(error) if ahead is None else ahead.routes).finish()
        raise error

    def prefetch(self, sparse: Jagged | KeyedJagged) -> None:
        """Start to route a later batch; collective. `forward` finds it by identity, so it needs the same object.

        `advance` continues the route. An error of the batch is raised by its `forward`.
        """
        self._ahead.add(sparse, self._router.start(sparse))
        if len(self._comm.ranks) == 1:
            self._ahead.advance()  # headers, then ids
            self._ahead.advance()

    def prefetch_failed(self, error: RowwiseError) -> None:
        """Collective replacement for `prefetch` on a rank that has no batch; `abort_forward` then gets this error."""
        self._ahead.add(error, self._router.start_failed(error))

    def advance(self) -> None:
        """Finish the current collective of each prefetched batch, and start its next; collective."""
        with self.phase("route"):
            self._ahead.advance()
        self._read_rows_ahead()

    def is_routed(self, batch: Jagged | KeyedJagged | RowwiseError) -> bool:
        """Whether `look_ahead` would look this batch up."""
        ahead = self._ahead.find(batch)
        return ahead is not None and ahead.routed is not None

    def is_looked_up(self, batch: Jagged | KeyedJagged | RowwiseError) -> bool:
        """Whether `look_ahead` has looked this batch up."""
        ahead = self._ahead.find(batch)
        return ahead is not None and ahead.looked_up is not None

    def look_ahead(self, sparse: Jagged | KeyedJagged | RowwiseError) -> None:
        """Look a prefetched batch up before its `forward`, if its ids have arrived; collective.

        That `forward` does not see updates after this lookup.
        """
        ahead = self._ahead.find(sparse)
        if ahead is not None and ahead.routed is not None:
            ahead.looked_up = self._look_up(ahead.routed)

    def forget_looked_up(self) -> None:
        """Discard the lookups of `look_ahead`, which `forward` then repeats; collective."""
        self._ahead.forget_looked_up()

    def is_ahead(self, batch: Jagged | KeyedJagged | RowwiseError) -> bool:
        """Whether this batch is prefetched and waits for its `forward`."""
        return self._ahead.find(batch) is not None

    def settle(self) -> None:
        """Finish the routes of all prefetched batches; collective."""
        self._ahead.wait()

    def drop_ahead(self) -> None:
        """Discard all prefetched batches; collective."""
        self._ahead.drop()

    def _read_rows_ahead(self) -> None:
        """Start to read the next routed batches' rows from disk."""
        if not self.reads_ahead:
            return
        with self.phase("prefetch"):
            for routed in self._ahead.rows_to_read():
                if routed.received is not None:
                    received = routed.received.expanded().contiguous()
                    for _, tiles in self._groups:
                        tiles.read_ahead(received)

    def _look_up(self, routed: RoutedBatch) -> BatchInFlight:
        """Look up this rank's pieces, and start to send the vectors."""
        with self.phase("lookup"):
            batch = BatchInFlight(self._exchange, routed.to(self.device), self.phase)
            self._read_rows_ahead()
        batch.send()
        return batch

    def _receive(self, batch: BatchInFlight) -> LookedUp:
        self._in_flight = None
        matrix_BS, sequences = batch.receive()
        if self.update_in_backward:
            steps = self._check_in_backward, self.update
            self._end.watch((matrix_BS, *sequences.values()), steps, self.discard)
        return convert((matrix_BS, sequences), self.vector_type)

    def _is_in_ddp(self) -> bool:
        """Whether a `DistributedDataParallel` runs this forward; raises if it does not leave the rows alone."""
        ddp = running_ddp()
        if ddp is None or id(ddp) == self._checked_ddp:
            return ddp is not None
        rows = {id(parameter) for parameter in self._parameters.values()}
        names = {name for name, parameter in ddp.module.named_parameters() if id(parameter) in rows}
        if broadcast := sorted(names - ddp.parameters_to_ignore):
            raise SpecError(
                f"DistributedDataParallel has copied {broadcast[0]!r} of rank 0 to the other ranks",
                hint="call shard() with the module that DistributedDataParallel wraps, not with one inside it",
            )
        if ddp.process_group.size() != len(self._comm.ranks):
            raise SpecError(
                f"DistributedDataParallel has {ddp.process_group.size()} ranks",
                f"the {len(self._comm.ranks)} of the tables",
            )
        self._checked_ddp = id(ddp)
        return True

    def _check_in_backward(self) -> None:
        """Raise on all ranks if a staged gradient of any rank is not finite; collective."""
        error: GradientError | None = None
        if self.device.type == "cpu":
            try:
                self.check_staged()
            except GradientError as caught:
                error = caught
            raise_if_any_rank_failed(self._comm, error, during="backward")

    def _receive_vectors(self) -> None:
        """Receive the vectors of the last lookup, if the model has not used them."""
        if self._in_flight is not None:
            self._in_flight.wait()

    @torch.no_grad()
    def update(self) -> None:
        """Apply the gradients staged since the last update; collective. Each touched row changes once."""
        self._receive_vectors()
        self._exchange.receive_gradients()
        self._exchange.sent.clear()
        samples, self._samples = self._samples, 0
        calls = self.forwards_per_batch
        updates = [partial(tiles.update, calls) for group, tiles in self._groups if not group.needs_full_rows]
        updates += [] if self._full_row_update is None else [partial(self._full_row_update.update, calls, self.device)]
        updates += [] if self._replicated_update is None else [partial(self._replicated_update.update, samples, calls)]
        run_all(updates)

    def check_staged(self) -> float:
        """Raise if a gradient of the next update is not finite; the caller informs the other ranks.

        On exact wires this rank checks the gradients that it sent, without waiting; on lossy wires it is collective.
        Returns this rank's term of a bound: the sum over ranks bounds the absolute gradient of any row.
        """
        if self._exchange.sends_exact_gradients:
            return sum(sent.check(self.tables, self._comm.rank) for sent in self._exchange.sent)
        self._exchange.receive_gradients()
        return sum(tiles.check_staged() for tiles in self._all_tiles())

    @property
    def has_gradients(self) -> bool:
        """Whether a backward was run since the last update; alike on all ranks."""
        return bool(self._exchange.sent)

    def take_staged(self) -> "HeldGradients":
        """Remove the staged gradients, for an update that comes later; collective."""
        check_not_in_backward(self)
        self._exchange.receive_gradients()
        self._exchange.sent.clear()
        samples, self._samples = self._samples, 0
        return HeldGradients(samples, [tiles.take_staged() for tiles in self._all_tiles()])

    def put_staged(self, held: "HeldGradients") -> None:
        """Stage the gradients that `take_staged` removed."""
        self._samples += held.samples
        for tiles, staged in zip(self._all_tiles(), held.staged, strict=True):
            tiles.staged = staged + tiles.staged

    def discard(self) -> None:
        """Drop the staged gradients."""
        with suppress(PeerError):  # an ended rank sends no more gradients
            self._receive_vectors()
            self._exchange.receive_gradients()
        self._exchange.sent.clear()
        self._samples = 0
        for tiles in self._all_tiles():
            tiles.discard()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """`.to(...)`: arenas move as a whole; see `Embeddings`."""
        moved = apply_to_empty(fn, self.vector_type, self.device)
        self.device, self.vector_type = moved.device, moved.dtype
        for arena in self.arenas:
            arena.to(self.device)
        self._make_parameters()
        return self

    def _make_parameters(self) -> None:
        in_memory = ((local.tile, local.rows) for local in self.local_tiles() if isinstance(local.rows, Tensor))
        point_parameters(self, {_parameter_name(self.routes, tile): rows for tile, rows in in_memory})

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._check_no_streams("state_dict()")
        super()._save_to_state_dict(*args, **kwargs)

    def _check_no_streams(self, what: str) -> None:
        """Raise if some rows of this rank are not in a tensor: a state dict would lack them."""
        for local in self.local_tiles():
            if not isinstance(local.rows, Tensor):
                raise StateError(
                    f"{what}: table {local.tile.table!r} has rows on the {local.tile.tier}, not in a tensor",
                    hint="save a checkpoint with CheckpointFolder or rowwise train",
                )

    def _all_tiles(self) -> list[Tiles]:
        return [tiles for tiles, _ in self._tiles_by_arena()]

    def _tiles_by_arena(self) -> list[tuple[Tiles, list[Tile]]]:
        """Each arena of this rank with the rectangles in it."""
        arenas = [(tiles, [piece.tile for piece in group.pieces]) for group, tiles in self._groups]
        if self._replicated is not None:
            rank = self._comm.rank
            full = [Tile(table=t.name, rank=rank, rows=(0, t.rows), cols=(0, t.dim)) for t in self.routes.replicated]
            arenas.append((self._replicated, full))
        return arenas

    def extra_repr(self) -> str:
        return "\n".join(str(local.tile) for local in self.local_tiles())


def check_merge_shared(merge_shared: bool, *, elastic: bool) -> None:
    if elastic and merge_shared:
        raise SpecError(
            "elastic results need a fixed order of summation, which merge_shared changes",
            "merge_shared=False, or determinism 'run'",
        )


def check_sharding(plan: Plan, comm: Comm, wire: Wire, *, elastic: bool) -> None:
    """Raise for a plan or a wire that cannot run, before any memory is allocated."""
    if plan.world != len(comm.ranks):
        raise SpecError(
            f"the plan is for {plan.world} ranks, the communicator has {len(comm.ranks)}", hint="plan again"
        )
    if elastic and not wire.exact:
        raise SpecError("elastic results need an exact wire", "fp32 on every link, or determinism 'run'")


def check_tiers(plan: Plan, device: torch.device, disk: Path | OpenStore | None) -> None:
    """Raise for rows in a memory tier that the runtime does not support on this type of device."""
    if device.type == "meta":  # allocates no memory, so any tier will do
        return
    runs = runnable_tiers(device.type)
    for tile in plan.tiles:
        if tile.tier not in runs:
            names = [tier for tier in TIERS if tier in runs]
            raise SpecError(
                f"table {tile.table!r}: tile {tile}: rows on the {tile.tier}; on {device.type!r} this runtime "
                f"supports rows on the {' and the '.join(names)} only",
                f"tier {' or '.join(map(repr, names))}, from a plan with more ranks or devices with more memory",
            )
    on_disk = [tile for tile in plan.tiles if tile.tier == "disk"]
    if on_disk and disk is None:
        raise SpecError(f"table {on_disk[0].table!r}: tile {on_disk[0]}", "a folder for rows on disk, `disk`")
    # Kernels read one slot per id of a feature; two column pieces of a row would be cached in different slots.
    ranges = Counter((tile.table, tile.rows) for tile in plan.tiles)
    for tile in on_disk:
        if ranges[tile.table, tile.rows] > 1:
            raise SpecError(
                f"table {tile.table!r}: tile {tile}: another tile has the same rows",
                "tiles of whole rows, on one rank each, for tables on disk",
            )


def check_pinned(plan: Plan, tables: Sequence[Table], hot_rows: HotRows) -> None:
    """Raise for tiles that pin rows of tables whose hot rows are unknown, or are no rows of theirs."""
    rows_of = {table.name: table.rows for table in tables}
    for tile in plan.tiles:
        if not tile.pinned_rows:
            continue
        if tile.tier != "disk":
            raise SpecError(f"tile {tile}: it pins rows of the tier {tile.tier!r}", "pinned_rows of tier 'disk' only")
        if tile.pinned_rows > tile.cache_rows - WAYS:
            raise SpecError(
                f"tile {tile}: pinned_rows={tile.pinned_rows}",
                f"at most cache_rows - {WAYS}, as rows that are not pinned need a set of {WAYS} slots",
            )
        if tile.table not in hot_rows:
            raise SpecError(
                f"tile {tile}: the hot rows of table {tile.table!r} are not known",
                "`pin` in the recipe, the number of training rows whose ids are counted; `hot_rows` in Python",
            )
        rows_U = hot_rows[tile.table]
        sizes = len(rows_U), len(rows_U.unique())
        if sizes[0] != sizes[1] or (len(rows_U) and not 0 <= rows_U.min() <= rows_U.max() < rows_of[tile.table]):
            raise SpecError(
                f"hot_rows of table {tile.table!r}: {sizes[0]:,} rows, {sizes[1]:,} of them distinct",
                f"distinct rows from 0 to {rows_of[tile.table] - 1:,}",
            )


def check_cached(plan: Plan, tables: Sequence[Table]) -> None:
    """Raise for tiles in host memory or on disk that GPUs cannot cache."""
    by_name = {table.name: table for table in tables}
    copies = Counter((tile.table, tile.rows, tile.cols) for tile in plan.tiles)
    for tile in plan.tiles:
        table = by_name[tile.table]
        reasons = {
            "rows are on the disk": tile.tier == "disk",
            f"it has {tile.cols[1] - tile.cols[0]} of {table.dim} columns": tile.cols != (0, table.dim),
            "the table is managed": table.managed is not None,
            "it is replicated": copies[tile.table, tile.rows, tile.cols] > 1,
        }
        reason = next((text for text, holds in reasons.items() if holds), "")
        if reason and tile.tier != "device":
            raise SpecError(f"tile {tile}: {reason}, so a GPU cannot cache it", "tier 'device', or tiles of whole rows")


def _before_load(module: nn.Module, _state: dict[str, Any], _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Copy even with `assign=True`: parameters are views of the arenas, and new ones would not change the rows."""
    assert isinstance(module, ShardedEmbeddings)
    module._check_no_streams("load_state_dict()")
    for arena in module.arenas:
        arena.mark_all()
    metadata["assign_to_params_buffers"] = False


def _parameter_name(routes: Routes, tile: Tile) -> str:
    table = next(table for table in routes.tables if table.name == tile.table)
    if tile.rows == (0, table.rows) and tile.cols == (0, table.dim):
        return table.name
    return f"{table.name}[{tile.rows[0]}:{tile.rows[1]}, {tile.cols[0]}:{tile.cols[1]}]"


def _table_piece(routes: Routes, piece: RankPiece, hot_rows: HotRows) -> TablePiece:
    table = routes.tables[piece.table]
    names = tuple(piece_slice.name for piece_slice in piece.slices(table))
    cut = TablePiece.cut(table, piece.tile.rows, piece.tile.cols, names)
    if piece.tile.tier == "disk":
        cut = cut._replace(cache_rows=piece.tile.cache_rows, pinned_rows=_hottest(piece.tile, hot_rows))
    # An owner of some of the rows returns sums: only the rank of the samples knows a bag's number of ids, and divides.
    return cut.pooled_by(Pooling.SUM) if table.pooling is Pooling.MEAN and not piece.all_rows else cut


def _hottest(tile: Tile, hot_rows: HotRows) -> torch.Tensor | None:
    """The rows that a tile pins, relative to its first; fewer where fewer are known."""
    if not tile.pinned_rows:
        return None
    rows_U = hot_rows[tile.table]
    in_tile_U = rows_U[(rows_U >= tile.rows[0]) & (rows_U < tile.rows[1])]
    return (in_tile_U[: tile.pinned_rows] - tile.rows[0]).sort().values


AnyEmbeddings = Embeddings | ShardedEmbeddings

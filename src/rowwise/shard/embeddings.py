"""`ShardedEmbeddings`: what `Embeddings` becomes when its tables are cut into tiles.

The same module to a model: a batch goes in, `Vectors` come out, a backward stages, `update` applies. In between, in the
order of this file: the ids go to the ranks that hold their rows, those look up for the samples of all ranks, the
vectors come back. All ranks call it alike, see [Note: Everyone joins].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Self, final

import torch
from torch import Tensor, nn

from rowwise.batch import Jagged, KeyedJagged
from rowwise.comm.seam import Comm
from rowwise.embedding import Embeddings, Vectors
from rowwise.errors import RowwiseError, SpecError
from rowwise.ops.arena import Arena
from rowwise.ops.layout import TablePiece
from rowwise.ops.lookup import StagedGradients
from rowwise.ops.tiles import Tiles
from rowwise.ops.update import join_parts, run_all
from rowwise.plan import TIERS, Plan, Tile
from rowwise.shard.copies import CopiesUpdate
from rowwise.shard.coupled import CoupledUpdate
from rowwise.shard.exchange import EmbeddingExchange, Phase, StreamLookup, exchange, no_timing
from rowwise.shard.ids import Router
from rowwise.shard.lookup import LocalLookup
from rowwise.shard.routes import RankPiece, Routes, make_routes
from rowwise.shard.tiers import tiers_of
from rowwise.spec import Pooling, Table, Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTile:
    """A piece of a table on this rank: its place, its rows as they are stored, their optimizer state, their marks."""

    tile: Tile
    rows: Tensor
    state: dict[str, Tensor]
    touched: (
        Tensor | None
    )  # [R] of bytes: rows that changed since they were cleared; None: `Arena.track` was not called


@final
class ShardedEmbeddings(nn.Module):
    """The tables of a module, of which this rank holds what a plan says.

    Args:
        tables: all of them, in the order of the output.
        plan: which rank holds what.
        comm: the ranks.
        wire: how vectors travel.
        elastic: results do not depend on the plan or the number of ranks, to the bit.
        device: where this rank's rows live.

    `state_dict` has what this rank holds: a table under its name, a piece under that and its place.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        plan: Plan,
        comm: Comm,
        *,
        wire: Wire | None = None,
        elastic: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Zeroed memory for this rank's pieces; called by all ranks. Rows are filled by whoever makes it."""
        super().__init__()
        wire = wire or Wire()
        check(plan, comm, wire, elastic=elastic)
        check_tiers(plan, torch.device(device))
        self.routes = routes = make_routes(tables, plan, comm.topology, elastic=elastic)
        self._comm, device = comm, torch.device(device)
        self.calls = 1  # this many calls, one after the other, are one batch in pieces
        self.phase: Phase = no_timing  # entered around each stage of a step, by those who want to know what it takes
        self._shelves = [
            (part, Tiles([_piece(routes, held) for held in part.held], device)) for part in routes.parts_W[comm.rank]
        ]
        self._copies = Tiles(routes.copied, device) if routes.copied else None
        self._lookup = LocalLookup(self._shelves, self._copies)
        self._router, self._exchange = Router(routes, comm), EmbeddingExchange(routes, comm, wire)
        coupled = [shelf for shelf in self._shelves if shelf[0].coupled]
        anywhere = any(part.coupled for parts in routes.parts_W for part in parts)
        self._coupled = CoupledUpdate(routes, plan, comm, coupled) if anywhere else None
        self._copied = None if self._copies is None else CopiesUpdate(self._copies, comm, elastic=elastic)
        self._anchor = torch.empty(0, requires_grad=True)
        self._samples = 0  # of all ranks, since the last update
        self.register_load_state_dict_pre_hook(_before_load)
        self._show_rows()

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables, whoever holds them."""
        return self.routes.tables

    @property
    def unknown_ids(self) -> dict[str, int]:
        """How many ids of this rank's batches were outside their table and mapped to its last row, by feature."""
        return self._router.unknown_ids

    @property
    def merge_shared(self) -> bool:
        """Whether gradients of bags that samples share are added up before they travel. See [Note: Merged bags]."""
        return self._exchange.merges

    @merge_shared.setter
    def merge_shared(self, merges: bool) -> None:
        check_merging(merges, elastic=self.routes.elastic)
        self._exchange.merges = merges
        if self._copies is not None:
            self._copies.merge_shared = merges

    @property
    def staged(self) -> Sequence[StagedGradients]:
        """What the next update would apply to this rank's pieces."""
        return tuple(s for tiles in self._all_tiles() for s in tiles.staged)

    def held(self) -> list[LocalTile]:
        """The pieces of this rank; their tensors are views."""
        found: list[LocalTile] = []
        for tiles, places in self._homes():
            for index, tile in enumerate(places):
                arena = tiles.arena
                touched = None if arena.touched is None else arena.touched.table(index)
                rows, state = arena.table(index), arena.table_state(index)
                found.append(LocalTile(tile=tile, rows=rows, state=state, touched=touched))
        return found

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The memory of this rank's pieces."""
        return tuple(tiles.arena for tiles in self._all_tiles())

    def fill(self, seed: int) -> None:
        """The rows that the whole tables have at the beginning."""
        for arena in self.arenas:
            arena.fill(seed)

    def forward(self, sparse: Jagged | KeyedJagged) -> Vectors:
        """Look a batch up, together with all other ranks; a batch may be empty."""
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._forward)(sparse)  # see Embeddings.forward
        return self._forward(sparse)

    def abort_forward(self, error: RowwiseError) -> NoReturn:
        """Instead of `forward`, where there is no batch: raises on all ranks. See [Note: Malformed batches]."""
        self._router.abort(error)

    def _forward(self, sparse: Jagged | KeyedJagged) -> Vectors:
        with self.phase("route"):
            routed = self._router.route(sparse)
        self._samples += sum(routed.samples_W) if torch.is_grad_enabled() else 0
        with self.phase("lookup"):
            outputs, copied = self._lookup.look_up(routed)
        looked = StreamLookup(routed=routed, outputs=outputs, copied=copied, stage=self._lookup.stage, phase=self.phase)
        matrix_BS, sequences = exchange(self._exchange, looked, self._anchor)
        return Vectors(matrix_BS=matrix_BS, columns=self.routes.columns, sequences=sequences)

    @torch.no_grad()
    def update(self) -> None:
        """Apply what the backwards since the last update staged, on all ranks: each touched row changes once."""
        samples, self._samples = self._samples, 0
        updates = [partial(self._update, tiles) for part, tiles in self._shelves if not part.coupled]
        updates += [] if self._coupled is None else [partial(self._coupled.update, self.calls)]
        updates += [] if self._copied is None else [partial(self._copied.update, samples, self.calls)]
        run_all(updates)

    def check_staged(self) -> float:
        """Raise if a gradient staged for this rank's pieces is not finite; a caller tells the other ranks.

        Returns a bound for the sums of those that are finite one by one.
        """
        return sum(tiles.check_staged() for tiles in self._all_tiles())

    def discard(self) -> None:
        """Forget what was staged."""
        self._samples = 0
        for tiles in self._all_tiles():
            tiles.discard()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Moves: blocks of memory go as a whole; rows keep their type, as those of `Embeddings` do."""
        for arena in self.arenas:
            arena.to(fn(torch.empty(0, device=arena.rows.device)).device)
        self._show_rows()
        return self

    def _show_rows(self) -> None:
        """(Re)make the parameters: views, as those of `Embeddings` are."""
        for held in self.held():
            name = _name(self.routes, held.tile)
            parameter = self._parameters.get(name)
            if parameter is None:
                # Not register_parameter: it refuses the names of methods, which tables may have.
                self._parameters[name] = nn.Parameter(held.rows, requires_grad=False)
            else:
                parameter.data = held.rows

    def _update(self, tiles: Tiles) -> None:
        """Pieces that need nothing of other ranks."""
        if self.calls > 1:
            groups = ([s for s in tiles.staged if s.call.per_id == per_id] for per_id in (False, True))
            tiles.staged = [s for group in groups for s in join_parts(group, self.calls)]
        tiles.update()

    def _all_tiles(self) -> list[Tiles]:
        return [tiles for tiles, _ in self._homes()]

    def _homes(self) -> list[tuple[Tiles, list[Tile]]]:
        """Each block of memory, and the tiles in it."""
        homes = [(tiles, [held.tile for held in part.held]) for part, tiles in self._shelves]
        if self._copies is not None:
            rank = self._comm.rank
            whole = [Tile(table=t.name, rank=rank, rows=(0, t.rows), cols=(0, t.dim)) for t in self.routes.copied]
            homes.append((self._copies, whole))
        return homes

    def extra_repr(self) -> str:
        """One line a piece."""
        return "\n".join(str(held.tile) for held in self.held())


def check_merging(merges: bool, *, elastic: bool) -> None:
    """Refuse sums in an order of their own, where results are to be those of any plan."""
    if elastic and merges:
        want = "want merge_shared=False, or determinism 'run'"
        raise SpecError(f"elastic results do not go with gradients of shared bags that are added up first: {want}")


def check(plan: Plan, comm: Comm, wire: Wire, *, elastic: bool) -> None:
    """Refuse what cannot be run, before any memory is taken."""
    if plan.world != len(comm.ranks):
        raise SpecError(f"a plan for {plan.world} ranks, and there are {len(comm.ranks)}: make one for these")
    if elastic and not wire.exact:
        raise SpecError("elastic results do not go with a wire that rounds: want fp32 everywhere, or determinism 'run'")


def check_tiers(plan: Plan, device: torch.device) -> None:
    """Refuse rows that live in a tier that this runtime does not run."""
    if device.type == "meta":  # they live nowhere
        return
    runs = tiers_of(device.type)
    for tile in plan.tiles:
        if tile.tier not in runs:
            names = [tier for tier in TIERS if tier in runs]
            where = f"on {device.type!r} this runtime has rows on the {' and the '.join(names)} only"
            want = f"want tier {' or '.join(map(repr, names))}, from a plan with more ranks or devices with more memory"
            raise SpecError(f"table {tile.table!r}: tile {tile}: rows on the {tile.tier}: {where}; {want}")


def _before_load(module: nn.Module, _state: dict[str, Any], _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Copy always: parameters are views, which torch would replace with assign=True, and the rows would stay old."""
    assert isinstance(module, ShardedEmbeddings)
    for arena in module.arenas:
        arena.mark_all()
    metadata["assign_to_params_buffers"] = False


def _name(routes: Routes, tile: Tile) -> str:
    """Under which a state dict has it."""
    table = next(table for table in routes.tables if table.name == tile.table)
    if tile.rows == (0, table.rows) and tile.cols == (0, table.dim):
        return table.name
    return f"{table.name}[{tile.rows[0]}:{tile.rows[1]}, {tile.cols[0]}:{tile.cols[1]}]"


def _piece(routes: Routes, held: RankPiece) -> TablePiece:
    table = routes.tables[held.table]
    names = tuple(asked.name for asked in held.slices(table))
    piece = TablePiece.cut(table, held.tile.rows, held.tile.cols, names)
    if table.pooling is not Pooling.MEAN or held.whole:
        return piece
    # Whoever asked knows how many ids a bag has, and divides.
    return piece.pooled_by(Pooling.SUM)


AnyEmbeddings = Embeddings | ShardedEmbeddings

"""The memory of all tables of a device: one block of rows, one of optimizer state.

Kernels address rows by their offset in the block, so any number of tables, of any row types, is one call. The blocks
are allocated on huge pages. Initial values are a function of (seed, table name, row, column): the same bits for any
number of threads and any cut of the tables. For a table in a `RowStore` the blocks have slots instead of its rows.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rowwise.base.errors import StateError, TableMemoryError
from rowwise.tables.managed import ID
from rowwise.tables.ops import rowtype
from rowwise.tables.ops.layout import ArenaOffset, FeatureDescriptor, TablePiece, lay_out_tables
from rowwise.tables.ops.newer import RowPlaces
from rowwise.tables.ops.touched import TouchedRows
from rowwise.tables.spec import Constant, Normal, RowType, Table, Uniform, state_slots, state_width
from rowwise.tables.store.row_store import NO_ROWS, ArenaSlots, OpenStore, RowPart, RowStore, SlotIds, SlotTable
from rowwise.tables.store.row_stream import InitialValues, RowStream

CHUNK = 1 << 22  # weights initialised at a time


class KernelBags(NamedTuple):
    """The ids of a batch and the features that look them up, as kernels take them."""

    features_FC: Tensor
    values_N: Tensor
    offsets: Tensor
    batch_size: int


@dataclass(slots=True, kw_only=True)
class Arena:
    """Rows and optimizer state of table pieces in two blocks of memory; `table` and `table_state` are views of them."""

    pieces: tuple[TablePiece, ...]
    offsets: tuple[ArenaOffset, ...]
    rows: Tensor = field(repr=False)  # uint8
    state: Tensor = field(repr=False)  # float32
    steps_T: Tensor = field(repr=False)  # updates so far, on the CPU
    keys_T: Tensor = field(repr=False)  # key of each table's random numbers
    learning_rates_T: Tensor | None = None  # in place of those of the tables' optimizers
    touched: TouchedRows | None = None  # marks of changed rows; None until `track`
    store: RowStore | None = None  # has the rows of tables with slots; None: no table has slots
    slot_rows: Tensor | None = None  # the row in each slot; None without a store
    places: RowPlaces | None = None  # where rows are in a table's memory; None: row r is at place r
    row_ids: dict[int, dict[str, Tensor]] = field(default_factory=dict, repr=False)  # of managed tables, by index
    row_ids_version: int = 0  # grows when code other than a table's policy may have written into `row_ids`
    # Memo of `_cached_features`, by number and order of the features of a batch.
    _cached_features_memo: dict[tuple[int, bytes], list[int]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def allocate(
        cls,
        tables: Sequence[Table | TablePiece],
        device: torch.device,
        open_store: OpenStore | None = None,
    ) -> "Arena":
        """Zeroed memory for tables or pieces of tables; a piece with `cache_rows` gets slots of a store."""
        pieces = tuple(x if isinstance(x, TablePiece) else TablePiece(x, x) for x in tables)
        offsets, size = lay_out_tables(pieces)
        try:
            rows, state = _zeros(size.base, device), _zeros(size.state_base * 4, device).view(torch.float32)
        except (MemoryError, torch.OutOfMemoryError):
            raise _too_large(pieces, size.base, size.state_base * 4, device) from None
        counts_T, ids = torch.zeros(len(tables), dtype=torch.int64), "meta" if rows.is_meta else "cpu"
        arena = cls(
            pieces=pieces,
            offsets=tuple(offsets),
            rows=rows,
            state=state,
            steps_T=counts_T,
            keys_T=counts_T.clone(),
            row_ids={
                index: {
                    name: torch.empty(piece.table.rows, dtype=torch.int64, device=ids) for name in managed.initial_state
                }
                for index, piece in enumerate(pieces)
                if (managed := piece.full_table.managed) is not None
            },
        )
        if arena.cached and not rows.is_meta:
            slots = sum(pieces[index].slots for index in arena.cached)
            arena.slot_rows = torch.empty(slots, dtype=torch.int64, device=device)
            assert open_store is not None, "tables with slots need a store"
            memory = ArenaSlots(tuple(map(arena._slot_table, arena.cached)), arena.slot_rows)
            arena.store = open_store(memory)
        return arena

    def check_in_host_memory(self) -> None:
        """Raise unless all rows are in host memory."""
        if self.rows.device.type != "cpu" or self.store is not None:
            raise StateError(f"the tables are on {self.rows.device}", "tables in host memory, to be cached on a device")

    def attach(self, rows: Tensor) -> None:
        """Use this memory for the rows of an arena on the meta device; optimizer state, for updates only, gets none."""
        assert self.rows.is_meta
        assert rows.shape == self.rows.shape
        self.rows = rows
        self.row_ids = {
            index: {name: torch.empty_like(value, device="cpu") for name, value in named.items()}
            for index, named in self.row_ids.items()
        }
        for index in self.row_ids:
            self._clear_ids(index)

    @property
    def cached(self) -> tuple[int, ...]:
        """The indices of tables whose rows are cached in slots here."""
        return tuple(index for index, piece in enumerate(self.pieces) if piece.cache_rows is not None)

    @property
    def first_slots(self) -> dict[int, int]:
        """Where the slots of each cached table begin in `slot_rows`, by its index."""
        firsts = accumulate((self.pieces[index].slots for index in self.cached), initial=0)
        return dict(zip(self.cached, firsts, strict=False))

    @contextmanager
    def pinned(self, bags: "KernelBags", *, changes: bool = False, counts: bool = False) -> Iterator[Tensor]:
        """The ids of a batch as kernels take them: slots ([Note: Rows in slots]), valid in the context, or places."""
        if self.places is not None:
            bags = bags._replace(values_N=self.places.find(*bags))
        if self.store is None or not bags.batch_size:
            yield bags.values_N
            return
        with self.store.pin(self._slot_ids(bags), changes=changes, counts=counts) as slots_N:
            yield slots_N

    def pool(self, bags: "KernelBags", weights: Tensor | None, columns: int) -> Tensor:
        """The pooled vectors [B, columns] of a batch; raises RuntimeError for an id outside its table."""
        with self.pinned(bags, counts=True) as values_N:
            features_FC, _, offsets, batch = bags
            return torch.ops.rowwise.pool(self.rows, features_FC, values_N, offsets, weights, batch, columns)

    def gather(self, bags: "KernelBags") -> Tensor:
        """The rows of all ids of a batch, flat, feature after feature; raises as `pool` does."""
        with self.pinned(bags, counts=True) as values_N:
            return torch.ops.rowwise.gather(self.rows, bags.features_FC, values_N, bags.offsets, bags.batch_size)

    def update(
        self, bags: "KernelBags", tables_TC: Tensor, hyper_and_keys: tuple[Tensor, Tensor], weights: Tensor | None,
        grad: Tensor, *, per_id: bool,
    ) -> None:  # fmt: skip
        """Mark the rows of a batch, see [Note: Touched rows], and update each of them once."""
        if self.touched is not None:
            self.touched.mark(self.rows, *bags)
        with self.pinned(bags, changes=True) as values_N:
            features_FC, _, offsets, batch = bags
            torch.ops.rowwise.update(
                self.rows, self.state, tables_TC, *hyper_and_keys, features_FC, values_N, offsets, weights, grad,
                batch, per_id, self.slot_rows,
            )  # fmt: skip

    def read_ahead(self, bags: "KernelBags") -> None:
        """Prefetch the rows of the next lookup into their slots."""
        if self.store is not None and bags.batch_size:
            self.store.read_ahead(self._slot_ids(bags))

    def _slot_ids(self, bags: "KernelBags") -> SlotIds:
        return SlotIds(bags.values_N, bags.offsets[:: bags.batch_size], self._cached_features(bags))

    def _numbers_of_cached(self) -> dict[int, int]:
        """{first byte in the arena: number of the cached table}; descriptors of features have the first byte only."""
        return {self.offsets[index].base: number for number, index in enumerate(self.cached)}

    def _cached_features(self, bags: "KernelBags") -> list[int]:
        """The number of the cached table of each feature of a batch; -1 for tables without a cache."""
        sources = (len(bags.offsets) - 1) // bags.batch_size
        key = sources, bags.features_FC.numpy().tobytes()
        tables_F = self._cached_features_memo.get(key)
        if tables_F is None:
            numbers, tables_F = self._numbers_of_cached(), [-1] * sources
            for feature in FeatureDescriptor.read(bags.features_FC):
                tables_F[feature.source] = numbers.get(feature.base, tables_F[feature.source])
            self._cached_features_memo[key] = tables_F
        return tables_F

    def _slot_table(self, index: int) -> SlotTable:
        assert self.slot_rows is not None
        piece, offset = self.pieces[index], self.offsets[index]
        table, slots, width = piece.table, piece.slots, state_width(piece.table)
        initial = torch.tensor([slot.initial for slot in state_slots(table).values() for _ in range(slot.width)])
        rows = self.rows[offset.base : offset.base + slots * table.row_bytes]

        def make_initial(rows_U: Tensor) -> tuple[Tensor, Tensor]:
            stored = initial_rows(piece, int(self.keys_T[index]), rows_U)
            return stored.view(torch.uint8).view(len(rows_U), -1), initial.expand(len(rows_U), width)

        return SlotTable(
            name=piece.full_table.name,
            index=index,
            rows=table.rows,
            spare_rows=piece.spare_rows,
            row_memory=rows.view(slots, -1),
            state_memory=self.state[offset.state_base : offset.state_base + slots * width].view(slots, width),
            slot_rows=self.slot_rows[self.first_slots[index] :][:slots],
            overflow=piece.overflow,
            initial=make_initial,
            pinned_rows=NO_ROWS if piece.pinned_rows is None else piece.pinned_rows,
        )

    @property
    def tables(self) -> tuple[Table, ...]:
        """Each piece as a table of its own."""
        return tuple(piece.table for piece in self.pieces)

    def table(self, index: int) -> Tensor:
        """The rows of a table as they are stored: [R, D], or bytes [R, row_bytes] of int8 rows; up to date."""
        rows = self.rows_stream(index)
        assert isinstance(rows, Tensor), f"table {self.pieces[index].table.name!r} is {self.store and self.store.place}"
        return rows

    def weights(self, index: int) -> Tensor:
        """The rows of a table as float32 [R, D]: the stored rows if they are float32, else a copy."""
        table = self.pieces[index].table
        return rowtype.unpack(self.table(index), table.dim, table.row_type, table.column_group)

    def table_state(self, index: int) -> dict[str, Tensor]:
        """Views of a table's optimizer state by name: [R] for one float a row, [R, W] for more; `step` is a scalar."""
        return {name: state for name, state in self.state_streams(index).items() if isinstance(state, Tensor)}

    def rows_stream(self, index: int) -> Tensor | RowStream:
        """The rows of a table as they are stored: a view, or a stream of those in a store."""
        piece, offset = self.pieces[index], self.offsets[index]
        table, dtype = piece.table, rowtype.dtype_of(piece.table.row_type)
        if self.store is not None and piece.cache_rows is not None:
            initial = InitialValues(init=piece.full_table.init, key=int(self.keys_T[index]))
            return self.store.part(self.cached.index(index), RowPart(dtype, initial))
        # A view of the one block. Through DLPack it has a storage of its own: torch.save rejects views of one storage
        # with several dtypes, and would write the whole block with any table.
        rows = self.rows[offset.base : offset.base + table.rows * table.row_bytes].view(dtype).view(table.rows, -1)
        return rows if rows.is_meta else torch.from_dlpack(rows)

    def state_streams(self, index: int) -> dict[str, Tensor | RowStream]:
        """A table's optimizer state by name: views, or streams of that in a store; `step` is a scalar."""
        piece, base = self.pieces[index], self.offsets[index].state_base
        rows, width = piece.table.rows, state_width(piece.table)
        streams: dict[str, Tensor | RowStream] = {"step": self.steps_T[index]}
        at = 0
        for name, slot in state_slots(piece.table).items():
            columns = slice(at, at + slot.width)
            if self.store is not None and piece.cache_rows is not None:
                part = RowPart(torch.float32, InitialValues(init=Constant(value=slot.initial)), columns)
                streams[name] = self.store.part(self.cached.index(index), part)
            else:
                block = self.state[base : base + rows * width].view(rows, width)
                streams[name] = block[:, at] if slot.width == 1 else block[:, columns]
            at += slot.width
        return streams | self.row_ids.get(index, {})

    def track(self) -> TouchedRows:
        """Track which rows change from now on."""
        if self.touched is None:
            rows_T, bases_T = [table.rows for table in self.tables], [offset.base for offset in self.offsets]
            self.touched = TouchedRows(rows_T, bases_T, self.rows.device, cached=bool(self.cached))
        return self.touched

    def mark_all(self) -> None:
        """Mark all rows as changed; called by code that writes into views of them."""
        self.row_ids_version += 1
        if self.store is not None:
            self.store.write_back()
        if self.touched is not None:
            self.touched.mark_all()

    def fill(self, seed: int) -> None:
        """Initialise rows and optimizer state."""
        self.mark_all()
        self.keys_T = torch.tensor([table_key(seed, piece.full_table.name) for piece in self.pieces], dtype=torch.int64)
        self.steps_T.zero_()
        if self.rows.is_meta:  # no memory: the tables will be sharded
            return
        for index in self.row_ids:
            self._clear_ids(index)
        for index, piece in enumerate(self.pieces):
            rows = self.rows_stream(index)
            if not isinstance(rows, Tensor):
                rows.forget()
                continue
            fill_piece(rows, piece, seed)
            views = self.table_state(index)
            for name, slot in state_slots(piece.table).items():
                views[name].fill_(slot.initial)

    def fill_ids(self, name: str, id_R: Tensor) -> None:
        """Give the rows of a managed table these ids, as if they had never been used."""
        index = next(index for index in self.row_ids if self.pieces[index].full_table.name == name)
        self._clear_ids(index)
        self.row_ids[index][ID].copy_(id_R)

    def _clear_ids(self, index: int) -> None:
        managed = self.pieces[index].full_table.managed
        assert managed is not None
        for name, value in managed.initial_state.items():
            self.row_ids[index][name].fill_(value)
        self.mark_all()

    @torch.no_grad()
    def reset_rows(self, index: int, rows_U: Tensor) -> None:
        """Give rows of a table, and their optimizer state, the values that `fill` gave them."""
        if not len(rows_U):
            return
        stored, state = self.table(index), self.table_state(index)
        at_U = rows_U.to(stored.device)
        stored[at_U] = initial_rows(self.pieces[index], int(self.keys_T[index]), rows_U).to(stored.device)
        for name, slot in state_slots(self.pieces[index].table).items():
            state[name][at_U] = slot.initial

    def copy_uncached(self, source: "Arena") -> None:
        """Copy tables without a cache here from an arena of the same tables: rows, optimizer state, ids and keys."""
        self.steps_T, self.keys_T, self.row_ids = source.steps_T, source.keys_T, source.row_ids
        for index, piece in enumerate(self.pieces):
            if piece.cache_rows is None:
                base, source_base = self.offsets[index].base, source.offsets[index].base
                size = piece.slots * piece.table.row_bytes  # with the spare rows
                self.rows[base : base + size].copy_(source.rows[source_base : source_base + size])
                for name, state in self.table_state(index).items():
                    state.copy_(source.table_state(index)[name])

    def mark_rows(self, index: int, rows_U: Tensor) -> None:
        """Mark rows of a table as changed."""
        if self.touched is not None:
            self.touched.table(index)[rows_U.to(self.touched.marks_R.device)] = 1

    def to(self, device: torch.device) -> None:
        """Move to another device; existing views keep the old memory."""
        if self.store is not None and device != self.rows.device:
            raise StateError(
                f"tables {self.store.place} cannot be moved", hint="plan without such tables, or save a checkpoint"
            )
        try:
            self.rows, self.state = self.rows.to(device), self.state.to(device)
        except torch.OutOfMemoryError:
            raise _too_large(self.pieces, self.rows.nbytes, self.state.nbytes, device) from None
        if self.touched is not None:
            self.touched.to(device)


def _too_large(
    pieces: Sequence[TablePiece], rows_bytes: int, state_bytes: int, device: torch.device
) -> TableMemoryError:
    need = f"{rows_bytes / 1e9:.1f} GB of rows and {state_bytes / 1e9:.1f} GB of optimizer state"
    largest = max((piece.table for piece in pieces), key=lambda t: t.rows * t.row_bytes)
    what = f"the largest is {largest.name!r} with {largest.rows} x {largest.dim}"
    where = "" if device.type == "cpu" else f" on {device}"
    return TableMemoryError(
        f"{len(pieces)} tables need {need}, which could not be allocated{where}; {what}",
        hint="use fewer or narrower rows, or more ranks",
    )


def fill_piece(stored: Tensor, piece: TablePiece, seed: int) -> None:
    """Initialise the stored rows of a piece with the full table's values for these rows and columns."""
    table, full_table = piece.table, piece.full_table
    # By name, not by position: adding a table leaves the rows of the others as they were.
    key = table_key(seed, full_table.name)
    # In chunks, so that a large table needs little more memory than its own.
    size = min(table.rows, max(1, CHUNK // full_table.dim))
    in_place = table.row_type is RowType.FP32 and table.dim == full_table.dim
    buffer = stored if in_place else torch.empty(size, full_table.dim, device=stored.device)
    columns = slice(piece.first_column, piece.first_column + table.dim)
    for first in range(0, table.rows, size):
        chunk = stored[first : first + size]
        rows = chunk if in_place else buffer[: len(chunk)]
        _fill(rows.view(-1), full_table, key, (piece.first_row + first) * full_table.dim)
        if not in_place:
            chunk.copy_(rowtype.pack(rows[:, columns], table.row_type, table.column_group))


def initial_rows(piece: TablePiece, key: int, rows_U: Tensor) -> Tensor:
    """These rows of a piece as `fill_piece` initialises them."""
    table, full_table = piece.table, piece.full_table
    weights_UD = torch.empty(len(rows_U), table.dim)
    starts_U = (piece.first_row + rows_U) * full_table.dim + piece.first_column
    match full_table.init:
        case Uniform(bound=bound):
            reach = 1 / math.sqrt(full_table.rows) if bound is None else bound
            torch.ops.rowwise.fill_uniform_rows(weights_UD, starts_U, key, -reach, reach)
        case Normal(std=std):
            angle_UD = torch.empty_like(weights_UD)
            torch.ops.rowwise.fill_uniform_rows(weights_UD, starts_U, key, 0.0, 1.0)
            torch.ops.rowwise.fill_uniform_rows(angle_UD, starts_U, key ^ 1, 0.0, 2 * math.pi)
            _to_normal(weights_UD, angle_UD, std)
        case Constant(value=value):
            weights_UD.fill_(value)
    return rowtype.pack(weights_UD, table.row_type, table.column_group)


def _fill(flat: Tensor, full_table: Table, key: int, start: int) -> None:
    """Initialise weights start, start + 1, ... of a table in row-major order."""
    match full_table.init:
        case Uniform(bound=bound):
            # DLRM's and TorchRec's default: the sum of a bag starts small however large the table is.
            reach = 1 / math.sqrt(full_table.rows) if bound is None else bound
            torch.ops.rowwise.fill_uniform(flat, key, start, -reach, reach)
        case Normal(std=std):
            _fill_normal(flat, key, start, std)
        case Constant(value=value):
            flat.fill_(value)


def table_key(seed: int, name: str) -> int:
    """The key of a table's random numbers: 63 bits that depend on seed and name."""
    # Not hash(): Python's is salted, and the same seed has to give the same rows in every process.
    text = f"{seed}/{name}".encode()
    return (zlib.crc32(text) << 31 | zlib.crc32(text[::-1])) & ((1 << 63) - 1)


def _fill_normal(flat: Tensor, key: int, start: int, std: float) -> None:
    """Box-Muller over two streams."""
    # key ^ 1 is another stream: no small number of steps leads from one to the other.
    angle = torch.empty_like(flat)
    torch.ops.rowwise.fill_uniform(flat, key, start, 0.0, 1.0)
    torch.ops.rowwise.fill_uniform(angle, key ^ 1, start, 0.0, 2 * math.pi)
    _to_normal(flat, angle, std)


def _to_normal(uniform: Tensor, angle: Tensor, std: float) -> None:
    # log1p(-u) with u in [0, 1) never meets log(0).
    uniform.copy_(std * torch.sqrt(-2 * torch.log1p(-uniform)) * torch.cos(angle))


def _zeros(size_bytes: int, device: torch.device) -> Tensor:
    # On huge pages that nothing touches before they are filled: each lands in the memory of the thread that fills it.
    if device.type == "cpu":
        return torch.ops.rowwise.zeros(size_bytes)
    return torch.zeros(size_bytes, dtype=torch.uint8, device=device)

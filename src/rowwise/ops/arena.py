"""The memory of all tables of a device: one block of rows, one of optimizer state.

Kernels address rows by their place in the block, so any number of tables, of whatever row types, is one call. The
blocks ask for huge pages. Filling is a function of (seed, table name, row, column) alone: the same bits for any
number of threads and any way of cutting the tables.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rowwise.errors import TableMemoryError
from rowwise.ops import rowtype
from rowwise.ops.layout import ArenaOffset, TablePiece, lay_out_tables
from rowwise.ops.touched import TouchedRows
from rowwise.spec import Constant, Normal, RowType, Table, Uniform, state_slots, state_width

CHUNK = 1 << 22  # numbers made at a time where torch does the arithmetic


@dataclass(slots=True, kw_only=True)
class Arena:
    """Rows and optimizer state of table pieces in two blocks of memory; `table` and `table_state` are views of them."""

    pieces: tuple[TablePiece, ...]
    offsets: tuple[ArenaOffset, ...]
    rows: Tensor = field(repr=False)  # uint8
    state: Tensor = field(repr=False)  # float32
    steps_T: Tensor = field(repr=False)  # updates so far, on the CPU
    keys_T: Tensor = field(repr=False)  # key of each table's random numbers
    touched: TouchedRows | None = None  # None: changes are not tracked

    @classmethod
    def allocate(cls, tables: Sequence[Table | TablePiece], device: torch.device) -> "Arena":
        """Zeroed memory for the tables, or pieces of tables."""
        pieces = tuple(x if isinstance(x, TablePiece) else TablePiece(x, x) for x in tables)
        offsets, size = lay_out_tables(piece.table for piece in pieces)
        try:
            rows, state = _zeros(size.base, device), _zeros(size.state_base * 4, device).view(torch.float32)
        except MemoryError:
            need = f"{size.base / 1e9:.1f} GB of rows and {size.state_base * 4 / 1e9:.1f} GB of optimizer state"
            largest = max((piece.table for piece in pieces), key=lambda t: t.rows * t.row_bytes)
            what = f"the largest is {largest.name!r} with {largest.rows} x {largest.dim}"
            got = f"{len(tables)} tables need {need}, which could not be allocated; {what}"
            raise TableMemoryError(f"{got}: want fewer or narrower rows, or more ranks") from None
        counts_T = torch.zeros(len(tables), dtype=torch.int64)
        return cls(
            pieces=pieces,
            offsets=tuple(offsets),
            rows=rows,
            state=state,
            steps_T=counts_T,
            keys_T=counts_T.clone(),
        )

    @property
    def tables(self) -> tuple[Table, ...]:
        """Each piece as a table of its own."""
        return tuple(piece.table for piece in self.pieces)

    def table(self, index: int) -> Tensor:
        """The rows of a table as they are stored: [R, D], or bytes [R, row_bytes] of int8 rows."""
        table, offset = self.pieces[index].table, self.offsets[index]
        # A view of the one block. Through DLPack it has a storage of its own: torch.save rejects views of one storage
        # with several dtypes, and would write the whole block with any table.
        block = self.rows[offset.base : offset.base + table.rows * table.row_bytes]
        rows = block.view(rowtype.dtype_of(table.row_type)).view(table.rows, -1)
        return rows if rows.is_meta else torch.from_dlpack(rows)

    def weights(self, index: int) -> Tensor:
        """The rows of a table as float32 [R, D]: the stored rows if they are float32, else a copy."""
        table = self.pieces[index].table
        return rowtype.unpack(self.table(index), table.dim, table.row_type, table.column_group)

    def table_state(self, index: int) -> dict[str, Tensor]:
        """Views of a table's optimizer state by name: [R] for one float a row, [R, W] for more; `step` is a scalar."""
        table, offset = self.pieces[index].table, self.offsets[index]
        width = state_width(table)
        block = self.state[offset.state_base : offset.state_base + table.rows * width].view(table.rows, width)
        views = {"step": self.steps_T[index]}
        at = 0
        for name, slot in state_slots(table).items():
            views[name] = block[:, at] if slot.width == 1 else block[:, at : at + slot.width]
            at += slot.width
        return views

    def track(self) -> TouchedRows:
        """Track which rows change from now on."""
        if self.touched is None:
            rows_T, bases_T = [table.rows for table in self.tables], [offset.base for offset in self.offsets]
            self.touched = TouchedRows(rows_T, bases_T, self.rows.device)
        return self.touched

    def mark_all(self) -> None:
        """Mark all rows as changed; called by code that writes into views of them."""
        if self.touched is not None:
            self.touched.mark_all()

    def fill(self, seed: int) -> None:
        """Initialise rows and optimizer state."""
        self.mark_all()
        self.keys_T = torch.tensor([table_key(seed, piece.full_table.name) for piece in self.pieces], dtype=torch.int64)
        self.steps_T.zero_()
        if self.rows.is_meta:  # no memory: the tables will be sharded
            return
        for index, piece in enumerate(self.pieces):
            fill_piece(self.table(index), piece, seed)
            table = piece.table
            views = self.table_state(index)
            for name, slot in state_slots(table).items():
                views[name].fill_(slot.initial)

    def to(self, device: torch.device) -> None:
        """Move to another device; existing views keep the old memory."""
        self.rows = self.rows.to(device)
        self.state = self.state.to(device)
        if self.touched is not None:
            self.touched.to(device)


def fill_piece(stored: Tensor, piece: TablePiece, seed: int) -> None:
    """Initialise the stored rows of a piece with the values that the whole table has there."""
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
    # log1p(-u) with u in [0, 1) never meets log(0).
    flat.copy_(std * torch.sqrt(-2 * torch.log1p(-flat)) * torch.cos(angle))


def _zeros(size_bytes: int, device: torch.device) -> Tensor:
    # Huge pages, and no page is touched before it is filled, so filling with many threads places them well.
    if device.type == "cpu":
        return torch.ops.rowwise.zeros(size_bytes)
    return torch.zeros(size_bytes, dtype=torch.uint8, device=device)

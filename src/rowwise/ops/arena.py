"""The memory of all tables of a device: one block of rows, one of optimizer state.

Kernels address rows by their place in the block, so any number of tables is one call. The blocks ask for huge
pages. Filling is a function of (seed, table name, row, column) alone: the same bits for any number of threads
and any way of cutting the tables.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rowwise.ops.layout import Place, place_tables, state_slots
from rowwise.spec import Constant, Normal, Table, Uniform

CHUNK = 1 << 22  # numbers made at a time where torch does the arithmetic


@dataclass(slots=True, kw_only=True)
class Arena:
    """Rows and optimizer state of `tables`; `table` and `state` give views."""

    tables: tuple[Table, ...]
    places: tuple[Place, ...]
    rows: Tensor = field(repr=False)
    state: Tensor = field(repr=False)

    @classmethod
    def allocate(cls, tables: Sequence[Table], device: torch.device) -> "Arena":
        """Zeroed memory for the tables."""
        places, size = place_tables(tables)
        try:
            rows, state = _zeros(size.base, device), _zeros(size.state_base, device)
        except MemoryError:
            need = f"{size.base * 4 / 1e9:.1f} GB of rows and {size.state_base * 4 / 1e9:.1f} GB of optimizer state"
            largest = max(tables, key=lambda t: t.rows * t.dim)
            what = f"the largest is {largest.name!r} with {largest.rows} x {largest.dim}"
            raise MemoryError(f"{len(tables)} tables need {need}, which this machine does not give; {what}") from None
        return cls(tables=tuple(tables), places=tuple(places), rows=rows, state=state)

    def table(self, index: int) -> Tensor:
        """The rows of a table [R, D]."""
        table, place = self.tables[index], self.places[index]
        # Cut from the one block: no copy, and no second owner.
        return self.rows[place.base : place.base + table.rows * table.dim].view(table.rows, table.dim)

    def table_state(self, index: int) -> dict[str, Tensor]:
        """The optimizer state of a table by name; a state of one float a row is [R]."""
        table, place = self.tables[index], self.places[index]
        slots = state_slots(table)
        width = sum(slots.values())
        block = self.state[place.state_base : place.state_base + table.rows * width].view(table.rows, width)
        views: dict[str, Tensor] = {}
        at = 0
        for name, size in slots.items():
            views[name] = block[:, at] if size == 1 else block[:, at : at + size]
            at += size
        return views

    def fill(self, seed: int) -> None:
        """Initial rows and state."""
        for index, table in enumerate(self.tables):
            fill_table(self.table(index), table, seed)
            for view in self.table_state(index).values():
                view.fill_(getattr(table.optimizer, "initial", 0.0))

    def to(self, device: torch.device) -> None:
        """Move to another device; views taken before stay behind."""
        self.rows = self.rows.to(device)
        self.state = self.state.to(device)


def fill_table(rows_RD: Tensor, table: Table, seed: int) -> None:
    """Fill a table as its `init` says."""
    flat = rows_RD.view(-1)
    # By name, not by position: adding a table leaves the rows of the others as they were.
    key = table_key(seed, table.name)
    match table.init:
        case Uniform(bound=bound):
            # DLRM's and TorchRec's default: the sum of a bag starts small however large the table is.
            reach = 1 / math.sqrt(table.rows) if bound is None else bound
            torch.ops.rowwise.fill_uniform(flat, key, 0, -reach, reach)
        case Normal(std=std):
            _fill_normal(flat, key, std)
        case Constant(value=value):
            flat.fill_(value)


def table_key(seed: int, name: str) -> int:
    """The key of a table's random numbers: 63 bits that depend on seed and name."""
    # Not hash(): Python's is salted, and the same seed has to give the same rows in every process.
    text = f"{seed}/{name}".encode()
    return (zlib.crc32(text) << 31 | zlib.crc32(text[::-1])) & ((1 << 63) - 1)


def _fill_normal(flat: Tensor, key: int, std: float) -> None:
    """Box-Muller over two streams, in pieces so that a large table needs little beside itself."""
    for start in range(0, flat.numel(), CHUNK):
        piece = flat[start : start + CHUNK]
        # key ^ 1 is another stream: no small number of steps leads from one to the other.
        angle = torch.empty_like(piece)
        torch.ops.rowwise.fill_uniform(piece, key, start, 0.0, 1.0)
        torch.ops.rowwise.fill_uniform(angle, key ^ 1, start, 0.0, 2 * math.pi)
        # log1p(-u) with u in [0, 1) never meets log(0).
        piece.copy_(std * torch.sqrt(-2 * torch.log1p(-piece)) * torch.cos(angle))


def _zeros(floats: int, device: torch.device) -> Tensor:
    # Huge pages, and no page is touched before it is filled, so filling with many threads places them well.
    if device.type == "cpu":
        return torch.ops.rowwise.zeros(floats)
    return torch.zeros(floats, device=device)

"""The tables of a collection in state dicts: plain tensors where each rank holds all of one, else ShardedTensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.distributed.types import Shard, ShardedTensor, ShardedTensorMetadata, ShardMetadata, TensorProperties

from rowwise.base.errors import StateError
from rowwise.parallel.plan import Tile
from rowwise.parallel.shard.embeddings import AnyEmbeddings
from rowwise.tables.embedding import Embeddings
from rowwise.tables.ops.rowtype import dtype_of
from rowwise.tables.row_optimizers import Adam
from rowwise.tables.spec import RowType, Table

STATE_NAMES = {"sum": "momentum1"}  # of ours in TorchRec; the others are alike


class HeldPiece(NamedTuple):
    """A rectangle of a table on this rank: views of its rows, and of its optimizer state by name."""

    tile: Tile
    rows: Tensor
    state: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePieces:
    """The pieces of a table on this rank, and where those of all ranks are."""

    table: Table
    local: Sequence[HeldPiece]
    tiles: Sequence[Tile]  # of all ranks, by columns, then by rows; empty if each rank holds the table
    env: Any  # TorchRec's environment

    def save_rows(self) -> Any:
        """The rows for a state dict."""
        if not self.tiles:
            return self.local[0].rows
        shards = [((tile.rows[0], tile.cols[0]), _sizes(tile)) for tile in self.tiles]
        size, dtype = (self.table.rows, self.table.dim), dtype_of(self.table.row_type)
        return self._sharded([piece.rows for piece in self.local], shards, size, dtype)

    def save_state(self) -> dict[str, Any]:
        """The optimizer state by TorchRec's names, which load_state_dict of an optimizer writes into."""
        names = [name for piece in self.local[:1] for name in piece.state if name != "step" or self._needs_step]
        return {f"{self.table.name}.{STATE_NAMES.get(name, name)}": self._save_slot(name) for name in names}

    def load_rows(self, key: str, value: Any) -> None:
        """Copy rows from a state dict: a plain tensor of the table, or the shards of a ShardedTensor on this rank."""
        sources: list[tuple[int, int, Tensor]] = [(0, 0, value)]
        if isinstance(value, ShardedTensor):
            sources = [(*shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
        if tuple(value.size()) != (self.table.rows, self.table.dim):
            raise StateError(f"{key}: got {tuple(value.size())}", (self.table.rows, self.table.dim))
        for piece in self.local:
            copied = sum(_copy_overlap(piece, *source) for source in sources)
            if copied != piece.rows.numel():
                raise StateError(
                    f"{key}: this rank's shards have {copied} of the {piece.rows.numel()} weights of {piece.tile}",
                    "the plan that the state dict was saved with, or a plain tensor of the table",
                    hint="torch.distributed.checkpoint loads into any plan",
                )

    @property
    def _needs_step(self) -> bool:
        """Whether an update depends on the number of updates before it; TorchRec has no name for that number."""
        return isinstance(self.table.optimizer, Adam) or self.table.row_type is not RowType.FP32

    def _save_slot(self, name: str) -> Any:
        slots: list[Tensor] = [piece.state[name] for piece in self.local]
        if not self.tiles or not slots[0].dim():
            return slots[0]
        if slots[0].dim() == 2:
            shards = [((tile.rows[0], tile.cols[0]), _sizes(tile)) for tile in self.tiles]
            return self._sharded(slots, shards, (self.table.rows, self.table.dim))
        # One number for each row of each piece: as TorchRec, one after the other, so that no two pieces overlap.
        ends = list(accumulate((_sizes(tile)[0] for tile in self.tiles), initial=0))
        rows = [((begin,), (end - begin,)) for begin, end in pairwise(ends)]
        return self._sharded(slots, rows, ends[-1:])

    def _sharded(
        self, tensors: Sequence[Tensor], shards: Sequence[Any], size: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Any:
        """A ShardedTensor of this rank's tensors, with a shard for each tile."""
        metadata = {
            tile: ShardMetadata(shard_offsets=list(offsets), shard_sizes=list(sizes), placement=f"rank:{tile.rank}/cpu")
            for tile, (offsets, sizes) in zip(self.tiles, shards, strict=True)
        }
        local = [Shard(tensor, metadata[piece.tile]) for piece, tensor in zip(self.local, tensors, strict=True)]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            local,
            ShardedTensorMetadata(list(metadata.values()), torch.Size(size), TensorProperties(dtype=dtype)),
            process_group=self.env.process_group,
        )


def find_pieces(embeddings: AnyEmbeddings, env: Any) -> Iterator[TablePieces]:
    """The pieces of each table, in order."""
    if isinstance(embeddings, Embeddings):
        states = embeddings.optimizer_state()
        for table in embeddings.tables:
            tile = Tile(table.name, 0, (0, table.rows), (0, table.dim))
            local = HeldPiece(tile, embeddings.table(table.name), states[table.name])
            yield TablePieces(table=table, local=[local], tiles=(), env=env)
        return
    everywhere = {table.name for table in embeddings.routes.replicated}
    tiles = [piece.tile for groups in embeddings.routes.groups_W for group in groups for piece in group.pieces]
    # Tiles of the door are in memory, so that rows and state are tensors.
    pieces = [
        HeldPiece(held.tile, held.rows, {name: x for name, x in held.state.items() if isinstance(x, Tensor)})
        for held in embeddings.local_tiles()
        if isinstance(held.rows, Tensor)
    ]
    for table in embeddings.tables:
        own = [tile for tile in tiles if tile.table == table.name and table.name not in everywhere]
        own.sort(key=lambda tile: (tile.cols, tile.rows))
        local = [piece for piece in pieces if piece.tile.table == table.name]
        yield TablePieces(table=table, local=local, tiles=own, env=env)


def _sizes(tile: Tile) -> tuple[int, int]:
    return tile.rows[1] - tile.rows[0], tile.cols[1] - tile.cols[0]


def _copy_overlap(piece: HeldPiece, row: int, column: int, source: Tensor) -> int:
    """Copy what a rectangle of the table shares with a piece; returns the number of weights."""
    first = [max(a, b) for a, b in zip((row, column), (piece.tile.rows[0], piece.tile.cols[0]), strict=True)]
    ends = (row + source.shape[0], column + source.shape[1]), (piece.tile.rows[1], piece.tile.cols[1])
    last = [min(a, b) for a, b in zip(*ends, strict=True)]
    if first[0] >= last[0] or first[1] >= last[1]:
        return 0

    def part(tensor: Tensor, at: tuple[int, int]) -> Tensor:
        return tensor[first[0] - at[0] : last[0] - at[0], first[1] - at[1] : last[1] - at[1]]

    target = part(piece.rows, (piece.tile.rows[0], piece.tile.cols[0]))
    target.copy_(part(source.detach(), (row, column)))
    return target.numel()

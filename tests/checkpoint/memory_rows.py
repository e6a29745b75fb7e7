"""Rows in memory that are read and written as those on disk are: in runs, never as one tensor."""

from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rowwise.parallel.shard.embeddings import LocalTile, ShardedEmbeddings


@dataclass
class MemoryRows:
    """A `RowStream` over a tensor; `sizes` has the bytes of each run that was read or written."""

    tensor: Tensor
    sizes: list[int] = field(default_factory=list)
    initial = None

    def forget(self):
        pass

    @property
    def shape(self):
        return tuple(self.tensor.shape)

    @property
    def dtype(self):
        return self.tensor.dtype

    def read(self, begin, end):
        assert 0 <= begin <= end <= len(self.tensor)
        return self._count(self.tensor[begin:end].clone())

    def read_rows(self, rows):
        assert rows.dtype == torch.int64
        assert bool((rows[1:] > rows[:-1]).all())
        return self._count(self.tensor[rows])

    def write(self, begin, values):
        assert begin + len(values) <= len(self.tensor)
        assert values.shape[1:] == self.tensor.shape[1:]
        self.tensor[begin : begin + len(values)] = self._count(values)

    def write_rows(self, rows, values):
        self.tensor[rows] = self._count(values)

    def _count(self, values):
        assert values.dtype == self.dtype
        self.sizes.append(values.nbytes)
        return values


@contextmanager
def streamed(module: ShardedEmbeddings, choose=lambda tile: True):
    """While it lasts, the chosen tiles of a module are streams over their memory; yields all sizes of runs."""
    views, sizes = module.local_tiles, list[int]()

    def stream(x: Tensor):
        return MemoryRows(x.detach(), sizes) if x.dim() else x

    def local_tiles() -> list[LocalTile]:
        return [
            replace(tile, rows=stream(tile.rows), state={name: stream(x) for name, x in tile.state.items()})
            if choose(tile.tile)
            else tile
            for tile in views()
        ]

    module.local_tiles = local_tiles
    try:
        yield sizes
    finally:
        del module.local_tiles

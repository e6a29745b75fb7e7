"""The peers of `tiers.py`: nn.EmbeddingBag on memory-mapped files, and rows in RocksDB.

Both get more than they would in practice. No control group limits the page cache; instead, the pages that it may keep
are chosen beforehand, those with the most frequent rows, and after each step the others are written and dropped: what
the system would have to do for room. RocksDB's rows come sorted, its log is off, and an update does not read again what
the lookup has read.
"""

import ctypes
import os
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from parts.tiers_work import (
    IN_FLIGHT,
    SKEW,
    START,
    STATE,
    BLOCK_bytes,
    FLOAT_bytes,
    Numbers,
    Size,
    adagrad,
    chunks,
    frequent_rows,
)

RANDOM, DONT_NEED = 1, 4  # advice to madvise
START_WRITE, WAIT = 2, 1  # flags of sync_file_range
SEGMENT_bytes = 64 << 20
KEYS = 1 << 16  # that are read at a time to warm a cache


@final
class MemoryMapped:
    """A file of rows and one of state for each table, `torch.from_file(shared=True)`, sparse gradients."""

    def __init__(self, size: Size, folder: Path) -> None:
        """Rows of a page are neighbours, so a page is as frequent as its rows together."""
        self._size, self._libc = size, ctypes.CDLL(None, use_errno=True)
        self._paths = [folder / f"t{number}.rows" for number in range(size.tables)]
        row_bytes = size.dim * FLOAT_bytes
        self._page_rows = BLOCK_bytes // row_bytes
        pages = -(-size.rows // self._page_rows)
        share_R = np.zeros(pages * self._page_rows)
        share_R[frequent_rows(size, 0, size.rows)] = np.arange(1, size.rows + 1.0) ** -SKEW
        share_P = share_R.reshape(pages, self._page_rows).sum(1)
        # State is always in memory: a page of it has the state of a thousand rows.
        kept = (size.budget_bytes // size.tables - size.rows * FLOAT_bytes) // BLOCK_bytes
        self._kept_P = np.zeros(pages, bool)
        self._kept_P[np.argpartition(-share_P, min(kept, pages - 1))[:kept]] = True
        for path in self._paths:
            self._write(path, pages)
        self._files = [os.open(path, os.O_RDWR) for path in self._paths]
        self._bags = [self._map(path) for path in self._paths]
        self._states = [torch.full((size.rows,), STATE) for _ in self._paths]
        self._out_BS = torch.empty(0)

    def look_up(self, ids_TB: Tensor) -> Tensor:
        bags = zip(self._bags, ids_TB, strict=True)
        self._out_BS = torch.cat([bag(ids_B.unsqueeze(1)) for bag, ids_B in bags], 1)
        return self._out_BS

    def update(self, ids_TB: Tensor, grad_BS: Tensor) -> None:
        self._out_BS.backward(grad_BS)
        for bag, state_R in zip(self._bags, self._states, strict=True):
            gradient = bag.weight.grad
            assert gradient is not None
            merged = gradient.coalesce()
            rows_U, weight_RD = merged.indices()[0], bag.weight.data
            weight_RD[rows_U], state_R[rows_U] = adagrad(weight_RD[rows_U], state_R[rows_U], merged.values())
            bag.weight.grad = None

    def end_step(self, ids_TB: Tensor) -> None:
        """Write and drop the pages that are not kept: all writes are started before the first is waited for."""
        found = []
        for file, bag, ids_B in zip(self._files, self._bags, ids_TB.numpy(), strict=True):
            pages = np.unique(ids_B // self._page_rows)
            found += [(file, bag, page * BLOCK_bytes) for page in pages[~self._kept_P[pages]].tolist()]
        for flags in (START_WRITE, WAIT):
            for file, _, at in found:
                self._libc.sync_file_range(file, ctypes.c_int64(at), ctypes.c_int64(BLOCK_bytes), flags)
        for file, bag, at in found:
            self._advise(bag, at, BLOCK_bytes, DONT_NEED)
            os.posix_fadvise(file, at, BLOCK_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for file, path in zip(self._files, self._paths, strict=True):
            os.close(file)
            path.unlink()

    def _write(self, path: Path, pages: int) -> None:
        """Write all rows, let go of all pages, and read those that are kept.

        The system caches what is written in larger units than pages, and drops no part of a unit.
        """
        page = np.full(BLOCK_bytes // FLOAT_bytes, START, np.float32).tobytes()
        with path.open("w+b", 0) as file:
            for begin, end in chunks(pages, SEGMENT_bytes // BLOCK_bytes):
                file.write(page * (end - begin))
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            places = (np.flatnonzero(self._kept_P) * BLOCK_bytes).tolist()
            with ThreadPoolExecutor(IN_FLIGHT) as threads:
                parts = (places[at::IN_FLIGHT] for at in range(IN_FLIGHT))
                list(threads.map(lambda part: [os.pread(file.fileno(), BLOCK_bytes, at) for at in part], parts))

    @property
    def cache_bytes(self) -> int:
        """Of the pages in memory."""
        count = 0
        for bag in self._bags:
            length = bag.weight.numel() * FLOAT_bytes
            pages = np.zeros(-(-length // BLOCK_bytes), np.uint8)
            address = ctypes.c_void_p(bag.weight.data_ptr())
            self._libc.mincore(address, ctypes.c_size_t(length), ctypes.c_void_p(pages.ctypes.data))
            count += int((pages & 1).sum())
        return count * BLOCK_bytes

    def _map(self, path: Path) -> nn.EmbeddingBag:
        size = self._size
        numbers = torch.from_file(str(path), shared=True, size=size.rows * size.dim, dtype=torch.float32)
        bag = nn.EmbeddingBag.from_pretrained(numbers.view(size.rows, size.dim), freeze=False, mode="sum", sparse=True)
        # Without this a fault reads the pages around it.
        self._advise(bag, 0, size.rows * size.dim * FLOAT_bytes, RANDOM)
        return bag

    def _advise(self, bag: nn.EmbeddingBag, at: int, count: int, advice: int) -> None:
        address = ctypes.c_void_p(bag.weight.data_ptr() + at)
        if self._libc.madvise(address, ctypes.c_size_t(count), advice):
            raise OSError(ctypes.get_errno(), "madvise")


@final
class RocksRows:
    """Rows and state as values of RocksDB: MultiGet, and a write batch for each step."""

    def __init__(self, size: Size, folder: Path) -> None:
        """Direct reads; the block cache has the budget."""
        import rocksdict as rocks

        self._rocks, self._size = rocks, size
        blocks = rocks.BlockBasedOptions()
        blocks.set_block_size(BLOCK_bytes)
        self._cache = rocks.Cache(size.budget_bytes)
        blocks.set_block_cache(self._cache)
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_bloom_filter(10, False)
        options = rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocks.DBCompressionType.none())
        options.set_block_based_table_factory(blocks)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.increase_parallelism(os.cpu_count() or 1)
        self._folder = folder / "rocks"
        self._db = rocks.Rdict(str(self._folder), options)
        self._write = rocks.WriteOptions()
        self._write.disable_wal = True
        self._values: list[tuple[Numbers, Tensor]] = []
        self._fill(options)

    def look_up(self, ids_TB: Tensor) -> Tensor:
        self._values, out = [], []
        for table, ids_B in enumerate(ids_TB.numpy()):
            rows_U, inverse_B = np.unique(ids_B, return_inverse=True)
            stored = self._db.get(self._keys(table, rows_U))
            values_UV = torch.frombuffer(bytearray(b"".join(stored)), dtype=torch.float32).view(len(rows_U), -1)
            self._values.append((rows_U, values_UV))
            out.append(values_UV[torch.from_numpy(inverse_B), :-1])
        return torch.cat(out, 1)

    def update(self, ids_TB: Tensor, grad_BS: Tensor) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        parts = zip(self._values, ids_TB.numpy(), grad_BS.split(self._size.dim, 1), strict=True)
        for table, ((rows_U, values_UV), ids_B, grad_BD) in enumerate(parts):
            inverse_B = torch.from_numpy(np.searchsorted(rows_U, ids_B))
            grad_UD = torch.zeros(len(rows_U), self._size.dim).index_add_(0, inverse_B, grad_BD)
            weights_UD, state_U = adagrad(values_UV[:, :-1], values_UV[:, -1], grad_UD)
            values = torch.cat([weights_UD, state_U.unsqueeze(1)], 1).numpy().tobytes()
            length = len(values) // len(rows_U)
            for number, key in enumerate(self._keys(table, rows_U)):
                batch.put(key, values[number * length : (number + 1) * length])
        self._db.write(batch, self._write)

    def end_step(self, ids_TB: Tensor) -> None:
        pass

    @property
    def cache_bytes(self) -> int:
        """Of blocks in memory."""
        return self._cache.get_usage()

    def close(self) -> None:
        self._db.close()
        shutil.rmtree(self._folder)

    def _keys(self, table: int, rows_U: Numbers) -> list[bytes]:
        keys = (rows_U | table << 40).astype(">u8").tobytes()
        return [keys[at : at + 8] for at in range(0, len(keys), 8)]

    def _fill(self, options: object) -> None:
        """Ingest sorted files of all rows, then read the most frequent ones, as many as the cache has blocks."""
        value = struct.pack(f"{self._size.dim + 1}f", *[START] * self._size.dim, STATE)
        for table in range(self._size.tables):
            path = self._folder.with_name(f"t{table}.sst")
            writer = self._rocks.SstFileWriter(options=options)
            writer.open(str(path))
            for begin, end in chunks(self._size.rows, KEYS):
                for key in self._keys(table, np.arange(begin, end)):
                    writer[key] = value
            writer.finish()
            moved = self._rocks.IngestExternalFileOptions()
            moved.set_move_files(True)
            self._db.ingest_external_file([str(path)], moved)
        blocks = self._size.budget_bytes // BLOCK_bytes // self._size.tables
        for table in range(self._size.tables):
            for begin, end in chunks(min(blocks, self._size.rows), KEYS):
                self._db.get(self._keys(table, np.sort(frequent_rows(self._size, begin, end))))

"""Measures sets of tables on this rank's device: the lookup, and backward with update.

The first access to a page costs more than a lookup. So each process touches a pool of memory once, and every set gets a
slice of it, which is zero before and after. The operators are the fused ones of training. All ranks measure at the same
time, each its own sets, so memory and caches are as busy as in a real step.

A machine's speed changes from second to second, and consecutive repeats all see the same speed. So several sets take
turns, with three repeats each: more sets are worth more than more repeats.

Before each repeat, other memory evicts the tables from caches, as the rest of a model does. With one thread, its
CPU time counts instead of wall-clock time, so that other programs on the same processor are not measured. Caches that a
small model leaves warm are not modelled.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from rowwise.planning.calibrate.draw import DrawnSet, FLOAT_bytes, LINE_bytes
from rowwise.planning.calibrate.ids import draw_batch
from rowwise.tables.batch import Jagged
from rowwise.tables.embedding import Embeddings
from rowwise.tables.ops.arena import Arena
from rowwise.tables.spec import state_width

BATCHES = 2  # that repeats alternate between
REPEATS = 3  # after a warm-up
MAX_TURNS = 8  # sets that take turns
LOW_QUANTILE = 0.2  # of the repeats, which is the result
MAX_FLUSH_bytes = 64 << 20
GPU_L2_bytes = 64 << 20  # if the device reports none
GRADIENT = 0.01  # standard deviation of gradients: no overflow, and no denormals, which are slow


class SetSeconds(NamedTuple):
    """Seconds of a set of tables."""

    lookup_s: float
    update_s: float  # backward and update


@final
class KernelBench:
    """A pool of memory on a device, in which sets of tables are measured."""

    def __init__(self, pool_bytes: int, vector_floats: int, device: str = "cpu") -> None:
        """Touches every page of the pool, so that no first access is measured."""
        self.device = torch.device(device)
        self._pool = _allocate_zeros(pool_bytes, self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        self._grads = torch.randn(vector_floats, generator=generator, device=self.device) * GRADIENT
        one_thread = self.device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if one_thread else time.perf_counter
        self._cache_filler = torch.ones(flush_bytes(self.device) // FLOAT_bytes, device=self.device)

    def take(self, sets: Iterable[DrawnSet]) -> list[DrawnSet]:
        """The first sets that fit the pool together, at least one and at most `MAX_TURNS`."""
        taken: list[DrawnSet] = []
        left_bytes = len(self._pool)
        for drawn in sets:
            left_bytes -= _arena_bytes(Embeddings([w.table for w in drawn.workloads], device="meta").arena)
            if taken and left_bytes < 0:
                break
            taken.append(drawn)
            if len(taken) == MAX_TURNS:
                break
        return taken

    def measure(self, sets: Sequence[DrawnSet], seed: int) -> list[SetSeconds]:
        """A low quantile of the repeats of each set, without the warm-up. Sets take turns."""
        placed = self._place_in_pool(sets, seed)
        repeats: list[list[SetSeconds]] = [[] for _ in sets]
        try:
            for repeat in range(REPEATS + 1):
                for index, (module, batches) in enumerate(placed):
                    repeats[index].append(self._step(module, batches[repeat % BATCHES]))
        finally:
            for module, batches in placed:
                _zero_touched_rows(module.arena, batches)
        return [SetSeconds(*(low_quantile(stage) for stage in zip(*stages[1:], strict=True))) for stages in repeats]

    def _place_in_pool(self, sets: Sequence[DrawnSet], seed: int) -> list[tuple[Embeddings, list[Jagged]]]:
        """Tables side by side in the pool, all weights zero, and batches for each set."""
        placed: list[tuple[Embeddings, list[Jagged]]] = []
        left = self._pool
        for drawn in sets:
            rng = np.random.default_rng((seed, drawn.number))
            module = Embeddings([w.table for w in drawn.workloads], device="meta")
            arena = module.arena
            rows_bytes, state_bytes = arena.rows.nbytes, arena.state.nbytes
            begin, end = _align(rows_bytes), _arena_bytes(arena)
            assert end <= len(left), f"{end} bytes of {len(left)}"
            arena.rows, arena.state = left[:rows_bytes], left[begin : begin + state_bytes].view(torch.float32)
            left = left[end:]
            placed.append(
                (module, [self._to_device(draw_batch(drawn.workloads, drawn.batch, rng)) for _ in range(BATCHES)])
            )
        return placed

    def _step(self, module: Embeddings, batch: Jagged) -> SetSeconds:
        self._cache_filler.sum()  # evicts tables from caches
        begin = self._now()
        vectors = module(batch)
        middle = self._now()
        matrix_BS = vectors.matrix_BS
        matrix_BS.backward(self._grads[: matrix_BS.numel()].view_as(matrix_BS))
        module.update()
        return SetSeconds(middle - begin, self._now() - middle)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._clock()

    def _to_device(self, batch: Jagged) -> Jagged:
        if self.device.type == "cpu":
            return batch
        values_N, lengths_FB = batch.values_N.to(self.device), batch.lengths_FB.to(self.device)
        return Jagged(features=batch.features, values_N=values_N, lengths_FB=lengths_FB)


def _zero_touched_rows(arena: Arena, batches: Sequence[Jagged]) -> None:
    """Zeroes rows that batches touched, or whole tables if that is less work."""
    ids = [[batch.values_N[begin:end] for begin, end in batch.id_ranges().values()] for batch in batches]
    begin = 0
    for index, table in enumerate(arena.tables):
        count = len(table.feature_names)
        ids_N = torch.cat([values for batch_ids in ids for values in batch_ids[begin : begin + count]])
        begin += count
        _zero_rows(arena.table(index), ids_N)
        offset, width = arena.offsets[index], state_width(table)
        if width:
            state = arena.state[offset.state_base : offset.state_base + table.rows * width]
            _zero_rows(state.view(table.rows, width), ids_N)


def _arena_bytes(arena: Arena) -> int:
    """Bytes of rows and of state, each aligned to a cache line."""
    return _align(arena.rows.nbytes) + _align(arena.state.nbytes)


def _align(size_bytes: int) -> int:
    return -(-size_bytes // LINE_bytes) * LINE_bytes


def low_quantile(seconds: Sequence[float]) -> float:
    """The 20 % quantile: the machine's own time, without most disturbances by other programs."""
    return sorted(seconds)[int(len(seconds) * LOW_QUANTILE)]


def flush_bytes(device: torch.device) -> int:
    """Twice the last-level cache, within limits."""
    if device.type == "cuda":
        return 2 * int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", GPU_L2_bytes))
    return min(2 * last_cache_bytes(), MAX_FLUSH_bytes)


def last_cache_bytes() -> int:
    """Size of the last-level cache by Linux; a common size elsewhere."""
    sizes = [
        _parse_cache_size(path.read_text()) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=MAX_FLUSH_bytes // 2)


def _parse_cache_size(text: str) -> int:
    """Parses a size such as 2048K."""
    number, unit = text.strip()[:-1], text.strip()[-1]
    return int(number) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[unit]


def _allocate_zeros(size_bytes: int, device: torch.device) -> Tensor:
    """Zeroed memory whose pages are mapped, allocated as an arena's."""
    if device.type == "cpu":
        return torch.ops.rowwise.zeros(size_bytes).zero_()
    return torch.zeros(size_bytes, dtype=torch.uint8, device=device)


def _zero_rows(rows_RD: Tensor, ids_N: Tensor) -> None:
    """Zeroes these rows; all rows, if they are not many more."""
    if len(rows_RD) <= 2 * len(ids_N):
        rows_RD.zero_()
    elif rows_RD.device.type == "cpu":
        # One void scalar per row: torch's indexing would copy element by element.
        rows_R = rows_RD.view(torch.uint8).numpy().view(f"V{rows_RD[0].nbytes}")[:, 0]
        rows_R[ids_N.numpy()] = np.zeros((), rows_R.dtype)
    else:
        rows_RD.index_fill_(0, ids_N, 0)

"""What a set of tables takes on this rank's device: its lookup, and the backward and update of what was looked up.

Fresh pages cost more than what is to be measured, so each process touches a pool of memory once, and every set lives
in a slice of it, which is zero before and after. The operators are the fused ones that train. Ranks measure at the
same time, each its own sets: a rank's neighbours are then as busy as they are in a real step, and what they share,
memory and caches, is shared.

What else goes on in a machine changes from second to second, and repeats that follow each other see the same of it. So
several sets take turns; more than three repeats tell nothing new, and more sets do.

Before each repeat other memory is read, as a step between two lookups reads the rest of a model. Where one thread does
all the work its own time is taken, not that of the wall: what other programs do to a processor that is shared with
them is not the machine's. Known limits: what a lookup finds in caches that a small model leaves alone.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from rowwise.batch import Jagged
from rowwise.calibrate.draw import DrawnSet, FLOAT_bytes, LINE_bytes
from rowwise.calibrate.ids import ids_of
from rowwise.embedding import Embeddings
from rowwise.ops.arena import Arena
from rowwise.spec import state_width

BATCHES = 2  # that repeats go through
REPEATS = 3  # after one that warms up
MOST_TURNS = 8  # sets that take turns
LOW = 0.2  # the share of repeats that are faster than what is told
MOST_FLUSH_bytes = 64 << 20
GPU_L2_bytes = 64 << 20  # where the device does not say
GRADIENT = 0.01  # deviation of what comes back: nothing overflows, nothing is so small that processors are slow


class SetSeconds(NamedTuple):
    """Seconds of each stage for one set of tables."""

    lookup_s: float
    update_s: float  # backward and update


@final
class KernelBench:
    """Memory for sets of tables on a device."""

    def __init__(self, pool_bytes: int, vector_floats: int, device: str = "cpu") -> None:
        """Touch all of it: pages that are met for the first time would be a part of what is measured."""
        self.device = torch.device(device)
        self._pool = _zeros(pool_bytes, self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        self._grads = torch.randn(vector_floats, generator=generator, device=self.device) * GRADIENT
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if alone else time.perf_counter
        self._other = torch.ones(flush_bytes(self.device) // FLOAT_bytes, device=self.device)

    def take(self, sets: Iterable[DrawnSet]) -> list[DrawnSet]:
        """The first of some sets, as many as take turns: those that fit the pool together, but at least one."""
        taken: list[DrawnSet] = []
        left_bytes = len(self._pool)
        for drawn in sets:
            left_bytes -= _size_bytes_of(Embeddings([w.table for w in drawn.workloads], device="meta").arena)
            if taken and left_bytes < 0:
                break
            taken.append(drawn)
            if len(taken) == MOST_TURNS:
                break
        return taken

    def measure(self, sets: Sequence[DrawnSet], seed: int) -> list[SetSeconds]:
        """A low quantile of some repeats of each, after one that warms up; sets that were taken together take turns."""
        places = self._places(sets, seed)
        taken: list[list[SetSeconds]] = [[] for _ in sets]
        try:
            for repeat in range(REPEATS + 1):
                for index, (module, batches) in enumerate(places):
                    taken[index].append(self._step(module, batches[repeat % BATCHES]))
        finally:
            for module, batches in places:
                _clean(module.arena, batches)
        return [SetSeconds(*(low(stage) for stage in zip(*each[1:], strict=True))) for each in taken]

    def _places(self, sets: Sequence[DrawnSet], seed: int) -> list[tuple[Embeddings, list[Jagged]]]:
        """Tables side by side in the pool, all of whose numbers are zero, and batches for each."""
        found: list[tuple[Embeddings, list[Jagged]]] = []
        left = self._pool
        for drawn in sets:
            rng = np.random.default_rng((seed, drawn.number))
            module = Embeddings([w.table for w in drawn.workloads], device="meta")
            arena = module.arena
            rows_bytes, state_bytes = arena.rows.nbytes, arena.state.nbytes
            begin, end = _aligned(rows_bytes), _size_bytes_of(arena)
            assert end <= len(left), f"{end} bytes of {len(left)}"
            arena.rows, arena.state = left[:rows_bytes], left[begin : begin + state_bytes].view(torch.float32)
            left = left[end:]
            found.append((module, [self._moved(ids_of(drawn.workloads, drawn.batch, rng)) for _ in range(BATCHES)]))
        return found

    def _step(self, module: Embeddings, batch: Jagged) -> SetSeconds:
        self._flush()
        begin = self._now()
        vectors = module(batch)
        middle = self._now()
        matrix_BS = vectors.matrix_BS
        matrix_BS.backward(self._grads[: matrix_BS.numel()].view_as(matrix_BS))
        module.update()
        return SetSeconds(middle - begin, self._now() - middle)

    def _flush(self) -> None:
        self._other.sum()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._clock()

    def _moved(self, batch: Jagged) -> Jagged:
        if self.device.type == "cpu":
            return batch
        values_N, lengths_FB = batch.values_N.to(self.device), batch.lengths_FB.to(self.device)
        return Jagged(features=batch.features, values_N=values_N, lengths_FB=lengths_FB)


def _clean(arena: Arena, batches: Sequence[Jagged]) -> None:
    """Zeros again: where rows were touched, or everywhere if that is less."""
    ids = [_ids_by_feature(batch) for batch in batches]
    at = 0
    for index, table in enumerate(arena.tables):
        count = len(table.feature_names)
        ids_N = torch.cat([values for each in ids for values in each[at : at + count]])
        at += count
        _zero(arena.table(index), ids_N)
        place, width = arena.places[index], state_width(table)
        if width:
            state = arena.state[place.state_base : place.state_base + table.rows * width]
            _zero(state.view(table.rows, width), ids_N)


def _size_bytes_of(arena: Arena) -> int:
    """Rows and state, each from a line of their own on."""
    return _aligned(arena.rows.nbytes) + _aligned(arena.state.nbytes)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // LINE_bytes) * LINE_bytes


def low(taken_s: Sequence[float]) -> float:
    """What a fifth of the repeats stay under: the machine's own, without most of what others do to it."""
    return sorted(taken_s)[int(len(taken_s) * LOW)]


def flush_bytes(device: torch.device) -> int:
    """Twice the last cache, as far as that is reasonable."""
    if device.type == "cuda":
        return 2 * int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", GPU_L2_bytes))
    return min(2 * last_cache_bytes(), MOST_FLUSH_bytes)


def last_cache_bytes() -> int:
    """Of this processor, as Linux says; a usual one where nobody does."""
    found = [_size_bytes(path.read_text()) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(found, default=MOST_FLUSH_bytes // 2)


def _size_bytes(text: str) -> int:
    number, unit = text.strip()[:-1], text.strip()[-1]
    return int(number) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[unit]


def _ids_by_feature(batch: Jagged) -> Sequence[Tensor]:
    counts = batch.lengths_FB.view(len(batch.features), -1).sum(1).tolist()
    return batch.values_N.split(counts)


def _zeros(size_bytes: int, device: torch.device) -> Tensor:
    """Memory like an arena's, all of which is there."""
    if device.type == "cpu":
        return torch.ops.rowwise.zeros(size_bytes).zero_()
    return torch.zeros(size_bytes, dtype=torch.uint8, device=device)


def _zero(rows_RD: Tensor, ids_N: Tensor) -> None:
    """These rows; all of them, if they are fewer."""
    if len(rows_RD) <= 2 * len(ids_N):
        rows_RD.zero_()
    elif rows_RD.device.type == "cpu":
        # A row as one value: torch goes over its elements one by one.
        rows_R = rows_RD.view(torch.uint8).numpy().view(f"V{rows_RD[0].nbytes}")[:, 0]
        rows_R[ids_N.numpy()] = np.zeros((), rows_R.dtype)
    else:
        rows_RD.index_fill_(0, ids_N, 0)

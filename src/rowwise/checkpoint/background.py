"""Saves in the background: copies the tensors, then writes the copies in a thread.

The next save reuses the memory of the copies: allocating fresh pages is many times slower than copying. Known limits:
memory for all tensors that a rank writes. A rank with rows on disk (`RowStream`), which may not fit into memory, copies
nothing, and its save returns when the checkpoint is written.

[Note: Writing behind]
The threads have a process group of their own, so their collectives never mix with those of the steps. At most one write
is running. The next write waits until the previous one has ended on all ranks, and raises its error on all of them.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import msgspec
import numpy as np
import torch
from torch import Tensor

from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import THREADS, assign_shards, run_on_all_ranks, write
from rowwise.parallel.comm.interface import Comm
from rowwise.tables.ops.output_cache import empty_cached

RUN_bytes = 64 << 20  # per task of a copy thread: large enough to bypass the caches


@final
class BackgroundWriter:
    """Writes checkpoints in a thread; all methods are collectives."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm.split([comm.ranks])
        self._copies: dict[tuple[object, ...], Tensor] = {}  # copies of the last save
        self._thread: threading.Thread | None = None
        self._folder = Path()
        self._actions: list[Callable[[], object]] = []
        self._error: Exception | None = None  # error of the write; the same on all ranks, as `write` raises on all
        self._action_error: OSError | None = None  # error of an action, on rank 0 only

    def write(
        self, folder: Path, shards: Sequence[LocalShard], data: Mapping[str, Any], base: Checkpoint | None = None
    ) -> None:
        """Wait for the previous write, copy the tensors, start the thread; with streams, also wait for it."""
        self.wait()
        assigned = assign_shards(shards, self._comm)
        streams = any(shard.stream is not None for shard in assigned)
        copies = assigned if streams else self._copy(assigned)
        copied = msgspec.json.decode(msgspec.json.encode(data))
        self._folder = folder
        self._thread = threading.Thread(target=self._run, args=(copies, copied, base), name="checkpoint", daemon=True)
        self._thread.start()
        if streams:  # other ranks continue to their next collective
            self._thread.join()

    def then(self, action: Callable[[], object]) -> None:
        """Run an action on rank 0 after the running write, unless that fails."""
        self._actions.append(action)
        if self._thread is None:
            self._finish()

    def wait(self) -> None:
        """Wait for the running write and its actions; raises their error on all ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._finish()

    def _finish(self) -> None:
        """Raise the thread's error, or run actions added after the thread's end."""
        error, self._error = self._error, None
        if error is not None:
            self._actions.clear()
            raise error
        run_on_all_ranks(self._comm, f"could not remove checkpoints before {self._folder}", self._run_actions)

    def _run(self, shards: Sequence[LocalShard], data: Mapping[str, Any], base: Checkpoint | None) -> None:
        try:
            write(self._folder, shards, data, self._comm, base)
        except Exception as error:  # raised by `wait`
            self._error = error
            return
        try:
            self._run_actions()
        except OSError as error:
            self._action_error = error

    def _run_actions(self) -> None:
        error, self._action_error = self._action_error, None
        if error is not None:
            raise error
        while self._actions:
            action = self._actions.pop(0)
            if self._comm.rank == 0:
                action()

    def _copy(self, shards: Sequence[LocalShard]) -> list[LocalShard]:
        previous = self._copies
        self._copies = {}
        copies: list[LocalShard] = []
        runs: list[tuple[Tensor, Tensor]] = []
        for shard in shards:
            if shard.ids is not None:  # `changed_rows` has copied them
                copies.append(shard)
                continue
            tensor = shard.tensor.detach()
            key = shard.name, shard.rows, shard.cols, tensor.shape, tensor.dtype
            copy = previous.get(key)
            copy = empty_cached(tuple(tensor.shape), tensor.new_empty(0, device="cpu")) if copy is None else copy
            self._copies[key] = copy
            copies.append(replace(shard, tensor=copy))
            step = max(1, RUN_bytes // max(1, shard.row_bytes))
            runs += zip(copy.split(step), tensor.split(step), strict=True)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(_copy_run, *zip(*runs, strict=True)) if runs else ())
        return copies


def _copy_run(copy: Tensor, tensor: Tensor) -> None:
    if tensor.is_cpu and tensor.dim() and tensor.stride(-1) == 1:
        # Numpy copies in the calling thread, bypassing the caches; torch would start threads of its own.
        np.copyto(copy.view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy())
    else:
        copy.copy_(tensor)

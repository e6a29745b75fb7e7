"""Saving while training goes on: a copy of what is to be saved, and a thread that writes it.

The copies keep their memory for the next time, as fresh pages cost many times what filling them does. Known limits:
memory, as much as a rank writes.

[Note: Writing behind]
The threads have a group of their own, made once, so their calls never mix with those of the steps. At most one
checkpoint is on its way: the next begins when the former has ended on all ranks, and what that met they all raise, at
the same place: where they wait for it.
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

from rowwise.checkpoint.parts import LocalShard
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import THREADS, own_parts, run_on_all_ranks, write
from rowwise.comm.seam import Comm
from rowwise.ops.output_cache import empty_cached

RUN_bytes = 64 << 20  # copied by one thread: long enough to go past the caches


@final
class BackgroundWriter:
    """Writes what `write` is given, then does what `then` is given."""

    def __init__(self, comm: Comm) -> None:
        """Called by all ranks, as all methods are."""
        self._comm = comm.split([comm.ranks])
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._folder = Path()
        self._after: list[Callable[[], object]] = []
        self._met: Exception | None = None  # all ranks have met it: see `write`
        self._late: OSError | None = None  # by rank 0 alone, afterwards

    def write(
        self, folder: Path, parts: Sequence[LocalShard], data: Mapping[str, Any], base: Checkpoint | None = None
    ) -> None:
        """Returns once everything is copied; waits for the former one first."""
        self.wait()
        copies = self._copy(own_parts(parts, self._comm))
        plain = msgspec.json.decode(msgspec.json.encode(data))  # a copy, too
        self._folder = folder
        self._thread = threading.Thread(target=self._run, args=(copies, plain, base), name="checkpoint", daemon=True)
        self._thread.start()

    def then(self, action: Callable[[], object]) -> None:
        """Done on rank 0 once the checkpoint under way is there; not, if it is not saved."""
        self._after.append(action)
        if self._thread is None:
            self._end()

    def wait(self) -> None:
        """Wait until no save is under way; raises the error of the last one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._end()

    def _end(self) -> None:
        """Raise the error of the thread, or finish the save on all ranks."""
        met, self._met = self._met, None
        if met is not None:
            self._after.clear()
            raise met
        run_on_all_ranks(self._comm, f"{self._folder}: the actions after it were not run", self._finish)

    def _run(self, parts: Sequence[LocalShard], data: Mapping[str, Any], base: Checkpoint | None) -> None:
        try:
            write(self._folder, parts, data, self._comm, base)
        except Exception as error:  # raised again where the rank waits for it
            self._met = error
            return
        try:
            self._finish()
        except OSError as error:
            self._late = error

    def _finish(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            raise late
        while self._after:
            action = self._after.pop(0)
            if self._comm.rank == 0:
                action()

    def _copy(self, parts: Sequence[LocalShard]) -> list[LocalShard]:
        kept = self._kept
        self._kept = {}
        copies: list[LocalShard] = []
        runs: list[tuple[Tensor, Tensor]] = []
        for part in parts:
            if part.ids is not None:  # copied when they were picked out
                copies.append(part)
                continue
            tensor = part.tensor.detach()
            place = part.name, part.rows, part.cols, tensor.shape, tensor.dtype
            copy = kept.get(place)
            copy = empty_cached(tuple(tensor.shape), tensor.new_empty(0, device="cpu")) if copy is None else copy
            self._kept[place] = copy
            copies.append(replace(part, tensor=copy))
            step = max(1, RUN_bytes // max(1, part.row_bytes))
            runs += zip(copy.split(step), tensor.split(step), strict=True)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(_copy_run, *zip(*runs, strict=True)) if runs else ())
        return copies


def _copy_run(copy: Tensor, tensor: Tensor) -> None:
    if tensor.is_cpu and tensor.dim() and tensor.stride(-1) == 1:
        # Numpy copies with the thread that calls it, and past the caches; torch would ask for threads of its own.
        np.copyto(copy.view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy())
    else:
        copy.copy_(tensor)

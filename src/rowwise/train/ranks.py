"""Seeds, batches without samples, and lockstep evaluation, for several ranks.

A forward is a collective. A rank whose data has ended, or cannot be read, must therefore take part in the forwards of
the others until all ranks know (`Lockstep`).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch

from rowwise.base.errors import AgreedError, PeerError
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.status import broadcast_object
from rowwise.tables.batch import Batch
from rowwise.train.draws import seed_draws
from rowwise.train.step_header import GlobalStatus, StepHeader, exchange_step_header


def seed_rank(comm: Comm) -> None:
    """Derive a seed for each rank from torch's current seed; rank 0 keeps the seed of a single rank."""
    if comm.rank:
        digest = hashlib.blake2b(f"{torch.initial_seed()} rank {comm.rank}".encode(), digest_size=8).digest()
        seed_draws(int.from_bytes(digest))


def empty_batch_like(batch: Batch) -> Batch:
    """A batch without samples, with the features and columns of this one."""
    return batch.map_tensors(lambda x: x[:0].clone())


def empty_batch_template(comm: Comm, status: GlobalStatus, batches: Sequence[Batch]) -> Batch | None:
    """A batch without samples; if a rank has no batch, the first rank with a batch broadcasts its template."""
    local = empty_batch_like(batches[0]) if batches else None
    if all(status.following_W) or not status.following:
        return local
    source = next(rank for rank, following in enumerate(status.following_W) if following)
    return broadcast_object(comm, None if local is None else local.to("cpu"), source, "batch")


@final
class Lockstep:
    """An evaluation over the same number of batches on each rank; an error of one rank is raised on all."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._error: Exception | None = None

    def iterate(self, batches: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
        """This rank's batches, then batches without samples until all ranks have reached their end."""
        iterator: Iterator[Batch] | None = None
        empty: Batch | None = None
        while True:
            batch = None
            with self.deferring_errors():
                iterator = iter(batches()) if iterator is None else iterator
                batch = next(iterator, None)
            local = [] if batch is None else [batch]
            header = StepHeader(following=len(local), error=self._error).with_batches(local)
            status = exchange_step_header(self._comm, header, during="evaluation")
            if not status.following:
                return
            if empty is None:
                empty = empty_batch_template(self._comm, status, local)
            assert empty is not None
            yield empty if batch is None else batch

    @contextmanager
    def deferring_errors(self) -> Iterator[None]:
        """Hold an error back until the next header carries it to all ranks; with a single rank it is raised at once."""
        try:
            yield
        except Exception as error:
            # After a PeerError the other ranks cannot be reached; an AgreedError, its subclass, was raised on all.
            lost_peer = isinstance(error, PeerError) and not isinstance(error, AgreedError)
            if lost_peer or len(self._comm.ranks) == 1:
                raise
            self._error = self._error or error

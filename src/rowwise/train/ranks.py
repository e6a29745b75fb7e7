"""Batches of several ranks: passes over them that all ranks take alike, and batches without samples.

A rank whose data has ended, or cannot be read, must go on taking part in forwards until all know (`Lockstep`).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch

from rowwise.batch import Batch
from rowwise.comm.seam import Comm
from rowwise.comm.status import broadcast_object
from rowwise.errors import AgreedError, PeerError
from rowwise.train.step_header import GlobalStatus, StepHeader, exchange_step_header


def seed_rank(comm: Comm) -> None:
    """Seed torch differently on each rank, derived from the current seed; rank 0 keeps its seed."""
    if comm.rank:
        digest = hashlib.blake2b(f"{torch.initial_seed()} rank {comm.rank}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest))


def without_samples(batch: Batch) -> Batch:
    """A batch as this one, of no samples."""
    kept = (None if x is None else x[:0].clone() for x in (batch.weights_B, batch.keys_B, batch.times_B))
    weights_B, keys_B, times_B = kept
    return Batch(
        dense_BF=batch.dense_BF[:0].clone(),
        sparse=batch.sparse.without_samples(),
        labels_BK=batch.labels_BK[:0].clone(),
        weights_B=weights_B,
        keys_B=keys_B,
        times_B=times_B,
    )


def empty_batch_template(comm: Comm, status: GlobalStatus, batches: Sequence[Batch]) -> Batch | None:
    """A batch without samples; a rank without a batch takes the template of the first rank that has one."""
    mine = without_samples(batches[0]) if batches else None
    if all(status.following_W) or not status.following:
        return mine
    source = next(rank for rank, following in enumerate(status.following_W) if following)
    return broadcast_object(comm, None if mine is None else mine.to("cpu"), source, "batch")


@final
class Lockstep:
    """A pass over equally many batches on each rank; an error of one rank ends it on all."""

    def __init__(self, comm: Comm, where: str) -> None:
        self._comm, self._where = comm, where
        self._error: Exception | None = None

    def over(self, batches: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
        """This rank's batches, then some without samples, until those of all ranks have been given."""
        left: Iterator[Batch] | None = None
        empty: Batch | None = None
        while True:
            batch = None
            with self.keeping_error():
                left = iter(batches()) if left is None else left
                batch = next(left, None)
            mine = [] if batch is None else [batch]
            header = StepHeader(following=len(mine), error=self._error).with_batches(mine)
            status = exchange_step_header(self._comm, header, during=self._where)
            if not status.following:
                return
            if empty is None:
                empty = empty_batch_template(self._comm, status, mine)
            assert empty is not None
            yield empty if batch is None else batch

    @contextmanager
    def keeping_error(self) -> Iterator[None]:
        """Keep what is raised inside until the others can be told; alone there is nobody to tell."""
        try:
            yield
        except Exception as error:
            gone = isinstance(error, PeerError) and not isinstance(error, AgreedError)
            if gone or len(self._comm.ranks) == 1:
                raise
            self._error = self._error or error

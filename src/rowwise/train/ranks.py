"""What the ranks of a run tell each other beside numbers: things to one rank, and batches without samples.

Here are also passes over batches that all ranks take alike (`Lockstep`): a rank whose data has ended, or cannot be
read, must go on taking part in forwards until all know. Its own file because training, evaluation and what is written
down need the same. Things travel as pickles, between processes of one run. Gives up: speed; a step uses `together.py`.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from rowwise.batch import Batch
from rowwise.comm.seam import Comm
from rowwise.errors import AgreedError, PeerError
from rowwise.train.together import Heard, Notice, hear


def to_first(comm: Comm, thing: object, what: str) -> list[Any] | None:
    """On the first rank what each rank has, itself included; called by all."""
    first, world = comm.rank == 0, len(comm.ranks)
    mine = torch.empty(0, dtype=torch.uint8) if first else _pack(thing)
    sizes_W = _sizes(comm, len(mine), what)
    receives_W = sizes_W if first else [0] * world
    came = comm.all_to_all(mine, [len(mine)] + [0] * (world - 1), receives_W, what).wait()
    if not first:
        return None
    return [thing, *(_unpack(part) for part in came.split(sizes_W)[1:])]


def from_rank(comm: Comm, thing: object, rank: int, what: str) -> Any:
    """What that rank of the group has, on all; called by all."""
    mine = _pack(thing) if comm.rank == rank else torch.empty(0, dtype=torch.uint8)
    return _unpack(comm.all_gather(mine, _sizes(comm, len(mine), what), what).wait())


def all_of(comm: Comm, tensor_N: Tensor, what: str) -> Tensor:
    """The numbers of all ranks, one after the other."""
    return comm.all_gather(tensor_N, _sizes(comm, len(tensor_N), what), what).wait()


def seed_rank(comm: Comm) -> None:
    """Let torch draw other numbers on each rank, that follow from what it was seeded with; the first draws as alone."""
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


def lend(comm: Comm, heard: Heard, batches: Sequence[Batch]) -> Batch | None:
    """A batch of no samples for the ranks that have none at all: of the first rank that has one."""
    mine = without_samples(batches[0]) if batches else None
    if all(heard.following_W) or not heard.following:
        return mine
    owner = next(rank for rank, following in enumerate(heard.following_W) if following)
    return from_rank(comm, None if mine is None else mine.to("cpu"), owner, "batch")


@contextmanager
def sharing(comm: Comm, where: str) -> Iterator[None]:
    """What is raised inside ends all ranks at the end of it; called by all, and nothing inside waits for another."""
    trouble: Exception | None = None
    try:
        yield
    except Exception as error:
        trouble = error
    hear(comm, Notice(trouble=trouble), where)


@final
class Lockstep:
    """One pass over batches, equally many on each rank; what a rank meets ends it on all."""

    def __init__(self, comm: Comm, where: str) -> None:
        """`where`: what errors say was being done."""
        self._comm, self._where = comm, where
        self._trouble: Exception | None = None

    def over(self, batches: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
        """This rank's batches, then some without samples, until those of all ranks have been given."""
        left: Iterator[Batch] | None = None
        empty: Batch | None = None
        while True:
            batch = None
            with self.sharing():
                left = iter(batches()) if left is None else left
                batch = next(left, None)
            notice = Notice(following=batch is not None, trouble=self._trouble)
            heard = hear(self._comm, notice.about([] if batch is None else [batch]), self._where)
            if not heard.following:
                return
            if empty is None:
                empty = lend(self._comm, heard, [] if batch is None else [batch])
            assert empty is not None
            yield empty if batch is None else batch

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Keep what is raised inside until the others can be told; alone there is nobody to tell."""
        try:
            yield
        except Exception as error:
            gone = isinstance(error, PeerError) and not isinstance(error, AgreedError)
            if gone or len(self._comm.ranks) == 1:
                raise
            self._trouble = self._trouble or error


def _sizes(comm: Comm, size: int, what: str) -> list[int]:
    return comm.all_gather(torch.tensor([size]), (1,) * len(comm.ranks), what).wait().tolist()


def _pack(thing: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)


def _unpack(packed: Tensor) -> Any:
    return pickle.loads(packed.numpy().tobytes())

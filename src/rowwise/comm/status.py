"""What ranks tell each other besides tensors of known sizes: objects, uneven tensors, and that one of them has failed.

[Note: rank status] An error of one rank ends what all ranks do together, on all of them, and they can still talk
afterwards. So a rank that has failed goes on to the next collective that the others wait in, and says so there: in
`raise_if_any_rank_failed`, which is a gather of its own, or in a header that is exchanged anyway, one number of which
is its packed `RankStatus`. If a header says that a rank has failed, all ranks call `raise_if_any_rank_failed`: the one
that failed raises its own error, the others an `AgreedError` with its rank and reason. Headers are the counts before
ids travel (`shard/ids.py`), and what `train/step_header.py` exchanges before a step and before its update. A rank that
fails where it cannot go on, within a forward or in a collective, just leaves, and the transport ends the others with a
`PeerError`.

Objects travel as pickles, between processes of one run. Known limits: speed; nothing here but `RankStatus` is for a
step.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rowwise.comm.seam import Comm
from rowwise.errors import AgreedError

LONGEST_BYTES = 1000  # of a rank's reason
FAILED_bits = 3


class RankStatus(NamedTuple):
    """What each rank tells the others at once: batch present, error, kind; packed into one number below 2**53."""

    count: int = 0  # of samples or batches that the rank brings
    failed: int = 0  # 0: no; 1 to 7: why, of which only the lowest is raised where ranks differ
    stop: bool = False  # the rank was asked to end the run

    def pack(self) -> int:
        return (self.count << 1 | self.stop) << FAILED_bits | self.failed

    @classmethod
    def unpack(cls, word: float) -> "RankStatus":
        rest, failed = divmod(int(word), 1 << FAILED_bits)
        return cls(rest >> 1, failed, bool(rest & 1))


def raise_if_any_failed(
    comm: Comm, statuses_W: Sequence[RankStatus], error: BaseException | None, *, during: str
) -> None:
    """By what a header said; called by all ranks, and no collective if none has failed."""
    first = min((status.failed for status in statuses_W if status.failed), default=0)
    if first:
        raise_if_any_rank_failed(comm, error if statuses_W[comm.rank].failed == first else None, during=during)


def raise_if_any_rank_failed(comm: Comm, error: BaseException | None, *, during: str) -> None:
    """Called by all ranks: one that failed raises its own error, the others an `AgreedError`. See [Note: rank status].

    Without an error it is one small gather, and none for one rank.
    """
    text = "" if error is None else f"{type(error).__name__}: {error}"
    reasons_W = [text] if len(comm.ranks) == 1 else all_gather_text(comm, text, "status", LONGEST_BYTES)
    if error is not None:
        raise error
    if any(reasons_W):
        failed = zip(comm.ranks, reasons_W, strict=True)
        said = "; ".join(f"rank {rank} ({during}): {reason}" for rank, reason in failed if reason)
        raise AgreedError(said, frozenset(reason.partition(":")[0] for reason in reasons_W if reason))


@contextmanager
def raising_on_all_ranks(comm: Comm, *, during: str) -> Iterator[None]:
    """What is raised inside ends all ranks at the end of it; called by all, and nothing inside waits for another."""
    caught: Exception | None = None
    try:
        yield
    except Exception as error:
        caught = error
    raise_if_any_rank_failed(comm, caught, during=during)


def all_gather_text(comm: Comm, text: str, what: str, longest_bytes: int | None = None) -> list[str]:
    """The text of each rank, on all; one gather where all are empty."""
    runs = all_gather_uneven(comm, _tensor(text.encode()[:longest_bytes]), what)
    return [bytes(run.tolist()).decode(errors="replace") for run in runs]


def all_gather_uneven(comm: Comm, tensor_N: Tensor, what: str) -> tuple[Tensor, ...]:
    """The tensor of each rank, on all, however long each is."""
    sizes_W = _sizes(comm, len(tensor_N), what)
    if not any(sizes_W):
        return (tensor_N,) * len(sizes_W)
    return comm.all_gather(tensor_N, sizes_W, what).wait().split(sizes_W)


def gather_object(comm: Comm, obj: object, what: str) -> list[Any] | None:
    """On the first rank the object of each rank, its own included, else None; called by all."""
    first, world = comm.rank == 0, len(comm.ranks)
    mine = _tensor(b"" if first else pickle.dumps(obj))
    sizes_W = _sizes(comm, len(mine), what)
    receives_W = sizes_W if first else [0] * world
    came = comm.all_to_all(mine, [len(mine)] + [0] * (world - 1), receives_W, what).wait()
    return [obj, *map(_unpickle, came.split(sizes_W)[1:])] if first else None


def broadcast_object(comm: Comm, obj: object, source: int, what: str) -> Any:
    """The object of one rank of the group, on all; called by all."""
    mine = _tensor(pickle.dumps(obj) if comm.rank == source else b"")
    return _unpickle(all_gather_uneven(comm, mine, what)[source])


def _sizes(comm: Comm, size: int, what: str) -> list[int]:
    return comm.all_gather(torch.tensor([size]), (1,) * len(comm.ranks), what).wait().tolist()


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _unpickle(packed: Tensor) -> Any:
    return pickle.loads(packed.numpy().tobytes())

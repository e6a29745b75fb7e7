"""Agreement between ranks about errors, and collectives for objects, texts and tensors of unknown sizes.

[Note: Rank status] If one rank has an error, all ranks raise, and their communicator still works afterwards. So a
failed rank continues to the next collective that the others wait in, and reports its error there: in
`raise_if_any_rank_failed`, an all-gather of its own, or in a header that is exchanged anyway and includes a packed
`RankStatus`. If a header reports a failure, all ranks call `raise_if_any_rank_failed`: the failed rank raises its own
error, the others an `AgreedError` with its rank and reason. Headers are those before ids (`parallel/shard/ids.py`), and
those of `train/step_header.py` before a step and before its update. A rank that cannot continue, as it failed inside a
forward or a collective, leaves; the transport then raises a `PeerError` on the others.

Objects are sent as pickles between processes of one run. Only `RankStatus` is fast enough for every step.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rowwise.base.errors import AgreedError, RowwiseError, one_line
from rowwise.parallel.comm.interface import Comm

MAX_MESSAGE_BYTES = 1000  # max. bytes of a rank's error message
FAILED_bits = 3
T = TypeVar("T")


class RankStatus(NamedTuple):
    """The status of a rank in a header, packed into one number below 2**53, which a float64 header keeps exactly."""

    count: int = 0  # samples or batches of the rank
    failed: int = 0  # 0 if not; 1 to 7: class of the error; if ranks differ, only the lowest is raised
    stop: bool = False  # whether the rank was asked to end the run

    def pack(self) -> int:
        return (self.count << 1 | self.stop) << FAILED_bits | self.failed

    @classmethod
    def unpack(cls, word: float) -> "RankStatus":
        rest, failed = divmod(int(word), 1 << FAILED_bits)
        return cls(rest >> 1, failed, bool(rest & 1))


def raise_if_any_failed(
    comm: Comm, statuses_W: Sequence[RankStatus], error: BaseException | None, *, during: str
) -> None:
    """Raise on all ranks if a header reports a failure; every rank calls it, and it communicates only then."""
    # All ranks have the same statuses, so all enter the gather or none. Only errors of the lowest class enter it:
    # if ranks failed for different reasons, the raised errors are of one class.
    first = min((status.failed for status in statuses_W if status.failed), default=0)
    if first:
        raise_if_any_rank_failed(comm, error if statuses_W[comm.rank].failed == first else None, during=during)


def raise_if_any_rank_failed(comm: Comm, error: BaseException | None, *, during: str) -> None:
    """Collective: a rank that failed raises its own error, the others an `AgreedError`. See [Note: Rank status].

    Without an error it is one small all-gather.
    """
    text = "" if error is None else f"{type(error).__name__}: {error}"
    reasons_W = [text] if len(comm.ranks) == 1 else all_gather_text(comm, text, "status", MAX_MESSAGE_BYTES)
    if error is not None:  # after the gather, which reports it to the other ranks
        raise error
    if any(reasons_W):
        failed = zip(comm.ranks, reasons_W, strict=True)
        reasons = "; ".join(f"rank {rank} ({during}): {reason}" for rank, reason in failed if reason)
        raise AgreedError(reasons, frozenset(reason.partition(":")[0] for reason in reasons_W if reason))


@contextmanager
def raising_on_all_ranks(comm: Comm, *, during: str) -> Iterator[None]:
    """Raises an error of the block on all ranks at its end; all ranks enter it, and the block has no collectives."""
    caught: Exception | None = None
    try:
        yield
    except Exception as error:
        caught = error
    raise_if_any_rank_failed(comm, caught, during=during)


def all_gather_text(comm: Comm, text: str, purpose: str, max_bytes: int | None = None) -> list[str]:
    """The text of each rank, on all ranks."""
    # `errors="replace"` as the cut at `max_bytes` may be inside a character.
    texts = all_gather_uneven(comm, _tensor(text.encode()[:max_bytes]), purpose)
    return [bytes(text_P.tolist()).decode(errors="replace") for text_P in texts]


def all_gather_uneven(comm: Comm, tensor_N: Tensor, purpose: str) -> tuple[Tensor, ...]:
    """The tensors of all ranks, on all ranks, of any lengths; one small all-gather if all are empty."""
    sizes_W = _sizes(comm, len(tensor_N), purpose)
    if not any(sizes_W):
        return (tensor_N,) * len(sizes_W)
    return comm.all_gather(tensor_N, sizes_W, purpose).wait().split(sizes_W)


def gather_object(comm: Comm, obj: object, purpose: str) -> list[Any] | None:
    """Collective: on rank 0 the objects of all ranks, on others None."""
    first, world = comm.rank == 0, len(comm.ranks)
    packed = _tensor(b"" if first else _pickle(obj))  # rank 0 keeps its own object, unpickled
    sizes_W = _sizes(comm, len(packed), purpose)
    output_splits = sizes_W if first else [0] * world
    received = comm.all_to_all(packed, [len(packed)] + [0] * (world - 1), output_splits, purpose).wait()
    return [obj, *map(_unpickle, received.split(sizes_W)[1:])] if first else None


def broadcast_object(comm: Comm, obj: object, source: int, purpose: str) -> Any:
    """Collective: the object of rank `source`, on all ranks."""
    packed = _tensor(_pickle(obj) if comm.rank == source else b"")
    return _unpickle(all_gather_uneven(comm, packed, purpose)[source])


def on_first_rank(comm: Comm, call: Callable[[], T]) -> T:
    """The result of `call` on the first rank, returned on every rank; a collective."""
    if len(comm.ranks) == 1:
        return call()
    result: T | None = None
    error: RowwiseError | OSError | None = None
    broadcast_object(comm, None, 0, "recipe")  # raises before the call if a rank has failed already
    if comm.rank == 0:
        try:
            result = call()
        except (RowwiseError, OSError) as first_error:
            error = first_error
    line = None if error is None else one_line(error) or str(error)
    received, line = broadcast_object(comm, (result, line), 0, "recipe")
    if error is not None:
        raise error
    if line is not None:
        raise AgreedError(line)
    return received


def _sizes(comm: Comm, size: int, purpose: str) -> list[int]:
    return comm.all_gather(torch.tensor([size]), (1,) * len(comm.ranks), purpose).wait().tolist()


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _pickle(obj: object) -> bytes:
    """The object with its tensors on the host: a tensor of a GPU would be made on the same GPU by every rank."""
    return pickle.dumps(tree_map_only(Tensor, Tensor.cpu, obj))


def _unpickle(packed: Tensor) -> Any:
    return pickle.loads(packed.numpy().tobytes())

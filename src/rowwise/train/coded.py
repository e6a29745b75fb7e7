"""All-reduce of encoded numbers: 16 bits each, fewer bits with a scale per run of numbers, or top-k of each run.

It is a reduce-scatter and an all-gather. Each rank receives one share of the numbers from all ranks, encoded, adds
them in float32 and in rank order, and sends the encoded sum to all. Every rank decodes the same bytes, also of its own
share, so all ranks end with the same bits. With error feedback a rank keeps the rounding errors of its encodings
(`residuals`) and adds them to the numbers of the next step, so that errors do not accumulate over steps.

Known limits: sums beyond the range of fp16 become infinite.
"""

from collections.abc import Sequence
from typing import final

from torch import Tensor
from torch.nn import functional as F

from rowwise.parallel.comm.codec import WireCodec
from rowwise.parallel.comm.interface import Comm, Work
from rowwise.tables.spec import RUN


@final
class CodedSum:
    """Call `start` for each bucket of a step in turn, then `finish` for all.

    Args:
        comm: the ranks whose numbers are summed.
        codec: encodes the numbers that travel.
        feedback: whether to add rounding errors to the numbers of the next step.
    """

    def __init__(self, comm: Comm, codec: WireCodec, *, feedback: bool) -> None:
        self._comm, self._codec, self._feedback = comm, codec, feedback
        self._run_bytes = codec.block_bytes((1, RUN))
        self.residuals: dict[int, Tensor] = {}  # rounding errors by bucket; differ between ranks

    def start(self, bucket: int, flat_N: Tensor) -> Work:
        """Send each rank its share of the bucket."""
        runs_RC = F.pad(flat_N.float(), (0, -len(flat_N) % RUN)).view(-1, RUN)
        residual_RC = self.residuals.get(bucket)
        # A run that is resumed with another kind of sum has residuals of other shapes.
        if self._feedback and residual_RC is not None and residual_RC.shape == runs_RC.shape:
            runs_RC = runs_RC + residual_RC
        packed_P = self._codec.encode(runs_RC)
        if self._feedback:
            self.residuals[bucket] = self._error(runs_RC, packed_P)
        sizes_W = [(end - begin) * self._run_bytes for begin, end in self._shares(len(flat_N))]
        return self._comm.all_to_all(packed_P, sizes_W, [sizes_W[self._comm.rank]] * len(sizes_W), "dense")

    def finish(self, handles: Sequence[Work], sizes: Sequence[int]) -> list[Tensor]:
        """The sums of all buckets, which have these sizes."""
        # Two passes: all gathers are in flight before the first wait.
        gathers = [
            self._add(bucket, handle.wait(), size)
            for bucket, (handle, size) in enumerate(zip(handles, sizes, strict=True))
        ]
        return [self._decode(handle.wait()).view(-1)[:size] for handle, size in zip(gathers, sizes, strict=True)]

    def _add(self, bucket: int, packed_P: Tensor, size: int) -> Work:
        """Add this rank's share over ranks, and start gathering it."""
        shares_W = self._shares(size)
        begin, end = shares_W[self._comm.rank]
        first_RC, *remaining = self._decode(packed_P).view(len(shares_W), end - begin, RUN).unbind()
        total_RC = first_RC.clone()
        for runs_RC in remaining:
            total_RC += runs_RC
        packed_P = self._codec.encode(total_RC)
        if self._feedback:
            self.residuals[bucket][begin:end] += self._error(total_RC, packed_P)
        return self._comm.all_gather(packed_P, [(end - begin) * self._run_bytes for begin, end in shares_W], "dense")

    def _shares(self, size: int) -> list[tuple[int, int]]:
        """The range of runs that each rank adds."""
        runs, world = -(-size // RUN), len(self._comm.ranks)
        return [(runs * w // world, runs * (w + 1) // world) for w in range(world)]

    def _decode(self, packed_P: Tensor) -> Tensor:
        return self._codec.decode(packed_P, (len(packed_P) // self._run_bytes, RUN))

    def _error(self, runs_RC: Tensor, packed_P: Tensor) -> Tensor:
        # NaN and infinity stop this step, but must not return in the steps after it.
        return (runs_RC - self._decode(packed_P)).nan_to_num(0.0, 0.0, 0.0)

"""All-reduce with encoded numbers on the wire: 16 bits, or 8 with a scale per block.

Each rank adds up a share of the whole: all send it their numbers encoded, it adds in 32 bits and in rank order, and
sends the sum encoded to all. Every rank decodes the same bytes, its own share too, so all end with the same bits. With
feedback a rank keeps what its encodings took from its numbers and from the sums that it made, and adds it the next
time: over many steps what arrived is what was meant, but for what is held at the end.

Known limits: sums past the range of fp16, which come out infinite.
"""

from collections.abc import Sequence
from typing import final

from torch import Tensor
from torch.nn import functional as F

from rowwise.comm.codec import WireCodec
from rowwise.comm.seam import Comm, Handle

RUN = 256  # numbers that share a scale: its 8 bytes are 3 % of a message


@final
class CodedSum:
    """`start` for each part of a step in turn, then `finish` for all.

    Args:
        comm: whose ranks are summed over.
        codec: how numbers travel.
        feedback: whether what rounding takes is made good later.
    """

    def __init__(self, comm: Comm, codec: WireCodec, *, feedback: bool) -> None:
        self._comm, self._codec, self._feedback = comm, codec, feedback
        self._run_bytes = codec.block_bytes((1, RUN))
        self.held: dict[int, Tensor] = {}  # by part, runs of what encoding took: state of a run, another on each rank

    def start(self, part: int, flat_N: Tensor) -> Handle:
        """Send each rank its share."""
        runs_RC = F.pad(flat_N.float(), (0, -len(flat_N) % RUN)).view(-1, RUN)
        if self._feedback and part in self.held:
            runs_RC = runs_RC + self.held[part]
        packed_P = self._codec.encode(runs_RC)
        if self._feedback:
            self.held[part] = self._lost(runs_RC, packed_P)
        sizes_W = [(end - begin) * self._run_bytes for begin, end in self._shares(len(flat_N))]
        return self._comm.all_to_all(packed_P, sizes_W, [sizes_W[self._comm.rank]] * len(sizes_W), "dense")

    def finish(self, handles: Sequence[Handle], sizes: Sequence[int]) -> list[Tensor]:
        """The sums of all parts, which had these sizes."""
        # All are on their way before the first is waited for.
        sums = [
            self._add(part, handle.wait(), size) for part, (handle, size) in enumerate(zip(handles, sizes, strict=True))
        ]
        return [self._decode(handle.wait()).view(-1)[:size] for handle, size in zip(sums, sizes, strict=True)]

    def _add(self, part: int, packed_P: Tensor, size: int) -> Handle:
        """Add up this rank's share, and send it to all."""
        shares_W = self._shares(size)
        begin, end = shares_W[self._comm.rank]
        first_RC, *others = self._decode(packed_P).view(len(shares_W), end - begin, RUN).unbind()
        total_RC = first_RC.clone()
        for runs_RC in others:
            total_RC += runs_RC
        packed_P = self._codec.encode(total_RC)
        if self._feedback:
            self.held[part][begin:end] += self._lost(total_RC, packed_P)
        return self._comm.all_gather(packed_P, [(end - begin) * self._run_bytes for begin, end in shares_W], "dense")

    def _shares(self, size: int) -> list[tuple[int, int]]:
        """The runs that each rank adds up."""
        runs, world = -(-size // RUN), len(self._comm.ranks)
        return [(runs * w // world, runs * (w + 1) // world) for w in range(world)]

    def _decode(self, packed_P: Tensor) -> Tensor:
        return self._codec.decode(packed_P, (len(packed_P) // self._run_bytes, RUN))

    def _lost(self, meant_RC: Tensor, packed_P: Tensor) -> Tensor:
        # A number that is not finite stops the step; it must not come back in all that follow.
        return (meant_RC - self._decode(packed_P)).nan_to_num(0.0, 0.0, 0.0)

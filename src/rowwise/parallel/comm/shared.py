"""`SharedMemoryTransport`: ranks of one host exchange through shared memory, ranks of other hosts through the network.

[Note: Shared memory] Each rank has a control block that the others map. It has a descriptor of each of the last `CALLS`
calls (splits, data block, time of completion), and a READ word for each: the number of the last call whose data this
rank has read. A call copies the data for other ranks into a free data block and publishes its descriptor. Waiting for a
call copies the others' data out of their blocks, or adds it up in rank order, then publishes the number as read, which
frees the blocks. There are no locks, so ranks may wait in any order.

Memory is anonymous (memfd): other ranks open it through /proc of its process, and it is freed when the last process
that maps it ends, even by a kill. Linux only. In an all-reduce each rank computes the full sum, so a call depends on no
other rank once all have published.
"""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple, final

import torch
from torch import Tensor

from rowwise.base.errors import PeerError
from rowwise.base.processor import usable_processors
from rowwise.parallel.comm.call import (
    SENDS_FULL_TENSOR,
    CollectiveCall,
    combine_segments,
    describe_mismatch,
    segment_for,
)
from rowwise.parallel.comm.group import PendingCollective, ReceivedTensor
from rowwise.parallel.comm.torch import TorchTransport, is_alive
from rowwise.tables.ops import native
from rowwise.tables.spec import Topology

HAS_SHARED_MEMORY = hasattr(os, "memfd_create")
CALLS = 64  # max. calls of a rank not yet read by another
# Words of a control block: whether the rank has left, whether it has mapped the other blocks, then CALLS READ words.
# Descriptors follow. MAPPED and READ are in different cache lines, as READ changes often.
LEFT, MAPPED, READ = 0, 1, 8
TEXT_BYTES = 128  # size of a descriptor's text: collective, dtype and purpose
MIN_BYTES = 1 << 16  # smallest data block
SPINS = 2000  # polls before a wait sleeps; about 20 microseconds
SLICE_S = 0.1  # longest sleep between checks that the other rank is alive


def _create(size_bytes: int) -> tuple[int, mmap.mmap]:
    """Anonymous shared memory; its pages are allocated now."""
    fd = os.memfd_create("rowwise")
    try:
        os.posix_fallocate(fd, 0, size_bytes)  # else a lack of memory would be a SIGBUS at the first write
        return fd, mmap.mmap(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise


@dataclass(frozen=True, slots=True)
class _Block:
    """A data block, as in the descriptor of a call."""

    index: int
    serial: int  # changes when a larger block replaces this one at its index
    fd: int
    size_bytes: int


NO_BLOCK = _Block(0, 0, 0, 0)


class _SentCall(NamedTuple):
    """The number of a call of this rank, and the time at which its data were in a block."""

    number: int
    at_s: float


@final
class _ControlBlock:
    """The control block of a rank, this or another, in a group of `world` ranks. See [Note: Shared memory]."""

    def __init__(self, memory: mmap.mmap, world: int) -> None:
        self.words = torch.frombuffer(memory, dtype=torch.int64)
        self.numbers = memoryview(memory).cast("q")
        self._memory, self._layout = memory, struct.Struct(f"4qd{TEXT_BYTES}s{2 * world}q")

    def put(self, word: int, block: _Block, call: CollectiveCall) -> float:
        """Write a descriptor without the call's number, which is published after it; returns its timestamp."""
        now_s = time.perf_counter()  # CLOCK_MONOTONIC, which the processes of a host share
        numbers = (block.index, block.serial, block.fd, block.size_bytes)
        self._layout.pack_into(
            self._memory, 8 * word + 8, *numbers, now_s, _to_text(call), *call.input_splits, *call.output_splits
        )
        return now_s

    def get(self, word: int) -> tuple[_Block, float, bytes, tuple[int, ...]]:
        """Data block, time, text, and input splits followed by output splits of a descriptor."""
        index, serial, fd, size_bytes, written_s, text, *sizes = self._layout.unpack_from(self._memory, 8 * word + 8)
        return _Block(index, serial, fd, size_bytes), written_s, text, tuple(sizes)


def _to_text(call: CollectiveCall) -> bytes:
    return f"{call.collective}\0{call.dtype}\0{call.purpose}".encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")


def _from_text(text: bytes, sizes: tuple[int, ...]) -> CollectiveCall:
    collective, dtype, purpose = text.rstrip(b"\0").decode(errors="replace").split("\0")
    dtype, w = getattr(torch, dtype.removeprefix("torch.")), len(sizes) // 2
    return CollectiveCall(collective, purpose, dtype, sizes[:w], sizes[w:])


@final
class SharedMemoryTransport:
    """Transport over shared memory inside a host, and over another transport between hosts."""

    def __init__(self, network: TorchTransport, topology: Topology) -> None:
        """Collective over the ranks of `network`."""
        native.load()
        self.network, self.world, self._topology = network, network.world, topology
        self.waited = network.waited
        ranks, w = self.world.ranks, len(self.world.ranks)
        host = topology.host_of(self.world.rank)
        near = [p for p, r in enumerate(ranks) if topology.host_of(r) == host]
        self._me, self._near = ranks.index(self.world.rank), range(near[0], near[-1] + 1)  # indices in the group
        # With more ranks than processors, polling would take the processor from the rank that it waits for.
        self._spins = SPINS if len(near) <= usable_processors() else 0
        # Words of a descriptor: full cache lines, or writers would slow readers.
        self._stride = -(-(6 + TEXT_BYTES // 8 + 2 * w) // 8) * 8
        self._calls, self._serials = count(1), count(1)
        self._blocks: list[tuple[_Block, mmap.mmap]] = []
        self._used: list[int] = []  # last call in each block
        # Blocks of other ranks that this rank has mapped, by (rank, index): mapping again per call would be slow.
        self._maps: dict[tuple[int, int], tuple[_Block, mmap.mmap]] = {}
        size_bytes = 8 * (self._descriptor(0) + CALLS * self._stride)  # descriptors begin at call 0's
        self._fd, memory = _create(size_bytes)
        self._control, ones_W = _ControlBlock(memory, w), (1,) * w
        call = CollectiveCall("all_gather", "control blocks", torch.int64, ones_W, ones_W)
        fds_W = network.start(call, torch.tensor([self._fd])).wait().tolist()
        self._controls: dict[int, _ControlBlock] = {}
        peers = {p: self._open(p, fds_W[p], size_bytes, call) for p in near if p != self._me}
        self._controls |= {p: _ControlBlock(memory, w) for p, memory in peers.items()}
        torch.ops.rowwise.publish(self._control.words, MAPPED, 1)

    def start(self, call: CollectiveCall, send_N: Tensor) -> PendingCollective:
        all_near = len(self._near) == len(self.world.ranks)
        if send_N.device.type != "cpu" or (call.collective == "all_reduce" and not all_near):
            return self.network.start(call, send_N)
        number = next(self._calls)
        # The descriptor and its READ word are a ring of CALLS entries: all ranks must have read the call that this one
        # overwrites. If this rank itself has not, waiting for it here would be a deadlock.
        read, before = READ + number % CALLS, number - CALLS
        if self._control.numbers[read] < before:
            raise PeerError(f"rank {self.world.rank}: {CALLS} collectives are pending: wait() for one before {call}")
        for peer, control in self._controls.items():
            if control.numbers[read] < before:
                self._wait_for(peer, read, before, call)
        # Data, then descriptor, then its number: an acquire load of the number sees the other two as well.
        sent_s = self._control.put(self._descriptor(number), self._write(call, send_N, number), call)
        torch.ops.rowwise.publish(self._control.words, self._descriptor(number), number)
        far = None if all_near else self._start_far(call, send_N)
        return PendingCollective(partial(self._finish, call, send_N, _SentCall(number, sent_s), far))

    def split(
        self, groups: Sequence[Sequence[int]], group: tuple[int, ...]
    ) -> "SharedMemoryTransport | TorchTransport":
        """The transport of a group; plain network if no two of its ranks share a host."""
        network = self.network.split(groups, group)
        hosts = {self._topology.host_of(r) for r in group}
        return network if len(hosts) == len(group) else SharedMemoryTransport(network, self._topology)

    def close(self) -> None:
        """Leave once the other ranks have read all that was sent."""
        if self._control.numbers[LEFT]:
            return
        torch.ops.rowwise.publish(self._control.words, LEFT, 1)
        for peer in self._controls:
            with contextlib.suppress(PeerError):  # an ended rank reads no more
                self._wait_for(peer, MAPPED, 1, "the end")
                for number in self._used:
                    self._wait_for(peer, READ + number % CALLS, number, "the end")
        for fd in (self._fd, *(block.fd for block, _ in self._blocks)):
            os.close(fd)
        self._blocks.clear()
        self._maps.clear()
        self.network.close()

    def _finish(
        self, call: CollectiveCall, send_N: Tensor, sent: _SentCall, far: PendingCollective | None
    ) -> ReceivedTensor:
        output_splits = [0 if p in self._near else n for p, n in enumerate(call.output_splits)]
        from_far, arrived_s = ReceivedTensor(send_N[:0], sent.at_s) if far is None else far.finish()
        segments_W, number = list(from_far.split(output_splits)), sent.number
        segments_W[self._me] = segment_for(call, send_N, self._me)
        for peer in self._controls:
            segments_W[peer], written_s = self._read(peer, call, number)
            arrived_s = max(arrived_s, written_s)
        # An all-reduce may overwrite its tensor, which saves fresh memory. `combine_segments` can write to one of the
        # first two segments only, so the result is in place on ranks 0 and 1.
        out = send_N if call.collective == "all_reduce" and self._me < 2 else None
        received = combine_segments(call, segments_W, out)
        torch.ops.rowwise.publish(self._control.words, READ + number % CALLS, number)
        return ReceivedTensor(received, arrived_s)

    def _descriptor(self, number: int) -> int:
        """Index of the word with a call's number; its descriptor follows."""
        return READ + CALLS + number % CALLS * self._stride

    def _wait_for(self, peer: int, word: int, value: int, call: CollectiveCall | str) -> None:
        """Wait until a word of another rank's control block is at least `value`; raises if it ends or times out."""
        control, rank, me = self._controls[peer], self.world.ranks[peer], self.world.rank
        begin_s = time.perf_counter()
        spins, end_s = self._spins, begin_s + self.world.timeout_s
        while not torch.ops.rowwise.wait_for(control.words, word, value, spins, SLICE_S):
            spins = 0
            # Checked again after the rank was seen to end: it may have published just before.
            if self._describe_end(peer) and not torch.ops.rowwise.wait_for(control.words, word, value, 0, 0.0):
                reason = self._describe_ends(peer)
                raise PeerError(f"rank {me} waits for {call}, which rank {rank} never called: {reason}")
            if time.perf_counter() >= end_s:
                raise PeerError(
                    f"rank {me} waited {self.world.timeout_s} s for {call}: not called by rank {rank}",
                    "the same calls on all ranks, or a larger --timeout",
                )
        self.waited.add(begin_s, time.perf_counter())

    def _describe_end(self, peer: int) -> str:
        """The end of a rank in words; empty while it takes part."""
        rank, control = self.world.ranks[peer], self._controls.get(peer)
        pid = self.world.pids[rank]
        if control is not None and control.numbers[LEFT]:
            return f"rank {rank} (process {pid}) has closed its side"
        return "" if is_alive(pid) else f"rank {rank} (process {pid}) has ended"

    def _describe_ends(self, first: int) -> str:
        """The ranks of this host that have ended, `first` first; another rank's end may be the cause."""
        peers = [p for p in self._near if p not in (first, self._me)]
        return "; ".join(filter(None, map(self._describe_end, [first, *peers])))

    def _write(self, call: CollectiveCall, send_N: Tensor, number: int) -> _Block:
        """Copy the data for other ranks of this host into a data block, segment by segment."""
        segments = [send_N]
        if call.collective not in SENDS_FULL_TENSOR:  # the segments before and after this rank's own, which is not sent
            first, own, end = (sum(call.input_splits[:p]) for p in (self._near[0], self._me, self._near[-1] + 1))
            segments = [send_N[first:own], send_N[own + call.input_splits[self._me] : end]]
        n = sum(segment.numel() for segment in segments)
        if not n or not self._controls:
            return NO_BLOCK
        block, memory = self._acquire_block(n * call.dtype.itemsize, call)
        self._used[block.index] = number
        torch.cat(segments, out=torch.frombuffer(memory, dtype=call.dtype, count=n))
        return block

    def _acquire_block(self, wanted_bytes: int, call: CollectiveCall) -> tuple[_Block, mmap.mmap]:
        """A large enough free block (read by all ranks), or a new one."""
        controls = self._controls.values()
        free = [i for i, n in enumerate(self._used) if all(c.numbers[READ + n % CALLS] >= n for c in controls)]
        sizes = {i: self._blocks[i][0].size_bytes for i in free}
        fit = [i for i in free if sizes[i] >= wanted_bytes]
        if fit:  # best fit; of equal sizes the last used, which may still be in a cache
            return self._blocks[min(fit, key=lambda i: (sizes[i], -self._used[i]))]
        # Replaces the largest free block, so that a rank whose calls grow does not collect blocks of every size.
        index = max(free, key=lambda i: sizes[i], default=len(self._blocks))
        # 1/8 more, as the next batch may be a little larger.
        size_bytes = -(-wanted_bytes * 9 // 8 // MIN_BYTES) * MIN_BYTES
        try:
            fd, memory = _create(size_bytes)
        except OSError as error:
            used_mb = sum(b.size_bytes for b, _ in self._blocks) >> 20
            need = f"{call} needs {size_bytes >> 20} MB of shared memory more than the {used_mb} MB in use"
            raise PeerError(
                f"rank {self.world.rank}: {need}: {error}",
                hint="give more memory, or use smaller batches or shared_memory=False",
            ) from error
        for old, _ in self._blocks[index : index + 1]:
            os.close(old.fd)
        self._blocks[index : index + 1] = [(_Block(index, next(self._serials), fd, size_bytes), memory)]
        self._used[index : index + 1] = [0]
        return self._blocks[index]

    def _read(self, peer: int, call: CollectiveCall, number: int) -> ReceivedTensor:
        """Another rank's data for this rank: a view of that rank's block."""
        self._wait_for(peer, self._descriptor(number), number, call)
        block, written_s, text, sizes = self._controls[peer].get(self._descriptor(number))
        w, n = len(self.world.ranks), sizes[self._me]
        if text != _to_text(call) or n != call.output_splits[peer] or sizes[w + self._me] != call.input_splits[peer]:
            calls = {self._me: call, peer: _from_text(text, sizes)}
            a, b = sorted(calls)
            unknown = f"ranks {self.world.ranks} do not agree about {call}: expected the same call on all of them"
            raise PeerError(describe_mismatch(calls[a], calls[b], a, b, self.world.ranks) or unknown)
        if not n:
            return ReceivedTensor(torch.empty(0, dtype=call.dtype), written_s)
        # A writer omits its own segment, so it does not count in the offset.
        before = () if call.collective in SENDS_FULL_TENSOR else range(self._near[0], self._me)
        skip = sum(sizes[p] for p in before if p != peer)
        mapping = self._maps.get((peer, block.index))
        if mapping is None or mapping[0] != block:
            mapping = block, self._open(peer, block.fd, block.size_bytes, call)
            self._maps[peer, block.index] = mapping
        view_N = torch.frombuffer(mapping[1], dtype=call.dtype, count=n, offset=skip * call.dtype.itemsize)
        return ReceivedTensor(view_N, written_s)

    def _open(self, peer: int, fd: int, size_bytes: int, call: CollectiveCall) -> mmap.mmap:
        """Map memory of another rank, through its file descriptor in /proc."""
        rank = self.world.ranks[peer]
        pid = self.world.pids[rank]
        try:
            local_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError as error:
            hidden = f"the memory of process {pid} is hidden from other processes: connect with shared_memory=False"
            reason = self._describe_ends(peer) or hidden
            raise PeerError(f"rank {self.world.rank}: {call}, from rank {rank}: {error}: {reason}") from error
        try:
            return mmap.mmap(local_fd, size_bytes)
        finally:
            os.close(local_fd)

    def _start_far(self, call: CollectiveCall, send_N: Tensor) -> PendingCollective:
        """Start the part of a collective with other hosts: an all-to-all with empty splits for ranks of this host."""
        input_splits, output_splits = (
            tuple(0 if p in self._near else n for p, n in enumerate(s)) for s in (call.input_splits, call.output_splits)
        )
        segments = [segment_for(call, send_N, p) for p in range(len(self.world.ranks)) if p not in self._near]
        far = CollectiveCall("all_to_all", call.purpose, call.dtype, input_splits, output_splits)
        return self.network.start(far, torch.cat(segments))

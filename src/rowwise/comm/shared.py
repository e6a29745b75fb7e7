"""Ranks of one host exchange through memory that they share; those of other hosts through the transport it wraps.

[Note: shared memory] Each rank has a board that the others map: a notice for each of its last calls (who gets how much,
in which block), and the number of the last call that it has read at each place. A call copies what is for others into
a free block and publishes its notice; waiting copies out, or adds in rank order, straight from the others' blocks,
then publishes that it has read them, which frees the blocks. Nobody holds a lock, so ranks may wait in any order.

Its own file because it is a protocol of its own. Memory has no name (memfd): others open it through the process that
made it, and it goes with the last that maps it, however that ends. Gives up: systems other than Linux; and in an
all-reduce each rank adds everything itself, so that a call needs nobody's help once it has begun.
"""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import final

import torch
from torch import Tensor

from rowwise.comm.call import WHOLE, Call, compare, join, run_for
from rowwise.comm.seam import Handle
from rowwise.comm.torch import Processes, is_alive
from rowwise.errors import PeerError
from rowwise.ops import native
from rowwise.spec import Topology

HAS_SHARED_MEMORY = hasattr(os, "memfd_create")
CALLS = 64  # of a rank that others may not have read yet
LEFT, MAPPED, READ = 0, 1, 8  # words of a board; from READ on one for each of CALLS, then the notices
NOTICE = 8 + READ + CALLS  # the word of the first notice
TEXT_BYTES = 128  # of a notice, to name the call
LEAST_BYTES = 1 << 16  # of a block
SPINS = 2000  # about 20 microseconds
SLICE_S = 0.1  # of sleep between looks at whether the other is alive


def _create(size_bytes: int) -> int:
    """A file descriptor of memory without a name, all of which is there: a later lack would be a crash."""
    fd = os.memfd_create("rowwise")
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open(pid: int, fd: int, size_bytes: int) -> mmap.mmap:
    """Memory that another process has made."""
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as error:
        out = "it has ended, or its memory is not shown to others: connect with shared_memory=False"
        raise PeerError(f"process {pid} of another rank: {error}: {out}") from error
    try:
        return mmap.mmap(own, size_bytes)
    finally:
        os.close(own)


@dataclass(slots=True)
class _Block:
    """Memory that a call's data is in; `call` is the last that used it."""

    serial: int
    size_bytes: int
    fd: int
    memory: mmap.mmap
    call: int = 0


@final
class _Board:
    """A rank's words and notices, its own or another's."""

    def __init__(self, memory: mmap.mmap, world: int) -> None:
        self.words = torch.frombuffer(memory, dtype=torch.int64)
        self.numbers = memoryview(memory).cast("q")
        self._memory = memory
        self._form = struct.Struct(f"4q{TEXT_BYTES}s{2 * world}q")

    @staticmethod
    def stride(world: int) -> int:
        """Words of a notice: its number, the block and what is called; whole cache lines."""
        return -(-(5 + TEXT_BYTES // 8 + 2 * world) // 8) * 8

    def put(self, word: int, block: tuple[int, int, int, int], call: Call) -> None:
        self._form.pack_into(self._memory, 8 * word + 8, *block, _text(call), *call.sizes_W, *call.receives_W)

    def get(self, word: int) -> tuple[tuple[int, int, int, int], bytes, tuple[int, ...]]:
        """The block, what is called, and its sizes and receives."""
        index, serial, fd, size_bytes, text, *sizes = self._form.unpack_from(self._memory, 8 * word + 8)
        return (index, serial, fd, size_bytes), text, tuple(sizes)


def _text(call: Call) -> bytes:
    return f"{call.collective}\0{call.dtype}\0{call.what}".encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")


def _call(text: bytes, sizes: tuple[int, ...]) -> Call:
    """What a notice says."""
    collective, dtype, what = text.rstrip(b"\0").decode(errors="replace").split("\0")
    dtype, w = getattr(torch, dtype.removeprefix("torch.")), len(sizes) // 2
    return Call(collective=collective, what=what, dtype=dtype, sizes_W=sizes[:w], receives_W=sizes[w:])


@final
class Memory:
    """A transport over shared memory, and over another between hosts."""

    def __init__(self, network: Processes, topology: Topology) -> None:
        """Called by all ranks of the network at once."""
        native.load()
        self.network, self.world, self._topology = network, network.world, topology
        self.me, w = self.world.ranks.index(network.world.rank), len(self.world.ranks)
        host = topology.host_of(network.world.rank)
        near = [p for p, r in enumerate(self.world.ranks) if topology.host_of(r) == host]
        self.near = range(near[0], near[-1] + 1)  # places in the group
        self.others = [p for p in near if p != self.me]
        self._spins = SPINS if len(near) <= len(os.sched_getaffinity(0)) else 0
        self._stride = _Board.stride(w)
        self._calls = count(1)
        self._blocks: list[_Block] = []
        self._serials = count(1)
        self._maps: dict[tuple[int, int], tuple[int, mmap.mmap]] = {}
        size_bytes = 8 * (NOTICE + CALLS * self._stride)
        self._fd = _create(size_bytes)
        self._board = _Board(mmap.mmap(self._fd, size_bytes), w)
        ones_W = (1,) * w
        call = Call(collective="all_gather", what="boards", dtype=torch.int64, sizes_W=ones_W, receives_W=ones_W)
        fds_W = network.start(call, torch.tensor([self._fd])).wait().tolist()
        pids = network.world.pids
        self._boards = {p: _Board(_open(pids[self.world.ranks[p]], fds_W[p], size_bytes), w) for p in self.others}
        torch.ops.rowwise.publish(self._board.words, MAPPED, 1)

    def start(self, call: Call, send_N: Tensor) -> Handle:
        """Begin a collective."""
        all_near = len(self.near) == len(self.world.ranks)
        if send_N.device.type != "cpu" or (call.collective == "all_reduce" and not all_near):
            return self.network.start(call, send_N)
        number = next(self._calls)
        before = number - CALLS
        if self._board.numbers[READ + number % CALLS] < before:
            raise PeerError(f"rank {self.world.rank}: {CALLS} collectives are under way: wait for one before {call}")
        for place in self.others:
            self._await(place, READ + number % CALLS, before, call)
        self._board.put(self._notice(number), self._write(call, send_N, number), call)
        torch.ops.rowwise.publish(self._board.words, self._notice(number), number)
        return _Under(self, call, send_N, number, None if all_near else self._start_far(call, send_N))

    def split(self, groups: Sequence[Sequence[int]], group: tuple[int, ...]) -> "Memory | Processes":
        """The same for a group."""
        network = self.network.split(groups, group)
        hosts = {self._topology.host_of(r) for r in group}
        return network if len(hosts) == len(group) else Memory(network, self._topology)

    def close(self) -> None:
        """Leave, once the others have what was sent."""
        torch.ops.rowwise.publish(self._board.words, LEFT, 1)
        for place in self.others:
            with contextlib.suppress(PeerError):  # whoever left needs nothing
                self._await(place, MAPPED, 1, "the end")
                for block in self._blocks:
                    self._await(place, READ + block.call % CALLS, block.call, "the end")
        for fd in (self._fd, *(block.fd for block in self._blocks)):
            os.close(fd)
        self._blocks.clear()
        self._maps.clear()
        self.network.close()

    def read(self, place: int, call: Call, number: int) -> Tensor:
        """What another rank has for this one, where that rank has put it."""
        self._await(place, self._notice(number), number, call)
        block, text, sizes = self._boards[place].get(self._notice(number))
        w, n = len(self.world.ranks), sizes[self.me]
        if text != _text(call) or n != call.receives_W[place] or sizes[w + self.me] != call.sizes_W[place]:
            pair = sorted([(self.me, call), (place, _call(text, sizes))], key=lambda p: p[0])
            found = compare(pair[0][1], pair[1][1], pair[0][0], pair[1][0], self.world.ranks)
            raise PeerError(found or f"ranks {self.world.ranks} do not agree about {call}")
        if not n:
            return torch.empty(0, dtype=call.dtype)
        skip = 0 if call.collective in WHOLE else sum(sizes[p] for p in range(self.near[0], self.me) if p != place)
        memory = self._map(place, *block)
        return torch.frombuffer(memory, dtype=call.dtype, count=n, offset=skip * call.dtype.itemsize)

    def have_read(self, number: int) -> None:
        """Tell the others that their blocks of a call are free."""
        torch.ops.rowwise.publish(self._board.words, READ + number % CALLS, number)

    def _notice(self, number: int) -> int:
        return NOTICE + number % CALLS * self._stride

    def _await(self, place: int, word: int, value: int, call: Call | str) -> None:
        """Until another rank's word has come to a value."""
        words, rank = self._boards[place].words, self.world.ranks[place]
        end_s = time.monotonic() + self.world.timeout_s
        spins, pid, me = self._spins, self.world.pids[rank], self.world.rank
        while not torch.ops.rowwise.wait_for(words, word, value, spins, SLICE_S):
            spins, left = 0, bool(self._boards[place].numbers[LEFT])
            if (left or not is_alive(pid)) and not torch.ops.rowwise.wait_for(words, word, value, 0, 0.0):
                how = "it has closed its side" if left else f"process {pid} has ended"
                raise PeerError(f"rank {me} waits for {call}, which rank {rank} never called: {how}")
            if time.monotonic() >= end_s:
                raise PeerError(f"rank {me} waited {self.world.timeout_s} s for {call}: not called by rank {rank}")

    def _write(self, call: Call, send_N: Tensor, number: int) -> tuple[int, int, int, int]:
        """Copy what is for the others of this host, one run after the other; gives the block to name in the notice."""
        runs = [send_N]
        if call.collective not in WHOLE:
            first, own, end = (sum(call.sizes_W[:p]) for p in (self.near[0], self.me, self.near[-1] + 1))
            runs = [send_N[first:own], send_N[own + call.sizes_W[self.me] : end]]
        n = sum(run.numel() for run in runs)
        if not n or not self.others:
            return (0, 0, 0, 0)
        index = self._take(n * call.dtype.itemsize, call)
        block = self._blocks[index]
        block.call = number
        torch.cat(runs, out=torch.frombuffer(block.memory, dtype=call.dtype, count=n))
        return (index, block.serial, block.fd, block.size_bytes)

    def _take(self, wanted_bytes: int, call: Call) -> int:
        """The index of a block that everybody has read and that is large enough; makes one if there is none."""
        boards = self._boards.values()
        free = [
            i
            for i, b in enumerate(self._blocks)
            if all(board.numbers[READ + b.call % CALLS] >= b.call for board in boards)
        ]
        sizes = {i: self._blocks[i].size_bytes for i in free}
        fit = [i for i in free if sizes[i] >= wanted_bytes]
        if fit:  # of equals the last used, which caches may still hold
            return min(fit, key=lambda i: (sizes[i], -self._blocks[i].call))
        index = max(free, key=lambda i: sizes[i], default=len(self._blocks))
        size_bytes = -(-wanted_bytes * 9 // 8 // LEAST_BYTES) * LEAST_BYTES  # the next may be a little larger
        if index < len(self._blocks):
            os.close(self._blocks[index].fd)
        try:
            fd = _create(size_bytes)
        except OSError as error:
            held = sum(b.size_bytes for b in self._blocks) >> 20
            want = f"want {size_bytes >> 20} MB of shared memory for {call}, beside {held} MB"
            out = "free some, send less at once, or connect with shared_memory=False"
            raise PeerError(f"rank {self.world.rank}: {want}: {error}: {out}") from error
        self._blocks[index : index + 1] = [_Block(next(self._serials), size_bytes, fd, mmap.mmap(fd, size_bytes))]
        return index

    def _map(self, place: int, index: int, serial: int, fd: int, size_bytes: int) -> mmap.mmap:
        """Another rank's block, mapped at its first use."""
        known = self._maps.get((place, index))
        if known is None or known[0] != serial:
            known = self._maps[place, index] = serial, _open(self.world.pids[self.world.ranks[place]], fd, size_bytes)
        return known[1]

    def _start_far(self, call: Call, send_N: Tensor) -> Handle:
        """What goes to and comes from other hosts."""
        sizes_W, receives_W = (
            tuple(0 if p in self.near else n for p, n in enumerate(s)) for s in (call.sizes_W, call.receives_W)
        )
        runs = [run_for(call, send_N, p) for p in range(len(self.world.ranks)) if p not in self.near]
        far = Call(collective="all_to_all", what=call.what, dtype=call.dtype, sizes_W=sizes_W, receives_W=receives_W)
        return self.network.start(far, torch.cat(runs))


@final
@dataclass(frozen=True, slots=True)
class _Under:
    """A collective under way."""

    by: Memory
    call: Call
    send_N: Tensor
    number: int
    far: Handle | None

    def wait(self) -> Tensor:
        by, call = self.by, self.call
        receives_W = [0 if p in by.near else n for p, n in enumerate(call.receives_W)]
        runs_W = list((self.send_N[:0] if self.far is None else self.far.wait()).split(receives_W))
        runs_W[by.me] = run_for(call, self.send_N, by.me)
        for place in by.others:
            runs_W[place] = by.read(place, call, self.number)
        # Fresh memory costs as much as the sum, and an all-reduce may use what it was given.
        came = join(call, runs_W, self.send_N if call.collective == "all_reduce" and by.me < 2 else None)
        by.have_read(self.number)
        return came

"""What the processes of a service tell each other: frozen values over stream sockets, with files beside them.

A message is its length and its MessagePack; one that comes with memory (`memory.py`) says so, and the file descriptor
travels with its bytes. Its own file because host, workers and clients share it and nothing else. Pickles are read
only from the process that started this one, which could run anything here anyway.
"""

import socket
import struct
from collections import deque
from typing import final

import msgspec

from rowwise.errors import PeerError
from rowwise.ingest.block import Layout
from rowwise.ingest.prepare import Spent
from rowwise.ingest.service.coordinator import Place, Plan
from rowwise.spec import Value

LENGTH = struct.Struct("<I?")
READ_BYTES = 1 << 16
MOST_FILES = 64


class Begin(Value, frozen=True, tag=True):
    """To the host: how to go about it, and what workers prepare from, as a pickle in memory that comes with it."""

    plan: Plan
    size_bytes: int
    path: tuple[str, ...] = ()  # where the owner finds modules
    workers: int | None = None  # as many as a host before this one had come to


class Set(Value, frozen=True, tag=True):
    """To a worker: what to prepare from, as a pickle in memory of so many bytes."""

    size_bytes: int
    path: tuple[str, ...] = ()


class Prepare(Value, frozen=True, tag=True):
    """To a worker: a split, and where to put it; the memory of a slot comes with it the first time."""

    place: Place
    slot: int


class Ready(Value, frozen=True, tag=True):
    """From a worker: it has been set."""


class Unable(Value, frozen=True, tag=True):
    """From a worker: it cannot work, and ends."""

    error: str


class Times(Value, frozen=True):
    """Where the seconds of a split went."""

    spent: Spent = Spent()
    busy_s: float = 0.0
    cpu_s: float = 0.0


class Prepared(Value, frozen=True, tag=True):
    """From a worker: a split is in its slot."""

    place: Place
    layout: Layout
    times: Times


class Bad(Value, frozen=True, tag=True):
    """From a worker: a split cannot be used, and why."""

    place: Place
    error: str


class Hello(Value, frozen=True, tag=True):
    """From a client: who it is, and the splits that it wants from here on."""

    client: int
    place: Place
    waited_s: float


class Done(Value, frozen=True, tag=True):
    """From a client: it has what it needs of a split."""

    place: Place
    waited_s: float


class Took(Value, frozen=True, tag=True):
    """To a client: a split, in the memory of a slot, which comes with it where it is new to the client."""

    place: Place
    slot: int
    layout: Layout
    workers: int  # at work now
    ready: int  # splits that are prepared
    times: Times


class Broken(Value, frozen=True, tag=True):
    """To a client: there is no such split, and no more after it."""

    place: Place
    error: str


Message = Begin | Set | Prepare | Ready | Unable | Prepared | Bad | Hello | Done | Took | Broken


@final
class Line:
    """One end of a conversation."""

    def __init__(self, end: socket.socket) -> None:
        """Talk over a connected stream socket."""
        self.socket = end
        self._buffer = bytearray()
        self._files: deque[int] = deque()

    def fileno(self) -> int:
        """For a selector."""
        return self.socket.fileno()

    def send(self, message: Message, file: int | None = None) -> None:
        """All of it; PeerError where the other end is gone."""
        body = msgspec.msgpack.encode(message)
        data = LENGTH.pack(len(body), file is not None) + body
        try:
            if file is not None:  # with the first byte, so that it is there when the message is
                sent = socket.send_fds(self.socket, [data], [file])
                data = data[sent:]
            self.socket.sendall(data)
        except OSError as error:
            raise PeerError(f"the other end of a service is gone: {error}") from error

    def receive(self) -> list[tuple[Message, int | None]]:
        """What has come, waiting for some of it; PeerError at its end. Files belong to whoever gets them."""
        try:
            data, files, _, _ = socket.recv_fds(self.socket, READ_BYTES, MOST_FILES)
        except TimeoutError:
            return []
        except OSError as error:
            raise PeerError(f"the other end of a service is gone: {error}") from error
        self._files.extend(files)
        if not data:
            raise PeerError("the other end of a service is gone")
        self._buffer += data
        return list(self._whole())

    def _whole(self) -> list[tuple[Message, int | None]]:
        found: list[tuple[Message, int | None]] = []
        at = 0
        while len(self._buffer) - at >= LENGTH.size:
            length, has_file = LENGTH.unpack_from(self._buffer, at)
            end = at + LENGTH.size + length
            if len(self._buffer) < end:
                break
            message = msgspec.msgpack.decode(bytes(self._buffer[at + LENGTH.size : end]), type=Message)
            found.append((message, self._files.popleft() if has_file else None))
            at = end
        del self._buffer[:at]
        return found

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

"""Messages between processes of a service: frozen values over stream sockets, with file descriptors.

Clients and workers say the coordinator's events and hear its commands. The memory of a slot comes with the first
command that names it: a message is its length and its MessagePack, says whether a file comes with it (`memory.py`), and
the descriptor travels with its bytes. Pickles are read only from the process that started this one, which could run
anything here anyway.
"""

import socket
import struct
from collections import deque
from typing import final

import msgspec

from rowwise.errors import PeerError
from rowwise.ingest.service.coordinator import (
    ClientAttached,
    ServiceConfig,
    SplitDelivery,
    SplitLease,
    SplitReady,
    SplitRefused,
    SplitReleased,
    WorkerJoined,
    WorkerLost,
)
from rowwise.spec import Value

LENGTH = struct.Struct("<I?")
READ_BYTES = 1 << 16
MOST_FILES = 64


class BeginService(Value, frozen=True, tag=True):
    """To the host: how to go about it, and what workers prepare from, as a pickle in memory that comes with it."""

    plan: ServiceConfig
    size_bytes: int
    path: tuple[str, ...] = ()  # where the owner finds modules
    workers: int | None = None  # as many as a host before this one had come to


class WorkerSetup(Value, frozen=True, tag=True):
    """To a worker: its number, and what to prepare from, as a pickle in memory of so many bytes."""

    worker: int
    size_bytes: int
    path: tuple[str, ...] = ()


FromClient = ClientAttached | SplitReleased
FromWorker = WorkerJoined | SplitReady | SplitRefused | WorkerLost
Message = BeginService | WorkerSetup | SplitLease | SplitDelivery | FromClient | FromWorker


@final
class Connection:
    """One end of a socket between a host and a worker or client."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = bytearray()
        self._files: deque[int] = deque()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message, file: int | None = None) -> None:
        """Send everything; raises PeerError if the peer is gone."""
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
        """Receive pending messages, waiting for at least one; raises PeerError at the end of the stream."""
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
        return list(self._complete_messages())

    def _complete_messages(self) -> list[tuple[Message, int | None]]:
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
        self.socket.close()

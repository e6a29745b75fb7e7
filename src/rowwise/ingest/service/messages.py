"""Messages between the processes of a service: frozen values over Unix stream sockets, some with a file descriptor.

Clients and workers send the coordinator's events and receive its commands. A message is its length, a flag whether a
file descriptor comes with it, and its MessagePack. The memory of a slot (`memory.py`) comes with the first command that
names the slot. A pickle is read only from the process that started this one, which could run any code here anyway.
"""

import socket
import struct
from collections import deque
from typing import final

import msgspec

from rowwise.base.errors import PeerError
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
from rowwise.tables.spec import Value

LENGTH = struct.Struct("<I?")
GONE = "a process of the service that prepares rows has ended"
READ_BYTES = 1 << 16
MAX_FILES = 64


class BeginService(Value, frozen=True, tag=True):
    """To the host: its configuration; the pickled `PreparationTask` is in the memory that comes with the message."""

    config: ServiceConfig
    size_bytes: int
    path: tuple[str, ...] = ()  # the owner's sys.path: pickled functions are imported from it
    workers: int | None = None  # worker count of the previous host; None for the first host


class WorkerSetup(Value, frozen=True, tag=True):
    """To a worker: its number; the pickled `PreparationTask` is in the memory that comes with the message."""

    worker: int
    size_bytes: int
    path: tuple[str, ...] = ()


FromClient = ClientAttached | SplitReleased
FromWorker = WorkerJoined | SplitReady | SplitRefused | WorkerLost
Message = BeginService | WorkerSetup | SplitLease | SplitDelivery | FromClient | FromWorker


@final
class Connection:
    """One end of a socket between the host and its owner, a worker or a client."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = bytearray()
        self._files: deque[int] = deque()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message, file: int | None = None) -> None:
        """Send the whole message; raises PeerError if the other end is closed."""
        body = msgspec.msgpack.encode(message)
        data = LENGTH.pack(len(body), file is not None) + body
        try:
            if file is not None:  # the descriptor travels with the first byte, so it precedes the rest of the message
                sent = socket.send_fds(self.socket, [data], [file])
                data = data[sent:]
            self.socket.sendall(data)
        except OSError as error:
            raise PeerError(f"{GONE}: {error}") from error

    def receive(self) -> list[tuple[Message, int | None]]:
        """Wait for bytes up to the socket's timeout, and return complete messages. The caller owns the descriptors."""
        try:
            data, files, _, _ = socket.recv_fds(self.socket, READ_BYTES, MAX_FILES)
        except TimeoutError:
            return []
        except OSError as error:
            raise PeerError(f"{GONE}: {error}") from error
        self._files.extend(files)
        if not data:
            raise PeerError(GONE)
        self._buffer += data
        return self._decode_complete()

    def _decode_complete(self) -> list[tuple[Message, int | None]]:
        messages: list[tuple[Message, int | None]] = []
        at = 0
        while len(self._buffer) - at >= LENGTH.size:
            length, has_file = LENGTH.unpack_from(self._buffer, at)
            end = at + LENGTH.size + length
            if len(self._buffer) < end:
                break
            message = msgspec.msgpack.decode(bytes(self._buffer[at + LENGTH.size : end]), type=Message)
            messages.append((message, self._files.popleft() if has_file else None))
            at = end
        del self._buffer[:at]
        return messages

    def close(self) -> None:
        self.socket.close()

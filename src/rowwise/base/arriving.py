"""`SocketReader`: the bytes that a socket receives, with a deadline for each read."""

import io
import select
import socket
from collections.abc import Callable
from typing import Any, final


@final
class SocketReader(io.RawIOBase):
    """The bytes that a socket receives, as a raw stream.

    Args:
        connection: stays open when this is closed.
        left_s: returns the seconds that the next read may take; raises `TimeoutError` after the deadline.
    """

    def __init__(self, connection: socket.socket, left_s: Callable[[], float]) -> None:
        self._connection, self._left_s = connection, left_s

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        self._connection.settimeout(self._left_s())
        return self._connection.recv_into(target)


def is_idle(connection: socket.socket) -> bool:
    """Whether a connection can be reused: the peer has not closed it, and no unread bytes wait."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)

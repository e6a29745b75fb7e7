"""Reads what a socket receives until a deadline."""

import io
import select
import socket
from collections.abc import Callable
from typing import Any, final


@final
class Arriving(io.RawIOBase):
    """What a socket receives.

    Args:
        connection: stays open when this is closed.
        left_s: seconds that the next read may take; raises `TimeoutError` when there are none.
    """

    def __init__(self, connection: socket.socket, left_s: Callable[[], float]) -> None:
        self._connection, self._left_s = connection, left_s

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        self._connection.settimeout(self._left_s())
        return self._connection.recv_into(target)


def is_idle(connection: socket.socket) -> bool:
    """Whether the other side has neither closed a connection nor sent what nobody reads."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)

"""A connection of an untrusted client: limits on the time and size of its requests.

uvicorn reads heads of any length and waits for ever for missing bytes. Here a connection has one deadline at a time:
for the head, for the body, for its next request, or for reading a response. One that breaks a limit gets an error, if
no response is in flight, and is closed.
"""

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, final

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from rowwise.serve.admission import ServiceLimits
from rowwise.serve.batches import Rejection

BAD_REQUEST, TIMEOUT, HEAD_TOO_LARGE, UNAVAILABLE = 400, 408, 431, 503
MAX_PIPELINED = 64  # pipelined requests of a connection
MAX_SMALL_CHUNKS, SMALL_CHUNK_bytes = 1000, 64  # a body may have up to MAX_SMALL_CHUNKS below this size
LINGER_s = 0.5  # time for a client that still sends to read its refusal


class _Part(Enum):
    """The expected part of a request."""

    NOTHING = auto()  # between requests
    HEAD = auto()
    BODY = auto()
    REFUSED = auto()  # further data is discarded


@final
class BoundedConnection(HttpToolsProtocol):
    """Closes connections that break a limit.

    Args:
        limits: of heads, bodies and connections.
        count: called with the status of each refusal.
        refusal_of_head: of the path and headers of a POST request that may be refused before its body is read.
    """

    def __init__(
        self,
        limits: ServiceLimits,
        count: Callable[[int], None],
        refusal_of_head: Callable[[bytes, Sequence[tuple[bytes, bytes]]], Rejection | None],
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._limits, self._count, self._refusal_of_head = limits, count, refusal_of_head
        self._unread = False  # whether the request was refused by its head; its body is discarded
        self._part, self._progressed, self._stalled_bytes = _Part.NOTHING, False, 0
        self._chunks = self._body_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._reader_timeout: asyncio.TimerHandle | None = None  # timeout of a client that does not read its response

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # pyrefly: ignore
        if len(self.connections) > self._limits.connections:
            self._refuse(
                UNAVAILABLE,
                f"{self._limits.connections} connections are open: expected fewer connections, or more workers",
            )
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._unset_keepalive_if_required()
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._part is _Part.REFUSED or self.transport.is_closing():
            return
        if self._part is _Part.NOTHING:
            self._part, self._stalled_bytes = _Part.HEAD, 0
        self._progressed = False
        super().data_received(data)
        if self._part is _Part.REFUSED or self.transport.is_closing():
            return
        if self._part is _Part.NOTHING:
            if not self._is_answering():
                self._await_request()  # the rest of a body that was answered early
            return
        self._stalled_bytes = 0 if self._progressed else self._stalled_bytes + len(data)
        if self._stalled_bytes >= self._limits.head_bytes:
            # In a head, or in chunk extensions and trailers, which are no part of a body.
            self._refuse(HEAD_TOO_LARGE, f"the head is larger than {self._limits.head_bytes} bytes: send fewer headers")
        elif self._deadline is None:
            self._set_deadline(self._limits.head_s if self._part is _Part.HEAD else self._limits.body_s)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = _Part.HEAD

    def on_headers_complete(self) -> None:
        refusal = self._refusal()
        self._unread = refusal is not None
        if refusal is None:
            super().on_headers_complete()
        else:
            self._count(refusal.code)
            retry_s = max(1, round(refusal.retry_after_s or 0))
            self._write_error(refusal.code, refusal.message, b"retry-after: %d\r\n" % retry_s)
        self._enter(_Part.BODY)
        self._chunks = self._body_bytes = 0
        if len(self.pipeline) > MAX_PIPELINED:
            raise ValueError(f"more than {MAX_PIPELINED} requests wait")

    def on_body(self, body: bytes) -> None:
        if not self._unread:
            super().on_body(body)
        self._progressed = True
        self._chunks += 1
        self._body_bytes += len(body)
        if self._chunks > MAX_SMALL_CHUNKS and self._body_bytes < self._chunks * SMALL_CHUNK_bytes:
            raise ValueError(f"chunks of less than {SMALL_CHUNK_bytes} bytes")

    def on_message_complete(self) -> None:
        if not self._unread:
            super().on_message_complete()
        self._enter(_Part.NOTHING)

    def send_400_response(self, msg: str) -> None:
        self._refuse(BAD_REQUEST, "invalid HTTP/1.1, or too many small chunks: expected one request at a time")

    def _unsupported_upgrade_warning(self) -> None:
        """Do not log requests for WebSockets by untrusted clients."""

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timeout = self.loop.call_later(self._limits.body_s, self._close)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_reader()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refusal(self) -> Rejection | None:
        """The refusal of a request by its head, if nothing of the connection waits."""
        parser = self.parser
        is_plain = parser.get_method() == b"POST" and parser.get_http_version() == "1.1" and parser.should_keep_alive()
        if self._is_answering() or self.flow.write_paused or not is_plain:
            return None
        return self._refusal_of_head(self.url, self.headers)

    def _write_error(self, code: int, message: str, header: bytes) -> None:
        body = msgspec.json.encode({"error": message})
        head = b"content-type: application/json\r\ncontent-length: %d\r\n%b\r\n" % (len(body), header)
        self.transport.write(STATUS_LINE[code] + head + body)

    def _enter(self, part: _Part) -> None:
        self._part, self._progressed = part, True
        self._set_deadline(None)

    def _await_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._refuse_late, seconds)

    def _stop_waiting_for_reader(self) -> None:
        if self._reader_timeout is not None:
            self._reader_timeout.cancel()
            self._reader_timeout = None

    def _refuse_late(self, seconds: float) -> None:
        what = "head" if self._part is _Part.HEAD else "body"
        self._refuse(TIMEOUT, f"the {what} of the request took more than {seconds:g} s: send it at once")

    def _refuse(self, code: int, message: str) -> None:
        """Send the error, unless another response of the connection is in flight, and close it."""
        self._count(code)
        cycle, is_answering = self.cycle, self._is_answering()
        may_answer = not is_answering or (self._part is _Part.BODY and not cycle.response_started and not self.pipeline)
        self._part = _Part.REFUSED
        self._set_deadline(None)
        if is_answering:
            cycle.disconnected = True  # discards its response
            cycle.message_event.set()
        if may_answer:
            self._write_error(code, message, b"connection: close\r\n")
        if may_answer and code != UNAVAILABLE:
            self.transport.write_eof()
            self._deadline = self.loop.call_later(LINGER_s, self._close)
        else:
            self._close()

    def _close(self) -> None:
        """Close at once, without waiting for the client to read buffered data."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

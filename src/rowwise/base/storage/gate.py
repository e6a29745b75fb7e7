"""Bounds the responses of an object store: a proxy on the loopback address between obstore and an endpoint.

obstore follows redirects to any host, with a session token, and has whole lists and errors in memory, however long; it
can be told to use a proxy. It sends its requests here, in plain text within the machine, with a secret. Each goes to
the store, by TLS if the endpoint is https; its response is read completely, up to a bound that depends on the request,
and then passed on. A redirect is refused. Requests to other hosts, such as services of credentials, are the client's
own: no response makes it send one.
"""

import http.client
import io
import secrets
import socket
import threading
import time
import weakref
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple, final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rowwise.base.arriving import SocketReader, is_idle
from rowwise.base.errors import StorageError
from rowwise.base.storage.limits import Limits

LIST_bytes = 8 << 20  # of a page of a list: 1,000 names of at most 1,024 bytes
ERROR_bytes = 1 << 16  # of an error, which is truncated
OTHER_bytes = 1 << 20
PIECE_bytes = 1 << 20
HOP = {"connection", "keep-alive", "proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding"}


class _Endpoint(NamedTuple):
    scheme: str
    host: str
    port: int
    netloc: str  # of the client's requests, which are http

    @classmethod
    def parse(cls, url: str) -> "_Endpoint":
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise StorageError("the endpoint of the store is no URL", "AWS_ENDPOINT_URL=https://HOST:PORT") from None
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
        is_default = port in (80, 443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname or "", port, host if is_default else f"{host}:{port}")


@final
class Gate:
    """A proxy in front of one endpoint, which ends with this object.

    Args:
        endpoint: of a store, such as https://host:port.
        limits: of the endpoint's responses.
    """

    def __init__(self, endpoint: str, limits: Limits) -> None:
        self._endpoint = _Endpoint.parse(endpoint)
        secret = secrets.token_urlsafe(24)
        self._password = "Basic " + b64encode(f"gate:{secret}".encode()).decode()
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.proxy = f"http://gate:{secret}@127.0.0.1:{listener.getsockname()[1]}"
        self.endpoint = f"http://{self._endpoint.netloc}{urlsplit(endpoint).path}"  # for the client
        self._refused: list[str] = []
        exchange = _Exchange(self._endpoint, limits, self._password, self._refused)
        threading.Thread(target=_accept, args=(listener, exchange), daemon=True).start()
        weakref.finalize(self, _stop, listener)

    def take_refusal(self) -> str | None:
        """The reason of the first refused response since the last call; None without one."""
        refusals = self._refused[:]
        del self._refused[:]
        return refusals[0] if refusals else None


def may_have_gate(endpoint: str) -> bool:
    """Whether requests reach an endpoint directly, and not by a proxy of the user's."""
    scheme, host, *_ = _Endpoint.parse(endpoint)
    return scheme in ("http", "https") and (getproxies().get(scheme) is None or bool(proxy_bypass(host)))


def _stop(listener: socket.socket) -> None:
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


class _Exchange(NamedTuple):
    """State that all connections of a gate share."""

    endpoint: _Endpoint
    limits: Limits
    password: str
    refused: list[str]


def _accept(listener: socket.socket, exchange: _Exchange) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(connection, exchange), daemon=True).start()


def _serve(connection: socket.socket, exchange: _Exchange) -> None:
    with connection, suppress(ConnectionError, TimeoutError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _Handler(connection, exchange)


class _RefusedResponseError(Exception):
    """A response that is not passed on, and that no retry would change."""


class _Bounded:
    """A socket for `http.client` whose requests have a deadline each."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.left_s: Callable[[], float] = lambda: 1.0

    def sendall(self, content: Any) -> None:
        self.connection.settimeout(self.left_s())
        self.connection.sendall(content)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(SocketReader(self.connection, lambda: self.left_s()), 1 << 16)

    def close(self) -> None:
        """Called when a response is the last of its connection; its content is still to be read."""


class _Handler(BaseHTTPRequestHandler):
    """The requests of one connection of the client, over one connection to the store."""

    protocol_version = "HTTP/1.1"
    rbufsize = wbufsize = PIECE_bytes

    def __init__(self, connection: socket.socket, exchange: _Exchange) -> None:
        self._to_store: tuple[HTTPConnection, _Bounded] | None = None
        self._exchange = exchange
        try:
            super().__init__(connection, ("", 0), exchange)  # pyrefly: ignore[bad-argument-type]
        finally:
            self._disconnect()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.headers.get("Proxy-Authorization") != self._exchange.password:
            self.close_connection = True
            self._respond(407, [], b"")
            return
        try:
            status, headers, content = self._forward()
        except _RefusedResponseError as error:
            self._disconnect()
            self._exchange.refused.append(str(error))
            self.close_connection = True
            self._respond(421, [], b"")
        except (OSError, HTTPException, ValueError) as error:
            self._disconnect()
            self.close_connection = True
            self._respond(502, [], str(error)[:200].encode())
        else:
            self._respond(status, headers, content)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def do_CONNECT(self) -> None:
        """A tunnel to a service of credentials."""
        self.close_connection = True
        if self.headers.get("Proxy-Authorization") != self._exchange.password:
            self._respond(407, [], b"")
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), self._exchange.limits.stall_s) as remote:
            self._respond(200, [], None)
            reverse = threading.Thread(target=_splice, args=(remote, self.connection), daemon=True)
            reverse.start()
            _splice(self.connection, remote)
            reverse.join()

    def _forward(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """Forward the current request; returns the store's response, whose size and time are bounded."""
        target, length = urlsplit(self.path), int(self.headers.get("Content-Length", 0))
        max_bytes = _max_bytes(self.command, target.query, self.headers.get("Range", ""))
        limits, begin_s = self._exchange.limits, time.monotonic()
        end_s = begin_s + limits.stall_s + (length + max_bytes) / limits.bytes_s

        def left_s() -> float:
            left = end_s - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the store is slow: not within {end_s - begin_s:.0f} s")
            return min(left, limits.stall_s)

        connection, bounded = self._connect(target.netloc, left_s)
        bounded.left_s = left_s
        path = self.path[len(f"{target.scheme}://{target.netloc}") :]
        connection.putrequest(self.command, path or "/", skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in HOP:
                connection.putheader(name, value)
        connection.endheaders()
        while length:
            piece = self.rfile.read(min(length, PIECE_bytes))
            if not piece:
                raise ConnectionAbortedError("the client has gone")
            length -= len(piece)
            connection.send(piece)
        response = connection.getresponse()
        headers = [
            (name, value) for name, value in response.getheaders() if name.lower() not in {*HOP, "content-length"}
        ]
        if 300 <= response.status < 400 and response.status != 304:
            place = response.getheader("Location", "")[:200]
            raise _RefusedResponseError(
                f"the store redirects to {place.partition('?')[0]!r}: expected the endpoint itself"
            )
        content = _content_of(response, max_bytes)
        if self.command == "HEAD":
            headers.append(("Content-Length", response.getheader("Content-Length", "0")))
        if response.will_close or not response.isclosed():
            self._disconnect()
        return response.status, headers, content

    def _connect(self, netloc: str, left_s: Callable[[], float]) -> tuple[HTTPConnection, _Bounded]:
        if self._to_store is not None and is_idle(self._to_store[1].connection):
            return self._to_store
        self._disconnect()
        endpoint = self._exchange.endpoint
        if netloc.lower() == endpoint.netloc.lower():
            scheme, host, port = endpoint[:3]
        else:
            parts = urlsplit(f"//{netloc}")
            scheme, host, port = "http", parts.hostname or "", parts.port or 80
        # Not imported above: a Python without ssl does not have it.
        kind = http.client.HTTPSConnection if scheme == "https" else HTTPConnection
        connection = kind(host, port, timeout=left_s())
        connection.connect()
        bounded = _Bounded(connection.sock)
        connection.sock = bounded
        self._to_store = connection, bounded
        return self._to_store

    def _disconnect(self) -> None:
        if self._to_store is not None:
            self._to_store[1].connection.close()
            self._to_store = None

    def _respond(self, status: int, headers: list[tuple[str, str]], content: bytes | None) -> None:
        self.send_response_only(status)
        has_length = False
        for name, value in headers:
            self.send_header(name, value)
            has_length |= name == "Content-Length"
        if content is not None and not has_length and status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if content and self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()


def _max_bytes(method: str, query: str, span: str) -> int:
    """Upper bound on the bytes of a valid response."""
    if method == "GET" and span.startswith("bytes="):
        first, _, last = span.removeprefix("bytes=").partition("-")
        if first and last:
            return int(last) - int(first) + 1
    return LIST_bytes if method == "GET" and "list-type=" in query else OTHER_bytes


def _content_of(response: HTTPResponse, max_bytes: int) -> bytes:
    if response.status >= 400:
        return response.read(ERROR_bytes)
    if (response.length or 0) > max_bytes:
        raise _RefusedResponseError(f"the store answers with {response.length:,} bytes: expected at most {max_bytes:,}")
    content = response.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _RefusedResponseError(f"the store answers with too many bytes: expected at most {max_bytes:,}")
    if response.length:
        raise ConnectionResetError(f"the response ended {response.length:,} bytes too early")
    return content


def _splice(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(PIECE_bytes):
            target.sendall(piece)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)

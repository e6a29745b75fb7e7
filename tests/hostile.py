"""Servers on the loopback address that answer as no server should."""

import socket
import threading
from collections import Counter
from contextlib import contextmanager, suppress

ENDLESS_bytes = 256 << 20  # after which an answer without end is given up
PIECE = bytes(1 << 16)


class HostileServer:
    """Serves each connection in a thread by a function; counts what it could send.

    Args:
        serve: of what sends, and of a reader; it ends when the other side is gone.
        tls: the context of encrypted connections.
    """

    def __init__(self, serve, tls=None):
        self.tls = tls
        self.serve, self.sent_bytes, self.connections = serve, Counter(), 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._open = []
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._run, args=(connection, self.connections), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, connection, number):
        def send(content):
            connection.sendall(content)
            self.sent_bytes[number] += len(content)

        with connection, suppress(OSError, ValueError):  # either side is gone
            if self.tls is not None:
                connection = self.tls.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as reader:
                self.serve(send, reader)

    def wait(self):
        """Until all connections are over; those that the other side keeps are not."""
        for thread in self._threads[1:]:
            thread.join(30)
            assert not thread.is_alive()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


@contextmanager
def hostile(serve, tls=None):
    server = HostileServer(serve, tls)
    try:
        yield server
    finally:
        server.close()


def until_gone(send):
    """Send without end, until the other side is gone; the bytes are what a reader would keep."""
    for _ in range(ENDLESS_bytes // len(PIECE)):
        send(PIECE)


def command_of(reader):
    """The words of the next command of the Redis protocol; empty at the end."""
    head = reader.readline()
    if not head:
        return []
    return [reader.read(int(reader.readline()[1:]) + 2)[:-2] for _ in range(int(head[1:]))]


def redis_that(answers, slots=b"-ERR This instance has cluster support disabled\r\n"):
    """Serves the Redis protocol; `answers`: a function of a command and of what sends its answer."""

    def serve(send, reader):
        while words := command_of(reader):
            if words[:2] == [b"CLUSTER", b"SLOTS"]:
                send(slots)
            else:
                answers(words, send)

    return serve


def http_that(answers):
    """Serves HTTP; `answers`: a function of the request's first line, its headers, and of what sends its answer."""

    def serve(send, reader):
        while line := reader.readline().decode():
            headers = {}
            while field := reader.readline().decode().strip():
                name, _, value = field.partition(":")
                headers[name.lower()] = value.strip()
            reader.read(int(headers.get("content-length", 0)))
            answers(line, headers, send)

    return serve


def http_answer(content=b"", status=b"200 OK", **headers):
    """The bytes of an answer; `headers` by their names with underscores."""
    fields = {b"Content-Length": b"%d" % len(content)}
    fields |= {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return b"HTTP/1.1 %b\r\n%b\r\n%b" % (status, b"".join(b"%b: %b\r\n" % one for one in fields.items()), content)


def list_page(names, token=""):
    """A page of a list; another follows if there is a token."""
    objects = "".join(
        f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
        for name in names
    )
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    truncated = f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>"
    return http_answer(f"<ListBucketResult>{truncated}{more}{objects}</ListBucketResult>".encode())

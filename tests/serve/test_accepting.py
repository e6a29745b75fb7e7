"""Workers take connections one at a time, so that those who wait at one socket have their part of them."""

import asyncio
import errno
import socket

import uvicorn

from rowwise.serve.admission import ServiceLimits
from rowwise.serve.service import ScoringService
from rowwise.serve.worker import _DrainingServer


async def nothing(scope, receive, send):
    """An application that is never asked."""


def server_at(bound):
    config = uvicorn.Config(nothing, log_level="warning")
    config.load()
    server = _DrainingServer(config, ScoringService(ServiceLimits()), bound)
    server.lifespan = config.lifespan_class(config)
    return server


async def close_all(server):
    for connection in list(server.server_state.connections):
        connection.shutdown()
    await asyncio.sleep(0.05)


def test_a_call_takes_one_connection():
    async def go():
        with socket.create_server(("127.0.0.1", 0)) as bound:
            server = server_at(bound)
            clients = [socket.create_connection(bound.getsockname()) for _ in range(3)]
            bound.setblocking(False)
            counts = []
            for _ in range(4):  # at last none waits, as where another worker was faster
                server._accept_one()
                await asyncio.gather(*server._arriving)
                counts.append(len(server.server_state.connections))
            for client in clients:
                client.close()
            await close_all(server)
            return counts

    assert asyncio.run(go()) == [1, 2, 3, 3]


def test_a_worker_without_files_takes_connections_later(monkeypatch, capsys):
    monkeypatch.setattr("rowwise.serve.worker.ACCEPT_RETRY_s", 0.01)

    class Full:
        """A socket whose process has no file left, twice."""

        def __init__(self, bound):
            self.bound, self.left = bound, 2

        def __getattr__(self, name):
            return getattr(self.bound, name)

        def accept(self):
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self.bound.accept()

    async def go():
        with socket.create_server(("127.0.0.1", 0)) as bound:
            server = server_at(Full(bound))
            server.accept()
            with socket.create_connection(bound.getsockname()):
                while not server.server_state.connections:
                    await asyncio.sleep(0.01)
                asyncio.get_running_loop().remove_reader(server._bound)
                await close_all(server)

    asyncio.run(asyncio.wait_for(go(), 30))
    assert capsys.readouterr().err.count("no connection can be accepted: Too many open files") == 2

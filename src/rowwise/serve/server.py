"""Runs the application in this process until SIGTERM or Ctrl-C: then no new connection is taken, and requests end."""

import gc
import os
import socket
from collections.abc import Callable

import torch
import uvicorn

from rowwise.errors import DataError
from rowwise.serve.app import make_app
from rowwise.serve.service import ScoringService, ServiceLimits
from rowwise.serve.version import ServedVersion

BACKLOG = 1024  # connections that wait to be taken
DRAIN_s = 30  # that requests have to end


def bind(host: str, port: int) -> socket.socket:
    """A socket that takes no connections yet; port 0: any free one."""
    try:
        if not host:
            raise DataError("--host '': want an address of this machine, such as 127.0.0.1")
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise DataError(f"--host {host}: {error.strerror}: want an address of this machine") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise DataError(f"{host}:{port}: {why}: want another --host or --port") from None
    return bound


def serve(version: ServedVersion, limits: ServiceLimits, bound: socket.socket, tell: Callable[[str], None]) -> None:
    """Answer requests; `tell` gets the address when connections are about to be taken."""
    torch.set_num_threads(1)  # several would wait for each other between the small operators of a request
    gc.collect()
    gc.freeze()  # else each full collection searches all modules: 145 ms in which no request is answered
    host, port = bound.getsockname()[:2]
    bound.listen(BACKLOG)
    config = uvicorn.Config(
        make_app(ScoringService(version, limits)),
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=DRAIN_s,
    )
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    tell(f"{version.name} version {version.number} at {url}/v1/models/{version.name}/score")
    uvicorn.Server(config).run(sockets=[bound])

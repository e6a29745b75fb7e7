"""Runs the application in this process until SIGTERM or Ctrl-C: then no new connection is taken, and requests end."""

import os
import socket
from collections.abc import Callable

import torch
import uvicorn

from rowwise.errors import DataError
from rowwise.serve.app import make_app
from rowwise.serve.service import ScoringService, ServiceLimits
from rowwise.serve.version import ServedVersion

DRAIN_s = 30  # that requests have to end


def serve(
    version: ServedVersion, limits: ServiceLimits, host: str, port: int, tell: Callable[[str], None] = print
) -> None:
    """Answer requests; `tell` gets the address once requests are taken. Port 0: any free one."""
    torch.set_num_threads(1)
    try:
        listening = socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise DataError(f"{host}:{port}: {os.strerror(error.errno or 0)}: want another --host or --port") from None
    with listening:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = f"http://{host}:{listening.getsockname()[1]}"
        config = uvicorn.Config(
            make_app(ScoringService(version, limits)),
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=DRAIN_s,
        )
        tell(f"{version.name} version {version.number} at {address}/v1/models/{version.name}/score")
        uvicorn.Server(config).run(sockets=[listening])

"""A service on this machine: a host process and its workers, started by one trainer, shared by all trainers here.

The owner keeps the pickled task and the listening socket, so that it can replace a host that was killed; clients lose
no split. Not supported: systems without Unix sockets.
"""

import contextlib
import math
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self, final, get_args

from rowwise.base.errors import PeerError, SpecError
from rowwise.base.processor import usable_processors
from rowwise.base.scratch import Scratch
from rowwise.base.value import check_max
from rowwise.ingest.prepare import PreparationTask
from rowwise.ingest.service.client import HostTransport, ServiceClient
from rowwise.ingest.service.coordinator import ServiceConfig
from rowwise.ingest.service.memory import make_memory
from rowwise.ingest.service.messages import BeginService, Connection
from rowwise.tables.spec import Value

HOST = "rowwise.ingest.service.host"
MAX_RESTARTS = 1000
MAX_WORKERS = 4096  # and splits ahead
MAX_ON_RAY = 64
EXIT_TIMEOUT_S = 5.0
WITHOUT_WORKERS = ", or data.workers=null, where each trainer prepares its rows itself"
On = Literal["processes", "ray"]


class Workers(Value, frozen=True):
    """The number of worker processes that prepare rows, and where they run."""

    count: int | None = None  # a fixed number; None to autoscale
    most: int | None = None  # upper limit of autoscaling; None for the number of cores
    ahead: int = 3  # backlog limit: ready splits beyond one per worker
    lease_s: float = 300.0  # lease of a split; its worker is killed when it expires
    on: On = "processes"  # of this machine; or "ray": actors of a Ray cluster, whose nodes see the same files
    address: str | None = None  # of the Ray cluster; None for this process's cluster, or a new one on this machine
    cpus: float = 1.0  # cores that Ray reserves for each worker

    def __post_init__(self) -> None:
        for name, value in (("count", self.count), ("most", self.most), ("ahead", self.ahead)):
            if value is not None and value < 1:
                raise SpecError(
                    f"data.workers.{name}={value}", f"at least 1{(WITHOUT_WORKERS if name == 'count' else '')}"
                )
        check_max("data.workers.", self, count=MAX_WORKERS, most=MAX_WORKERS, ahead=MAX_WORKERS, cpus=MAX_WORKERS)
        for name, value in (("lease_s", self.lease_s), ("cpus", self.cpus)):
            if not 0 < value < math.inf:
                raise SpecError(f"data.workers.{name}={value}", "more than 0")
        if self.on not in get_args(On):
            raise SpecError(f"data.workers.on={self.on!r}", " or ".join(get_args(On)))
        if self.address is not None and self.on != "ray":
            raise SpecError(f"data.workers.address={self.address!r} with on={self.on}", "on=ray, or no address")
        if self.count is not None and self.most is not None and self.count > self.most:
            raise SpecError(
                f"data.workers: count={self.count} and most={self.most}",
                "count (a fixed number) or most (an upper limit), not both",
            )

    def service_config(self, clients: int, task: PreparationTask) -> ServiceConfig:
        most = self.count or self.most or (usable_processors() if self.on == "processes" else MAX_ON_RAY)
        return ServiceConfig(
            clients=clients,
            splits=len(task.splits),
            epochs=task.epochs,
            workers=self.count or 1,
            min_workers=self.count or 1,
            max_workers=most,
            ahead=self.ahead,
            lease_s=self.lease_s,
        )


@final
class Service:
    """The owner of a service; close it when the run ends. Its processes also end when the owner's process does."""

    def __init__(self, task: PreparationTask, workers: Workers | None = None, clients: int = 1) -> None:
        """Start the host, which starts workers; they prepare splits once all clients are attached."""
        self._config = (workers or Workers()).service_config(clients, task)
        self._file = make_memory()
        try:
            self._size_bytes = _write_pickle(self._file, task)
        except SpecError:
            os.close(self._file)
            raise
        self._scratch = Scratch()
        self.address = self._scratch.path / "ingest"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short_path(self.address) as name:
            self._listener.bind(name)
        self._listener.listen(128)
        self._clients: list[ServiceClient] = []
        self._restarts = 0
        self._process, self._owner = self._start_host(None)

    def client(self, number: int = 0) -> ServiceClient:
        """A client in the owner's process, which replaces a killed host."""
        client = ServiceClient(HostTransport(number, self._connect, self._is_alive))
        self._clients.append(client)
        return client

    def _is_alive(self) -> bool:
        return self._process.poll() is None

    def _connect(self, workers: int | None) -> Connection:
        """Connect to the host. `workers`: worker count of a dead host to replace; None if the host runs."""
        if workers is not None:
            self._restarts += 1
            if self._restarts > MAX_RESTARTS:
                raise PeerError(
                    f"the service that prepares rows died {self._restarts} times",
                    hint="see the errors above, and resume the run",
                )
            self._stop_host()
            self._process, self._owner = self._start_host(workers)
        return connect_to_host(self.address)

    def _start_host(self, workers: int | None) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        with theirs:
            files = [theirs.fileno(), self._listener.fileno()]
            command = [sys.executable, "-m", HOST, *map(str, files)]
            process = subprocess.Popen(command, pass_fds=files, stdin=subprocess.DEVNULL)
        connection = Connection(ours)
        begin = BeginService(config=self._config, size_bytes=self._size_bytes, path=tuple(sys.path), workers=workers)
        connection.send(begin, self._file)
        return process, connection

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the host and its workers. Splits that clients have taken stay valid."""
        for client in self._clients:
            client.close()
        self._stop_host()
        self._listener.close()
        self._scratch.close()
        os.close(self._file)

    def _stop_host(self) -> None:
        self._owner.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_client(address: Path, number: int) -> ServiceClient:
    """A client outside the owner's process; it waits for a restart of the host while the owner runs."""
    return ServiceClient(HostTransport(number, lambda _: connect_to_host(address), address.parent.exists))


def connect_to_host(address: Path) -> Connection:
    """Connect to the socket at an address; the owner holds the listening socket, so a restart loses no connection."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(address) as name:
            peer.connect(name)
    except OSError as error:
        peer.close()
        raise PeerError(f"{address}: the service that prepares rows is gone: {error}", hint="resume the run") from error
    return Connection(peer)


@contextlib.contextmanager
def _short_path(address: Path) -> Iterator[str]:
    """A short path of a socket in a deeply nested folder: the system allows about a hundred bytes."""
    if not Path("/proc/self/fd").exists():
        yield str(address)
        return
    folder = os.open(address.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{address.name}"
    finally:
        os.close(folder)


def _write_pickle(file: int, task: PreparationTask) -> int:
    try:
        data = pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        kind = type(task.reader).__name__
        raise SpecError(
            f"{kind} cannot be sent to workers: {error}", "functions at the top level of a module, or data.workers=null"
        ) from error
    with os.fdopen(os.dup(file), "wb") as memory:
        memory.write(data)
    return len(data)

"""A service on this machine: a host process and its workers, started by one trainer and shared by all that are here.

The owner keeps what the host needs (what to prepare, and the socket at which clients call), so that a host that was
killed is replaced without anybody's losing anything. Known limits: systems without Unix sockets.
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

from rowwise.errors import PeerError, SpecError
from rowwise.ingest.prepare import PreparationTask
from rowwise.ingest.service.client import HostTransport, ServiceClient
from rowwise.ingest.service.coordinator import ServiceConfig
from rowwise.ingest.service.memory import make_memory
from rowwise.ingest.service.messages import BeginService, Connection
from rowwise.scratch import Scratch
from rowwise.spec import Value
from rowwise.value import check_most

HOST = "rowwise.ingest.service.host"
MOST_RESTARTS = 1000
MOST_WORKERS = 4096  # also of splits that lie ready
MOST_ON_RAY = 64
GRACE_S = 5.0
ALONE = ", or data.workers=null, where each trainer prepares its rows itself"
On = Literal["processes", "ray"]


class Workers(Value, frozen=True):
    """The number of worker processes that prepare rows, and where they run."""

    count: int | None = None  # so many; None: as many as it takes
    most: int | None = None  # None: as many as there are cores
    ahead: int = 3  # splits that lie ready beside those that are being prepared
    lease_s: float = 300.0  # how long one may take
    on: On = "processes"  # of this machine; or ray: of a Ray cluster, whose nodes see the same files
    address: str | None = None  # of the cluster; None: the one this process is part of, or one of this machine
    cpus: float = 1.0  # of a node that a worker on Ray takes

    def __post_init__(self) -> None:
        for name, value in (("count", self.count), ("most", self.most), ("ahead", self.ahead)):
            if value is not None and value < 1:
                raise SpecError(f"data.workers.{name}={value}: want at least 1{ALONE if name == 'count' else ''}")
        check_most("data.workers.", self, count=MOST_WORKERS, most=MOST_WORKERS, ahead=MOST_WORKERS, cpus=MOST_WORKERS)
        for name, value in (("lease_s", self.lease_s), ("cpus", self.cpus)):
            if not 0 < value < math.inf:
                raise SpecError(f"data.workers.{name}={value}: want more than 0")
        if self.on not in get_args(On):
            raise SpecError(f"data.workers.on={self.on!r}: want {' or '.join(get_args(On))}")
        if self.address is not None and self.on != "ray":
            raise SpecError(f"data.workers.address={self.address!r} with on={self.on}: want on=ray, or no address")
        if self.count is not None and self.most is not None and self.count > self.most:
            out = "give count for so many, or most for as many as it takes up to that"
            raise SpecError(f"data.workers: count={self.count} and most={self.most}: {out}")

    def plan(self, clients: int, task: PreparationTask) -> ServiceConfig:
        """For so many trainers that share them."""
        most = self.count or self.most or (cores() if self.on == "processes" else MOST_ON_RAY)
        return ServiceConfig(
            clients=clients,
            splits=len(task.splits),
            epochs=task.epochs,
            workers=self.count or 1,
            least=self.count or 1,
            most=most,
            ahead=self.ahead,
            lease_s=self.lease_s,
        )


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@final
class Service:
    """The owner's side; close it when the run ends. Its processes end by themselves when the owner does."""

    def __init__(self, task: PreparationTask, workers: Workers | None = None, clients: int = 1) -> None:
        """Start the host, which starts workers when all clients have called."""
        self._plan = (workers or Workers()).plan(clients, task)
        self._file = make_memory()
        try:
            self._size_bytes = _write(self._file, task)
        except SpecError:
            os.close(self._file)
            raise
        self._scratch = Scratch()
        self.address = self._scratch.path / "ingest"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _near(self.address) as name:
            self._listening.bind(name)
        self._listening.listen(128)
        self._clients: list[ServiceClient] = []
        self._restarts = 0
        self._process, self._owner = self._start(None)

    def client(self, number: int = 0) -> ServiceClient:
        """The owner's own end, which starts the host again where that was killed."""
        made = ServiceClient(HostTransport(number, self._call, self._is_alive))
        self._clients.append(made)
        return made

    def _is_alive(self) -> bool:
        return self._process.poll() is None

    def _call(self, workers: int | None) -> Connection:
        """`workers`: those of a host that is gone; None: the first call."""
        if workers is not None:
            self._restarts += 1
            if self._restarts > MOST_RESTARTS:
                raise PeerError(f"the service that prepares rows has ended {self._restarts} times")
            self._stop()
            self._process, self._owner = self._start(workers)
        return call(self.address)

    def _start(self, workers: int | None) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        with theirs:
            files = [theirs.fileno(), self._listening.fileno()]
            command = [sys.executable, "-m", HOST, *map(str, files)]
            process = subprocess.Popen(command, pass_fds=files, stdin=subprocess.DEVNULL)
        line = Connection(ours)
        begin = BeginService(plan=self._plan, size_bytes=self._size_bytes, path=tuple(sys.path), workers=workers)
        line.send(begin, self._file)
        return process, line

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the host and its workers. Splits that were taken stay good."""
        for client in self._clients:
            client.close()
        self._stop()
        self._listening.close()
        self._scratch.close()
        os.close(self._file)

    def _stop(self) -> None:
        self._owner.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def client_of(address: Path, number: int) -> ServiceClient:
    """Another trainer's end, while the owner is there."""
    return ServiceClient(HostTransport(number, lambda _: call(address), address.parent.exists))


def call(address: Path) -> Connection:
    """A conversation with the host at an address; it may come to listen later."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _near(address) as name:
            end.connect(name)
    except OSError as error:
        end.close()
        raise PeerError(f"{address}: the service that prepares rows is gone: {error}") from error
    return Connection(end)


@contextlib.contextmanager
def _near(address: Path) -> Iterator[str]:
    """A name for a socket that is short, however long the folder's is: there are about a hundred bytes for it."""
    if not Path("/proc/self/fd").exists():
        yield str(address)
        return
    folder = os.open(address.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{address.name}"
    finally:
        os.close(folder)


def _write(file: int, task: PreparationTask) -> int:
    try:
        data = pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        kind = type(task.reader).__name__
        out = "want functions that are at the top of a module, or no workers"
        raise SpecError(f"{kind} cannot be sent to workers: {error}; {out}") from error
    with os.fdopen(os.dup(file), "wb") as memory:
        memory.write(data)
    return len(data)

"""The host process of a service on one machine: feeds events to the coordinator and executes its commands.

It is a separate process, so that it does not compete with trainers for the GIL and several trainers share its
workers. It ends with the process that started it, and its workers end with it.
"""

import contextlib
import selectors
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from time import monotonic
from typing import final

from rowwise.base.errors import PeerError
from rowwise.ingest.service.coordinator import (
    ClientAttached,
    ClientDetached,
    ClockTick,
    Command,
    Coordinator,
    Event,
    KillWorker,
    RetireWorker,
    SplitDelivery,
    SplitLease,
    SplitReady,
    SplitRefused,
    SplitReleased,
    StartWorker,
    WorkerJoined,
    WorkerLost,
)
from rowwise.ingest.service.memory import make_memory
from rowwise.ingest.service.messages import BeginService, Connection, Message, WorkerSetup

TICK_S = 0.1
WORKER = "rowwise.ingest.service.worker"
EXIT_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _WorkerProcess:
    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    slots: set[int] = field(default_factory=set)  # slots sent to it
    error: str | None = None  # sent by it before it exited


@dataclass(slots=True)
class _ClientConnection:
    connection: Connection
    number: int | None = None  # None until it attaches
    slots: set[int] = field(default_factory=set)  # slots sent to it


def main() -> None:
    """Serve until the owner closes its connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; exit with the owner
    owner, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    with contextlib.suppress(PeerError):
        connection = Connection(owner)
        received = connection.receive()
        while not received:
            received = connection.receive()
        setup, file = received[0]
        assert isinstance(setup, BeginService)
        assert file is not None
        ServiceHost(setup, file, connection, listener).serve()


@final
class ServiceHost:
    """The event loop over the owner, the clients and the workers, and the memory of the slots."""

    def __init__(self, setup: BeginService, file: int, owner: Connection, listener: socket.socket) -> None:
        self._setup, self._file, self._owner, self._listener = setup, file, owner, listener
        self._coordinator = Coordinator(setup.config, setup.workers)
        self._workers: dict[int, _WorkerProcess] = {}
        self._clients: list[_ClientConnection] = []
        self._slots: dict[int, int] = {}  # file descriptor by slot
        self._selector = selectors.DefaultSelector()
        self._events: list[Event] = []

    def serve(self) -> None:
        self._selector.register(self._owner, selectors.EVENT_READ, self._read_owner)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept_client)
        try:
            while True:
                for key, _ in self._selector.select(TICK_S):
                    key.data()
                self._events.append(ClockTick())
                while self._events:
                    for command in self._coordinator.handle(self._events.pop(0), monotonic()):
                        self._execute(command)
        finally:
            self._kill_workers()

    def _read_owner(self) -> None:
        self._owner.receive()  # the owner sends nothing more: its EOF raises PeerError, which ends `serve`

    def _accept_client(self) -> None:
        end, _ = self._listener.accept()
        client = _ClientConnection(Connection(end))
        self._clients.append(client)
        self._selector.register(client.connection, selectors.EVENT_READ, lambda: self._read_client(client))

    def _read_client(self, client: _ClientConnection) -> None:
        try:
            messages = client.connection.receive()
        except PeerError:
            self._drop_client(client)
            return
        for message, _ in messages:
            match message:
                case ClientAttached():
                    client.number = message.client
                    self._events.append(message)
                case SplitReleased():
                    self._events.append(message)
                case _:
                    raise AssertionError(f"a client sent {message}")

    def _drop_client(self, client: _ClientConnection) -> None:
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        # The same client may have reconnected before the EOF of its old connection was read.
        if client.number is not None and all(remaining.number != client.number for remaining in self._clients):
            self._events.append(ClientDetached(client.number))

    def _read_worker(self, worker: _WorkerProcess) -> None:
        try:
            messages = worker.connection.receive()
        except PeerError:
            self._reap_worker(worker)
            return
        for message, _ in messages:
            match message:
                case WorkerLost(reason=reason):
                    worker.error = reason
                case WorkerJoined() | SplitReady() | SplitRefused():
                    self._events.append(message)
                case _:
                    raise AssertionError(f"a worker sent {message}")

    def _reap_worker(self, worker: _WorkerProcess) -> None:
        """Wait for a worker to exit, then report it lost: until then it may still write to its slot."""
        self._selector.unregister(worker.connection)
        worker.connection.close()
        del self._workers[worker.number]
        try:
            code = worker.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            code = worker.process.wait()
        self._events.append(WorkerLost(worker.number, worker.error or describe_exit(code)))

    def _execute(self, command: Command) -> None:
        match command:
            case StartWorker(worker=number):
                self._start(number)
            case RetireWorker(worker=number) | KillWorker(worker=number) if number not in self._workers:
                pass  # the worker has already exited
            case RetireWorker(worker=number):  # the worker reads EOF and returns
                self._workers[number].connection.socket.shutdown(socket.SHUT_WR)
            case KillWorker(worker=number):
                self._workers[number].process.kill()
            case SplitLease():
                self._lease(command)
            case SplitDelivery():
                for client in [c for c in self._clients if c.number == command.client]:
                    self._deliver(client, command)

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", WORKER, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        worker = _WorkerProcess(number, process, Connection(ours))
        self._workers[number] = worker
        self._selector.register(worker.connection, selectors.EVENT_READ, lambda: self._read_worker(worker))
        setup = WorkerSetup(worker=number, size_bytes=self._setup.size_bytes, path=self._setup.path)
        self._send(worker.connection, setup, self._file)

    def _lease(self, lease: SplitLease) -> None:
        worker = self._workers.get(lease.worker)
        if worker is None:
            return  # its WorkerLost is queued
        if lease.slot not in self._slots:
            self._slots[lease.slot] = make_memory()
        file = None if lease.slot in worker.slots else self._slots[lease.slot]
        worker.slots.add(lease.slot)
        self._send(worker.connection, lease, file)

    def _deliver(self, client: _ClientConnection, delivery: SplitDelivery) -> None:
        file = None if delivery.slot is None or delivery.slot in client.slots else self._slots[delivery.slot]
        if delivery.slot is not None:
            client.slots.add(delivery.slot)
        self._send(client.connection, delivery, file)

    @staticmethod
    def _send(connection: Connection, message: Message, file: int | None = None) -> None:
        with contextlib.suppress(PeerError):  # the event loop reads EOF and handles the loss
            connection.send(message, file)

    def _kill_workers(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.process.wait()


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    cause = " (the system kills processes when memory runs out)" if code == -signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(-code).name}{cause}"


if __name__ == "__main__":
    main()

"""The host of a service on one machine: delivers events to the coordinator and executes its commands.

A process of its own, so that a trainer's Python does nothing for its workers, and several trainers share them. It ends
with the process that started it, and its workers end with it.
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

from rowwise.errors import PeerError
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
GRACE_S = 2.0


@dataclass(slots=True)
class _WorkerProcess:
    number: int
    process: subprocess.Popen[bytes]
    line: Connection
    slots: set[int] = field(default_factory=set)  # whose memory it has
    error: str | None = None  # why it ends


@dataclass(slots=True)
class _ClientConnection:
    line: Connection
    number: int | None = None  # None: it has not said
    slots: set[int] = field(default_factory=set)  # whose memory it has


def main() -> None:
    """Serve until the owner hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its owner
    owner, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    with contextlib.suppress(PeerError):
        line = Connection(owner)
        begun = line.receive()
        while not begun:
            begun = line.receive()
        begin, file = begun[0]
        assert isinstance(begin, BeginService)
        assert file is not None
        ServiceHost(begin, file, line, listening).serve()


@final
class ServiceHost:
    """Processes, sockets and slots."""

    def __init__(self, begin: BeginService, file: int, owner: Connection, listening: socket.socket) -> None:
        self._begin, self._file, self._owner, self._listening = begin, file, owner, listening
        self._coordinator = Coordinator(begin.plan, begin.workers)
        self._workers: dict[int, _WorkerProcess] = {}
        self._clients: list[_ClientConnection] = []
        self._slots: dict[int, int] = {}  # number: file
        self._selector = selectors.DefaultSelector()
        self._events: list[Event] = []

    def serve(self) -> None:
        self._selector.register(self._owner, selectors.EVENT_READ, self._owner_speaks)
        self._selector.register(self._listening, selectors.EVENT_READ, self._client_calls)
        try:
            while True:
                for key, _ in self._selector.select(TICK_S):
                    key.data()
                self._events.append(ClockTick())
                while self._events:
                    for command in self._coordinator.handle(self._events.pop(0), monotonic()):
                        self._do(command)
        finally:
            self._end()

    def _owner_speaks(self) -> None:
        self._owner.receive()  # it says nothing after the beginning, but hangs up in the end

    def _client_calls(self) -> None:
        end, _ = self._listening.accept()
        client = _ClientConnection(Connection(end))
        self._clients.append(client)
        self._selector.register(client.line, selectors.EVENT_READ, lambda: self._client_speaks(client))

    def _client_speaks(self, client: _ClientConnection) -> None:
        try:
            messages = client.line.receive()
        except PeerError:
            self._drop(client)
            return
        for message, _ in messages:
            match message:
                case ClientAttached():
                    client.number = message.client
                    self._events.append(message)
                case SplitReleased():
                    self._events.append(message)
                case _:
                    raise AssertionError(f"a client said {message}")

    def _drop(self, client: _ClientConnection) -> None:
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._selector.unregister(client.line)
        client.line.close()
        # The same client may have called again already.
        if client.number is not None and all(other.number != client.number for other in self._clients):
            self._events.append(ClientDetached(client.number))

    def _worker_speaks(self, worker: _WorkerProcess) -> None:
        try:
            messages = worker.line.receive()
        except PeerError:
            self._reap(worker)
            return
        for message, _ in messages:
            match message:
                case WorkerLost(how=how):
                    worker.error = how
                case WorkerJoined() | SplitReady() | SplitRefused():
                    self._events.append(message)
                case _:
                    raise AssertionError(f"a worker said {message}")

    def _reap(self, worker: _WorkerProcess) -> None:
        """Reap a worker only after its process has ended: its slots may still be written until then."""
        self._selector.unregister(worker.line)
        worker.line.close()
        del self._workers[worker.number]
        try:
            code = worker.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            code = worker.process.wait()
        self._events.append(WorkerLost(worker.number, worker.error or describe_exit(code)))

    def _do(self, command: Command) -> None:
        match command:
            case StartWorker(worker=number):
                self._start(number)
            case RetireWorker(worker=number) | KillWorker(worker=number) if number not in self._workers:
                pass  # it has ended by itself
            case RetireWorker(worker=number):
                self._workers[number].line.socket.shutdown(socket.SHUT_WR)
            case KillWorker(worker=number):
                self._workers[number].process.kill()
            case SplitLease():
                self._lease(command)
            case SplitDelivery():
                for client in [c for c in self._clients if c.number == command.client]:
                    self._give(client, command)

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", WORKER, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        worker = _WorkerProcess(number, process, Connection(ours))
        self._workers[number] = worker
        self._selector.register(worker.line, selectors.EVENT_READ, lambda: self._worker_speaks(worker))
        setup = WorkerSetup(worker=number, size_bytes=self._begin.size_bytes, path=self._begin.path)
        self._send(worker.line, setup, self._file)

    def _lease(self, lease: SplitLease) -> None:
        worker = self._workers.get(lease.worker)
        if worker is None:
            return  # its end is on its way
        if lease.slot not in self._slots:
            self._slots[lease.slot] = make_memory()
        file = None if lease.slot in worker.slots else self._slots[lease.slot]
        worker.slots.add(lease.slot)
        self._send(worker.line, lease, file)

    def _give(self, client: _ClientConnection, give: SplitDelivery) -> None:
        file = None if give.slot is None or give.slot in client.slots else self._slots[give.slot]
        if give.slot is not None:
            client.slots.add(give.slot)
        self._send(client.line, give, file)

    @staticmethod
    def _send(line: Connection, message: Message, file: int | None = None) -> None:
        with contextlib.suppress(PeerError):  # that it is gone is heard where it is listened to
            line.send(message, file)

    def _end(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.process.wait()


def describe_exit(code: int) -> str:
    """An exit code, for people."""
    if code >= 0:
        return f"it ended with code {code}"
    why = ", as the system does where memory is short" if code == -signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(-code).name}{why}"


if __name__ == "__main__":
    main()

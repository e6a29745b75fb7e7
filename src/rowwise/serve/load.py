"""A load generator for servers, in a separate process; responses are checked after the measurement.

Each connection has one request in flight. In a closed loop it sends the next one after a response. In an open loop
requests arrive at random times independent of the server, and wait for a free connection; latencies count from the
arrival, to avoid coordinated omission. A thread generates arrivals, as the timers of an event loop have a resolution of
a millisecond. If the generator itself is late, the latency counts from the planned arrival.
"""

import asyncio
import multiprocessing
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

END = b"\r\n\r\n"


class Load(NamedTuple):
    """Requests to a server, and their schedule."""

    host: str
    port: int
    path: str
    bodies: tuple[bytes, ...]  # round robin
    requests: int
    connections: int
    rate: float | None = None  # requests per second; None for a closed loop
    timeout_ms: int | None = None  # sent with requests; None for the default of the server


class Answer(NamedTuple):
    """A response with its status and latency."""

    body: int  # index of the request body
    arrived_s: float
    seconds: float
    code: int
    answer: bytes
    late_s: float = 0.0  # delay of the generator after the planned arrival


def send(load: Load) -> list[Answer]:
    """All responses, in order of completion."""
    with open_sender() as send_load:
        return send_load(load)


@contextmanager
def open_sender() -> Iterator[Callable[[Load], list[Answer]]]:
    """`send` in a process that is reused until the `with` ends, as its start takes longer than most loads."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield lambda load: pool.apply(_run, (load,))


def _run(load: Load) -> list[Answer]:
    import uvloop

    return uvloop.run(_send_all(load))


async def _send_all(load: Load) -> list[Answer]:
    loop = asyncio.get_running_loop()
    run = _LoadRun(load, loop)
    for _ in range(load.connections):
        await loop.create_connection(lambda: _Connection(run), load.host, load.port)
    run.begin()
    await run.finished
    return run.answers


class _LoadRun:
    """State of a load: requests to send, and responses."""

    def __init__(self, load: Load, loop: asyncio.AbstractEventLoop) -> None:
        self.load, self.loop, self.finished = load, loop, loop.create_future()
        head = f"POST {load.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += "" if load.timeout_ms is None else f"x-timeout-ms: {load.timeout_ms}\r\n"
        head += "content-length: "
        self.requests = [f"{head}{len(body)}".encode() + END + body for body in load.bodies]
        self.waiting: deque[tuple[int, float, float]] = deque()
        self.idle: list[_Connection] = []
        self.answers: list[Answer] = []
        self.sent = 0

    def begin(self) -> None:
        if self.load.rate is None:
            for _ in range(self.load.connections):
                self._arrive(time.perf_counter())
        else:
            threading.Thread(target=self._arrive_at_random, args=(self.load.rate,), daemon=True).start()

    def _arrive(self, planned_s: float) -> None:
        if self.sent < self.load.requests:
            late_s = time.perf_counter() - planned_s
            self.waiting.append((self.sent % len(self.requests), planned_s, late_s))
            self.sent += 1
            self._dispatch()

    def _arrive_at_random(self, rate: float) -> None:
        generator, planned_s = random.Random(0), time.perf_counter()
        for _ in range(self.load.requests):
            time.sleep(max(0.0, planned_s - time.perf_counter()))
            with suppress(RuntimeError):  # the loop is closed, after the server closed a connection
                self.loop.call_soon_threadsafe(self._arrive, planned_s)
            planned_s += generator.expovariate(rate)

    def _dispatch(self) -> None:
        while self.waiting and self.idle:
            self.idle.pop().send(*self.waiting.popleft())

    def done(self, connection: "_Connection", answer: Answer) -> None:
        self.answers.append(answer)
        self.idle.append(connection)
        if len(self.answers) == self.load.requests:
            self.finished.set_result(None)
        elif self.load.rate is None:
            self._arrive(time.perf_counter())
        else:
            self._dispatch()


class _Connection(asyncio.Protocol):
    """One connection, with one request in flight."""

    def __init__(self, run: _LoadRun) -> None:
        self._run, self._received = run, bytearray()
        self._body, self._arrived_s, self._late_s = 0, 0.0, 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._run.idle.append(self)

    def send(self, body: int, arrived_s: float, late_s: float) -> None:
        self._body, self._arrived_s, self._late_s = body, arrived_s, late_s
        self._transport.write(self._run.requests[body])

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        end = received.find(END)
        if end < 0:
            return
        at = received.find(b"content-length: ", 0, end) + 16
        begin = end + len(END)
        length = int(received[at : received.find(b"\r", at)])
        if len(received) - begin == length:
            seconds = time.perf_counter() - self._arrived_s
            code, answer = int(received[9:12]), bytes(received[begin:])
            received.clear()
            self._run.done(self, Answer(self._body, self._arrived_s, seconds, code, answer, self._late_s))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._run.finished.done():
            self._run.finished.set_exception(exc or ConnectionError("the server closed a connection"))


def seconds_of(answers: Sequence[Answer]) -> float:
    """Seconds from the first arrival to the last response."""
    return max(answer.arrived_s + answer.seconds for answer in answers) - min(answer.arrived_s for answer in answers)


def quantiles_ms(answers: Sequence[Answer]) -> dict[str, float]:
    """Quantiles of latency in milliseconds."""
    seconds = sorted(answer.seconds for answer in answers)
    return {
        name: 1e3 * seconds[min(len(seconds) - 1, int(q * len(seconds)))]
        for name, q in (("p50_ms", 0.5), ("p99_ms", 0.99), ("p99.9_ms", 0.999))
    }

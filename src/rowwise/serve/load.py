"""A load generator for servers, in a process of its own: answers are looked at after the clock has stopped.

Each connection has one request at a time. In a closed loop it sends the next one when it has an answer. In an open loop
requests arrive at random times whatever the server does, and wait for a free connection; their latencies count from
their arrival, so that a server that stalls does not hide it. Arrivals are made by a thread, as the timers of an event
loop are exact to a millisecond only. An arrival that the generator itself is late for counts from its planned time.
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
    """Requests to a server, and how they are sent."""

    host: str
    port: int
    path: str
    bodies: tuple[bytes, ...]  # in turn
    requests: int
    connections: int
    rate: float | None = None  # requests a second; None: a closed loop
    timeout_ms: int | None = None  # that requests give the server; None: they name none


class Answer(NamedTuple):
    """One of the answers."""

    body: int  # which was sent
    arrived_s: float
    seconds: float
    code: int
    answer: bytes
    late_s: float = 0.0  # from the arrival to when the generator saw it: other work on its core


def send(load: Load) -> list[Answer]:
    """All answers, in the order in which they came."""
    with one_sender() as send_one:
        return send_one(load)


@contextmanager
def one_sender() -> Iterator[Callable[[Load], list[Answer]]]:
    """`send` by one process until the `with` ends, as starting one takes longer than many a load."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield lambda load: pool.apply(_run, (load,))


def _run(load: Load) -> list[Answer]:
    import uvloop

    return uvloop.run(_send_all(load))


async def _send_all(load: Load) -> list[Answer]:
    loop = asyncio.get_running_loop()
    work = _Work(load, loop)
    for _ in range(load.connections):
        await loop.create_connection(lambda: _Connection(work), load.host, load.port)
    work.begin()
    await work.finished
    return work.answers


class _Work:
    """Requests that are to be sent, and answers."""

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
            self._give()

    def _arrive_at_random(self, rate: float) -> None:
        draw, planned_s = random.Random(0), time.perf_counter()
        for _ in range(self.load.requests):
            time.sleep(max(0.0, planned_s - time.perf_counter()))
            with suppress(RuntimeError):  # the loop is closed, as the server has closed a connection
                self.loop.call_soon_threadsafe(self._arrive, planned_s)
            planned_s += draw.expovariate(rate)

    def _give(self) -> None:
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
            self._give()


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, work: _Work) -> None:
        self._work, self._received = work, bytearray()
        self._body, self._arrived_s, self._late_s = 0, 0.0, 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._work.idle.append(self)

    def send(self, body: int, arrived_s: float, late_s: float) -> None:
        self._body, self._arrived_s, self._late_s = body, arrived_s, late_s
        self._transport.write(self._work.requests[body])

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
            self._work.done(self, Answer(self._body, self._arrived_s, seconds, code, answer, self._late_s))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._work.finished.done():
            self._work.finished.set_exception(exc or ConnectionError("the server closed a connection"))


def seconds_of(answers: Sequence[Answer]) -> float:
    """From the first arrival to the last answer."""
    return max(one.arrived_s + one.seconds for one in answers) - min(one.arrived_s for one in answers)


def quantiles_ms(answers: Sequence[Answer]) -> dict[str, float]:
    """Latencies of answers in milliseconds, by quantile."""
    seconds = sorted(answer.seconds for answer in answers)
    return {
        name: 1e3 * seconds[min(len(seconds) - 1, int(q * len(seconds)))]
        for name, q in (("p50_ms", 0.5), ("p99_ms", 0.99), ("p99.9_ms", 0.999))
    }

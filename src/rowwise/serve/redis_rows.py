"""Rows of cached tables in Redis, or in a Redis Cluster, shared by servers.

Redis holds copies. A value begins with a tag, which identifies the version of its row, and a checksum: a value with
another tag, or a damaged one, is a miss. So Redis may be flushed, evict, restart, and serve several versions, without a
wrong answer.

Keys are hashed to parts, and each part is on one node. A batch sends each node one pipeline with one MGET per part. A
node that fails is skipped for a backoff time, which doubles with each failure.

Answers of nodes are not trusted: a command has one deadline, from the connection to the last byte, and its answer is
bounded in bytes and checked for its shape. Anything else closes the connection and is a failure of the node.
"""

import io
import re
import socket
import sys
import threading
import time
import weakref
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from rowwise.base.arriving import SocketReader, is_idle
from rowwise.base.errors import SpecError, printable
from rowwise.serve.later import LaterCalls
from rowwise.tables.store.policy import Ints, mix64
from rowwise.tables.store.shared_cache import Bytes

TIMEOUT_s = 0.05  # per node, to connect, send and receive
MAX_TIMEOUTS = 4  # budget of a batch, in timeouts
MIN_BACKOFF_s, MAX_BACKOFF_s = 0.5, 30.0  # of a failed node
PARTS = 64  # of the keys; many more than nodes, for balance
HEAD_bytes = 16  # tag and checksum before a row
LINE_bytes = 1024  # maximum line of an answer: an error, or a size
ITEM_bytes = 32  # overhead of each value in an answer
INFO_bytes, SLOTS_bytes = 1 << 16, 1 << 20  # limits of the answers to INFO and CLUSTER SLOTS
SLOTS = 1 << 14  # of a cluster
MAX_DEPTH = 4  # of nested lists in an answer
MAX_LATER = 64  # batches in the queue of later writes
URLS = "redis://HOST:PORT, or several with commas between them"
HOST = re.compile(rb"[\w.:-]{0,253}")
UNAVAILABLE = ("LOADING", "NOAUTH", "MASTERDOWN", "ERR max number of clients")  # errors of a node that is down
INFO = ("used_cpu_user", "used_cpu_sys", "maxmemory", "total_system_memory")
INFO_PATTERN = re.compile(rf"^({'|'.join(INFO)}):(\d{{1,18}}(?:\.\d{{1,18}})?)\r?$".encode(), re.M)
MEASURED_rows, MEASURED_s = 4096, 1.0  # rows and duration of the measurement of nodes
Words = NDArray[np.uint64]


@dataclass(slots=True)
class NodeState:
    """Exponential backoff of a failing node; pure: times are arguments."""

    failures: int = 0
    retry_at_s: float = 0.0

    def is_available(self, now_s: float) -> bool:
        return now_s >= self.retry_at_s

    def fail(self, now_s: float) -> None:
        self.retry_at_s = now_s + min(MAX_BACKOFF_s, MIN_BACKOFF_s * 2 ** min(self.failures, 10))
        self.failures += 1

    def answer(self) -> None:
        self.failures = 0


class RedisAddress(NamedTuple):
    """The host and port of a node."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "RedisAddress":
        try:
            parts = urlsplit(text)
            port = 6379 if parts.port is None else parts.port
        except ValueError:
            raise SpecError(f"--redis {text}", URLS) from None
        plain = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password)
        if parts.scheme != "redis" or not parts.hostname or not port or not plain:
            raise SpecError(f"--redis {text}", URLS)
        return cls(parts.hostname, port)


def parse_addresses(text: str) -> tuple[RedisAddress, ...]:
    return tuple(RedisAddress.parse(part.strip()) for part in text.split(","))


class WrongAnswerError(Exception):
    """The answer of a node is malformed, too large or of a wrong type."""


class RefusalText(str):
    """An error reply of a node."""


class RedisCommand(NamedTuple):
    """A command, with the size limit and type of its answer."""

    words: Sequence[bytes]
    max_bytes: int
    is_valid: Callable[[Any], bool]  # checks the shape of an answer other than an error

    def pack(self) -> bytes:
        return b"*%d\r\n%b" % (len(self.words), b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in self.words))


@final
class _Answers:
    """Reads bounded answers of the Redis protocol (RESP2)."""

    def __init__(self, connection: socket.socket, left_s: Callable[[], float]) -> None:
        self._file, self._left_bytes = io.BufferedReader(SocketReader(connection, left_s), 1 << 16), 0

    def read(self, command: RedisCommand) -> Any:
        self._left_bytes = command.max_bytes
        answer = self._next(0)
        if isinstance(answer, RefusalText) and answer.startswith(UNAVAILABLE):
            raise WrongAnswerError(answer)
        if not (isinstance(answer, RefusalText) or command.is_valid(answer)):
            raise WrongAnswerError(f"its answer to {command.words[0].decode()} is of a wrong type")
        return answer

    def _next(self, level: int) -> Any:
        return self._parse(self._file.readline(LINE_bytes), level)

    def _parse(self, line: bytes, level: int) -> Any:
        if not line.endswith(b"\r\n"):
            raise WrongAnswerError("a line is too long" if len(line) == LINE_bytes else "it ends too early")
        self._left_bytes -= len(line)
        kind, text = line[:1], line[1:-2]
        if kind == b"+":
            return text
        if kind == b"-":
            return RefusalText(text.decode(errors="replace"))
        try:
            number = int(text)
        except ValueError:
            raise WrongAnswerError("its answer is not of the Redis protocol") from None
        if kind == b":":
            return number
        if number == -1 and kind in b"$*":
            return None
        if kind == b"$" and self._check_remaining(number):
            content = self._file.read(number + 2)
            if len(content) < number + 2:
                raise WrongAnswerError("it ends too early")
            self._left_bytes -= number + 2
            return content[:-2]
        if kind == b"*" and self._check_remaining(3 * number) and level < MAX_DEPTH:
            return self._read_list(number, level + 1)
        raise WrongAnswerError("its answer is not of the Redis protocol")

    def _read_list(self, number: int, level: int) -> list[Any]:
        items: list[Any] = []
        readline, read, last_line, size = self._file.readline, self._file.read, b"", 0
        for _ in range(number):
            line = readline(LINE_bytes)
            if line == last_line and size <= self._left_bytes:  # fast path: same header as before
                content = read(size)
                self._left_bytes -= size + len(line)
                if len(content) < size:
                    raise WrongAnswerError("it ends too early")
                items.append(content[:-2])
                continue
            items.append(self._parse(line, level))
            if line[:1] == b"$" and items[-1] is not None:
                last_line, size = line, len(items[-1]) + 2
        return items

    def _check_remaining(self, count: int) -> bool:
        if count > self._left_bytes:
            raise WrongAnswerError(f"its answer exceeds the limit by {count - self._left_bytes:,} bytes")
        return count >= 0


@final
class RedisNodes:
    """Connections to the nodes of a Redis, and the node of each part of the keys.

    Args:
        addresses: of the server, or of some nodes of a cluster.
        prefix: prefix of all keys.
        timeout_s: per node, to connect, send and receive.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        addresses: Sequence[RedisAddress],
        prefix: str,
        timeout_s: float = TIMEOUT_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seeds, self._timeout_s, self._clock = tuple(addresses), timeout_s, clock
        self._lock = threading.Lock()
        self.prefixes = tuple(f"{{{prefix}/{part}}}".encode() for part in range(PARTS))
        self._connections: dict[RedisAddress, socket.socket] = {}
        weakref.finalize(self, _close_all, self._connections)
        self._states: dict[RedisAddress, NodeState] = {}
        self._nodes: tuple[RedisAddress, ...] = ()  # by part; empty if unknown
        self._is_stale = True  # whether parts may have moved to other nodes
        self._refreshed_s = -1e9

    def send(self, commands: Sequence[tuple[int, RedisCommand]]) -> list[Any]:
        """Send commands by part; the answer of a failed node is None. Thread-safe, one call at a time."""
        with self._lock:
            return self._send(commands)

    def _send(self, commands: Sequence[tuple[int, RedisCommand]]) -> list[Any]:
        answers: list[Any] = [None] * len(commands)
        end_s = self._clock() + MAX_TIMEOUTS * self._timeout_s
        nodes = self._find_nodes(end_s)
        if not nodes:
            return answers
        for node in dict.fromkeys(nodes[part] for part, _ in commands):
            if self._clock() > end_s:
                break
            chosen = [number for number, (part, _) in enumerate(commands) if nodes[part] == node]
            for number, answer in zip(chosen, self._exchange(node, [commands[k][1] for k in chosen]), strict=True):
                answers[number] = None if isinstance(answer, RefusalText) else answer
                if isinstance(answer, RefusalText):
                    self._is_stale = True
        return answers

    def info(self) -> list[dict[str, float]]:
        """CPU times and memory by INFO, for each node that answers."""
        command = RedisCommand([b"INFO"], INFO_bytes, _is_text)
        with self._lock:
            nodes = dict.fromkeys(self._find_nodes(self._clock() + MAX_TIMEOUTS * self._timeout_s))
            texts = [text for node in nodes for text in self._exchange(node, [command]) if isinstance(text, bytes)]
        facts = [{key.decode(): float(value) for key, value in INFO_PATTERN.findall(text)} for text in texts]
        return [node_facts for node_facts in facts if len(node_facts) == len(INFO)]

    def _exchange(self, node: RedisAddress, commands: Sequence[RedisCommand]) -> list[Any]:
        """The answers of a node; None for each if it fails or is in backoff."""
        state, end_s = self._states.setdefault(node, NodeState()), self._clock() + self._timeout_s
        if not state.is_available(end_s - self._timeout_s):
            return [None] * len(commands)

        def left_s() -> float:
            left = end_s - self._clock()
            if left <= 0:
                raise TimeoutError(f"not within {self._timeout_s:g} s")
            return left

        try:
            connection = self._connect(node, left_s)
            connection.settimeout(left_s())
            connection.sendall(b"".join(command.pack() for command in commands))
            reader = _Answers(connection, left_s)
            answers = [reader.read(command) for command in commands]
        except (OSError, WrongAnswerError) as error:
            self._fail(node, error)
            return [None] * len(commands)
        if state.failures:
            print(f"redis at {node.host}:{node.port} answers again", file=sys.stderr, flush=True)
        state.answer()
        return answers

    def _connect(self, node: RedisAddress, left_s: Callable[[], float]) -> socket.socket:
        """The connection to a node; replaced if it was closed or has unread data."""
        connection = self._connections.get(node)
        if connection is not None:
            if is_idle(connection):
                return connection
            self._connections.pop(node).close()
        try:
            addresses = socket.getaddrinfo(*node, type=socket.SOCK_STREAM)
        except UnicodeError:
            raise ConnectionError("its host is not a valid name") from None
        error: OSError = ConnectionError("its host has no address")
        for family, kind, protocol, _, address in addresses:
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(left_s())
                connection.connect(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as raised:
                connection.close()
                error = raised
                continue
            self._connections[node] = connection
            return connection
        raise error

    def _fail(self, node: RedisAddress, error: Exception) -> None:
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.close()
        self._is_stale = True
        state = self._states[node]
        if not state.failures:
            problem = printable(f"redis at {node.host}:{node.port} does not answer: {str(error)[:200]}")
            print(f"{problem}; its rows are read from files", file=sys.stderr, flush=True)
        state.fail(self._clock())

    def _find_nodes(self, end_s: float) -> tuple[RedisAddress, ...]:
        """The node of each part; refreshed after an error, at most once per MIN_BACKOFF_s."""
        now_s = self._clock()
        if not self._is_stale or now_s < self._refreshed_s + MIN_BACKOFF_s:
            return self._nodes
        self._refreshed_s = now_s
        for seed in dict.fromkeys((*self._seeds, *self._connections)):
            if self._clock() > end_s:
                break
            (slots,) = self._exchange(seed, [RedisCommand([b"CLUSTER", b"SLOTS"], SLOTS_bytes, _are_slots)])
            nodes: tuple[RedisAddress, ...] = ()
            if isinstance(slots, RefusalText):  # not a cluster
                nodes = (seed,) * PARTS
            elif slots is not None:
                nodes = self._nodes_of(slots, seed)
            if nodes:
                self._nodes, self._is_stale = nodes, False
                self._close_stale()
                break
        return self._nodes

    def _nodes_of(self, slots: list[Any], seed: RedisAddress) -> tuple[RedisAddress, ...]:
        """The node of each part by cluster slots; empty if a slot is unassigned."""
        bounds_N2 = np.array([slot_range[:2] for slot_range in slots], np.int64).reshape(-1, 2)
        nodes: list[RedisAddress] = []
        for slot in map(key_slot, self.prefixes):
            matches = np.flatnonzero((bounds_N2[:, 0] <= slot) & (slot <= bounds_N2[:, 1]))
            if not len(matches):
                return ()
            nodes.append(_address(slots[matches[0]][2], seed))
        return tuple(nodes)

    def _close_stale(self) -> None:
        """Close connections to nodes without parts, as a cluster may name new ones each time."""
        known = {*self._seeds, *self._nodes}
        for node in self._connections.keys() - known:
            self._connections.pop(node).close()
        self._states = {node: state for node, state in self._states.items() if node in known}


def _close_all(connections: dict[RedisAddress, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


def key_slot(prefix: bytes) -> int:
    """The cluster slot of keys with a prefix in braces (a hash tag)."""
    return crc_hqx(prefix[1:-1], 0) % SLOTS


def _are_slots(answer: Any) -> bool:
    return isinstance(answer, list) and all(
        isinstance(entry, list)
        and len(entry) > 2
        and all(isinstance(slot, int) and 0 <= slot < SLOTS for slot in entry[:2])
        and isinstance(entry[2], list)
        and len(entry[2]) > 1
        and (entry[2][0] is None or (isinstance(entry[2][0], bytes) and HOST.fullmatch(entry[2][0]) is not None))
        and isinstance(entry[2][1], int)
        and 0 < entry[2][1] < 1 << 16
        for entry in answer
    )


def _address(node: Sequence[Any], seed: RedisAddress) -> RedisAddress:
    return RedisAddress(node[0].decode() if node[0] else seed.host, node[1])


def _are_values(count: int, answer: Any) -> bool:
    return (
        isinstance(answer, list)
        and len(answer) == count
        and all(value is None or isinstance(value, bytes) for value in answer)
    )


def _is_number(answer: Any) -> bool:
    return answer is None or isinstance(answer, int)


def _is_text(answer: Any) -> bool:
    return isinstance(answer, bytes)


def _is_ok(answer: Any) -> bool:
    return answer == b"OK"


class NodeCosts(NamedTuple):
    """Costs of rows of one width in a node."""

    row_bytes: int  # memory per row, with its key and overhead
    rows_s: float  # rows per second of one core
    memory_bytes: int  # of the smallest node


@final
class RedisRows:
    """Rows of one width in Redis, a cache that may miss any row.

    Args:
        reads: nodes, for the computing thread.
        writes: the same nodes, for the background thread.
        row_bytes: bytes per row.
    """

    def __init__(self, reads: RedisNodes, writes: RedisNodes, row_bytes: int) -> None:
        self._reads, self._writes, self._row_bytes = reads, writes, row_bytes
        self._later = LaterCalls(MAX_LATER)
        words = -(-(8 + row_bytes) // 8)
        generator = np.random.default_rng(row_bytes)
        self._odd_W = generator.integers(0, 1 << 63, words, np.uint64) * np.uint64(2) + np.uint64(1)

    def read(self, keys_M: Ints, tags_M: Words, rows_MB: Bytes) -> NDArray[np.bool_]:
        """Read rows into `rows_MB`; returns the hits. An error is a miss."""
        found_M = np.zeros(len(keys_M), bool)
        size = HEAD_bytes + self._row_bytes

        def get(at: list[int], names: list[bytes]) -> RedisCommand:
            max_bytes = LINE_bytes + len(at) * (size + ITEM_bytes)
            return RedisCommand([b"MGET", *names], max_bytes, partial(_are_values, len(at)))

        positions: list[int] = []
        values: list[bytes] = []
        for at, answer in self._send(self._reads, keys_M, get):
            for position, value in zip(at, answer or [None] * len(at), strict=True):
                if value is not None and len(value) == size:
                    positions.append(position)
                    values.append(value)
        if not positions:
            return found_M
        at_F = np.array(positions)
        stored_FB = np.frombuffer(b"".join(values), np.uint8).reshape(len(positions), size)
        head_F2 = np.ascontiguousarray(stored_FB[:, :HEAD_bytes]).view(np.uint64)
        rows_FB = stored_FB[:, HEAD_bytes:]
        valid_F = (head_F2[:, 0] == tags_M[at_F]) & (head_F2[:, 1] == self._checksums(tags_M[at_F], rows_FB))
        rows_MB[at_F[valid_F]] = rows_FB[valid_F]
        found_M[at_F[valid_F]] = True
        return found_M

    def write_later(self, keys_M: Ints, tags_M: Words, rows_MB: Bytes) -> None:
        """Queue rows to write in the background, or drop them if the queue is full."""
        self._later.submit(partial(self._write, keys_M, tags_M, rows_MB))

    def measure(self) -> "NodeCosts":
        """Benchmark: write rows, read them for a second, and delete them; raises if they are not found."""
        keys_M, tags_M = np.arange(MEASURED_rows), np.zeros(MEASURED_rows, np.uint64)
        rows_MB, read = np.ones((MEASURED_rows, self._row_bytes), np.uint8), 0
        self._write(keys_M, tags_M, rows_MB)
        begin_s, before = time.monotonic(), self._reads.info()
        while time.monotonic() < begin_s + MEASURED_s:
            for at in np.split(keys_M, MEASURED_rows // 512):
                read += int(self.read(at, tags_M[at], rows_MB[at]).sum())
        after = self._reads.info()

        def make(*command: bytes) -> Callable[[list[int], list[bytes]], RedisCommand]:
            return lambda _, names: RedisCommand([*command, *names], LINE_bytes, _is_number)

        ((_, size),) = self._send(self._reads, keys_M[:1], make(b"MEMORY", b"USAGE"))
        self._send(self._writes, keys_M, make(b"DEL"))
        if not read or size is None or not after:
            raise SpecError("--redis: rows written to it are not found", "nodes that answer, with memory")
        used_s = sum(facts["used_cpu_user"] + facts["used_cpu_sys"] for facts in after)
        used_s -= sum(facts["used_cpu_user"] + facts["used_cpu_sys"] for facts in before)
        if used_s <= 0:
            raise SpecError("--redis: its nodes do not report their CPU time", "another Redis")
        memory = min(facts["maxmemory"] or facts["total_system_memory"] for facts in after)
        return NodeCosts(size, read / used_s, int(memory))

    def _write(self, keys_M: Ints, tags_M: Words, rows_MB: Bytes) -> None:
        head_M2 = np.stack([tags_M, self._checksums(tags_M, rows_MB)], 1)
        values = np.concatenate([head_M2.view(np.uint8), rows_MB], 1)

        def put(at: list[int], names: list[bytes]) -> RedisCommand:
            pairs = zip(names, (values[m].tobytes() for m in at), strict=True)
            return RedisCommand([b"MSET", *chain.from_iterable(pairs)], LINE_bytes, _is_ok)

        self._send(self._writes, keys_M, put)

    def _send(
        self, nodes: RedisNodes, keys_M: Ints, make: Callable[[list[int], list[bytes]], RedisCommand]
    ) -> list[tuple[list[int], Any]]:
        """Send the command of each part, made from positions and names of its keys; returns positions and answers."""
        part_M = (mix64(keys_M.astype(np.uint64)) % np.uint64(PARTS)).astype(np.int64)
        order_M = np.argsort(part_M, kind="stable")
        parts, firsts = np.unique(part_M[order_M], return_index=True)
        positions = [at.tolist() for at in np.split(order_M, firsts[1:])]
        keys, commands = keys_M.astype("<i8").tobytes(), list[tuple[int, RedisCommand]]()
        for part, at in zip(parts.tolist(), positions, strict=True):
            prefix = b"%s:%d:" % (nodes.prefixes[part], self._row_bytes)
            commands.append((part, make(at, [prefix + keys[8 * m : 8 * m + 8] for m in at])))
        return list(zip(positions, nodes.send(commands), strict=True))

    def _checksums(self, tags_M: Words, rows_MB: Bytes) -> Words:
        """Multilinear checksums of tags and rows: sums of 64-bit words times random odd numbers."""
        padded = np.zeros((len(rows_MB), 8 * len(self._odd_W)), np.uint8)
        padded[:, :8] = tags_M[:, None].view(np.uint8)
        padded[:, 8 : 8 + self._row_bytes] = rows_MB
        return (padded.view(np.uint64) * self._odd_W).sum(1, dtype=np.uint64)

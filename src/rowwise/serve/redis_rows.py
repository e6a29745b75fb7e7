"""Rows of cached tables in Redis, or in a Redis Cluster, which servers share.

Redis holds copies. A value begins with a tag, which tells the version of its row, and a checksum: a value with another
tag, or a damaged one, is as good as none. So Redis may be emptied, evict, end and start again, and serve several
versions: no answer is wrong.

Keys are distributed over parts, and a part is on one node. A batch sends each node one pipeline with one MGET a part.
A node that fails is left alone for a while, which doubles with each failure.

A node is not trusted to answer: a question has one deadline, from the connection to the last byte, and its answer has
at most the bytes and the shape that were asked for. Anything else closes the connection and is a failure of the node.
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

TIMEOUT_s = 0.05  # of a node: to connect, send and answer
MAX_TIMEOUTS = 4  # of slow nodes in one batch, which then asks no other
MIN_AWAY_s, MAX_AWAY_s = 0.5, 30.0  # that a node is left alone
PARTS = 64  # of the keys: more than nodes, so that each has about as many
HEAD_bytes = 16  # tag and checksum before a row
LINE_bytes = 1024  # of a line of an answer: an error, or a size
ITEM_bytes = 32  # of an answer, beside the bytes of each value
INFO_bytes, SLOTS_bytes = 1 << 16, 1 << 20  # of these answers
SLOTS = 1 << 14  # of a cluster
LEVELS = 4  # of lists in an answer
MAX_LATER = 64  # batches whose rows wait to be written
URLS = "redis://HOST:PORT, or several with commas between them"
HOST = re.compile(rb"[\w.:-]{0,253}")
NOT_NOW = ("LOADING", "NOAUTH", "MASTERDOWN", "ERR max number of clients")  # errors of a node that answers nothing
INFO = ("used_cpu_user", "used_cpu_sys", "maxmemory", "total_system_memory")
INFO_NUMBER = re.compile(rf"^({'|'.join(INFO)}):(\d{{1,18}}(?:\.\d{{1,18}})?)\r?$".encode(), re.M)
MEASURED, MEASURED_s = 4096, 1.0  # rows to measure nodes by
Words = NDArray[np.uint64]


@dataclass(slots=True)
class NodeState:
    """Whether a node is asked: a pure rule of its failures and the clock."""

    failures: int = 0
    away_until_s: float = 0.0

    def is_asked(self, now_s: float) -> bool:
        return now_s >= self.away_until_s

    def fail(self, now_s: float) -> None:
        self.away_until_s = now_s + min(MAX_AWAY_s, MIN_AWAY_s * 2 ** min(self.failures, 10))
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
    """The answer of a node does not fit its request."""


class RefusalText(str):
    """The text of a node's error."""


class Question(NamedTuple):
    """A command, and what its answer may be."""

    words: Sequence[bytes]
    max_bytes: int
    fits: Callable[[Any], bool]  # whether an answer that is no error has the right shape

    def pack(self) -> bytes:
        return b"*%d\r\n%b" % (len(self.words), b"".join(b"$%d\r\n%b\r\n" % (len(one), one) for one in self.words))


@final
class _Answers:
    """Reads answers of the Redis protocol (RESP2) that are bounded."""

    def __init__(self, connection: socket.socket, left_s: Callable[[], float]) -> None:
        self._file, self._left_bytes = io.BufferedReader(SocketReader(connection, left_s), 1 << 16), 0

    def read(self, question: Question) -> Any:
        self._left_bytes = question.max_bytes
        answer = self._next(0)
        if isinstance(answer, RefusalText) and answer.startswith(NOT_NOW):
            raise WrongAnswerError(answer)
        if not (isinstance(answer, RefusalText) or question.fits(answer)):
            raise WrongAnswerError(f"its answer to {question.words[0].decode()} is of a wrong kind")
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
        if kind == b"$" and self._may_have(number):
            content = self._file.read(number + 2)
            if len(content) < number + 2:
                raise WrongAnswerError("it ends too early")
            self._left_bytes -= number + 2
            return content[:-2]
        if kind == b"*" and self._may_have(3 * number) and level < LEVELS:
            return self._read_list(number, level + 1)
        raise WrongAnswerError("its answer is not of the Redis protocol")

    def _read_list(self, number: int, level: int) -> list[Any]:
        items: list[Any] = []
        readline, read, usual, size = self._file.readline, self._file.read, b"", 0
        for _ in range(number):
            line = readline(LINE_bytes)
            if line == usual and size <= self._left_bytes:  # as the one before, which saves time
                content = read(size)
                self._left_bytes -= size + len(line)
                if len(content) < size:
                    raise WrongAnswerError("it ends too early")
                items.append(content[:-2])
                continue
            items.append(self._parse(line, level))
            if line[:1] == b"$" and items[-1] is not None:
                usual, size = line, len(items[-1]) + 2
        return items

    def _may_have(self, count: int) -> bool:
        if count > self._left_bytes:
            raise WrongAnswerError(f"its answer is larger than was asked for by {count - self._left_bytes:,} bytes")
        return count >= 0


@final
class RedisNodes:
    """Connections to the nodes of a Redis, and which node has each part of the keys.

    Args:
        addresses: of the server, or of some nodes of a cluster.
        prefix: begins all keys.
        timeout_s: of a node, to connect, send and answer.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        addresses: Sequence[RedisAddress],
        prefix: str,
        timeout_s: float = TIMEOUT_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seeds, self._timeout_s, self._clock = tuple(addresses), timeout_s, clock
        self._one_at_a_time = threading.Lock()
        self.prefixes = tuple(f"{{{prefix}/{part}}}".encode() for part in range(PARTS))
        self._connections: dict[RedisAddress, socket.socket] = {}
        weakref.finalize(self, _close_all, self._connections)
        self._states: dict[RedisAddress, NodeState] = {}
        self._nodes: tuple[RedisAddress, ...] = ()  # by part; empty: not known
        self._may_differ = True  # whether a part may have moved to another node
        self._looked_s = -1e9

    def send(self, questions: Sequence[tuple[int, Question]]) -> list[Any]:
        """Send a question for each part; an answer is None where its node has none. Threads take turns."""
        with self._one_at_a_time:
            return self._send(questions)

    def _send(self, questions: Sequence[tuple[int, Question]]) -> list[Any]:
        answers: list[Any] = [None] * len(questions)
        end_s = self._clock() + MAX_TIMEOUTS * self._timeout_s
        nodes = self._find_nodes(end_s)
        if not nodes:
            return answers
        for node in dict.fromkeys(nodes[part] for part, _ in questions):
            if self._clock() > end_s:
                break
            chosen = [number for number, (part, _) in enumerate(questions) if nodes[part] == node]
            for number, answer in zip(chosen, self._ask(node, [questions[k][1] for k in chosen]), strict=True):
                answers[number] = None if isinstance(answer, RefusalText) else answer
                if isinstance(answer, RefusalText):
                    self._may_differ = True
        return answers

    def info(self) -> list[dict[str, float]]:
        """The numbers that each node says of its processor time and memory; none of a node that does not answer."""
        question = Question([b"INFO"], INFO_bytes, _is_text)
        with self._one_at_a_time:
            nodes = dict.fromkeys(self._find_nodes(self._clock() + MAX_TIMEOUTS * self._timeout_s))
            texts = [text for node in nodes for text in self._ask(node, [question]) if isinstance(text, bytes)]
        found = [{key.decode(): float(value) for key, value in INFO_NUMBER.findall(text)} for text in texts]
        return [one for one in found if len(one) == len(INFO)]

    def _ask(self, node: RedisAddress, questions: Sequence[Question]) -> list[Any]:
        """The answers of a node, which are None if it is left alone or fails."""
        state, end_s = self._states.setdefault(node, NodeState()), self._clock() + self._timeout_s
        if not state.is_asked(end_s - self._timeout_s):
            return [None] * len(questions)

        def left_s() -> float:
            left = end_s - self._clock()
            if left <= 0:
                raise TimeoutError(f"not within {self._timeout_s:g} s")
            return left

        try:
            connection = self._connect(node, left_s)
            connection.settimeout(left_s())
            connection.sendall(b"".join(question.pack() for question in questions))
            reader = _Answers(connection, left_s)
            answers = [reader.read(question) for question in questions]
        except (OSError, WrongAnswerError) as error:
            self._fail(node, error)
            return [None] * len(questions)
        if state.failures:
            print(f"redis at {node.host}:{node.port} answers again", file=sys.stderr, flush=True)
        state.answer()
        return answers

    def _connect(self, node: RedisAddress, left_s: Callable[[], float]) -> socket.socket:
        """The connection to a node, or a new one where it was closed, or where anything is left in it."""
        connection = self._connections.get(node)
        if connection is not None:
            if is_idle(connection):
                return connection
            self._connections.pop(node).close()
        try:
            places = socket.getaddrinfo(*node, type=socket.SOCK_STREAM)
        except UnicodeError:
            raise ConnectionError("its host is no name") from None
        error: OSError = ConnectionError("its host has no address")
        for family, kind, protocol, _, place in places:
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(left_s())
                connection.connect(place)
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
        self._may_differ = True
        state = self._states[node]
        if not state.failures:
            got = printable(f"redis at {node.host}:{node.port} does not answer: {str(error)[:200]}")
            print(f"{got}; its rows are read from files", file=sys.stderr, flush=True)
        state.fail(self._clock())

    def _find_nodes(self, end_s: float) -> tuple[RedisAddress, ...]:
        """The node of each part. Asked for again, not more often than nodes are, after an error."""
        now_s = self._clock()
        if not self._may_differ or now_s < self._looked_s + MIN_AWAY_s:
            return self._nodes
        self._looked_s = now_s
        for seed in dict.fromkeys((*self._seeds, *self._connections)):
            if self._clock() > end_s:
                break
            (found,) = self._ask(seed, [Question([b"CLUSTER", b"SLOTS"], SLOTS_bytes, _are_slots)])
            nodes: tuple[RedisAddress, ...] = ()
            if isinstance(found, RefusalText):  # no cluster
                nodes = (seed,) * PARTS
            elif found is not None:
                nodes = self._nodes_of(found, seed)
            if nodes:
                self._nodes, self._may_differ = nodes, False
                self._forget_others()
                break
        return self._nodes

    def _nodes_of(self, slots: list[Any], seed: RedisAddress) -> tuple[RedisAddress, ...]:
        """The node of each part by the slots of a cluster; empty if any part has none."""
        bounds_N2 = np.array([one[:2] for one in slots], np.int64).reshape(-1, 2)
        nodes: list[RedisAddress] = []
        for slot in map(key_slot, self.prefixes):
            at = np.flatnonzero((bounds_N2[:, 0] <= slot) & (slot <= bounds_N2[:, 1]))
            if not len(at):
                return ()
            nodes.append(_address(slots[at[0]][2], seed))
        return tuple(nodes)

    def _forget_others(self) -> None:
        """Close connections to nodes that have no part: a cluster may name others each time."""
        kept = {*self._seeds, *self._nodes}
        for node in self._connections.keys() - kept:
            self._connections.pop(node).close()
        self._states = {node: state for node, state in self._states.items() if node in kept}


def _close_all(connections: dict[RedisAddress, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


def key_slot(prefix: bytes) -> int:
    """The slot of a cluster that has the keys with a prefix, which is in braces."""
    return crc_hqx(prefix[1:-1], 0) % SLOTS


def _are_slots(answer: Any) -> bool:
    return isinstance(answer, list) and all(
        isinstance(one, list)
        and len(one) > 2
        and all(isinstance(slot, int) and 0 <= slot < SLOTS for slot in one[:2])
        and isinstance(one[2], list)
        and len(one[2]) > 1
        and (one[2][0] is None or (isinstance(one[2][0], bytes) and HOST.fullmatch(one[2][0]) is not None))
        and isinstance(one[2][1], int)
        and 0 < one[2][1] < 1 << 16
        for one in answer
    )


def _address(node: Sequence[Any], seed: RedisAddress) -> RedisAddress:
    return RedisAddress(node[0].decode() if node[0] else seed.host, node[1])


def _are_values(count: int, answer: Any) -> bool:
    return (
        isinstance(answer, list)
        and len(answer) == count
        and all(one is None or isinstance(one, bytes) for one in answer)
    )


def _is_number(answer: Any) -> bool:
    return answer is None or isinstance(answer, int)


def _is_text(answer: Any) -> bool:
    return isinstance(answer, bytes)


def _is_ok(answer: Any) -> bool:
    return answer == b"OK"


class NodeCosts(NamedTuple):
    """What rows of one width take of a node."""

    row_bytes: int  # of its memory, with the key and all that belongs to it
    rows_s: float  # rows a second that its core answers
    memory_bytes: int  # of the node with the least


@final
class RedisRows:
    """Rows of one width in Redis, which servers share: any of them may be there, or none.

    Args:
        reads: nodes, for the thread that computes.
        writes: the same nodes, for a thread.
        row_bytes: of each row.
    """

    def __init__(self, reads: RedisNodes, writes: RedisNodes, row_bytes: int) -> None:
        self._reads, self._writes, self._row_bytes = reads, writes, row_bytes
        self._later = LaterCalls(MAX_LATER)
        words = -(-(8 + row_bytes) // 8)
        draw = np.random.default_rng(row_bytes)
        self._odd_W = draw.integers(0, 1 << 63, words, np.uint64) * np.uint64(2) + np.uint64(1)

    def read(self, keys_M: Ints, tags_M: Words, rows_MB: Bytes) -> NDArray[np.bool_]:
        """Read rows into `rows_MB`; whether each was found. An error finds none."""
        found_M = np.zeros(len(keys_M), bool)
        size = HEAD_bytes + self._row_bytes

        def get(at: list[int], names: list[bytes]) -> Question:
            max_bytes = LINE_bytes + len(at) * (size + ITEM_bytes)
            return Question([b"MGET", *names], max_bytes, partial(_are_values, len(at)))

        places: list[int] = []
        values: list[bytes] = []
        for at, answer in self._send(self._reads, keys_M, get):
            for place, value in zip(at, answer or [None] * len(at), strict=True):
                if value is not None and len(value) == size:
                    places.append(place)
                    values.append(value)
        if not places:
            return found_M
        at_F = np.array(places)
        stored_FB = np.frombuffer(b"".join(values), np.uint8).reshape(len(places), size)
        head_F2 = np.ascontiguousarray(stored_FB[:, :HEAD_bytes]).view(np.uint64)
        rows_FB = stored_FB[:, HEAD_bytes:]
        good_F = (head_F2[:, 0] == tags_M[at_F]) & (head_F2[:, 1] == self._sums(tags_M[at_F], rows_FB))
        rows_MB[at_F[good_F]] = rows_FB[good_F]
        found_M[at_F[good_F]] = True
        return found_M

    def write_later(self, keys_M: Ints, tags_M: Words, rows_MB: Bytes) -> None:
        """Write rows while others are computed; where too many wait, none of these."""
        self._later.add(partial(self._write, keys_M, tags_M, rows_MB))

    def measure(self) -> "NodeCosts":
        """Write rows, read them for a second, and delete them; raises where they are not there."""
        keys_M, tags_M = np.arange(MEASURED), np.zeros(MEASURED, np.uint64)
        rows_MB, read = np.ones((MEASURED, self._row_bytes), np.uint8), 0
        self._write(keys_M, tags_M, rows_MB)
        begin_s, before = time.monotonic(), self._reads.info()
        while time.monotonic() < begin_s + MEASURED_s:
            for at in np.split(keys_M, MEASURED // 512):
                read += int(self.read(at, tags_M[at], rows_MB[at]).sum())
        after = self._reads.info()

        def ask(*command: bytes) -> Callable[[list[int], list[bytes]], Question]:
            return lambda _, names: Question([*command, *names], LINE_bytes, _is_number)

        ((_, size),) = self._send(self._reads, keys_M[:1], ask(b"MEMORY", b"USAGE"))
        self._send(self._writes, keys_M, ask(b"DEL"))
        if not read or size is None or not after:
            raise SpecError("--redis: rows that were written to it are not there", "nodes that answer, with memory")
        used_s = sum(one["used_cpu_user"] + one["used_cpu_sys"] for one in after)
        used_s -= sum(one["used_cpu_user"] + one["used_cpu_sys"] for one in before)
        if used_s <= 0:
            raise SpecError("--redis: its nodes do not say what processor time they take", "another Redis")
        memory = min(one["maxmemory"] or one["total_system_memory"] for one in after)
        return NodeCosts(size, read / used_s, int(memory))

    def _write(self, keys_M: Ints, tags_M: Words, rows_MB: Bytes) -> None:
        head_M2 = np.stack([tags_M, self._sums(tags_M, rows_MB)], 1)
        values = np.concatenate([head_M2.view(np.uint8), rows_MB], 1)

        def put(at: list[int], names: list[bytes]) -> Question:
            pairs = zip(names, (values[m].tobytes() for m in at), strict=True)
            return Question([b"MSET", *chain.from_iterable(pairs)], LINE_bytes, _is_ok)

        self._send(self._writes, keys_M, put)

    def _send(
        self, nodes: RedisNodes, keys_M: Ints, ask: Callable[[list[int], list[bytes]], Question]
    ) -> list[tuple[list[int], Any]]:
        """Ask for the keys of each part, by their places and names; returns the places and the answer of each part."""
        part_M = (mix64(keys_M.astype(np.uint64)) % np.uint64(PARTS)).astype(np.int64)
        order_M = np.argsort(part_M, kind="stable")
        parts, firsts = np.unique(part_M[order_M], return_index=True)
        places = [at.tolist() for at in np.split(order_M, firsts[1:])]
        keys, questions = keys_M.astype("<i8").tobytes(), list[tuple[int, Question]]()
        for part, at in zip(parts.tolist(), places, strict=True):
            prefix = b"%s:%d:" % (nodes.prefixes[part], self._row_bytes)
            questions.append((part, ask(at, [prefix + keys[8 * m : 8 * m + 8] for m in at])))
        return list(zip(places, nodes.send(questions), strict=True))

    def _sums(self, tags_M: Words, rows_MB: Bytes) -> Words:
        """Checksums of tags and rows: sums of words times odd numbers."""
        padded = np.zeros((len(rows_MB), 8 * len(self._odd_W)), np.uint8)
        padded[:, :8] = tags_M[:, None].view(np.uint8)
        padded[:, 8 : 8 + self._row_bytes] = rows_MB
        return (padded.view(np.uint64) * self._odd_W).sum(1, dtype=np.uint64)

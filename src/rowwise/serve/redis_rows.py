"""Rows of cached tables in Redis, or in a Redis Cluster, which servers share.

Redis holds copies. A value begins with a tag, which tells the version of its row, and a checksum: a value with another
tag, or a damaged one, is as good as none. So Redis may be emptied, evict, end and start again, and serve several
versions: no answer is wrong.

Keys are distributed over parts, and a part is on one node. A batch sends each node one pipeline with one MGET a part.
A node that fails is left alone for a while, which doubles with each failure.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import SpecError
from rowwise.serve.later import LaterCalls
from rowwise.store.policy import Ints, mix64
from rowwise.store.shared_cache import Bytes

TIMEOUT_s = 0.05  # of a node's answer
LEAST_AWAY_s, MOST_AWAY_s = 0.5, 30.0  # that a node is left alone
PARTS = 64  # of the keys: more than nodes, so that each has about as many
HEAD_bytes = 16  # tag and checksum before a row
MOST_LATER = 64  # batches whose rows wait to be written
WANT = "want redis://HOST:PORT, or several with commas between them"
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
        self.away_until_s = now_s + min(MOST_AWAY_s, LEAST_AWAY_s * 2 ** min(self.failures, 10))
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
            raise SpecError(f"--redis {text}: {WANT}") from None
        plain = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password)
        if parts.scheme != "redis" or not parts.hostname or not port or not plain:
            raise SpecError(f"--redis {text}: {WANT}")
        return cls(parts.hostname, port)


def parse_addresses(text: str) -> tuple[RedisAddress, ...]:
    return tuple(RedisAddress.parse(part.strip()) for part in text.split(","))


@final
class RedisNodes:
    """Connections to the nodes of a Redis, and which node has each part of the keys.

    Args:
        addresses: of the server, or of some nodes of a cluster.
        prefix: begins all keys.
        timeout_s: of a node's answer.
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
        self._clients: dict[RedisAddress, Any] = {}
        self._states: dict[RedisAddress, NodeState] = {}
        self._nodes: tuple[RedisAddress, ...] = ()  # by part; empty: not known
        self._looked_s = -1e9

    def send(self, commands: Sequence[tuple[int, Sequence[Any]]]) -> list[Any]:
        """Send a command for each part; an answer is None where its node has none. Threads take turns."""
        with self._one_at_a_time:
            return self._send(commands)

    def _send(self, commands: Sequence[tuple[int, Sequence[Any]]]) -> list[Any]:
        answers: list[Any] = [None] * len(commands)
        nodes = self._find_nodes()
        if not nodes:
            return answers
        for node in dict.fromkeys(nodes[part] for part, _ in commands):
            chosen = [number for number, (part, _) in enumerate(commands) if nodes[part] == node]
            for number, answer in zip(chosen, self._ask(node, [commands[k][1] for k in chosen]), strict=True):
                answers[number] = answer
        return answers

    def info(self) -> list[dict[str, Any]]:
        """What each node says of its processor time and memory."""
        with self._one_at_a_time:
            return [self._client(node).info() for node in dict.fromkeys(self._find_nodes())]

    def _ask(self, node: RedisAddress, commands: Sequence[Sequence[Any]]) -> list[Any]:
        from redis.exceptions import RedisError, ResponseError

        state, now_s = self._states.setdefault(node, NodeState()), self._clock()
        if not state.is_asked(now_s):
            return [None] * len(commands)
        try:
            pipeline = self._client(node).pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers = pipeline.execute(raise_on_error=False)
        except (RedisError, OSError) as error:
            self._fail(node, error)
            self._nodes = ()  # a part may have moved to another node
            return [None] * len(commands)
        if state.failures:
            print(f"redis at {node.host}:{node.port} answers again", file=sys.stderr, flush=True)
        state.answer()
        if any(isinstance(answer, ResponseError) for answer in answers):
            self._nodes = ()
        return [None if isinstance(answer, Exception) else answer for answer in answers]

    def _fail(self, node: RedisAddress, error: Exception) -> None:
        state = self._states[node]
        if not state.failures:
            got = f"redis at {node.host}:{node.port} does not answer: {str(error)[:200]}"
            print(f"{got}; its rows are read from files", file=sys.stderr, flush=True)
        state.fail(self._clock())

    def _find_nodes(self) -> tuple[RedisAddress, ...]:
        """The node of each part. Asked for again, not more often than nodes are, after an error."""
        now_s = self._clock()
        if self._nodes or now_s < self._looked_s + LEAST_AWAY_s:
            return self._nodes
        self._looked_s = now_s
        from redis.crc import key_slot
        from redis.exceptions import RedisError, ResponseError

        for seed in dict.fromkeys((*self._seeds, *self._clients)):
            state = self._states.setdefault(seed, NodeState())
            if not state.is_asked(now_s):
                continue
            try:
                found = self._client(seed).execute_command("CLUSTER SLOTS")
            except ResponseError:  # no cluster
                self._nodes = (seed,) * PARTS
                return self._nodes
            except (RedisError, OSError) as error:
                self._fail(seed, error)
                continue
            slots = [(int(one[0]), int(one[1]), _address(one[2], seed)) for one in _as_rows(found)]
            of_part = [
                next((node for first, last, node in slots if first <= key_slot(prefix) <= last), None)
                for prefix in self.prefixes
            ]
            known = [node for node in of_part if node is not None]
            if len(known) == PARTS:
                self._nodes = tuple(known)
                return self._nodes
        return ()

    def _client(self, node: RedisAddress) -> Any:
        if node not in self._clients:
            from redis import Redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry

            self._clients[node] = Redis(
                node.host, node.port, socket_timeout=self._timeout_s, socket_connect_timeout=self._timeout_s,
                retry=Retry(NoBackoff(), 0),
            )  # fmt: skip
        return self._clients[node]


def _as_rows(found: Any) -> list[Any]:
    """The answer to CLUSTER SLOTS as rows, which the client may have parsed."""
    if isinstance(found, dict):
        return [(first, last, one["primary"]) for (first, last), one in found.items()]
    return found


def _address(node: Sequence[Any], seed: RedisAddress) -> RedisAddress:
    host = node[0].decode() if isinstance(node[0], bytes) else node[0]
    return RedisAddress(host or seed.host, int(node[1]))


class NodeCosts(NamedTuple):
    """What rows of one width take of a node."""

    row_bytes: int  # of its memory, with the key and all that belongs to it
    rows_s: float  # rows a second that its core answers
    memory_bytes: int  # of the node with the least


@final
class RedisRows:
    """Rows of one width in Redis, as `SharedRowStore`.

    Args:
        reads: nodes, for the thread that computes.
        writes: the same nodes, for a thread.
        row_bytes: of each row.
    """

    def __init__(self, reads: RedisNodes, writes: RedisNodes, row_bytes: int) -> None:
        self._reads, self._writes, self._row_bytes = reads, writes, row_bytes
        self._later = LaterCalls(MOST_LATER)
        words = -(-(8 + row_bytes) // 8)
        draw = np.random.default_rng(row_bytes)
        self._odd_W = draw.integers(0, 1 << 63, words, np.uint64) * np.uint64(2) + np.uint64(1)

    def read(self, keys_M: Ints, tags_M: Words, rows_MB: Bytes) -> NDArray[np.bool_]:
        found_M = np.zeros(len(keys_M), bool)
        by_part = self._split(keys_M)
        names = self._names(self._reads, keys_M)
        answers = self._reads.send([(part, ["MGET", *(names[m] for m in at)]) for part, at in by_part])
        size = HEAD_bytes + self._row_bytes
        places: list[int] = []
        values: list[bytes] = []
        for (_, at), answer in zip(by_part, answers, strict=True):
            for place, value in zip(at, answer or (), strict=False):
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
        self._later.add(partial(self._write, keys_M, tags_M, rows_MB))

    def measure(self) -> "NodeCosts":
        """Write rows, read them for a second, and delete them; raises where they are not there."""
        keys_M, tags_M = np.arange(MEASURED), np.zeros(MEASURED, np.uint64)
        rows_MB, read = np.ones((MEASURED, self._row_bytes), np.uint8), 0
        self._write(keys_M, tags_M, rows_MB)
        names = self._names(self._writes, keys_M)
        begin_s, before = time.monotonic(), self._reads.info()
        while time.monotonic() < begin_s + MEASURED_s:
            for at in np.split(keys_M, MEASURED // 512):
                read += int(self.read(at, tags_M[at], rows_MB[at]).sum())
        after, key = self._reads.info(), names[0]
        first = int(_parts(keys_M[:1])[0])
        (size,) = self._reads.send([(first, ["MEMORY", "USAGE", key])])
        self._writes.send([(part, ["DEL", *(names[m] for m in at)]) for part, at in self._split(keys_M)])
        if not read or size is None or not after:
            raise SpecError("--redis: rows that were written to it are not there: want nodes that answer, with memory")
        used_s = sum(one["used_cpu_user"] + one["used_cpu_sys"] for one in after)
        used_s -= sum(one["used_cpu_user"] + one["used_cpu_sys"] for one in before)
        memory = min(one["maxmemory"] or one["total_system_memory"] for one in after)
        return NodeCosts(int(size), read / used_s, memory)

    def _write(self, keys_M: Ints, tags_M: Words, rows_MB: Bytes) -> None:
        head_M2 = np.stack([tags_M, self._sums(tags_M, rows_MB)], 1)
        values = np.concatenate([head_M2.view(np.uint8), rows_MB], 1)
        names = self._names(self._writes, keys_M)
        self._writes.send(
            [
                (part, ["MSET", *(item for m in at for item in (names[m], values[m].tobytes()))])
                for part, at in self._split(keys_M)
            ]
        )

    def _names(self, nodes: RedisNodes, keys_M: Ints) -> list[bytes]:
        prefixes = [b"%s:%d:" % (prefix, self._row_bytes) for prefix in nodes.prefixes]
        keys = keys_M.astype("<i8").tobytes()
        return [prefixes[part] + keys[8 * m : 8 * m + 8] for m, part in enumerate(_parts(keys_M).tolist())]

    def _split(self, keys_M: Ints) -> list[tuple[int, list[int]]]:
        """The places of the keys of each part."""
        part_M = _parts(keys_M)
        order_M = np.argsort(part_M, kind="stable")
        parts, firsts = np.unique(part_M[order_M], return_index=True)
        return [(int(part), at.tolist()) for part, at in zip(parts, np.split(order_M, firsts[1:]), strict=True)]

    def _sums(self, tags_M: Words, rows_MB: Bytes) -> Words:
        """Checksums of tags and rows: sums of words times odd numbers."""
        padded = np.zeros((len(rows_MB), 8 * len(self._odd_W)), np.uint8)
        padded[:, :8] = tags_M[:, None].view(np.uint8)
        padded[:, 8 : 8 + self._row_bytes] = rows_MB
        return (padded.view(np.uint64) * self._odd_W).sum(1, dtype=np.uint64)


def _parts(keys_M: Ints) -> Ints:
    return (mix64(keys_M.astype(np.uint64)) % np.uint64(PARTS)).astype(np.int64)

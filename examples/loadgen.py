"""MLPerf LoadGen judges a server, or the library in process: a query is a context and 100 to 700 candidates.

    rowwise serve served &
    python examples/loadgen.py served --candidates item,shop --url http://127.0.0.1:8080/v1/models/NAME/score --rate 100
    python examples/loadgen.py served --candidates item,shop --find-rate

LoadGen (`pip install 'rowwise[judges]'`) decides when queries arrive, measures their latencies, and gives the verdict.
SERVED is a folder of `rowwise export`: queries are made of its golden rows, or of the rows of a Parquet file, and the
last answer to each query is compared with the logits that the library computes. Without --url, the library itself is
the system under test: one thread, one query after the other, its columns in memory. Any server that takes the body of
`rowwise serve` can be judged, so that two servers are compared under one harness.

--find-rate searches for the largest rate that is VALID in the scenario `server`: it doubles or halves until it has both
verdicts, then bisects until these are 5 % apart, or --budget seconds are over. The exit code is 0 if the verdict is
VALID, no query failed, and no logit is another.

The client is threads with a connection each, which stays open; requests are made before the first query, and answers
are read after the last. What it takes of the machine's cores is a column of the table, in ms of processor for a query.
"""

import argparse
import json
import math
import queue
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rowwise.base.errors import RowwiseError
from rowwise.cli.terminal import make_table, make_terminal
from rowwise.recipes.served import open_version
from rowwise.serve.client import ARROW, JSON, arrow_stream
from rowwise.serve.forward import arrays_of
from rowwise.serve.package import find_version, read_golden
from rowwise.serve.version import ServedVersion

QUERIES = 256  # different ones
WARM_UP = 20  # queries
SCENARIOS = {"server": "Server", "offline": "Offline", "single-stream": "SingleStream"}
OK, CLOSE = 200, 1e-4  # of logits: another library may sum in another order
APART = 1.05  # ratio of the lowest rate that is INVALID and the highest that is VALID
MIN_RATE = 0.05
CONSTRAINT = re.compile(r"^  (.+?) satisfied ?: ?(?:NO|No)$", re.M)
P50, P99 = (re.compile(rf"^{q}\.00 percentile latency \(ns\) +: (\d+)", re.M) for q in (50, 99))
RATE = re.compile(r"^(?:Completed samples per second +|Samples per second|QPS w/ loadgen overhead +): ([\d.]+)", re.M)
NUMBERS = {  # columns of the table, with the format of a field
    "target/s": "{target_rate:,.1f}", "achieved/s": "{achieved_rate:,.1f}", "queries": "{queries:,}",
    "p50 ms": "{p50_ms:.1f}", "p99 ms": "{p99_ms:.1f}", "client ms": "{client_cpu_ms:.2f}", "failed": "{failed:,}",
    "differ": "{max_difference:.1g}",
}  # fmt: skip


class Query(NamedTuple):
    """A context and its candidates: as a request, and as rows."""

    rows: pa.Table
    body: bytes


class SystemUnderTest(Protocol):
    """Answers a query, in one of `threads` threads; an answer is read by `logits`, or None if the query failed."""

    threads: int

    def connect(self) -> AbstractContextManager[Callable[[Query], Any]]: ...

    def logits(self, answer: Any, tasks: Sequence[str]) -> np.ndarray: ...


class InProcess:
    """The library: raw columns in, logits out."""

    threads = 1

    def __init__(self, version: ServedVersion) -> None:
        self._version = version

    @contextmanager
    def connect(self) -> Iterator[Callable[[Query], Any]]:
        yield lambda query: compute(self._version, query.rows)

    def logits(self, answer: np.ndarray, tasks: Sequence[str]) -> np.ndarray:
        return answer


class HttpServer:
    """A server, at the URL of its score endpoint."""

    def __init__(self, url: str, threads: int, kind: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or not parts.path.strip("/"):
            sys.exit(
                f"loadgen: --url {url}: expected http://HOST:PORT/v1/models/NAME/score, as rowwise serve prints it"
            )
        self.url, self.threads, self._kind = url, threads, kind
        self._address = (parts.hostname, parts.port or 80)
        self._head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: {kind}\r\naccept: {kind}\r\n"

    @contextmanager
    def connect(self) -> Iterator[Callable[[Query], bytes | None]]:
        opened = list[socket.socket]()

        def send(query: Query) -> bytes | None:
            for _ in range(2):  # a server closes connections that are idle
                try:
                    if not opened:
                        opened.append(self._open())
                    status, answer = self._exchange(opened[0], query.body)
                except (OSError, ValueError):
                    close()
                else:
                    return answer if status == OK else None
            return None

        def close() -> None:
            while opened:
                opened.pop().close()

        try:
            yield send
        finally:
            close()

    def ask(self, query: Query) -> None:
        """Exit with one line unless the server answers this query."""
        try:
            with closing(self._open()) as connection:
                status, answer = self._exchange(connection, query.body)
        except (OSError, ValueError) as error:
            sys.exit(f"loadgen: {self.url}: {error}: expected a server; start one: rowwise serve SERVED")
        if status != OK:
            sys.exit(f"loadgen: {self.url}: {status} {answer[:300].decode(errors='replace')}")

    def logits(self, answer: bytes, tasks: Sequence[str]) -> np.ndarray:
        names = [f"{task}_logit" for task in tasks]
        if self._kind == ARROW:
            table = pa.ipc.open_stream(answer).read_all()
            return np.stack([table[name].to_numpy() for name in names], 1)
        outputs = json.loads(answer)["outputs"]
        return np.array([outputs[name] for name in names], np.float32).T

    def _open(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _exchange(self, connection: socket.socket, body: bytes) -> tuple[int, bytes]:
        connection.sendall(f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body)
        received = bytearray()
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += _receive(connection)
        lines = bytes(received[:end]).lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), None)
        if length is None:
            raise ConnectionError("an answer has no content-length")
        while len(received) < end + 4 + length:
            received += _receive(connection)
        return int(lines[0].split()[1]), bytes(received[end + 4 :])


def _receive(connection: socket.socket) -> bytes:
    part = connection.recv(1 << 18)
    if not part:
        raise ConnectionError("the server closed a connection")
    return part


def compute(version: ServedVersion, rows: pa.Table) -> np.ndarray:
    """The logits of rows, by the library."""
    with torch.inference_mode():
        return version.forward(arrays_of(rows), rows.num_rows, rows.num_rows).numpy()


def make_queries(rows: pa.Table, candidates: Sequence[str], sizes: range, seed: int, kind: str) -> list[Query]:
    """Queries of these sizes: the context of a row, and the candidates of others; the same ones for the same seed."""
    draw, queries = np.random.default_rng(seed), []
    context = [name for name in rows.column_names if name not in candidates]
    for _ in range(QUERIES):
        count, row = int(draw.integers(sizes.start, sizes.stop)), int(draw.integers(rows.num_rows))
        items = rows.select(candidates).take(draw.integers(rows.num_rows, size=count))
        repeated = rows.select(context).take(np.full(count, row))
        table = pa.table({name: (items if name in candidates else repeated)[name] for name in rows.column_names})
        table = table.combine_chunks()
        shared = {name: _as_json(rows[name][row].as_py()) for name in context}
        body = {"context": shared, "candidates": {name: _as_json(items[name].to_pylist()) for name in candidates}}
        queries.append(Query(table, arrow_stream(table) if kind == ARROW else json.dumps(body, default=str).encode()))
    return queries


def _as_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Judge:
    """LoadGen in front of a system; `run` gives a row of the table."""

    def __init__(self, system: SystemUnderTest, queries: Sequence[Query], options: argparse.Namespace) -> None:
        self._system, self._queries, self._options = system, queries, options
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: dict[int, Any] = {}  # the last one to each query
        self._completed = self._failed = 0
        self._lock = threading.Lock()
        self._sut = loadgen.ConstructSUT(self._issue, lambda: None)
        self._library = loadgen.ConstructQSL(len(queries), len(queries), lambda _: None, lambda _: None)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(system.threads)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        loadgen.DestroyQSL(self._library)
        loadgen.DestroySUT(self._sut)

    def run(self, scenario: str, rate: float) -> dict[str, Any]:
        """A row; LoadGen plans `offline` and `single-stream` by the rate, so that one that is too low is corrected."""
        row = self._run(scenario, rate)
        if scenario != "server" and "min duration" in row["reason"]:
            row = self._run(scenario, 1.5 * row["achieved_rate"])
        return row

    def _run(self, scenario: str, rate: float) -> dict[str, Any]:
        settings, options = loadgen.TestSettings(), self._options
        settings.scenario = getattr(loadgen.TestScenario, SCENARIOS[scenario])
        settings.mode = loadgen.TestMode.PerformanceOnly
        settings.server_target_qps = settings.offline_expected_qps = rate
        settings.server_target_latency_ns = int(1e6 * options.p99)
        settings.single_stream_expected_latency_ns = int(1e9 / rate)
        settings.server_target_latency_percentile = settings.single_stream_target_latency_percentile = 0.99
        settings.min_query_count, settings.min_duration_ms = options.queries, int(1000 * options.seconds)
        settings.schedule_rng_seed = settings.sample_index_rng_seed = settings.qsl_rng_seed = options.seed
        self._completed = self._failed = 0
        with tempfile.TemporaryDirectory() as folder:
            output, logs = loadgen.LogOutputSettings(), loadgen.LogSettings()
            output.outdir, logs.log_output, logs.enable_trace = folder, output, False
            begin_s = time.process_time()
            loadgen.StartTestWithLogSettings(self._sut, self._library, settings, logs)
            cpu_s = time.process_time() - begin_s
            summary = (Path(folder) / "mlperf_log_summary.txt").read_text()
        row = {"scenario": scenario, "target_rate": rate, "queries": self._completed, **read_summary(summary)}
        row |= {"failed": self._failed, "client_cpu_ms": 1e3 * cpu_s / max(1, self._completed)}
        said = f"{row['achieved_rate']:,.1f} queries/s, p99 {row['p99_ms']:.1f} ms, {row['verdict']}: {row['reason']}"
        print(f"{scenario} at {rate:,.1f}/s: {said}", flush=True)
        return row

    def find_rate(self, rate: float, budget_s: float) -> list[dict[str, Any]]:
        """Rows of the rates that were tried; the last one is the highest that is VALID, or the lowest that is not."""
        end_s, rows = time.monotonic() + budget_s, list[dict[str, Any]]()
        low, high = 0.0, math.inf
        while rate >= MIN_RATE and high / max(low, MIN_RATE / 2) > APART:
            if rows and time.monotonic() + max(self._options.queries / rate, self._options.seconds) > end_s:
                break
            rows.append(self.run("server", rate))
            low, high = (rate, high) if is_good(rows[-1]) else (low, rate)
            rate = 2 * low if high == math.inf else math.sqrt(low * high) if low else high / 2
        return sorted(rows, key=lambda row: row["target_rate"] if is_good(row) else -row["target_rate"])

    def max_difference(self, version: ServedVersion, wanted: Sequence[np.ndarray]) -> float:
        """Of the answers' logits from these; infinite if an answer has no logits, or not those of its candidates."""
        differences = [0.0]
        for index, answer in self.answers.items():
            try:
                logits = self._system.logits(answer, version.tasks)
            except (KeyError, TypeError, ValueError):
                return math.inf
            same_shape = logits.shape == wanted[index].shape
            differences.append(float(np.abs(logits - wanted[index]).max()) if same_shape else math.inf)
        return max(differences)

    def _issue(self, samples: Sequence[Any]) -> None:
        for sample in samples:
            self._waiting.put((sample.id, sample.index))

    def _work(self) -> None:
        with self._system.connect() as send:
            while (waiting := self._waiting.get()) is not None:
                number, index = waiting
                answer = send(self._queries[index])
                with self._lock:
                    self._completed += 1
                    self._failed += answer is None
                if answer is not None:
                    self.answers[index] = answer
                loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(number, 0, 0)])


def read_summary(text: str) -> dict[str, Any]:
    """LoadGen's verdict and figures."""
    p50, p99, rate = (re.search(pattern, text) for pattern in (P50, P99, RATE))
    verdict = re.search(r"^Result is : (\w+)", text, re.M)
    if not (p50 and p99 and rate and verdict):
        sys.exit(f"loadgen: LoadGen's summary has no verdict: {' '.join(text.split())[:300]}")
    reason = ", ".join(CONSTRAINT.findall(text)).lower()
    ms = {"p50_ms": int(p50[1]) / 1e6, "p99_ms": int(p99[1]) / 1e6}
    return {"achieved_rate": float(rate[1]), **ms, "verdict": verdict[1], "reason": reason or "-"}


def is_good(row: dict[str, Any]) -> bool:
    return row["verdict"] == "VALID" and not row["failed"]


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = make_table(("scenario",), NUMBERS, ("verdict", "reason"))
    for row in rows:
        # All queries of `offline` arrive at once: their latencies say nothing.
        hidden = ("p50 ms", "p99 ms") if row["scenario"] == "offline" else ()
        cells = ("-" if name in hidden else form.format_map(row) for name, form in NUMBERS.items())
        table.add_row(row["scenario"], *cells, row["verdict"], row["reason"])
    make_terminal().print(table)


def read_rows(options: argparse.Namespace, version: ServedVersion) -> tuple[pa.Table, list[str]]:
    """Rows to make queries of, and the columns of candidates."""
    names = version.schema.names
    golden = read_golden(find_version(options.served).path).rows
    try:
        rows = golden if options.rows is None else pq.read_table(options.rows)
        missing = [name for name in names if name not in rows.column_names]
        if missing or not rows.num_rows:
            sys.exit(f"loadgen: --rows {options.rows}: no {f'column {missing[0]}' if missing else 'rows'}")
        rows = rows.select(names).cast(version.schema)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        sys.exit(f"loadgen: --rows {options.rows}: {reason}: expected a Parquet file of the model's rows")
    candidates = options.candidates.split(",")
    unknown = [name for name in candidates if name not in names]
    if unknown or len(set(candidates)) == len(names):
        problem = f"the model reads no {', '.join(unknown)}" if unknown else "no column is left for the context"
        sys.exit(f"loadgen: --candidates {options.candidates}: {problem}: expected some of {', '.join(names)}")
    return rows, candidates


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("served", type=Path, metavar="SERVED", help="folder of rowwise export")
    parser.add_argument("--candidates", required=True, metavar="COLUMNS", help="of items; others are the context")
    parser.add_argument("--url", help="of a score endpoint; default: the library in process")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=["server"])
    parser.add_argument("--rate", type=float, default=50.0, help="queries a second of `server`, expected of others")
    parser.add_argument("--p99", type=float, default=60.0, metavar="MS", help="latency target of `server`")
    parser.add_argument("--queries", type=int, default=1000, help="at least; for a p99 LoadGen wants 662 or more")
    parser.add_argument("--seconds", type=float, default=10.0, help="at least")
    parser.add_argument("--sizes", default="100:700", metavar="MIN:MAX", help="candidates of a query")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, metavar="PARQUET", help="rows of queries; default: the golden rows")
    parser.add_argument("--body", choices=("json", "arrow"), default="json", help="arrow repeats the context")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--find-rate", action="store_true", help="of `server`: the largest rate that is VALID")
    parser.add_argument("--budget", type=float, default=180.0, metavar="SECONDS", help="of --find-rate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    options = parser.parse_args(words)
    for name in ("rate", "p99", "queries", "seconds", "connections", "budget"):
        if not 0 < getattr(options, name) < math.inf:
            sys.exit(f"loadgen: --{name} {getattr(options, name)}: expected a number above 0")
    bounds = re.fullmatch(r"([1-9]\d{0,4}):([1-9]\d{0,4})", options.sizes)
    if bounds is None or int(bounds[1]) > int(bounds[2]):
        sys.exit(f"loadgen: --sizes {options.sizes}: expected MIN:MAX, such as 100:700")
    options.sizes = range(int(bounds[1]), int(bounds[2]) + 1)
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = read_options(words)
    torch.set_num_threads(1)
    kind = ARROW if options.body == "arrow" else JSON
    try:
        version = open_version(options.served)
        queries = make_queries(*read_rows(options, version), options.sizes, options.seed, kind)
        wanted = [compute(version, query.rows) for query in queries]
    except RowwiseError as error:
        sys.exit(f"loadgen: {error}")
    system: Any = InProcess(version)
    if options.url:
        system = HttpServer(options.url, options.connections, kind)
        system.ask(queries[0])
    with system.connect() as send:
        for query in queries[:WARM_UP]:
            send(query)
    judged, tried = list[dict[str, Any]](), list[dict[str, Any]]()
    with closing(Judge(system, queries, options)) as judge:
        for scenario in options.scenario:
            if scenario == "server" and options.find_rate:
                tried = judge.find_rate(options.rate, options.budget)
            judged.append(tried[-1] if scenario == "server" and tried else judge.run(scenario, options.rate))
    difference = judge.max_difference(version, wanted)
    for row in judged:
        row["max_difference"] = difference
    show(judged)
    if options.json:
        options.json.write_text(json.dumps({"rows": judged, "tried": tried}, indent=1))
    return int(not all(is_good(row) and difference <= CLOSE for row in judged))


try:
    import mlperf_loadgen as loadgen
except ImportError:
    sys.exit("loadgen: mlperf_loadgen is not installed; pip install 'rowwise[judges]'")

if __name__ == "__main__":
    sys.exit(main())

"""`rowwise fleet`: measures a worker on this machine, and says how many a rate of requests needs."""

import math
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import typer

from rowwise.base.errors import PeerError, SpecError
from rowwise.cli.options import AsJson, MemoryForRows, Redis
from rowwise.cli.serve import make_row_tiers
from rowwise.cli.signals import handle_signals
from rowwise.cli.terminal import make_table, make_terminal, print_json

if TYPE_CHECKING:
    from rowwise.serve.fleet import BatchTimes, MeasuredBatches
    from rowwise.serve.load import Answer, Load
    from rowwise.serve.row_tiers import RowTiers
    from rowwise.serve.start import CoreTimes, StartedServer

FILLED = 64  # clients of a closed loop that always has a request for the worker
PACES = (0.2, 0.4, 0.6, 0.8)  # of the rate of that loop: requests at random times whose batches are measured
LOADS = (0.25, 0.5, 0.75)  # of the rate that the server can answer
ROUNDS = 3  # in each, batches are measured just before the checks: machines are faster now than then
MEASURED_S = 2.0  # of each loop
MIN_LOAD = 0.05  # of a check: at less, requests come alone
DRIFT = 1.15  # from which on the rates of rounds differ
CHECKED, CHECKED_S = 600, 3.0  # of a check, whichever is longer: a quantile of few is that of chance
MAX_S, MIN_CHECKED = 10.0, 200  # but of slow requests not longer than this, unless they are so few
CONNECTIONS = ROWS_AT_ONCE = 256  # rows as of rowwise serve; requests that come at random times do not wait for others
MIN_REQUESTS, MIN_PACED = 64, 16
ALONE, ALONE_LOAD = 200, 0.2  # requests at random times, of which most come alone
END_S = 30.0
LATE_MS, WAITED = 2.0, 0.03  # more than that is other work on the cores


def fleet(  # noqa: PLR0913 - one for each option
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that rowwise export wrote, or a version.")],
    qps: Annotated[float, typer.Option(min=0.001, help="Requests a second, of all replicas.")],
    p99: Annotated[float, typer.Option(min=0.001, metavar="MS", help="99 % of them take at most so long.")] = 25.0,
    rows: Annotated[int, typer.Option(min=1, max=16384, help="Rows of a request.")] = 1,
    workers: Annotated[
        int, typer.Option(min=1, max=1024, help="Workers of a replica: one for each of its cores.")
    ] = 16,
    memory: MemoryForRows = None,
    redis: Redis = None,
    check: Annotated[bool, typer.Option(help="Send requests at random times, and compare with the forecast.")] = True,
    as_json: AsJson = False,
) -> None:
    """Say how many replicas of a server a rate of requests needs, and how long requests will take.

    One worker is started on this machine and measured with the golden rows of the version. A model of its queue
    forecasts latencies at any rate. It is compared with requests at random times, also at the rate that a worker will
    have. The answer says what memory a replica takes, and with --redis how many nodes. Leave a core free for clients.

    Example: rowwise fleet served/ --qps 20000 --p99 25

    Example: rowwise fleet served/ --qps 500 --p99 50 --rows 100 --workers 32 --memory 8GB
    """
    for name, value, expected in (("--qps", qps, "requests a second"), ("--p99", p99, "milliseconds")):
        if not math.isfinite(value):
            raise SpecError(f"{name} {value}", f"a number of {expected}")
    from rowwise.serve.fleet import check_p99, forecast, max_rate
    from rowwise.serve.load import one_sender
    from rowwise.serve.package import find_version
    from rowwise.serve.start import core_times, memory_of

    tiers = make_row_tiers(find_version(folder).path, memory, redis)  # raises before a server is started
    options = [
        item
        for name, value in (("--memory", memory), ("--redis", redis))
        if value is not None
        for item in (name, value)
    ]
    console = make_terminal(stderr=True, quiet=as_json)
    with console.status("starting a worker") as status, _one_worker(folder, options) as server, one_sender() as send:
        load, most = _make_load(folder, server.url, rows), ROWS_AT_ONCE / rows
        shares, tools = LOADS if check else (), _Tools(send, status.update, partial(core_times, server.process))
        check_p99(p99 / 1000, min(one.seconds for one in tools.send(load)))
        rounds = [_round(load, lambda rate: [s * rate for s in shares], tools) for _ in range(ROUNDS)]
        times = _middle(_times_of(rounds, most))
        rate = max_rate(times, p99 / 1000)
        needed = math.ceil(qps / rate)
        replicas = -(-needed // workers)
        planned = qps / (replicas * workers)
        if check and planned > MIN_LOAD * times.max_rate:
            rounds.append(_round(load, lambda _: [planned] * ROUNDS, tools))
        beside = [[sent.beside(t) for sent in r.checks] for r, t in zip(rounds, _times_of(rounds, most), strict=True)]
        # The first rounds have a check of each rate, the last one has several of the planned rate.
        checks = [_median_of(parts) for parts in (*zip(*beside[:ROUNDS], strict=True), *beside[ROUNDS:])]
        host, worker, *_ = memory_of(server.process)
        redis_nodes = _redis_nodes(tiers, qps * rounds[0].cached_rows, status.update) if tiers.redis else None
    found = forecast(planned, times)
    assert tiers.layout is not None
    in_memory = tiers.layout.resident_bytes + tiers.layout.cache_bytes
    report = {
        "fixed_ms": 1000 * times.fixed_s, "request_ms": 1000 * times.request_s, "max_requests": times.most,
        "rate_of_a_worker": rate, "workers": needed, "replicas": replicas, "workers_of_a_replica": workers,
        "filled_rates": [one.filled_rate for one in rounds], "rate_planned": planned,
        "p50_ms": 1000 * found.p50_s, "p99_ms": 1000 * found.p99_s, "checks": checks,
        "memory_bytes": in_memory + host + workers * worker, "worker_bytes": worker,
        "resident_bytes": tiers.layout.resident_bytes, "cache_bytes": tiers.layout.cache_bytes,
        "cached_tables": len(tiers.layout.cached), "tables": len(tiers.layout.tables), "redis": redis_nodes,
    }  # fmt: skip
    if as_json:
        print_json(report)
    else:
        _show(report, qps, p99)


@contextmanager
def _one_worker(folder: Path, options: list[str]) -> Iterator["StartedServer"]:
    """A server with one worker, which ends with the `with`."""
    from rowwise.serve.start import end_server, start_server

    with handle_signals(_end, (signal.SIGTERM,)), tempfile.TemporaryFile("w+") as errors:
        tell = partial(print, file=sys.stderr)  # what the version runs
        server = start_server(
            [str(folder), "--workers", "1", "--rows-at-once", str(ROWS_AT_ONCE), *options], errors=errors, tell=tell
        )
        if server is None:
            errors.seek(0)
            why = errors.read().strip().splitlines()
            raise SpecError(why[-1].removeprefix("rowwise: ") if why else f"{folder}: the server ended")
        try:
            yield server
        finally:
            end_server(server.process, END_S)


def _end(number: int) -> None:
    """End this process like an exception, so that the server ends before it."""
    raise SystemExit(128 + number)


def _make_load(folder: Path, url: str, rows: int) -> "Load":
    """Requests of so many golden rows of the version."""
    import json

    from rowwise.serve.load import Load
    from rowwise.serve.package import find_version, read_golden

    golden, place = read_golden(find_version(folder).path).rows, urlsplit(url)
    bodies: list[bytes] = []
    for begin in range(golden.num_rows):
        chosen = golden.take([(begin + k) % golden.num_rows for k in range(rows)]).to_pydict()
        columns = {name: [_as_json(value) for value in values] for name, values in chosen.items()}
        bodies.append(json.dumps({"rows": columns}, default=str).encode())
    return Load(str(place.hostname), place.port or 80, place.path, tuple(bodies), MIN_REQUESTS, 1)


def _as_json(value: Any) -> Any:
    """A value of a column, with null for what JSON has no number for."""
    if isinstance(value, list):
        return [_as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Tools(NamedTuple):
    """What all measurements of a server need."""

    send_all: "Callable[[Load], list[Answer]]"
    tell: Callable[[str], object]  # shows what is done
    times: "Callable[[], CoreTimes]"  # of the server's main threads so far

    def send(self, load: "Load") -> "list[Answer]":
        """The answers to a load; raises unless each has status 200."""
        answers = self.send_all(load)
        bad = next((one for one in answers if one.code != 200), None)
        if bad is not None:
            raise PeerError(f"the server answered {bad.code}: {bad.answer[:200].decode(errors='replace')}")
        return answers


class _Round(NamedTuple):
    """Measurements of one round, a few seconds long."""

    filled_rate: float  # of requests that the worker answers while it always has one
    batches: "list[MeasuredBatches]"
    alone_s: list[float]
    cached_rows: float  # that a request needs
    checks: "list[_Check]"


def _round(load: "Load", rates_of: Callable[[float], Sequence[float]], tools: _Tools) -> _Round:
    """Measure batches, and then requests at random times, at rates that follow from what the worker can answer now."""
    from rowwise.serve.fleet import MeasuredBatches
    from rowwise.serve.load import seconds_of

    tools.send(load)  # warms up
    first = seconds_of(tools.send(load))
    tools.tell(f"measuring {FILLED} clients")
    count = max(MIN_REQUESTS, int(MIN_REQUESTS * MEASURED_S / first))
    filled = _batches(load._replace(connections=FILLED, requests=count), tools)
    found, alone_s = [MeasuredBatches(filled.requests, filled.seconds)], list[float]()
    alone = _at_random(load, ALONE_LOAD * MIN_REQUESTS / first, ALONE)
    rates = [pace * filled.rate for pace in PACES]
    paced = [_at_random(load, rate, max(MIN_PACED, int(rate * MEASURED_S))) for rate in rates]
    for sent in (alone, *paced):
        tools.tell(f"measuring batches at {sent.rate:,.0f} requests a second")
        one = _batches(sent, tools)
        alone_s = alone_s or _alone_s(one.answers)
        # What a batch waits for, such as rows of Redis, is in proportion.
        seconds = one.run_s * max(1.0, filled.seconds / filled.run_s)
        found.append(MeasuredBatches(one.requests, seconds, woken=math.exp(-one.rate * seconds)))
    checks = [_check(load, rate, tools) for rate in rates_of(filled.rate)]
    return _Round(filled.rate, found, alone_s, filled.cached_rows, checks)


class _AverageBatch(NamedTuple):
    """Batches of a load, on average."""

    rate: float  # of requests
    requests: float
    seconds: float  # from one to the next
    run_s: float  # that main threads of the server ran for one
    cached_rows: float  # that a request needs
    answers: "list[Answer]"


def _batches(load: "Load", tools: _Tools) -> _AverageBatch:
    from rowwise.serve.load import seconds_of

    before, ran_s = _counts(load), tools.times().run_s
    answers = tools.send(load)
    run_s, seconds = tools.times().run_s - ran_s, seconds_of(answers)
    batches, cached = (now - then for now, then in zip(_counts(load), before, strict=True))
    if not run_s:
        raise PeerError("/proc/PID/schedstat does not say how long a server runs", "a Linux that counts it")
    requests = load.requests / batches
    each = (seconds / batches, run_s / batches, cached / load.requests)
    return _AverageBatch(load.requests / seconds, requests, *each, answers)


def _times_of(rounds: Sequence[_Round], most: float) -> "list[BatchTimes]":
    from rowwise.serve.fleet import BatchTimes

    return BatchTimes.fit_rounds([(one.batches, one.alone_s) for one in rounds], most)


def _middle(times: "Sequence[BatchTimes]") -> "BatchTimes":
    return sorted(times, key=lambda one: one.max_rate)[len(times) // 2]


def _median_of(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The medians of checks at a load: other work on the cores may have a round of its own."""
    return {name: median(one[name] for one in parts) for name in parts[0]}


def _alone_s(answers: list["Answer"]) -> list[float]:
    """The seconds of requests that came while no other was computed."""
    found: list[float] = []
    free_s = 0.0
    for one in sorted(answers, key=lambda one: one.arrived_s):
        if one.arrived_s > free_s:
            found.append(one.seconds)
        free_s = max(free_s, one.arrived_s + one.seconds)
    return found


def _counts(load: "Load") -> tuple[float, float]:
    """How many batches the server has computed, and rows of cached tables in them."""
    from urllib.request import urlopen

    with urlopen(f"http://{load.host}:{load.port}/metrics", timeout=END_S) as answer:
        text = answer.read().decode()

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^{name} (\S+)$", text, re.M))

    return total("rowwise_batch_rows_count"), total(r"rowwise_cached_rows_total\S+")


def _redis_nodes(tiers: "RowTiers", rows_s: float, tell: Any) -> dict[str, float]:
    """Nodes for copies of all rows of cached tables, and for so many of them a second."""
    from rowwise.serve.redis_rows import RedisNodes, RedisRows

    tell("measuring Redis")
    assert tiers.layout is not None
    total_bytes, min_rows_s, memory_bytes = 0, math.inf, math.inf
    for one in tiers.layout.caches:
        nodes = RedisNodes(tiers.redis, "rowwise-fleet")
        costs = RedisRows(nodes, nodes, one.shape.row_bytes).measure()
        total_bytes += costs.row_bytes * sum(table.rows for table in one.tables)
        min_rows_s, memory_bytes = min(min_rows_s, costs.rows_s), min(memory_bytes, costs.memory_bytes)
    needed = max(1, math.ceil(total_bytes / memory_bytes), math.ceil(rows_s / min_rows_s)) if total_bytes else 0
    return {
        "nodes": needed, "memory_bytes": total_bytes, "node_memory_bytes": memory_bytes,
        "node_rows_s": min_rows_s, "rows_s": rows_s,
    }  # fmt: skip


class _Check(NamedTuple):
    """Requests at random times."""

    rate: float
    answers: "list[Answer]"  # in the order of their requests
    waited_share: float  # of the time, in which other work had the cores of the server

    def beside(self, times: "BatchTimes") -> dict[str, float]:
        """Their latencies, and the forecast for the times at which they came."""
        import numpy as np

        from rowwise.serve.fleet import latencies

        forecast_s = latencies([one.arrived_s for one in self.answers], times)
        found = {"rate": self.rate, "waited_share": self.waited_share}
        for name, seconds in (
            ("", [one.seconds for one in self.answers]),
            ("forecast_", forecast_s),
            ("late_", [one.late_s for one in self.answers]),
        ):
            p50, p99 = 1000 * np.quantile(seconds[len(seconds) // 10 :], (0.5, 0.99))
            found |= {f"{name}p50_ms": float(p50), f"{name}p99_ms": float(p99)}
        return found | {"p99_over_forecast": found["p99_ms"] / found["forecast_p99_ms"]}


def _check(load: "Load", rate: float, tools: _Tools) -> _Check:
    from rowwise.serve.load import seconds_of

    tools.tell(f"measuring {rate:,.0f} requests a second")
    sent = _at_random(load, rate, max(CHECKED, int(rate * CHECKED_S)))
    before_s = tools.times().waited_s
    answers = sorted(tools.send(sent), key=lambda one: one.arrived_s)
    return _Check(rate, answers, (tools.times().waited_s - before_s) / seconds_of(answers))


def _at_random(load: "Load", rate: float, requests: int) -> "Load":
    """So many requests at random times, or those of some seconds."""
    fewer = min(requests, max(MIN_CHECKED, int(rate * MAX_S)))
    return load._replace(connections=CONNECTIONS, requests=fewer, rate=rate)


def _show(report: dict[str, Any], qps: float, p99: float) -> None:
    from rowwise.base.quantity import format_bytes

    terminal = make_terminal()
    if report["checks"]:
        table = make_table((), ("requests a second", "p50", "forecast", "p99", "forecast", "p99 / forecast"))
        for one in report["checks"]:
            names = ("p50_ms", "forecast_p50_ms", "p99_ms", "forecast_p99_ms")
            ratio = f"{one['p99_over_forecast']:.2f}"
            table.add_row(f"{one['rate']:,.0f}", *(f"{one[name]:.1f} ms" for name in names), ratio)
        terminal.print("one worker on this machine:")
        terminal.print(table)
        late_ms, share = (max(one[name] for one in report["checks"]) for name in ("late_p99_ms", "waited_share"))
        if late_ms > LATE_MS or share > WAITED:
            terminal.print(
                f"other work has these cores: the worker waited {share:.0%} of the time for its own, and 1 % of the "
                f"requests were sent {late_ms:.0f} ms late. The forecast knows nothing of it: measure where cores idle"
            )
    slow, *_, fast = sorted(report["filled_rates"])
    if fast > DRIFT * slow:
        terminal.print(
            f"within this minute the worker could answer {slow:,.0f} to {fast:,.0f} requests a second: other work "
            "slows its core, and the forecast knows nothing of it"
        )
    terminal.print(
        f"a batch takes {report['fixed_ms']:.1f} ms and {report['request_ms']:.2f} ms a request: "
        f"a worker answers {report['rate_of_a_worker']:,.0f} requests a second with a p99 of {p99:g} ms"
    )
    many = "replicas" if report["replicas"] > 1 else "replica"
    terminal.print(
        f"{qps:g} requests a second: {report['replicas']} {many} of {report['workers_of_a_replica']} workers, "
        f"p50 {report['p50_ms']:.1f} ms, p99 {report['p99_ms']:.1f} ms"
    )
    tables = "all rows"
    if report["cached_tables"]:
        tables = f"{report['tables'] - report['cached_tables']} tables with all rows, {report['cached_tables']} in "
        tables += f"caches of {format_bytes(report['cache_bytes'])}"
    terminal.print(
        f"memory of a replica: {format_bytes(report['memory_bytes'])}: {format_bytes(report['resident_bytes'])} for "
        f"{tables}, and up to {format_bytes(report['worker_bytes'])} a worker"
    )
    redis = report["redis"]
    if redis is not None:
        nodes = "nodes" if redis["nodes"] != 1 else "node"
        terminal.print(
            f"Redis: {redis['nodes']} {nodes} of {format_bytes(redis['node_memory_bytes'])}: all rows take "
            f"{format_bytes(redis['memory_bytes'])} there; a core of a node answers {redis['node_rows_s']:,.0f} rows a "
            f"second, and while all caches are empty {redis['rows_s']:,.0f} are asked for"
        )

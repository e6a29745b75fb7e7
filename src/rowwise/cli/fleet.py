"""`rowwise fleet`: measures a worker on this machine, and sizes a fleet of servers for a request rate."""

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

SATURATING = 64  # clients of a closed loop that saturates the worker
PACE_SHARES = (0.2, 0.4, 0.6, 0.8)  # open loops whose batches are measured, as shares of the saturated rate
CHECK_SHARES = (0.25, 0.5, 0.75)  # rates of the checks, as shares of the saturated rate
ROUNDS = 3  # batches are measured just before the checks of a round, as the speed of a machine drifts
MEASURED_S = 2.0  # duration of each loop
MIN_LOAD = 0.05  # of a check; below, requests never meet
DRIFT = 1.15  # ratio of rates from which on a drift is reported
CHECK_requests, CHECK_S = 600, 3.0  # of a check, whichever is more: quantiles need samples
MAX_S, MIN_CHECK_requests = 10.0, 200  # limits of a check for slow requests
CONNECTIONS = ROWS_AT_ONCE = 256  # rows as in rowwise serve; enough connections for an open loop
MIN_REQUESTS, MIN_PACED = 64, 16
SINGLE, SINGLE_LOAD = 200, 0.2  # requests of an open loop in which most are alone
END_S = 30.0
LATE_MS, MAX_WAITED = 2.0, 0.03  # limits above which other work on the cores is reported


def fleet(  # noqa: PLR0913 - one for each option
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of rowwise export, or one version.")],
    qps: Annotated[float, typer.Option(min=0.001, help="Total request rate, in requests per second.")],
    p99: Annotated[float, typer.Option(min=0.001, metavar="MS", help="p99 latency target in ms.")] = 25.0,
    rows: Annotated[int, typer.Option(min=1, max=16384, help="Rows per request.")] = 1,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Workers per replica, one per core.")] = 16,
    memory: MemoryForRows = None,
    redis: Redis = None,
    check: Annotated[bool, typer.Option(help="Check the forecast with requests at random times.")] = True,
    as_json: AsJson = False,
) -> None:
    """Size a fleet: replicas needed for a request rate within a latency target, and the expected latencies.

    Starts one worker on this machine and measures it with the golden rows of the version. A queueing model forecasts
    latencies at any rate, and is checked with requests at random times, also at the planned rate per worker. The report
    includes the memory of a replica, and with --redis the number of nodes. Leave a core free for clients.

    Example: rowwise fleet served/ --qps 20000 --p99 25

    Example: rowwise fleet served/ --qps 500 --p99 50 --rows 100 --workers 32 --memory 8GB
    """
    for name, value, expected in (("--qps", qps, "requests a second"), ("--p99", p99, "milliseconds")):
        if not math.isfinite(value):
            raise SpecError(f"{name} {value}", f"a number of {expected}")
    from rowwise.serve.fleet import check_p99, forecast, max_rate
    from rowwise.serve.load import open_sender
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
    with console.status("starting a worker") as status, _start_worker(folder, options) as server, open_sender() as send:
        load, max_requests = _make_load(folder, server.url, rows), ROWS_AT_ONCE / rows
        shares, probe = CHECK_SHARES if check else (), _Probe(send, status.update, partial(core_times, server.process))
        check_p99(p99 / 1000, min(answer.seconds for answer in probe.send(load)))
        rounds = [_measure_round(load, lambda rate: [s * rate for s in shares], probe) for _ in range(ROUNDS)]
        times = _median_model(_fit_rounds(rounds, max_requests))
        rate = max_rate(times, p99 / 1000)
        needed_workers = math.ceil(qps / rate)
        replicas = -(-needed_workers // workers)
        planned_rate = qps / (replicas * workers)
        if check and planned_rate > MIN_LOAD * times.max_rate:
            rounds.append(_measure_round(load, lambda _: [planned_rate] * ROUNDS, probe))
        comparisons = [
            [sent.compare(t) for sent in r.checks]
            for r, t in zip(rounds, _fit_rounds(rounds, max_requests), strict=True)
        ]
        # The first rounds have a check of each rate, the last one has several of the planned rate.
        checks = [_median_of(parts) for parts in (*zip(*comparisons[:ROUNDS], strict=True), *comparisons[ROUNDS:])]
        host, worker, *_ = memory_of(server.process)
        redis_nodes = _size_redis(tiers, qps * rounds[0].cached_rows, status.update) if tiers.redis else None
    prediction = forecast(planned_rate, times)
    assert tiers.layout is not None
    in_memory = tiers.layout.resident_bytes + tiers.layout.cache_bytes
    report = {
        "fixed_ms": 1000 * times.fixed_s, "request_ms": 1000 * times.request_s, "max_requests": times.max_requests,
        "rate_of_a_worker": rate, "workers": needed_workers, "replicas": replicas, "workers_of_a_replica": workers,
        "filled_rates": [measured.filled_rate for measured in rounds], "rate_planned": planned_rate,
        "p50_ms": 1000 * prediction.p50_s, "p99_ms": 1000 * prediction.p99_s, "checks": checks,
        "memory_bytes": in_memory + host + workers * worker, "worker_bytes": worker,
        "resident_bytes": tiers.layout.resident_bytes, "cache_bytes": tiers.layout.cache_bytes,
        "cached_tables": len(tiers.layout.cached), "tables": len(tiers.layout.tables), "redis": redis_nodes,
    }  # fmt: skip
    if as_json:
        print_json(report)
    else:
        _show(report, qps, p99)


@contextmanager
def _start_worker(folder: Path, options: list[str]) -> Iterator["StartedServer"]:
    """A server with one worker, until the block ends."""
    from rowwise.serve.start import end_server, start_server

    with handle_signals(_end, (signal.SIGTERM,)), tempfile.TemporaryFile("w+") as errors:
        log = partial(print, file=sys.stderr)  # such as the code that the version runs
        server = start_server(
            [str(folder), "--workers", "1", "--rows-at-once", str(ROWS_AT_ONCE), *options], errors=errors, log=log
        )
        if server is None:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            raise SpecError(lines[-1].removeprefix("rowwise: ") if lines else f"{folder}: the server ended")
        try:
            yield server
        finally:
            end_server(server.process, END_S)


def _end(number: int) -> None:
    """Exit by an exception, so that the server is ended first."""
    raise SystemExit(128 + number)


def _make_load(folder: Path, url: str, rows: int) -> "Load":
    """Requests with `rows` golden rows each."""
    import json

    from rowwise.serve.load import Load
    from rowwise.serve.package import find_version, read_golden

    golden, address = read_golden(find_version(folder).path).rows, urlsplit(url)
    bodies: list[bytes] = []
    for begin in range(golden.num_rows):
        chosen = golden.take([(begin + k) % golden.num_rows for k in range(rows)]).to_pydict()
        columns = {name: [_as_json(value) for value in values] for name, values in chosen.items()}
        bodies.append(json.dumps({"rows": columns}, default=str).encode())
    return Load(str(address.hostname), address.port or 80, address.path, tuple(bodies), MIN_REQUESTS, 1)


def _as_json(value: Any) -> Any:
    """A value for JSON, with null for NaN and infinities."""
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Probe(NamedTuple):
    """Client, progress report and CPU times of the measured server."""

    send_all: "Callable[[Load], list[Answer]]"
    report: Callable[[str], object]  # shows the current measurement
    times: "Callable[[], CoreTimes]"  # of the server's main threads so far

    def send(self, load: "Load") -> "list[Answer]":
        """Send a load and return its answers; raises unless all have status 200."""
        answers = self.send_all(load)
        failed = next((answer for answer in answers if answer.code != 200), None)
        if failed is not None:
            raise PeerError(f"the server answered {failed.code}: {failed.answer[:200].decode(errors='replace')}")
        return answers


class _Round(NamedTuple):
    """Measurements of one round, a few seconds long."""

    filled_rate: float  # throughput of the saturated worker
    batches: "list[MeasuredBatches]"
    single_s: list[float]
    cached_rows: float  # per request
    checks: "list[_Check]"


def _measure_round(load: "Load", rates_of: Callable[[float], Sequence[float]], probe: _Probe) -> _Round:
    """Measure batches, then check open loops at rates derived from the current throughput of the worker."""
    from rowwise.serve.fleet import MeasuredBatches
    from rowwise.serve.load import seconds_of

    probe.send(load)  # warms up
    first = seconds_of(probe.send(load))
    probe.report(f"measuring {SATURATING} clients")
    count = max(MIN_REQUESTS, int(MIN_REQUESTS * MEASURED_S / first))
    saturated = _measure_batches(load._replace(connections=SATURATING, requests=count), probe)
    batches, single_s = [MeasuredBatches(saturated.requests, saturated.seconds)], list[float]()
    single = _paced(load, SINGLE_LOAD * MIN_REQUESTS / first, SINGLE)
    rates = [pace * saturated.rate for pace in PACE_SHARES]
    paced = [_paced(load, rate, max(MIN_PACED, int(rate * MEASURED_S))) for rate in rates]
    for load_sent in (single, *paced):
        probe.report(f"measuring batches at {load_sent.rate:,.0f} requests a second")
        average = _measure_batches(load_sent, probe)
        single_s = single_s or _single_latencies(average.answers)
        # Waiting within a batch, such as for Redis, is taken to be proportional to its CPU time.
        seconds = average.run_s * max(1.0, saturated.seconds / saturated.run_s)
        batches.append(MeasuredBatches(average.requests, seconds, woken_share=math.exp(-average.rate * seconds)))
    checks = [_check(load, rate, probe) for rate in rates_of(saturated.rate)]
    return _Round(saturated.rate, batches, single_s, saturated.cached_rows, checks)


class _AverageBatch(NamedTuple):
    """Averages over the batches of a load."""

    rate: float  # requests per second
    requests: float
    seconds: float  # between batches
    run_s: float  # CPU time of main threads of the server
    cached_rows: float  # per request
    answers: "list[Answer]"


def _measure_batches(load: "Load", probe: _Probe) -> _AverageBatch:
    from rowwise.serve.load import seconds_of

    before, ran_s = _read_counters(load), probe.times().run_s
    answers = probe.send(load)
    run_s, seconds = probe.times().run_s - ran_s, seconds_of(answers)
    batches, cached = (now - then for now, then in zip(_read_counters(load), before, strict=True))
    if not run_s:
        raise PeerError("/proc/PID/schedstat has no run times", "a Linux kernel with schedstats")
    requests = load.requests / batches
    each = (seconds / batches, run_s / batches, cached / load.requests)
    return _AverageBatch(load.requests / seconds, requests, *each, answers)


def _fit_rounds(rounds: Sequence[_Round], max_requests: float) -> "list[BatchTimes]":
    from rowwise.serve.fleet import BatchTimes

    return BatchTimes.fit_rounds([(measured.batches, measured.single_s) for measured in rounds], max_requests)


def _median_model(times: "Sequence[BatchTimes]") -> "BatchTimes":
    return sorted(times, key=lambda model: model.max_rate)[len(times) // 2]


def _median_of(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over checks of one rate, which are robust to other work during a round."""
    return {name: median(part[name] for part in parts) for name in parts[0]}


def _single_latencies(answers: list["Answer"]) -> list[float]:
    """Latencies of requests that arrived at an idle worker."""
    latencies_s: list[float] = []
    free_s = 0.0
    for answer in sorted(answers, key=lambda answer: answer.arrived_s):
        if answer.arrived_s > free_s:
            latencies_s.append(answer.seconds)
        free_s = max(free_s, answer.arrived_s + answer.seconds)
    return latencies_s


def _read_counters(load: "Load") -> tuple[float, float]:
    """The counters of batches and of their cached rows."""
    from urllib.request import urlopen

    with urlopen(f"http://{load.host}:{load.port}/metrics", timeout=END_S) as answer:
        text = answer.read().decode()

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^{name} (\S+)$", text, re.M))

    return total("rowwise_batch_rows_count"), total(r"rowwise_cached_rows_total\S+")


def _size_redis(tiers: "RowTiers", rows_s: float, report: Any) -> dict[str, float]:
    """Redis nodes for all rows of cached tables at a rate of `rows_s`."""
    from rowwise.serve.redis_rows import RedisNodes, RedisRows

    report("measuring Redis")
    assert tiers.layout is not None
    total_bytes, min_rows_s, memory_bytes = 0, math.inf, math.inf
    for group in tiers.layout.caches:
        nodes = RedisNodes(tiers.redis, "rowwise-fleet")
        costs = RedisRows(nodes, nodes, group.shape.row_bytes).measure()
        total_bytes += costs.row_bytes * sum(table.rows for table in group.tables)
        min_rows_s, memory_bytes = min(min_rows_s, costs.rows_s), min(memory_bytes, costs.memory_bytes)
    needed = max(1, math.ceil(total_bytes / memory_bytes), math.ceil(rows_s / min_rows_s)) if total_bytes else 0
    return {
        "nodes": needed, "memory_bytes": total_bytes, "node_memory_bytes": memory_bytes,
        "node_rows_s": min_rows_s, "rows_s": rows_s,
    }  # fmt: skip


class _Check(NamedTuple):
    """Measured answers of an open loop."""

    rate: float
    answers: "list[Answer]"  # by arrival
    waited_share: float  # share of the time in which the server waited for its cores

    def compare(self, times: "BatchTimes") -> dict[str, float]:
        """Quantiles of measured latencies, and of the forecast for the same arrivals."""
        import numpy as np

        from rowwise.serve.fleet import latencies

        forecast_s = latencies([answer.arrived_s for answer in self.answers], times)
        result = {"rate": self.rate, "waited_share": self.waited_share}
        for name, seconds in (
            ("", [answer.seconds for answer in self.answers]),
            ("forecast_", forecast_s),
            ("late_", [answer.late_s for answer in self.answers]),
        ):
            p50, p99 = 1000 * np.quantile(seconds[len(seconds) // 10 :], (0.5, 0.99))
            result |= {f"{name}p50_ms": float(p50), f"{name}p99_ms": float(p99)}
        return result | {"p99_over_forecast": result["p99_ms"] / result["forecast_p99_ms"]}


def _check(load: "Load", rate: float, probe: _Probe) -> _Check:
    from rowwise.serve.load import seconds_of

    probe.report(f"measuring {rate:,.0f} requests a second")
    sent = _paced(load, rate, max(CHECK_requests, int(rate * CHECK_S)))
    before_s = probe.times().waited_s
    answers = sorted(probe.send(sent), key=lambda answer: answer.arrived_s)
    return _Check(rate, answers, (probe.times().waited_s - before_s) / seconds_of(answers))


def _paced(load: "Load", rate: float, requests: int) -> "Load":
    """An open loop of up to `requests`, limited to about MAX_S."""
    limited = min(requests, max(MIN_CHECK_requests, int(rate * MAX_S)))
    return load._replace(connections=CONNECTIONS, requests=limited, rate=rate)


def _show(report: dict[str, Any], qps: float, p99: float) -> None:
    from rowwise.base.quantity import format_bytes

    terminal = make_terminal()
    if report["checks"]:
        table = make_table((), ("requests a second", "p50", "forecast", "p99", "forecast", "p99 / forecast"))
        for check in report["checks"]:
            names = ("p50_ms", "forecast_p50_ms", "p99_ms", "forecast_p99_ms")
            ratio = f"{check['p99_over_forecast']:.2f}"
            table.add_row(f"{check['rate']:,.0f}", *(f"{check[name]:.1f} ms" for name in names), ratio)
        terminal.print("one worker on this machine:")
        terminal.print(table)
        late_ms, share = (max(check[name] for check in report["checks"]) for name in ("late_p99_ms", "waited_share"))
        if late_ms > LATE_MS or share > MAX_WAITED:
            terminal.print(
                f"other work uses these cores: the worker waited {share:.0%} of the time for its core, and 1 % of the "
                f"requests were sent {late_ms:.0f} ms late. The forecast ignores this: measure on idle cores"
            )
    slow, *_, fast = sorted(report["filled_rates"])
    if fast > DRIFT * slow:
        terminal.print(
            f"within this minute the throughput of the worker was {slow:,.0f} to {fast:,.0f} requests a second: other "
            "work slows its core, which the forecast ignores"
        )
    terminal.print(
        f"a batch takes {report['fixed_ms']:.1f} ms and {report['request_ms']:.2f} ms a request: "
        f"a worker answers {report['rate_of_a_worker']:,.0f} requests a second with a p99 of {p99:g} ms"
    )
    noun = "replicas" if report["replicas"] > 1 else "replica"
    terminal.print(
        f"{qps:g} requests a second: {report['replicas']} {noun} of {report['workers_of_a_replica']} workers, "
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
            f"second, and with empty caches {redis['rows_s']:,.0f} are requested"
        )

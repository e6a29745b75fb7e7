"""`rowwise fleet`: measures a worker on this machine, and says how many a rate of requests needs."""

import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from rowwise.cli.serve import make_row_tiers
from rowwise.cli.terminal import make_terminal, print_json
from rowwise.errors import PeerError, SpecError

if TYPE_CHECKING:
    from rowwise.serve.fleet import BatchTimes
    from rowwise.serve.load import Load

CLIENTS = (1, 2, 4, 8, 16, 32, 64)  # of the closed loops
LOADS = (0.25, 0.5, 0.75)  # of the rate that the server can answer
MEASURED_S = 2.0  # of each closed loop
CHECKED_S = 9.0  # of requests at random times: a quantile of few is that of chance
LEAST_REQUESTS = 64
END_S = 30.0


def fleet(  # noqa: PLR0913 - one for each option
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that rowwise export wrote, or a version.")],
    qps: Annotated[float, typer.Option(min=0.001, help="Requests a second, of all replicas.")],
    p99: Annotated[float, typer.Option(min=0.001, metavar="MS", help="99 % of them take at most so long.")] = 25.0,
    rows: Annotated[int, typer.Option(min=1, max=16384, help="Rows of a request.")] = 1,
    workers: Annotated[
        int, typer.Option(min=1, max=1024, help="Workers of a replica: one for each of its cores.")
    ] = 16,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a replica for rows, as of rowwise serve.")
    ] = None,
    redis: Annotated[str | None, typer.Option(metavar="URL", help="Redis, as of rowwise serve.")] = None,
    check: Annotated[bool, typer.Option(help="Send requests at random times, and compare with the forecast.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say how many replicas of a server a rate of requests needs, and how long requests will take.

    One worker is started on this machine and measured with the golden rows of the version. A model of its queue
    forecasts latencies at any rate, and is compared with requests at random times. Leave a core free for the clients.

    Example: rowwise fleet served/ --qps 20000 --p99 25

    Example: rowwise fleet served/ --qps 500 --p99 50 --rows 100 --workers 32 --memory 8GB
    """
    for name, value, want in (("--qps", qps, "requests a second"), ("--p99", p99, "milliseconds")):
        if not math.isfinite(value):
            raise SpecError(f"{name} {value}: want a number of {want}")
    from rowwise.serve.fleet import BatchTimes, forecast, most_rate, workers_for
    from rowwise.serve.package import find_version

    make_row_tiers(find_version(folder).path, memory, redis)  # raises before a server is started
    options = [
        item
        for name, value in (("--memory", memory), ("--redis", redis))
        if value is not None
        for item in (name, value)
    ]
    console = make_terminal(stderr=True, quiet=as_json)
    with console.status("starting a worker") as status, _one_worker(folder, options) as url:
        load = _make_load(folder, url, rows)
        times = BatchTimes.of({clients: _batch_s(load, clients, status.update) for clients in CLIENTS})
        rate = most_rate(times, p99 / 1000)
        checks = [_check(load, share * times.most_rate, times, status.update) for share in LOADS] if check else []
    needed = workers_for(qps, times, p99 / 1000)
    replicas = -(-needed // workers)
    found = forecast(qps / (replicas * workers), times)
    report = {
        "batch_ms": {size: 1000 * batch_s for size, batch_s in zip(*times, strict=True)}, "rate_of_a_worker": rate,
        "workers": needed, "replicas": replicas, "workers_of_a_replica": workers,
        "p50_ms": 1000 * found.p50_s, "p99_ms": 1000 * found.p99_s, "checks": checks,
    }  # fmt: skip
    if as_json:
        print_json(report)
    else:
        _show(report, qps, p99)


@contextmanager
def _one_worker(folder: Path, options: list[str]) -> Iterator[str]:
    """The address of a server with one worker, which ends with the `with`."""
    from rowwise.serve.start import end_server, start_server

    with tempfile.TemporaryFile("w+") as errors:
        tell = partial(print, file=sys.stderr)  # what the version runs
        server = start_server([str(folder), "--workers", "1", *options], errors=errors, tell=tell)
        if server is None:
            errors.seek(0)
            why = errors.read().strip().splitlines()
            raise SpecError(why[-1].removeprefix("rowwise: ") if why else f"{folder}: the server ended")
        try:
            yield server.url
        finally:
            end_server(server.process, END_S)


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
    return Load(str(place.hostname), place.port or 80, place.path, tuple(bodies), LEAST_REQUESTS, 1)


def _as_json(value: Any) -> Any:
    """A value of a column, with null for what JSON has no number for."""
    if isinstance(value, list):
        return [_as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _batch_s(load: "Load", clients: int, tell: Any) -> float:
    """The seconds of a batch of as many requests as there are clients."""
    tell(f"measuring {clients} clients")
    first = _seconds(load._replace(connections=clients))
    count = max(LEAST_REQUESTS, int(LEAST_REQUESTS * MEASURED_S / first))
    return clients * _seconds(load._replace(connections=clients, requests=count)) / count


def _seconds(load: "Load") -> float:
    from rowwise.serve.load import seconds_of, send

    answers = send(load)
    bad = next((one for one in answers if one.code != 200), None)
    if bad is not None:
        raise PeerError(f"the server answered {bad.code}: {bad.answer[:200].decode(errors='replace')}")
    return seconds_of(answers)


def _check(load: "Load", rate: float, times: "BatchTimes", tell: Any) -> dict[str, float]:
    """Latencies of requests at random times, and their forecast."""
    from rowwise.serve.fleet import forecast
    from rowwise.serve.load import quantiles_ms, send

    tell(f"measuring {rate:,.0f} requests a second")
    count = max(LEAST_REQUESTS, int(rate * CHECKED_S))
    answers = send(load._replace(connections=64, requests=count, rate=rate))
    measured = quantiles_ms(answers[count // 10 :])  # without the first ones, which wait for their connections
    found = forecast(rate, times)
    return {
        "rate": rate, "p50_ms": measured["p50_ms"], "p99_ms": measured["p99_ms"],
        "forecast_p50_ms": 1000 * found.p50_s, "forecast_p99_ms": 1000 * found.p99_s,
    }  # fmt: skip


def _show(report: dict[str, Any], qps: float, p99: float) -> None:
    from rich.table import Table

    terminal = make_terminal()
    if report["checks"]:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in ("requests a second", "p50", "forecast", "p99", "forecast"):
            table.add_column(name, justify="right")
        for one in report["checks"]:
            names = ("p50_ms", "forecast_p50_ms", "p99_ms", "forecast_p99_ms")
            table.add_row(f"{one['rate']:,.0f}", *(f"{one[name]:.1f} ms" for name in names))
        terminal.print("one worker on this machine:")
        terminal.print(table)
    batch_ms, most = report["batch_ms"], CLIENTS[-1]
    terminal.print(
        f"a batch of 1 takes {batch_ms[1]:.1f} ms, one of {most} {batch_ms[most]:.0f} ms: "
        f"a worker answers {report['rate_of_a_worker']:,.0f} requests a second with a p99 of {p99:g} ms"
    )
    many = "replicas" if report["replicas"] > 1 else "replica"
    terminal.print(
        f"{qps:g} requests a second: {report['replicas']} {many} of {report['workers_of_a_replica']} workers, "
        f"p50 {report['p50_ms']:.1f} ms, p99 {report['p99_ms']:.1f} ms"
    )

"""`rowwise watch`: follows runs from their files, on a terminal, as lines of JSON, or for Prometheus and a browser."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from rowwise.base.errors import RowwiseError, SpecError
from rowwise.base.storage.folder import parse_folder
from rowwise.cli.terminal import escape_json, make_table, make_terminal, refuse_nan, say

if TYPE_CHECKING:
    from rich.table import Table

    from rowwise.base.storage.folder import Folder
    from rowwise.report.watched import RunStatus

MIN_S, HOST = 0.1, "127.0.0.1"
PACKAGES = ("starlette", "uvicorn", "prometheus_client")
DIED = ("failed", "killed")


def watch(
    path: Annotated[
        str, typer.Argument(metavar="RUN|RUNS", help="A run, a folder of runs, or the URL of a mirror or of several.")
    ],
    every: Annotated[float, typer.Option(min=MIN_S, max=86400.0, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Answer /metrics and a page at this port; 0: a free one.")
    ] = None,
    host: Annotated[str | None, typer.Option(help=f"The address to listen at (default: {HOST}).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each change of a run.")] = False,
) -> None:
    """Follow runs of this or another machine, until they are over.

    Reads the files of runs and nothing else, so it can begin and end at any time. With --port it goes on until Ctrl-C,
    also where there is no run yet.
    Exits with 1 if a run has failed or was killed.

    Example: rowwise watch runs/dlrm-synthetic/1

    Example: rowwise watch s3://bucket/clicks-7 --every 30

    Example: rowwise watch runs --port 9108

    Example: rowwise watch runs --once --json
    """
    refuse_nan("--every", every, "a number of seconds")
    from rowwise.report.watched import LineAges, find_runs, read_status

    place, ages = parse_folder(path), LineAges()

    runs: list[RunStatus] = []

    def look() -> "list[RunStatus]":
        """Runs as they are; with --port those of the last look where there is none, or the place cannot be read."""
        nonlocal runs
        try:
            runs = [read_status(name, one, ages) for name, one in find_runs(place).items()]
        except (RowwiseError, OSError):
            if port is None:
                raise
        return runs

    look()
    with _answering(place, look, host or HOST, port), _shown(as_json=as_json) as show:
        show(runs)
        while not once and (port is not None or not all(one.is_over for one in runs)):
            time.sleep(every)
            show(look())
    if any(one.state in DIED for one in runs):
        raise typer.Exit(1)


@contextmanager
def _shown(*, as_json: bool) -> Iterator[Callable[[Sequence["RunStatus"]], None]]:
    """Shows runs: in one place of a terminal, elsewhere a line for each change."""
    console = make_terminal()
    if console.is_terminal and not as_json:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            yield lambda runs: live.update(_table(runs), refresh=True)
        return
    import msgspec

    from rowwise.report.watch_pages import COLUMNS, cells_of

    former: dict[str, tuple[object, ...]] = {}

    def show(runs: Sequence["RunStatus"]) -> None:
        for one in runs:
            state = (one.state, one.step, one.metrics, one.warnings)
            if former.get(one.run) == state:
                continue
            former[one.run] = state
            if as_json:
                print(escape_json(msgspec.json.encode(one).decode()), flush=True)
            else:
                run, word, *cells = cells_of(one)
                named = (f"{name} {cell}" for name, cell in zip(COLUMNS[2:], cells, strict=True) if cell)
                say(console, f"{run} {word}: {', '.join(named)}")

    yield show


def _table(runs: Sequence["RunStatus"]) -> "Table":
    from rich.markup import escape

    from rowwise.report.watch_pages import COLUMNS, cells_of

    table = make_table(COLUMNS)
    for one in runs:
        table.add_row(*map(escape, cells_of(one)))
    for one in runs:
        for line in (one.message, *one.warnings[-1:]):
            if line:
                table.caption = f"{table.caption or ''}{escape(one.run)}: {escape(line)}\n"
    return table


@contextmanager
def _answering(
    place: "Folder", look: Callable[[], "Sequence[RunStatus]"], host: str, port: int | None
) -> Iterator[None]:
    """Answers requests in a thread."""
    if port is None:
        yield
        return
    if any(find_spec(name) is None for name in PACKAGES):
        raise SpecError("--port needs packages that are not there: pip install 'rowwise[serve]'")
    import uvicorn

    from rowwise.report.watch_pages import make_pages
    from rowwise.report.watched import find_runs

    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise SpecError(
            f"--host {host} --port {port}: {error.strerror or error}", "another --host or --port, or --port 0"
        ) from None
    config = uvicorn.Config(make_pages(lambda: find_runs(place), look), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    with listener:
        thread.start()
        where = f"http://{host}:{listener.getsockname()[1]}"
        say(make_terminal(stderr=True), f"{where}/ and {where}/metrics")
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()

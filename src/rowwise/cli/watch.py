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
    every: Annotated[float, typer.Option(min=MIN_S, max=86400.0, help="Polling interval in seconds.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the status once, and exit.")] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve /metrics and a page at this port; 0 for any free port.")
    ] = None,
    host: Annotated[str | None, typer.Option(help=f"Address to listen on (default: {HOST}).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each change of a run.")] = False,
) -> None:
    """Follow runs of this or another machine, until they have ended.

    Reads only the files of runs, so it can start and stop at any time. With --port it continues until Ctrl-C, even
    before the first run.
    Exits with 1 if a run has failed or was killed.

    Example: rowwise watch runs/dlrm-synthetic/1

    Example: rowwise watch s3://bucket/clicks-7 --every 30

    Example: rowwise watch runs --port 9108

    Example: rowwise watch runs --once --json
    """
    refuse_nan("--every", every, "a number of seconds")
    from rowwise.report.watched import LineAges, find_runs, read_status

    location, ages = parse_folder(path), LineAges()

    runs: list[RunStatus] = []

    def refresh() -> "list[RunStatus]":
        """The status of runs; with --port, errors of reading keep the last status."""
        nonlocal runs
        try:
            runs = [read_status(name, run, ages) for name, run in find_runs(location).items()]
        except (RowwiseError, OSError):
            if port is None:
                raise
        return runs

    refresh()
    with _serve_pages(location, refresh, host or HOST, port), _open_display(as_json=as_json) as show:
        show(runs)
        while not once and (port is not None or not all(run.is_over for run in runs)):
            time.sleep(every)
            show(refresh())
    if any(run.state in DIED for run in runs):
        raise typer.Exit(1)


@contextmanager
def _open_display(*, as_json: bool) -> Iterator[Callable[[Sequence["RunStatus"]], None]]:
    """Yields a function that shows runs: a live table on terminals, elsewhere a line for each change."""
    console = make_terminal()
    if console.is_terminal and not as_json:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            yield lambda runs: live.update(_table(runs), refresh=True)
        return
    import msgspec

    from rowwise.report.watch_pages import COLUMNS, cells_of

    last_states: dict[str, tuple[object, ...]] = {}

    def show(runs: Sequence["RunStatus"]) -> None:
        for run in runs:
            state = (run.state, run.step, run.metrics, run.warnings)
            if last_states.get(run.run) == state:
                continue
            last_states[run.run] = state
            if as_json:
                print(escape_json(msgspec.json.encode(run).decode()), flush=True)
            else:
                name, state_word, *cells = cells_of(run)
                cells_by_name = (f"{column} {cell}" for column, cell in zip(COLUMNS[2:], cells, strict=True) if cell)
                say(console, f"{name} {state_word}: {', '.join(cells_by_name)}")

    yield show


def _table(runs: Sequence["RunStatus"]) -> "Table":
    from rich.markup import escape

    from rowwise.report.watch_pages import COLUMNS, cells_of

    table = make_table(COLUMNS)
    for run in runs:
        table.add_row(*map(escape, cells_of(run)))
    for run in runs:
        for line in (run.message, *run.warnings[-1:]):
            if line:
                table.caption = f"{table.caption or ''}{escape(run.run)}: {escape(line)}\n"
    return table


@contextmanager
def _serve_pages(
    location: "Folder", refresh: Callable[[], "Sequence[RunStatus]"], host: str, port: int | None
) -> Iterator[None]:
    """Serve the pages in a thread until the block ends."""
    if port is None:
        yield
        return
    if any(find_spec(name) is None for name in PACKAGES):
        raise SpecError("--port needs packages that are not installed: pip install 'rowwise[serve]'")
    import uvicorn

    from rowwise.report.watch_pages import make_pages
    from rowwise.report.watched import find_runs

    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise SpecError(
            f"--host {host} --port {port}: {error.strerror or error}", "another --host or --port, or --port 0"
        ) from None
    config = uvicorn.Config(make_pages(lambda: find_runs(location), refresh), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    with listener:
        thread.start()
        url = f"http://{host}:{listener.getsockname()[1]}"
        say(make_terminal(stderr=True), f"{url}/ and {url}/metrics")
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()

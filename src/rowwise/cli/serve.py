"""`rowwise serve`: answers requests for predictions over HTTP."""

import os
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from rowwise.base.errors import SpecError, StorageError
from rowwise.cli.options import MemoryForRows, Redis
from rowwise.cli.stored import open_store
from rowwise.cli.terminal import make_table, make_terminal, print_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from rowwise.recipes.served import ServedModel
    from rowwise.serve.admission import ServiceLimits
    from rowwise.serve.record import Recording
    from rowwise.serve.row_memory import RowMemory
    from rowwise.serve.row_tiers import DeviceRows, RowTiers
    from rowwise.serve.traffic import Traffic

PATIENCE_s = 20.0  # with a store, before what there is goes on answering
PACKAGES = ("starlette", "uvicorn", "prometheus_client")
METRICS = "PROMETHEUS_MULTIPROC_DIR"  # a folder in which workers have their numbers


def serve(  # noqa: PLR0913 - one for each option
    folder: Annotated[
        str, typer.Argument(metavar="DIR|URL", help="A folder or URL that rowwise export wrote to, or a version.")
    ],
    version: Annotated[
        int | None,
        typer.Option(min=1, help="Serve this version, whatever becomes current (default: follow the folder)."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Processes that answer (default: one for each core).")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8080,
    expect: Annotated[
        str | None,
        typer.Option(metavar="DIGEST", help="Serve this digest only, whatever becomes current; see rowwise versions."),
    ] = None,
    rows_at_once: Annotated[int, typer.Option(min=1, max=65536, help="Most rows that are computed together.")] = 256,
    timeout: Annotated[
        int, typer.Option(min=1, max=3_600_000, metavar="MS", help="Milliseconds for requests that name none.")
    ] = 5000,
    record: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep requests and answers in this folder, for rowwise audit.")
    ] = None,
    record_share: Annotated[
        str | None, typer.Option(metavar="SHARE", help="How many requests --record keeps (default: 1%).")
    ] = None,
    memory: MemoryForRows = None,
    redis: Redis = None,
    hit_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Answer at once if so many rows are cached; the others count as default rows."
        ),
    ] = None,
    default_row: Annotated[
        str | None,
        typer.Option(
            metavar="zero|mean", help="What --hit-rate answers with for a row: zeros, or its table's mean row."
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Copy versions of a URL to this folder (default: a temporary one)."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="Compute on a GPU, with hot rows in its memory (default: cpu)."),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="GPU memory for a version's rows in a worker (default: two versions take most of it)."
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A limit of requests or connections, such as idle_s=60."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show where rows would be, and end.")] = False,
) -> None:
    """Answer requests for predictions over HTTP, with the bits that rowwise predict gives.

    Requests are JSON or Arrow. The server is ready when the rows that came with the version have come out right. When
    another version becomes the current one, it is loaded beside the old one, and requests move to it without a pause.
    Versions of a URL are copied to this machine; while its store is away, the server goes on with those that it has.
    Opening a version runs the transforms and models that are in it: serve only what you trust.

    Example: rowwise serve served/

    Example: rowwise serve served/ --version 2 --workers 4 --host 0.0.0.0 --port 9000 --timeout 50

    Example: rowwise serve s3://models/clicks --cache versions/

    Example: rowwise serve served/ --record records/ --record-share 1%

    Example: rowwise serve served/ --memory 8GB --redis redis://10.0.0.5:6379

    Example: rowwise serve served/ --memory 8GB --hit-rate 90% --default-row mean

    Example: rowwise serve served/ --device cuda --device-memory 8GB

    Example: rowwise serve served/ --limit max_json_bytes=8MB --limit body_s=10
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise SpecError(f"{', '.join(missing)} is not installed", hint="pip install 'rowwise[serve]'")
    from rowwise.base.scratch import Scratch
    from rowwise.serve.host import HostTask, ServerHost, bind

    limits = make_limits(limit or (), rows_at_once=rows_at_once, timeout_s=timeout / 1000)
    recording = None if record is None else _recording(record, record_share or "1%")
    tell = partial(print, flush=True)
    with (
        bind(host, port) as bound,
        Scratch() as metrics,
        open_versions(folder, version, cache, expect, tell) as versions,
    ):
        os.environ[METRICS] = str(metrics.path)  # noqa: TID251 - prometheus_client reads it when it is loaded
        from rowwise.recipes.served import load_rows, open_version, read_model
        from rowwise.serve.package import find_version
        from rowwise.serve.worker import WorkerTask, run_worker

        first = find_version(versions.folder, version)
        served = read_model(first.path)
        tiers = make_row_tiers(first.path, memory, redis, hit_rate, default_row)
        if device is not None:
            workers = workers or (1 if device.startswith("cuda") else None)
            tiers = tiers._replace(device=_device_rows(device, device_memory, memory, rows_at_once, workers or 1))
        if expect is None and not (explain and tiers.device is None):
            for code in served.code:
                print_line(f"this version runs {code}: make sure that you trust it")
        if explain:
            on_device = None
            if tiers.device is not None:
                on_device = _on_device(served, tiers.device)
            _explain(tiers.layout, on_device)
            return
        task = HostTask(
            name=served.name,
            read_traffic=versions.read_traffic,
            load_rows=partial(load_rows, versions.folder, tiers),
            run_worker=partial(
                run_worker, WorkerTask(partial(open_version, versions.folder, None, tiers=tiers), limits, recording)
            ),
            workers=workers or len(os.sched_getaffinity(0)),
            preload=("rowwise.recipes.served", "rowwise.serve.worker"),
            metrics=metrics.path,
            load_s=limits.load_s,
        )
        ServerHost(task, bound, tell).run()


def make_limits(texts: "Sequence[str]", **given: float) -> "ServiceLimits":
    """Limits of a server, of NAME=VALUE; `given`: those that have an option of their own."""
    import msgspec

    from rowwise.planning.planner.machines import parse_size
    from rowwise.serve.admission import ServiceLimits

    names = [name for name in ServiceLimits.__struct_fields__ if name not in given]
    found: dict[str, float | str] = dict(given)
    for text in texts:
        name, _, value = text.partition("=")
        if name not in names or not value:
            raise SpecError(f"--limit {text}", f"NAME=VALUE, where NAME is one of {', '.join(names)}")
        found[name] = parse_size(value, f"--limit {name}") if name.endswith("_bytes") else value
    try:
        return msgspec.convert(found, ServiceLimits, strict=False)
    except msgspec.ValidationError as error:
        raise SpecError(f"--limit: {error}", "a number") from None


class VersionSource(NamedTuple):
    """A folder of this machine, and which of its versions to answer by."""

    folder: Path
    read_traffic: "Callable[[Collection[int]], Traffic]"


@contextmanager
def open_versions(
    path: str, version: int | None, cache: Path | None, expect: str | None, tell: "Callable[[str], None]"
) -> "Iterator[VersionSource]":
    """The versions of a folder, or those of a URL in the folder that they are copied to, until the block ends.

    With `expect` a private copy of one version, whose digest that is.
    """
    from rowwise.serve.follow_store import StoreFollower
    from rowwise.serve.package import find_version, read_traffic
    from rowwise.serve.traffic import Traffic

    with open_store(path, cache, PATIENCE_s) as store:
        folder = Path(path) if store is None else store.folder
        if store is not None and version is None:
            follower = StoreFollower(store, tell)
            if expect is None:
                with follower:
                    yield VersionSource(folder, follower.read_traffic)
                return
            version = follower.read_traffic(()).current
        if store is not None and version is not None:
            try:
                store.fetch(version)
            except StorageError:  # away; the version may be here
                if version not in store.complete():
                    raise
            store.keep({version})
        first = find_version(folder, version)
        follows = version is None and first.path != folder and expect is None

        def read(_in_use: "Collection[int]") -> Traffic:
            return read_traffic(folder) if follows else Traffic(first.number)

        with first.checked(expect) as checked:
            yield VersionSource(folder if expect is None else checked.path, read)


def make_row_tiers(
    version: Path, memory: str | None, redis: str | None, hit_rate: str | None = None, default_row: str | None = None
) -> "RowTiers":
    """Where the rows of a version will be; raises for options that are none."""
    from rowwise.checkpoint.manifest import CheckpointManifest
    from rowwise.planning.planner.machines import parse_size
    from rowwise.serve.default_rows import DefaultRow, read_mean_rows
    from rowwise.serve.redis_rows import parse_addresses
    from rowwise.serve.row_tiers import make_tiers
    from rowwise.serve.traffic import parse_share

    if default_row is not None and default_row not in tuple(DefaultRow):
        raise SpecError(f"--default-row {default_row}", "zero or mean")
    try:
        least = None if hit_rate is None else parse_share(hit_rate)
    except ValueError:
        least = -1.0
    if least is not None and not 0 <= least <= 1:
        raise SpecError(f"--hit-rate {hit_rate}", "a share of the rows, such as 90%")
    size = None if memory is None else parse_size(memory, "--memory")
    addresses = () if redis is None else parse_addresses(redis)
    default = DefaultRow(default_row or DefaultRow.ZERO)
    if default is DefaultRow.MEAN:
        read_mean_rows(version)  # raises before a server is started
    return make_tiers(CheckpointManifest.read(version), size, addresses, least, default)


def _device_rows(
    device: str, memory: str | None, host_memory: str | None, rows_at_once: int, workers: int
) -> "DeviceRows | None":
    """The memory of a device for rows; None: of a CPU without a limit, which is that of the host."""
    import torch

    from rowwise.models.inference import FIXED_ROWS, LARGER_ROWS
    from rowwise.planning.planner.machines import parse_size
    from rowwise.recipes.device_tables import memory_for_versions
    from rowwise.serve.row_tiers import DeviceRows

    try:
        where = torch.device(device)
    except RuntimeError:
        where = None
    if where is None or where.type not in ("cpu", "cuda"):
        raise SpecError(f"--device {device}", "cpu or cuda")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise SpecError(f"--device {device}: torch finds no such GPU", "--device cpu", hint="see rowwise doctor")
    if where.type == "cpu" and memory is None:
        return None
    if host_memory is not None:
        got = f"--memory {host_memory} with --device {device}"
        raise SpecError(f"{got}: a device reads rows in the memory of the host, which has to have all of them")
    size = memory_for_versions(where) // workers if memory is None else parse_size(memory, "--device-memory")
    return DeviceRows(device, size, max(rows_at_once, FIXED_ROWS) + LARGER_ROWS)


def _on_device(served: "ServedModel", given: "DeviceRows") -> dict[str, int | None]:
    """How many rows of each table a device caches, by tensor; None: all of them."""
    from rowwise.checkpoint.tables import full_name, table_modules
    from rowwise.recipes.compose import build_model
    from rowwise.recipes.device_tables import choose_served

    model = build_model(served.parts, on_meta=True)
    chosen = choose_served(model, given, {})
    paths = [path for path, _ in table_modules(model)]
    return {
        f"model/{full_name(path, table)}": one.cache_rows.get(table.name)
        for path, one in zip(paths, chosen, strict=True)
        for table in one.module.tables
    }


def _recording(folder: Path, share: str) -> "Recording":
    from rowwise.serve.record import Recording
    from rowwise.serve.traffic import parse_share

    try:
        value = parse_share(share)
    except ValueError:
        raise SpecError(f"--record-share {share}", "a share of the requests, such as 1%") from None
    recording = Recording(str(folder), value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--record {folder}: {error.strerror}", "a writable folder for requests") from None
    return recording


def _explain(memory: "RowMemory | None", on_device: dict[str, int | None] | None) -> None:
    """Print the tables: which have all rows in memory, or on a device, and which a cache."""
    from rowwise.base.quantity import format_bytes, format_rows

    assert memory is not None
    places = ("in memory",) if on_device is None else ("in memory", "on the device")
    shown = make_table(("table",), ("rows", "bytes"), places)
    cache_of = {table.name: one for one in memory.caches for table in one.tables}
    for table in sorted(memory.tables, key=lambda table: -table.size_bytes):
        found = cache_of.get(table.name)
        where = "all rows" if found is None else f"a cache of {format_rows(found.shape.slots)} rows"
        if found is not None and len(found.tables) > 1:
            where += f", with {len(found.tables) - 1} others"
        cells = [format_rows(table.rows), format_bytes(table.size_bytes), where]
        if on_device is not None:
            slots = on_device[table.name]
            cells.append("all rows" if slots is None else f"a cache of {format_rows(slots)} rows")
        shown.add_row(table.name.removeprefix("model/"), *cells)
    terminal = make_terminal()
    terminal.print(shown)
    caches = f", {format_bytes(memory.cache_bytes)} are caches" if memory.caches else ""
    terminal.print(f"{format_bytes(memory.resident_bytes)} of rows are in memory{caches}; all workers share both")

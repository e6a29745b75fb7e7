"""`rowwise serve`: serves predictions over HTTP."""

import os
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from rowwise.base.errors import SpecError, StorageError
from rowwise.base.processor import usable_processors
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

STORE_TIMEOUT_s = 20.0  # for an unavailable store, before local versions are served
PACKAGES = ("starlette", "uvicorn", "prometheus_client")
METRICS = "PROMETHEUS_MULTIPROC_DIR"  # folder of the metrics of all workers


def serve(  # noqa: PLR0913 - one for each option
    folder: Annotated[
        str, typer.Argument(metavar="DIR|URL", help="Folder or URL that rowwise export wrote to, or one version.")
    ],
    version: Annotated[
        int | None,
        typer.Option(min=1, help="Serve only this version (default: follow the current version)."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Number of worker processes (default: one per core).")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 8080,
    expect: Annotated[
        str | None,
        typer.Option(metavar="DIGEST", help="Serve only the version with this digest; see rowwise versions."),
    ] = None,
    rows_at_once: Annotated[int, typer.Option(min=1, max=65536, help="Maximum batch size in rows.")] = 256,
    timeout: Annotated[
        int, typer.Option(min=1, max=3_600_000, metavar="MS", help="Default timeout of a request, in milliseconds.")
    ] = 5000,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Record requests and answers in this folder, for rowwise audit."),
    ] = None,
    record_share: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Share of requests that --record samples (default: 1%).")
    ] = None,
    memory: MemoryForRows = None,
    redis: Redis = None,
    hit_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Minimum cache hit rate to answer without waiting; missing rows get default rows."
        ),
    ] = None,
    default_row: Annotated[
        str | None,
        typer.Option(
            metavar="zero|mean", help="Default row for --hit-rate: zeros, or the mean row of the table (default: zero)."
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Download versions of a URL to this folder (default: a temporary one)."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda", help="Device to compute on; a GPU caches hot rows in its memory (default: cpu)."
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="GPU memory for the rows of one version, per worker (default: two versions fit)."
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Limit on requests or connections, such as idle_s=60; may be repeated."
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the placement of rows, and exit.")] = False,
) -> None:
    """Serve predictions over HTTP, bitwise equal to those of rowwise predict.

    Requests are JSON or Arrow. The server is ready once it has reproduced the golden rows of the version. When the
    current version changes, the new one is loaded beside the old one, and requests move to it without downtime.
    Versions of a URL are downloaded; while the store is unavailable, the server keeps serving its local versions.
    Opening a version runs the transforms and models in it: serve only versions that you trust.

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
    log = partial(print, flush=True)
    with (
        bind(host, port) as bound,
        Scratch() as metrics,
        open_versions(folder, version, cache, expect, log) as versions,
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
                on_device = _device_cache_rows(served, tiers.device)
            _explain(tiers.layout, on_device)
            return
        task = HostTask(
            name=served.name,
            read_traffic=versions.read_traffic,
            load_rows=partial(load_rows, versions.folder, tiers),
            run_worker=partial(
                run_worker, WorkerTask(partial(open_version, versions.folder, None, tiers=tiers), limits, recording)
            ),
            workers=workers or usable_processors(),
            preload=("rowwise.recipes.served", "rowwise.serve.worker"),
            metrics=metrics.path,
            load_s=limits.load_s,
            starved_s=limits.starved_s,
        )
        ServerHost(task, bound, log).run()


def make_limits(texts: "Sequence[str]", **preset: float) -> "ServiceLimits":
    """Limits of a server from NAME=VALUE texts; `preset` has those with an option of their own."""
    import msgspec

    from rowwise.planning.planner.machines import parse_size
    from rowwise.serve.admission import ServiceLimits

    names = [name for name in ServiceLimits.__struct_fields__ if name not in preset]
    values: dict[str, float | str] = dict(preset)
    for text in texts:
        name, _, value = text.partition("=")
        if name not in names or not value:
            raise SpecError(f"--limit {text}", f"NAME=VALUE, where NAME is one of {', '.join(names)}")
        values[name] = parse_size(value, f"--limit {name}") if name.endswith("_bytes") else value
    try:
        return msgspec.convert(values, ServiceLimits, strict=False)
    except msgspec.ValidationError as error:
        raise SpecError(f"--limit: {error}", "a number") from None


class VersionSource(NamedTuple):
    """A local folder of versions, and the share of requests that each version serves."""

    folder: Path
    read_traffic: "Callable[[Collection[int]], Traffic]"


@contextmanager
def open_versions(
    path: str, version: int | None, cache: Path | None, expect: str | None, log: "Callable[[str], None]"
) -> "Iterator[VersionSource]":
    """The versions of a folder, or of a URL as downloaded to a local folder, until the block ends.

    With `expect`, a private copy of the version, checked against this digest.
    """
    from rowwise.serve.follow_store import StoreFollower
    from rowwise.serve.package import find_version, read_traffic
    from rowwise.serve.traffic import Traffic

    with open_store(path, cache, STORE_TIMEOUT_s) as store:
        folder = Path(path) if store is None else store.folder
        if store is not None and version is None:
            follower = StoreFollower(store, log)
            if expect is None:
                with follower:
                    yield VersionSource(folder, follower.read_traffic)
                return
            version = follower.read_traffic(()).current
        if store is not None and version is not None:
            try:
                store.fetch(version)
            except StorageError:  # unavailable; the version may be local
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
    """The row tiers of a version; raises for invalid options."""
    from rowwise.checkpoint.manifest import CheckpointManifest
    from rowwise.planning.planner.machines import parse_size
    from rowwise.serve.default_rows import DefaultRow, read_mean_rows
    from rowwise.serve.redis_rows import parse_addresses
    from rowwise.serve.row_tiers import make_tiers
    from rowwise.serve.traffic import parse_share

    if default_row is not None and default_row not in tuple(DefaultRow):
        raise SpecError(f"--default-row {default_row}", "zero or mean")
    try:
        min_hit_rate = None if hit_rate is None else parse_share(hit_rate)
    except ValueError:
        min_hit_rate = -1.0
    if min_hit_rate is not None and not 0 <= min_hit_rate <= 1:
        raise SpecError(f"--hit-rate {hit_rate}", "a share of the rows, such as 90%")
    size = None if memory is None else parse_size(memory, "--memory")
    addresses = () if redis is None else parse_addresses(redis)
    default = DefaultRow(default_row or DefaultRow.ZERO)
    if default is DefaultRow.MEAN:
        read_mean_rows(version)  # raises before a server is started
    return make_tiers(CheckpointManifest.read(version), size, addresses, min_hit_rate, default)


def _device_rows(
    device: str, memory: str | None, host_memory: str | None, rows_at_once: int, workers: int
) -> "DeviceRows | None":
    """The budget of device memory for rows; None for a CPU without a limit, which uses the rows in host memory."""
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
        problem = f"--memory {host_memory} with --device {device}"
        raise SpecError(f"{problem}: the rows of a device cache are read from host memory, which must hold all of them")
    size = memory_for_versions(where) // workers if memory is None else parse_size(memory, "--device-memory")
    return DeviceRows(device, size, max(rows_at_once, FIXED_ROWS) + LARGER_ROWS)


def _device_cache_rows(served: "ServedModel", device: "DeviceRows") -> dict[str, int | None]:
    """Rows that the device caches, by tensor of a table; None if it holds all rows."""
    from rowwise.checkpoint.tables import full_name, table_modules
    from rowwise.recipes.compose import build_model
    from rowwise.recipes.device_tables import choose_served

    model = build_model(served.parts, on_meta=True)
    chosen = choose_served(model, device, {})
    paths = [path for path, _ in table_modules(model)]
    return {
        f"model/{full_name(path, table)}": plan.cache_rows.get(table.name)
        for path, plan in zip(paths, chosen, strict=True)
        for table in plan.module.tables
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
        raise SpecError(f"--record {folder}: {error.strerror}", "a writable folder") from None
    return recording


def _explain(memory: "RowMemory | None", on_device: dict[str, int | None] | None) -> None:
    """Print for each table whether memory, and the device, hold all its rows or a cache."""
    from rowwise.base.quantity import format_bytes, format_rows

    assert memory is not None
    places = ("in memory",) if on_device is None else ("in memory", "on the device")
    grid = make_table(("table",), ("rows", "bytes"), places)
    cache_of = {table.name: cache for cache in memory.caches for table in cache.tables}
    for table in sorted(memory.tables, key=lambda table: -table.size_bytes):
        cache = cache_of.get(table.name)
        where = "all rows" if cache is None else f"a cache of {format_rows(cache.shape.slots)} rows"
        if cache is not None and len(cache.tables) > 1:
            where += f", with {len(cache.tables) - 1} others"
        cells = [format_rows(table.rows), format_bytes(table.size_bytes), where]
        if on_device is not None:
            slots = on_device[table.name]
            cells.append("all rows" if slots is None else f"a cache of {format_rows(slots)} rows")
        grid.add_row(table.name.removeprefix("model/"), *cells)
    terminal = make_terminal()
    terminal.print(grid)
    caches = f", {format_bytes(memory.cache_bytes)} are caches" if memory.caches else ""
    terminal.print(f"{format_bytes(memory.resident_bytes)} of rows are in memory{caches}; all workers share both")

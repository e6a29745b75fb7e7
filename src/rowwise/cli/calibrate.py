"""`rowwise calibrate`: measure this machine's kernels and links, and write the profile that `rowwise plan` reads.

Arguments are checked before torch is loaded. Measurements are saved: the same command resumes them.
"""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from rowwise.base.errors import PeerError, SpecError, printable
from rowwise.base.inside import fault_of_name
from rowwise.base.processor import usable_processors
from rowwise.base.storage.folder import as_storage, parse_folder
from rowwise.base.value import MAX_THREADS
from rowwise.cli.environment import CommandEnvironment
from rowwise.cli.options import MAX_SEED, Dim
from rowwise.cli.progress import fraction_bar
from rowwise.cli.terminal import make_terminal, say

if TYPE_CHECKING:
    from rowwise.planning.calibrate.fit import MachineDescription
    from rowwise.planning.calibrate.folder import MeasurementFolder, MeasurementSpec

DEVICES, TRANSPORTS = ("cpu", "cuda"), ("shared", "gloo")
DEFAULT_RANKS = 2  # links need two; 1 on one core
MAX_MINUTES = 1e5
DISK_s = 4.0  # duration of the disk measurement
TABLE_FRACTION = 0.8  # share of memory that the profile gives to tables
ReportProgress = Callable[[str, float], None]


def calibrate(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder for the measurements and the profile.")] = Path("calibration"),
    minutes: Annotated[
        float, typer.Option(metavar="N", help="Total time budget in minutes; a later call with more minutes continues.")
    ] = 10.0,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_THREADS, metavar="N", help=f"Number of ranks (default: {DEFAULT_RANKS}, or 1 on one core)."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_THREADS, metavar="N", help="Threads per rank (default: 1; with one rank, all cores)."
        ),
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure tables like those in FILE, as for rowwise plan.")
    ] = None,
    dim: Dim = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the random sets of tables.")] = 0,
    device: Annotated[str, typer.Option(help="Device to measure: cpu or cuda.")] = "cpu",
    transport: Annotated[
        str | None, typer.Option(help="Transport between ranks: shared (memory) or gloo (default: shared).")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the machine in the profile (default: its hostname).")
    ] = None,
    save: Annotated[
        str | None, typer.Option(metavar="URL", help="Also write the profile to a URL or path that ends in .json.")
    ] = None,
) -> None:
    """Measure lookups, updates and exchanges on this machine, and fit a profile that predicts their cost.

    Measures random sets of tables for some minutes, then fits. Writes the profile FOLDER/machine.json, which rowwise
    plan and rowwise train --hardware read. Prints an estimate of the total time first. The same command resumes after
    a stop or a kill.

    Example: rowwise calibrate --minutes 10 --tables tables.csv

    Example: rowwise calibrate --save s3://models/machines/big-host.json

    Example: rowwise calibrate big-host --nproc 8 --threads 4 --minutes 30 --name big-host
    """
    if not 0 < minutes < MAX_MINUTES:
        raise SpecError(f"--minutes {minutes:g}", "a number of minutes above 0, such as 10")
    if name == "":
        raise SpecError("--name ''", "a name for the machine")
    environment: CommandEnvironment = ctx.obj
    if environment.torchrun is not None:
        raise SpecError("rowwise calibrate starts its own ranks", hint="run it without torchrun")
    if save is not None:
        check_target(save)
    spec = _make_spec(nproc, threads, device, transport, seed)
    if tables is not None:
        spec = _add_tables(spec, tables, dim)
    console = make_terminal(stderr=True)
    with console.status("starting"):
        from rowwise.planning.calibrate.folder import open_folder
        from rowwise.planning.calibrate.forecast import forecast_calibration

        measurements = open_folder(folder, spec)
        spec = measurements.read_spec()
        forecast = forecast_calibration(spec, measurements, minutes)
    say(console, forecast)
    try:
        with _show_progress(console, "measuring") as report:
            _measure(spec, measurements, minutes, report)
        _fit(spec, measurements, name or os.uname().nodename, save, console)
    except KeyboardInterrupt:
        say(console, f"measurements are in {folder}; the same command continues")
        raise


def _make_spec(
    nproc: int | None, threads: int | None, device: str, transport: str | None, seed: int
) -> "MeasurementSpec":
    from rowwise.planning.calibrate.folder import MeasurementSpec, limits_of_machine

    transport_name = TRANSPORTS[0] if transport is None else transport
    for option, value, known in (("device", device, DEVICES), ("transport", transport_name, TRANSPORTS)):
        if value not in known:
            raise SpecError(f"--{option} {value!r}", " or ".join(known))
    if device == "cuda":
        _check_cuda(nproc)
    cores = usable_processors()
    world = nproc or (1 if device == "cuda" else min(cores, DEFAULT_RANKS))
    if transport is not None and world == 1:
        raise SpecError(f"--transport {transport} with one rank", "--nproc 2 or more, or no --transport")
    return MeasurementSpec(
        seed=seed,
        world=world,
        threads=threads or (1 if world > 1 else cores),
        device=device,
        transport=transport_name,
        limits=limits_of_machine(world, device),
    )


def _check_cuda(nproc: int | None) -> None:
    if nproc is not None and nproc > 1:
        raise SpecError(
            f"--nproc {nproc} with --device cuda",
            "1, as links between GPUs are not measured",
            hint="edit links in the profile",
        )
    import torch

    if not torch.cuda.is_available():
        raise SpecError("--device cuda: torch finds no GPU", "--device cpu", hint="see rowwise doctor")


def _add_tables(spec: "MeasurementSpec", path: Path, dim: int | None) -> "MeasurementSpec":
    from rowwise.planning.calibrate.draw import Population
    from rowwise.planning.planner.inputs import read_tables

    workloads = read_tables(path, dim=dim).workloads
    try:
        Population(workloads, spec.limits.pool_bytes)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    return msgspec.structs.replace(spec, tables=workloads)


def _measure(spec: "MeasurementSpec", folder: "MeasurementFolder", minutes: float, report: ReportProgress) -> None:
    """Measure within a budget of minutes; a failed rank is reported in one line, or a bug by its traceback."""
    from rowwise.parallel.comm.spawn import RanksFailed
    from rowwise.planning.calibrate.measure import measure

    try:
        measure(spec, folder, minutes, report)
    except RanksFailed as failed:
        first = failed.failures[0]
        if first.kind == "bug":
            print(f"rank {first.rank}: {printable(first.trace)}", end="", file=sys.stderr)
            raise typer.Exit(1) from None
        raise PeerError(f"{failed.line}; measurements are in {folder.path}: the same command continues") from None


def check_target(save: str) -> None:
    """Raise for an unusable target of --save before the measurements begin."""
    folder, _, name = save.rpartition("/")
    if not name.endswith(".json") or fault_of_name(name):
        raise SpecError(f"--save {save}", "a URL or path that ends in .json, such as s3://models/machines/a.json")
    target = as_storage(parse_folder(folder or "."))
    target.storage.list(f"{target.inside(name)}/")  # one request, to fail early


def save_profile(save: str, profile: str) -> None:
    folder, _, name = save.rpartition("/")
    target, content = as_storage(parse_folder(folder or ".")), profile.encode()
    target.storage.write(target.inside(name), lambda: [content], len(content))


def _fit(spec: "MeasurementSpec", folder: "MeasurementFolder", name: str, save: str | None, console: Console) -> None:
    from rowwise.cli.plan import write_atomically
    from rowwise.planning.calibrate.fit import fit_profile
    from rowwise.planning.calibrate.samples import LinkSample
    from rowwise.planning.calibrate.train_exchange import MIN_EXCHANGES
    from rowwise.report.calibration import draw_calibration

    samples = list(folder.read())
    exchanges = sum(isinstance(sample, LinkSample) for sample in samples)
    thorough = exchanges >= MIN_EXCHANGES or (spec.world == 1 and len(samples) >= MIN_EXCHANGES)
    machine = _describe_machine(spec, name, folder.path, thorough=thorough)
    with _show_progress(console, "fitting") as report:
        fitted = fit_profile(samples, machine, report)
    hardware = fitted.hardware
    if hardware.linears is not None and hardware.copies_inside:
        with console.status("measuring steps"):
            from rowwise.recipes.step_overheads import with_overheads

            try:
                hardware = with_overheads(hardware, spec.world)
            except PeerError as error:
                say(console, f"steps are not measured: {error}")
    profile, quality = folder.path / "machine.json", msgspec.json.format(msgspec.json.encode(fitted.quality))
    page = draw_calibration(hardware.name, hardware.source, fitted.quality)
    texts = {"quality.json": f"{quality.decode()}\n", "report.html": page, profile.name: hardware.to_json() + "\n"}
    for line in fitted.lines():
        say(console, line)
    for file, text in texts.items():
        write_atomically(folder.path / file, text)
        say(console, f"wrote   {folder.path / file}")
    if save is not None:
        save_profile(save, texts[profile.name])
        say(console, f"wrote   {save}")
    command = f"rowwise plan --tables FILE --topology {spec.world}x{save or profile}"
    say(console, f"use it  {command}")


def _describe_machine(spec: "MeasurementSpec", name: str, folder: Path, *, thorough: bool) -> "MachineDescription":
    """Facts of the machine for its profile; `thorough` adds times of dense layers and of compressed wires."""
    import torch

    from rowwise.planning.calibrate.coding import measure_coding
    from rowwise.planning.calibrate.dense_times import measure_dense
    from rowwise.planning.calibrate.disk import measure_disk
    from rowwise.planning.calibrate.fit import MachineDescription
    from rowwise.planning.calibrate.kernels import last_cache_bytes
    from rowwise.planning.calibrate.wire_costs import measure_wire_costs
    from rowwise.recipes.machine import Environment

    facts, shared_memory = Environment.read(""), spec.transport == "shared"
    thorough_dense = thorough and spec.device == "cpu"
    narrow = thorough and spec.world > 1
    host_bytes = int(facts.memory_gb * 1e9 * TABLE_FRACTION)
    memory = {"device_bytes": host_bytes // spec.world, "cache_bytes": last_cache_bytes() // spec.world}
    if spec.device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        memory = {"device_bytes": int(gpu.total_memory * TABLE_FRACTION), "cache_bytes": gpu.L2_cache_size}
        memory["host_bytes"] = host_bytes
    return MachineDescription(
        name=name,
        machine=f"{facts.cpu}, {facts.usable_cores} cores, rowwise {facts.rowwise}, torch {facts.torch}",
        device=spec.device if spec.device == "cpu" else facts.cuda,
        world=spec.world,
        threads=spec.threads,
        coding=measure_coding(torch.device(spec.device), spec.threads),
        narrow=measure_wire_costs(spec.world, spec.threads, shared_memory=shared_memory) if narrow else (),
        copies_inside=shared_memory and spec.device == "cpu" and spec.world > 1,
        dense=measure_dense(spec.world, spec.threads, shared_memory=shared_memory) if thorough_dense else None,
        disk=measure_disk(folder, DISK_s),
        disk_bytes=int(shutil.disk_usage(folder).free * TABLE_FRACTION),
        **memory,
    )


def _show_progress(console: Console, what: str) -> AbstractContextManager[ReportProgress]:
    columns = (TextColumn(f"{what}, " + "{task.description}"), BarColumn(), TimeRemainingColumn())
    return fraction_bar(console, columns, f"{what}, ")

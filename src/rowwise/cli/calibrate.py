"""`rowwise calibrate`: measure this machine's kernels and links, and write the profile that `rowwise plan` reads.

Only asks and shows: what is measured is in `calibrate`, and so is what is learned from it. Everything that can be
refused is refused before torch is loaded, and everything that was measured is kept: the same command goes on.
"""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from rowwise.cli.console import console_for
from rowwise.cli.environment import CommandEnvironment
from rowwise.cli.progress import share_bar
from rowwise.errors import PeerError, SpecError
from rowwise.textfile import printable
from rowwise.value import MOST_THREADS

if TYPE_CHECKING:
    from rowwise.calibrate.fit import MachineDescription
    from rowwise.calibrate.folder import MeasurementFolder, MeasurementSpec

DEVICES, TRANSPORTS = ("cpu", "cuda"), ("shared", "gloo")
USUAL_RANKS = 2  # where there are cores for them: links want two
MOST_MINUTES = 1e5
FOR_TABLES = 0.8  # of all memory: what a profile says that tables may have
Tell = Callable[[str, float], None]


def calibrate(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Where measurements and the profile are kept.")] = Path("calibration"),
    minutes: Annotated[float, typer.Option(metavar="N", help="Of measuring, in all: more later goes on.")] = 10.0,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help=f"Ranks: {USUAL_RANKS}, or as many as there are cores.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Of each rank: 1, or all cores if there is one rank.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV or JSON, as for rowwise plan: measure the like of these.")
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Columns of tables whose file does not say.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    transport: Annotated[
        str | None, typer.Option(help="Between ranks of this machine: shared (memory, the default) or gloo.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the profile calls the machine: this host's name.")] = None,
) -> None:
    """Measure what embedding tables cost on this machine, and learn to predict it.

    Sets of tables are looked up, updated and exchanged between ranks for some minutes; then costs are learned.
    Whatever ends it, the same command goes on.

    Example: rowwise calibrate --minutes 10 --tables tables.csv

    Example: rowwise calibrate big-host --nproc 8 --threads 4 --minutes 30 --name big-host
    """
    if not 0 < minutes < MOST_MINUTES:
        raise SpecError(f"--minutes {minutes:g}: want more than 0, such as 10")
    if dim is not None and tables is None:
        raise SpecError(f"--dim {dim} without --tables: it is for tables whose file does not say")
    if name == "":
        raise SpecError("--name '': want what the profile is to call the machine")
    around: CommandEnvironment = ctx.obj
    if around.torchrun is not None:
        raise SpecError("rowwise calibrate makes its ranks itself: start it without torchrun")
    order = _order(nproc, threads, device, transport, seed)
    if tables is not None:
        order = _with_tables(order, tables, dim)
    from rowwise.calibrate.folder import open_folder

    opened = open_folder(folder, order)
    order = opened.read_spec()
    console = console_for(quiet=False)
    try:
        with _showing(console, "measuring") as tell:
            _measure(order, opened, minutes, tell)
        _fit(order, opened, name or os.uname().nodename, console)
    except KeyboardInterrupt:
        console.print(f"what was measured is in {folder}; the same command goes on", markup=False, soft_wrap=True)
        raise


def _order(nproc: int | None, threads: int | None, device: str, transport: str | None, seed: int) -> "MeasurementSpec":
    """What is asked for, all of it said."""
    from rowwise.calibrate.folder import MeasurementSpec, limits_of_machine

    for option, value in (("nproc", nproc), ("threads", threads)):
        if value is not None and not 1 <= value <= MOST_THREADS:
            raise SpecError(f"--{option} {value}: want at least 1, and at most {MOST_THREADS}")
    if not 0 <= seed < 1 << 31:
        raise SpecError(f"--seed {seed}: want at least 0, and less than 2**31")
    chosen = TRANSPORTS[0] if transport is None else transport
    for option, got, known in (("device", device, DEVICES), ("transport", chosen, TRANSPORTS)):
        if got not in known:
            raise SpecError(f"--{option} {got!r}: want {' or '.join(known)}")
    if device == "cuda":
        _check_cuda(nproc)
    cores = len(os.sched_getaffinity(0))
    world = nproc or (1 if device == "cuda" else min(cores, USUAL_RANKS))
    if transport is not None and world == 1:
        raise SpecError(f"--transport {transport} with one rank: it is between ranks: leave it away, or give --nproc")
    return MeasurementSpec(
        seed=seed,
        world=world,
        threads=threads or (1 if world > 1 else cores),
        device=device,
        transport=chosen,
        limits=limits_of_machine(world, device),
    )


def _check_cuda(nproc: int | None) -> None:
    if nproc is not None and nproc > 1:
        want = "want 1: links between GPUs are not measured, those of a profile can be edited"
        raise SpecError(f"--nproc {nproc} with --device cuda: {want}")
    import torch

    if not torch.cuda.is_available():
        raise SpecError("--device cuda: torch finds no GPU here: want cpu, or see rowwise doctor")


def _with_tables(order: "MeasurementSpec", path: Path, dim: int | None) -> "MeasurementSpec":
    from rowwise.calibrate.draw import Population
    from rowwise.planner.inputs import read_tables

    workloads = read_tables(path, dim=dim).workloads
    try:
        Population(workloads, order.limits.pool_bytes)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    return msgspec.structs.replace(order, tables=workloads)


def _measure(order: "MeasurementSpec", folder: "MeasurementFolder", minutes: float, tell: Tell) -> None:
    """Until there is enough; a rank that fails is one line, or the traceback of a bug."""
    from rowwise.calibrate.measure import measure
    from rowwise.comm.spawn import RanksFailed

    try:
        measure(order, folder, minutes, tell)
    except RanksFailed as failed:
        first = failed.failures[0]
        if first.kind == "bug":
            print(f"rank {first.rank}: {printable(first.trace)}", end="", file=sys.stderr)
            raise typer.Exit(1) from None
        raise PeerError(f"{failed.line}; what was measured is in {folder.path}: the same command goes on") from None


def _fit(order: "MeasurementSpec", folder: "MeasurementFolder", name: str, console: Console) -> None:
    """Learn from everything that was measured, and write the profile."""
    from rowwise.calibrate.fit import fit_profile
    from rowwise.calibrate.samples import LinkSample
    from rowwise.calibrate.train_exchange import FEWEST
    from rowwise.cli.plan import write_whole
    from rowwise.report.calibration import calibration_page

    samples = list(folder.read())
    about = _about(order, name, narrow=sum(isinstance(sample, LinkSample) for sample in samples) >= FEWEST)
    with _showing(console, "fitting") as tell:
        fitted = fit_profile(samples, about, tell)
    profile, quality = folder.path / "machine.json", _text(fitted.quality)
    shown = calibration_page(fitted.hardware.name, fitted.hardware.source, quality)
    texts = {"quality.json": quality, "report.html": shown, profile.name: fitted.hardware.to_json() + "\n"}
    for line in fitted.lines():
        console.print(line, markup=False, soft_wrap=True)
    for file, text in texts.items():
        write_whole(folder.path / file, text)
        console.print(f"wrote   {folder.path / file}", markup=False, soft_wrap=True)
    use = f"rowwise plan --tables FILE --topology {order.world}x{profile}"
    console.print(f"use it  {use}", markup=False, soft_wrap=True)


def _about(order: "MeasurementSpec", name: str, *, narrow: bool) -> "MachineDescription":
    """The machine, as its profile will describe it; `narrow`: there are networks for exchanges that wires add to."""
    import torch

    from rowwise.calibrate.coding import measure_coding
    from rowwise.calibrate.fit import MachineDescription
    from rowwise.calibrate.kernels import last_cache_bytes
    from rowwise.calibrate.wire_costs import measure_wire_costs
    from rowwise.recipes.machine import Environment

    found, shared = Environment.read(""), order.transport == "shared"
    host_bytes = int(found.memory_gb * 1e9 * FOR_TABLES)
    more = {"device_bytes": host_bytes // order.world, "cache_bytes": last_cache_bytes() // order.world}
    if order.device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        more = {"device_bytes": int(gpu.total_memory * FOR_TABLES), "cache_bytes": gpu.L2_cache_size}
        more["host_bytes"] = host_bytes
    return MachineDescription(
        name=name,
        machine=f"{found.cpu}, {found.usable_cores} cores, rowwise {found.rowwise}, torch {found.torch}",
        device=order.device if order.device == "cpu" else found.cuda,
        world=order.world,
        threads=order.threads,
        coding=measure_coding(torch.device(order.device), order.threads),
        narrow=measure_wire_costs(order.world, order.threads, shared_memory=shared) if narrow else (),
        **more,
    )


def _text(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def _showing(console: Console, what: str) -> AbstractContextManager[Tell]:
    """A bar on a terminal, else a line now and then."""
    columns = (TextColumn(f"{what}, " + "{task.description}"), BarColumn(), TimeRemainingColumn())
    return share_bar(console, columns, f"{what}, ")

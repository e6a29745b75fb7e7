"""`rowwise doctor`: describes this machine and installation for a bug report, tests the kernels, measures the disk."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rowwise.cli.environment import CommandEnvironment
from rowwise.cli.options import AsJson
from rowwise.cli.progress import splits_bar
from rowwise.cli.terminal import Terminal, print_json, refuse_nan, say
from rowwise.recipes.machine import Environment, NativeLibrary

if TYPE_CHECKING:
    from rowwise.planning.calibrate.disk import DiskRates
    from rowwise.recipes.drills.selftest import SelfTestResult

MAX_SECONDS = 1e5
KiB = 1024
DISK_s = 4.0  # maximum duration of the disk measurement; at most half of --seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The output of `rowwise doctor`; `error` is why the native operators are missing, and the fix."""

    machine: Environment
    native: NativeLibrary | None
    result: "SelfTestResult | None"
    disk: "DiskRates"  # of the current folder, which has runs and their tables on disk
    error: str

    @property
    def ok(self) -> bool:
        return self.result is not None and not any(check.failure for check in self.result.checks)


def doctor(
    ctx: typer.Context,
    as_json: AsJson = False,
    seconds: Annotated[
        float, typer.Option(min=0, max=MAX_SECONDS, help="Duration of the self-test, in seconds.")
    ] = 10.0,
) -> None:
    """Show versions, processor and memory, test the native kernels against their reference, and measure the disk.

    The disk is that of the current folder, where runs keep tables that do not fit into memory. Exits with 0 only if all
    checks pass. Paste the output into a bug report.

    Example: rowwise doctor

    Example: rowwise doctor --json --seconds 2
    """
    refuse_nan("--seconds", seconds, "a number of seconds, such as 10")
    console = Terminal(highlight=False)
    with splits_bar(Terminal(quiet=as_json), "self-test") as bar:
        environment = ctx.find_object(CommandEnvironment)
        policy = environment.omp_wait_policy if environment else "not set"
        report = _self_test(policy, seconds, lambda elapsed_s: bar(min(elapsed_s, seconds), seconds))
    if as_json:
        print_json({"ok": report.ok, **asdict(report), "disk": report.disk})
    else:
        _show(report, console)
    raise typer.Exit(0 if report.ok else 1)


def _self_test(omp_wait_policy: str, seconds: float, tell: Callable[[float], None]) -> DoctorReport:
    from rowwise.planning.calibrate.disk import measure_disk

    machine, disk = Environment.read(omp_wait_policy), measure_disk(Path.cwd(), min(seconds / 2, DISK_s))
    try:
        native = NativeLibrary.read()
    except (ImportError, OSError) as error:  # NativeError, or torch itself fails to load
        return DoctorReport(machine=machine, native=None, result=None, disk=disk, error=str(error))
    from rowwise.recipes.drills.selftest import run_selftest

    result = run_selftest(native.isa_sets, seconds, tell)
    return DoctorReport(machine=machine, native=native, result=result, disk=disk, error="")


def _show(report: DoctorReport, console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # paths are wrapped, not cut
    lines = _machine_lines(report.machine) | _native_lines(report.native) | {"disk here": _disk_line(report.disk)}
    for name, value in lines.items():
        table.add_row(name, value)
    console.print(table, markup=False)
    if report.result is None:
        say(console, f"\nFAILED: {report.error}", "red")
        return
    _show_result(report.result, console)


def _machine_lines(machine: Environment) -> dict[str, str]:
    return {
        "rowwise": machine.rowwise,
        "python": machine.python,
        "torch": machine.torch,
        "CUDA": machine.cuda,
        "numpy": machine.numpy,
        "OS": machine.os,
        "CPU": f"{machine.cpu}{f' ({machine.family})' if machine.family else ''}",
        "CPU lacks": "\n".join(machine.lacks) or "nothing",
        "cores": f"{machine.cores}, {machine.usable_cores} usable by this process",
        "torch threads": str(machine.torch_threads),
        "OMP_WAIT_POLICY": machine.omp_wait_policy,
        "huge pages": machine.huge_pages,
        "memory": f"{machine.memory_gb} GB",
    }


def _native_lines(native: NativeLibrary | None) -> dict[str, str]:
    if native is None:
        return {"native library": "missing"}
    return {
        "instruction set": f"{native.isa} (this processor has {', '.join(native.isa_sets)})",
        "native library": f"{native.library} ({native.library_bytes / 1e3:.0f} kB)",
        "on a GPU": native.on_gpu,
    }


def _disk_line(disk: "DiskRates") -> str:
    if disk.refused:
        return f"not measured: {disk.refused}"
    reads = ", ".join(f"{rate:,.0f}/s of {_format_block(size)}" for size, rate in disk.reads_s.items())
    return f"random reads {reads}; writes {disk.write_Bps / 1e6:,.0f} MB/s"


def _format_block(size: int) -> str:
    return f"{size} B" if size < KiB else f"{size // KiB} KiB"


def _show_result(result: "SelfTestResult", console: Console) -> None:
    speed = result.speed
    fraction = speed.lookup_rows_s / speed.gather_limit_rows_s
    console.print(
        f"\nlookup  {_format_rate(speed.lookup_rows_s)} of 64 floats, {fraction:.0%} of the memory bandwidth limit"
    )
    console.print(f"update  {_format_rate(speed.update_rows_s)} of 64 floats")
    failed = [check for check in result.checks if check.failure]
    for check in failed:
        say(console, f"FAILED: {check.name}: {check.failure}", "red")
    passed = f"{len(result.checks) - len(failed)} of {len(result.checks)} checks passed"
    console.print(f"{passed} ({result.rounds} rounds)", style="red" if failed else "green")


def _format_rate(rows_s: float) -> str:
    return f"{rows_s / 1e6:.1f} million rows/s"

"""Prints simulations: a step with possible speedups, a sweep as a table, a run compared with its simulation."""

from typing import TYPE_CHECKING

from rich.console import Console

from rowwise.base.quantity import format_bytes, format_seconds, round_digits, si_prefix
from rowwise.cli.terminal import make_table, say

if TYPE_CHECKING:
    from rowwise.base.records import Simulation, Sweep, SweptRow
    from rowwise.recipes.simulated_run import CheckedRun

HELPFUL = 0.005  # smallest printed saving, as a share of a step
MAX_ROWS = 60
NOT_RUN = "not run here: dense layers that ranks cut (tp, pp), inference by all ranks, and what a paper leaves out"


def show_simulation(result: "Simulation", console: Console) -> None:
    from rowwise.planning.simulate.simulation import describe_memory

    dense = f"dense layers {result.dense}, {result.wire} on the wire"
    lines = {
        "model": f"{result.model}: {result.batch:,} samples a step, {dense}",
        "machine": describe_machine(result),
        "memory": f"of a rank: {describe_memory(result.memory)}",
    }
    if result.step_s is not None:
        lines["step"] = f"{format_seconds(result.step_s)}, {format_rate(result.samples_s)} samples/s"
    for lead, text in lines.items():
        _print_line(console, lead, text)
    if result.uses:
        table = make_table(("resource",), ("busy", "exposed"))
        for use in result.uses:
            table.add_row(use.resource, format_seconds(use.busy_s), format_seconds(use.exposed_s))
        console.print(table, markup=False)
    _show_help(result, console)
    _show_published(result, console)
    _show_notes(result.notes, console, runs_here=result.runs_here)


def _show_published(result: "Simulation", console: Console) -> None:
    """Print published rates, and the step by the counts of the paper."""
    for rate in result.published:
        _print_line(console, "paper", f"{format_rate(rate.samples_s)} samples/s, {rate.source}")
    if result.counted:
        table = make_table(("counted as in the paper",), ("a step", "samples/s"))
        for counted in result.counted:
            table.add_row(counted.what, format_seconds(counted.step_s), format_rate(counted.samples_s))
        console.print(table, markup=False)


def _show_help(result: "Simulation", console: Console) -> None:
    """Print possible speedups, and the bottleneck."""
    if result.help:
        table = make_table(("what would help",), ("a step", "less"))
        for speedup in result.help:
            if speedup.saved >= HELPFUL:
                how = "no latency" if speedup.what == "latency" else f"{speedup.what} twice as fast"
                table.add_row(how, format_seconds(speedup.step_s), f"{speedup.saved:.0%}")
        console.print(table, markup=False)
    if result.limits:
        _print_line(console, "limits", result.limits)


def show_sweep(swept: "Sweep", console: Console) -> None:
    names = list(swept.rows[0].settings)
    table = make_table(names[:1], (*names[1:], "a step", "samples/s", "of all sharded", ""))
    for row in swept.rows[:MAX_ROWS]:
        table.add_row(*(row.settings[name] for name in names), *_cells(row))
    console.print(table, markup=False)
    if len(swept.rows) > MAX_ROWS:
        console.print(f"and {len(swept.rows) - MAX_ROWS:,} more: --json has all", markup=False)
    for kind in ("lossless", "lossy"):
        best = swept.best(kind)
        if best is not None:
            chosen = ", ".join(f"{name}={value}" for name, value in best.settings.items())
            _print_line(console, "best", f"{kind}: {chosen}, {format_rate(best.simulation.samples_s)} samples/s")
    if swept.fastest is not None:
        _show_help(swept.fastest, console)
    notes = dict.fromkeys(note for row in swept.rows for note in row.simulation.notes)
    _show_notes(tuple(notes), console, runs_here=all(row.simulation.runs_here for row in swept.rows))


def show_check(run: "CheckedRun", console: Console) -> None:
    table = make_table(("stage",), ("predicted", "measured", "predicted over measured"))
    for stage in run.stages:
        table.add_row(stage.stage, *_compare(stage.predicted_s, stage.measured_s))
    table.add_row("step", *_compare(run.predicted_s, run.measured_s))
    _print_line(console, "run", run.run)
    console.print(table, markup=False)
    _show_notes(run.notes, console)


def describe_machine(result: "Simulation") -> str:
    hosts = f"{result.hosts:,} host{'s' * (result.hosts != 1)}"
    return f"{result.hosts * result.devices:,} ranks: {hosts} of {result.devices} {result.machine}"


def format_rate(samples_s: float) -> str:
    scale, letter = si_prefix(round_digits(samples_s))
    return f"{samples_s / scale:.4g}{' ' if letter else ''}{letter}"


def _cells(row: "SweptRow") -> tuple[str, str, str, str]:
    result = row.simulation
    if result.step_s is None:
        return "does not fit", "", "", f"lacks {format_bytes(result.lacking_bytes)}"
    factor = "" if row.factor is None else f"{row.factor:.2f}x"
    remarks = [f"best {row.best}" if row.best else "", "" if result.runs_here else "not run here"]
    return format_seconds(result.step_s), format_rate(result.samples_s), factor, ", ".join(filter(None, remarks))


def _compare(predicted_s: float, measured_s: float) -> tuple[str, str, str]:
    ratio = f"{predicted_s / measured_s:.2f}" if measured_s > 0 else ""
    return format_seconds(predicted_s), format_seconds(measured_s), ratio


def _show_notes(notes: tuple[str, ...], console: Console, *, runs_here: bool = True) -> None:
    for note in notes:
        _print_line(console, "note", note)
    if not runs_here:
        _print_line(console, "note", NOT_RUN)


def _print_line(console: Console, lead: str, text: str) -> None:
    say(console, f"{lead:8}{text}")

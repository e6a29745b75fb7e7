"""`rowwise bench`: runs the benchmarks of a source checkout with the Python that runs rowwise.

Benchmarks are the scripts directly in `benchmarks/`; they are not installed. Each takes `--quick`, `--smoke` and
`--save`. Its docstring begins with the question that it answers and ends with "Takes:" and "Needs:" lines; the last
line that it prints is its result as JSON. `cache` is built in, and needs no checkout.
"""

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated

import typer

import rowwise
from rowwise.base.errors import RowwiseError, did_you_mean

SIGNAL_BASE = 128  # shells report 128 + signal for a command that a signal ended
LAST_LINES = 30  # of output printed for a failed benchmark
CACHE = "cache"  # the built-in benchmark
COLLECTIONS = frozenset({"towers"})  # benchmarks that run others, which --all runs anyway
LIMIT_s = 3 * 3600.0  # timeout of each benchmark with --all


def bench(  # noqa: PLR0913 - one for each option
    name: Annotated[str | None, typer.Argument(help="Benchmark to run (default: list all).")] = None,
    extra: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the benchmark; put -- before its options.")
    ] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Run a smaller version, mostly in under a minute.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a tiny version, which checks results and measures no speed.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--list", help="List each benchmark with its question, duration and needs.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Run all benchmarks; save results unless --smoke.")] = False,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE", help="cache: ids in FILE.npy or FILE.parquet:COLUMN, or drawn by zipf:POWER:ROWS."
        ),
    ] = None,
    rows_cached: Annotated[
        str | None, typer.Option(metavar="N,...", help="cache: capacities in rows, or in shares of all rows as 1%,16%.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="cache: lru or lfu (default: both).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="cache: print one JSON object instead of text.")] = False,
) -> None:
    """Run one benchmark or all of them, or list them. Needs a checkout of the sources.

    The benchmark cache needs none: it replays a trace of accesses through row caches, and prints their hit rates beside
    the predictions of plans and the optimum.

    Example: rowwise bench --list

    Example: rowwise bench ops --quick

    Example: rowwise bench ops -- --threads 1 --save

    Example: rowwise bench --all --smoke

    Example: rowwise bench cache --trace zipf:1.05:100000

    Example: rowwise bench cache --trace logs.parquet:item_id --rows-cached 10000,100000 --policy lru --json
    """
    if name == CACHE:
        if trace is None or quick or smoke or extra:
            raise RowwiseError("bench cache", "--trace, such as --trace zipf:1.05:100000, and no --quick or --smoke")
        from rowwise.cli.bench_cache import bench_cache

        bench_cache(trace, rows_cached, policy, as_json=as_json)
        return
    for option, value in (("trace", trace), ("rows-cached", rows_cached), ("policy", policy), ("json", as_json)):
        if value:
            raise RowwiseError(f"--{option} is for the benchmark cache", "rowwise bench cache --trace TRACE")
    scripts = find_benchmarks()
    options = [flag for flag, chosen in (("--quick", quick), ("--smoke", smoke)) if chosen]
    if every:
        single = {name: script for name, script in scripts.items() if name not in COLLECTIONS}
        raise typer.Exit(run_all(single, options if smoke else [*options, "--save"]))
    if show or name is None:
        print("\n".join(describe_benchmarks(scripts)))
        return
    if name not in scripts:
        guess = did_you_mean(name, scripts)
        advice = f"; {guess}" if guess else f": expected one of {', '.join(scripts)}."
        raise RowwiseError(f"no benchmark {name!r}{advice} See rowwise bench --list")
    code = subprocess.run([sys.executable, str(scripts[name]), *options, *(extra or [])], check=False).returncode
    raise typer.Exit(code if code >= 0 else SIGNAL_BASE - code)


def find_benchmarks() -> dict[str, Path]:
    """The benchmarks of the checkout around the current folder, else of the one that this package runs from."""
    for folder in _candidate_folders():
        # Other projects have a folder benchmarks/ too; this one is next to src/rowwise.
        if (folder / "src" / "rowwise").is_dir() and (folder / "benchmarks").is_dir():
            return {script.stem: script for script in sorted((folder / "benchmarks").glob("*.py"))}
    raise RowwiseError("no folder benchmarks/ here or above: run this command in a checkout of the rowwise sources")


def describe_benchmarks(scripts: dict[str, Path]) -> Iterator[str]:
    """Two lines for each benchmark from its docstring: its question, and its duration and needs."""
    for name, script in scripts.items():
        lines = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").splitlines()
        yield f"{name:18}{lines[0] if lines else ''}"
        notes = [line for line in lines if line.startswith(("Takes: ", "Needs: "))]
        if notes:
            yield f"{'':18}{'. '.join(notes)}"


def run_all(scripts: dict[str, Path], options: list[str]) -> int:
    """Run the benchmarks one after another and print a line for each; returns 1 if one failed, else 0."""
    failed = 0
    for name, script in scripts.items():
        begin_s = time.monotonic()
        with tempfile.TemporaryFile() as output:
            code = _run_with_limit([sys.executable, "-W", "ignore", str(script), *options], output)
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
        duration = f"{name:18}{time.monotonic() - begin_s:7.1f} s"
        outcome = "stopped: over the limit" if code is None else _read_outcome(code, lines)
        print(f"{duration}  {outcome}", flush=True)
        if not outcome.startswith("ok"):
            failed = 1
            print("\n".join(f"    {line[:400]}" for line in lines[-LAST_LINES:]), flush=True)
    return failed


def _run_with_limit(command: list[str], output: IO[bytes]) -> int | None:
    """The exit code, or None after a timeout of LIMIT_s, which kills the process group."""
    with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            return process.wait(LIMIT_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _read_outcome(code: int, lines: list[str]) -> str:
    """One line on the result, which is the last printed line as JSON: "ok" with its floors, or the failure."""
    if code:
        return f"exit code {code}"
    try:
        result = json.loads(lines[-1])
        missed = [floor["name"] for floor in result["floors"] if not floor["ok"]]
        counts = f"{len(result['floors'])} floors, {len(missed)} missed, {len(result['rows'])} rows"
    except (IndexError, KeyError, TypeError, ValueError):
        return "its last line is not a result as JSON"
    return f"ok  {counts}" + "".join(f"\n    missed: {name}" for name in missed)


def _candidate_folders() -> Iterator[Path]:
    for start in (Path.cwd(), *(Path(folder) for folder in rowwise.__path__)):
        yield from (start, *start.parents)

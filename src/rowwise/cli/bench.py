"""`rowwise bench`: runs the benchmarks of the source checkout with the Python that runs rowwise.

Benchmarks are scripts that live beside the sources and are not installed; this command only finds them, so
that `rowwise bench ops` works from any folder of a checkout. Every script right in `benchmarks/` is one: it takes
`--quick`, `--smoke` and `--save`, its docstring begins with the question that it answers and ends with what it takes
and needs, and its last printed line is its result as JSON.
"""

import ast
import difflib
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
from rowwise.errors import RowwiseError

KILLED = 128  # shells report 128 + signal for a command that a signal ended
SHOWN = 30  # lines of one that failed
LIMIT_s = 3 * 3600.0  # of one of all


def bench(
    name: Annotated[str | None, typer.Argument(help="Which benchmark; without one they are listed.")] = None,
    extra: Annotated[
        list[str] | None, typer.Argument(help="Passed on to the benchmark; put -- before options.")
    ] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="A coarser answer, mostly in under a minute.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny: does it run, and are its results right?")] = False,
    show: Annotated[bool, typer.Option("--list", help="What each answers, takes and needs.")] = False,
    every: Annotated[bool, typer.Option("--all", help="All of them; results go to benchmarks/results.")] = False,
) -> None:
    """Run one of the benchmarks, or all, or list them.

    Example: rowwise bench --list

    Example: rowwise bench ops --quick

    Example: rowwise bench ops -- --threads 1 --save

    Example: rowwise bench --all --smoke
    """
    found = find_benchmarks()
    options = [flag for flag, given in (("--quick", quick), ("--smoke", smoke)) if given]
    for both, got in (
        (every and name is not None, f"both a benchmark, {name!r}, and --all"),
        (show and name is not None, f"both a benchmark, {name!r}, and --list"),
        (show and every, "both --list and --all"),
        (quick and smoke, "both --quick and --smoke"),
    ):
        if both:
            raise RowwiseError(f"{got}: want one of the two")
    if every:
        raise typer.Exit(run_all(found, options if smoke else [*options, "--save"]))
    if (show or name is None) and options:
        raise RowwiseError(f"{options[0]} where nothing is run: want the name of a benchmark, or --all")
    if show or name is None:
        print("\n".join(about(found)))
        return
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1)
        guess = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(found)}."
        raise RowwiseError(f"no benchmark {name!r}{guess} rowwise bench --list says what each answers")
    code = subprocess.run([sys.executable, str(found[name]), *options, *(extra or [])], check=False).returncode
    raise typer.Exit(code if code >= 0 else KILLED - code)


def find_benchmarks() -> dict[str, Path]:
    """The benchmarks of the checkout around the current folder, else of the one this package runs from."""
    for folder in _candidates():
        # Any project may have a folder of this name; ours stands beside our sources.
        if (folder / "src" / "rowwise").is_dir() and (folder / "benchmarks").is_dir():
            return {script.stem: script for script in sorted((folder / "benchmarks").glob("*.py"))}
    raise RowwiseError("no folder benchmarks/ here or above: run this inside a checkout of the rowwise sources")


def about(found: dict[str, Path]) -> Iterator[str]:
    """Two lines for each: the question, and what it takes and needs, as its docstring has them."""
    for name, script in found.items():
        lines = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").splitlines()
        yield f"{name:18}{lines[0] if lines else ''}"
        notes = [line for line in lines if line.startswith(("Takes: ", "Needs: "))]
        if notes:
            yield f"{'':18}{'. '.join(notes)}"


def run_all(found: dict[str, Path], options: list[str]) -> int:
    """One after the other, a line each; 1 if one of them did not end well."""
    failed = 0
    for name, script in found.items():
        begin_s = time.monotonic()
        with tempfile.TemporaryFile() as output:
            code = _run([sys.executable, "-W", "ignore", str(script), *options], output)
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
        took = f"{name:18}{time.monotonic() - begin_s:7.1f} s"
        outcome = "stopped: over the limit" if code is None else _outcome(code, lines)
        print(f"{took}  {outcome}", flush=True)
        if not outcome.startswith("ok"):
            failed = 1
            print("\n".join(f"    {line[:400]}" for line in lines[-SHOWN:]), flush=True)
    return failed


def _run(command: list[str], output: IO[bytes]) -> int | None:
    """The exit code; None: it took too long. Its own processes end with it."""
    with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            return process.wait(LIMIT_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _outcome(code: int, lines: list[str]) -> str:
    """What the last line, a result as JSON, says of floors."""
    if code:
        return f"exit code {code}"
    try:
        result = json.loads(lines[-1])
        missed = [floor["name"] for floor in result["floors"] if not floor["ok"]]
        counted = f"{len(result['floors'])} floors, {len(missed)} missed, {len(result['rows'])} rows"
    except (IndexError, KeyError, TypeError, ValueError):
        return "its last line is no result"
    return f"ok  {counted}" + "".join(f"\n    missed: {name}" for name in missed)


def _candidates() -> Iterator[Path]:
    for start in (Path.cwd(), *(Path(folder) for folder in rowwise.__path__)):
        yield from (start, *start.parents)

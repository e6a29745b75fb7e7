"""`rowwise bench`: runs a benchmark of the source checkout with the Python that runs rowwise.

Benchmarks are scripts that live beside the sources and are not installed; this command only finds them, so
that `rowwise bench ops` works from any folder of a checkout. A benchmark is a script that takes `--quick`.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import rowwise
from rowwise.errors import RowwiseError

KILLED = 128  # shells report 128 + signal for a command that a signal ended


def bench(
    name: Annotated[str | None, typer.Argument(help="Which benchmark; without one they are listed.")] = None,
    extra: Annotated[
        list[str] | None, typer.Argument(help="Passed on to the benchmark; put -- before options.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A coarser answer in under a minute.")] = False,
) -> None:
    """Run one of the benchmarks, or list them.

    Example: rowwise bench ops --quick

    Example: rowwise bench ops -- --save ops.json
    """
    found = find_benchmarks()
    if name is None:
        for script in found.values():
            print(f"{script.stem:16} {first_line(script)}")
        return
    if name not in found:
        raise RowwiseError(f"no benchmark {name!r}; there are: {', '.join(found)}")
    options = ["--quick"] if quick else []
    code = subprocess.run([sys.executable, str(found[name]), *options, *(extra or [])], check=False).returncode
    raise typer.Exit(code if code >= 0 else KILLED - code)


def find_benchmarks() -> dict[str, Path]:
    """The benchmarks of the checkout around the current folder, else of the one this package runs from."""
    for folder in _candidates():
        # Any project may have a folder of this name; ours stands beside our sources.
        if (folder / "src" / "rowwise").is_dir() and (folder / "benchmarks").is_dir():
            scripts = sorted((folder / "benchmarks").glob("*.py"))
            return {script.stem: script for script in scripts if "--quick" in script.read_text(encoding="utf-8")}
    raise RowwiseError("no folder benchmarks/ here or above: run this inside a checkout of the rowwise sources")


def first_line(script: Path) -> str:
    """The first line of a script's docstring."""
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    return (docstring or "").partition("\n")[0]


def _candidates() -> Iterator[Path]:
    for start in (Path.cwd(), *(Path(folder) for folder in rowwise.__path__)):
        yield from (start, *start.parents)

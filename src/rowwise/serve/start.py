"""Starts `rowwise serve` as a process, for what measures or tests a server."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

ADDRESS = " at http://"


class StartedServer(NamedTuple):
    """A server that takes requests."""

    process: subprocess.Popen[str]
    url: str  # of its scores


def start_server(
    arguments: Sequence[str],
    *,
    errors: IO[str] | None = None,
    folder: Path | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> StartedServer | None:
    """Start a server on any free port, and wait until it takes requests; None: it ended before.

    Args:
        arguments: of `rowwise serve`, but for the port.
        errors: gets its error output; None: that of this process.
        folder: in which it runs.
        tell: called with the lines before its address.
    """
    command = [sys.executable, "-m", "rowwise", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    try:
        for line in iter(process.stdout.readline, ""):
            if ADDRESS in line:
                threading.Thread(target=_read_all, args=(process.stdout,), daemon=True).start()
                return StartedServer(process, line.partition(" at ")[2].strip())
            tell(line.rstrip())
    except BaseException:  # Ctrl-C
        end_server(process, 0)
        raise
    process.stdout.close()
    process.wait()
    return None


def _read_all(pipe: IO[str]) -> None:
    """Read what a server prints, so that its pipe is never full."""
    with pipe:
        pipe.read()


def end_server(process: subprocess.Popen[str], limit_s: float) -> None:
    """Let a server answer the requests that it has, within a time."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
    process.kill()
    process.wait()


def processes_of(process: subprocess.Popen[str]) -> Iterator[Path]:
    """The folders in /proc of a process and its descendants; its own is the first."""
    waiting = [process.pid]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        yield folder
        with suppress(OSError):  # it has ended meanwhile
            waiting += map(int, (folder / f"task/{folder.name}/children").read_text().split())


def memory_of(process: subprocess.Popen[str]) -> list[int]:
    """Bytes of a server's processes without what is shared: the host, and then workers, the largest first."""
    found: list[int] = []
    for folder in processes_of(process):
        with suppress(OSError):  # it has ended meanwhile
            text = (folder / "smaps_rollup").read_text()
            found.append(1024 * sum(int(kb) for kb in re.findall(r"^Pss_(?:Anon|File): +(\d+)", text, re.M)))
    return [*found[:1], *sorted(found[1:], reverse=True)]


class CoreTimes(NamedTuple):
    """Seconds of the main threads of a server's processes so far."""

    run_s: float
    waited_s: float  # they were ready, but other work had their cores


def core_times(process: subprocess.Popen[str]) -> CoreTimes:
    """The times of a server's processes; those that have ended count no more."""
    found = [0.0, 0.0]
    for folder in processes_of(process):
        with suppress(OSError):  # it has ended meanwhile
            for k, ns in enumerate((folder / "schedstat").read_text().split()[:2]):
                found[k] += int(ns) / 1e9
    return CoreTimes(*found)

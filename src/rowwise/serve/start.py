"""Starts `rowwise serve` as a process, for benchmarks and tests."""

import os
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
    """A server that accepts requests."""

    process: subprocess.Popen[str]
    url: str  # of its score endpoint


def start_server(
    arguments: Sequence[str],
    *,
    errors: IO[str] | None = None,
    folder: Path | None = None,
    log: Callable[[str], object] = lambda line: None,
) -> StartedServer | None:
    """Start a server on a free port, and wait until it accepts requests; None if it ended before.

    Args:
        arguments: of `rowwise serve`, without --port.
        errors: file for its error output, or None to inherit.
        folder: its working folder.
        log: called with the lines printed before its address.
    """
    command = [sys.executable, "-m", "rowwise", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    try:
        for line in iter(process.stdout.readline, ""):
            if ADDRESS in line:
                threading.Thread(target=_drain_pipe, args=(process.stdout,), daemon=True).start()
                return StartedServer(process, line.partition(" at ")[2].strip())
            log(line.rstrip())
    except BaseException:  # Ctrl-C
        end_server(process, 0)
        raise
    process.stdout.close()
    process.wait()
    return None


def _drain_pipe(pipe: IO[str]) -> None:
    """Read the output of a server, so that its pipe never fills up."""
    with pipe:
        pipe.read()


def end_server(process: subprocess.Popen[str], limit_s: float) -> None:
    """Terminate a server gracefully; kill it after `limit_s`."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
    process.kill()
    process.wait()


def processes_of(process: subprocess.Popen[str]) -> Iterator[Path]:
    """The folders in /proc of a process and of its descendants, in this order."""
    pids = [process.pid]
    while pids:
        folder = Path(f"/proc/{pids.pop()}")
        yield folder
        with suppress(OSError):  # it has ended meanwhile
            pids += map(int, (folder / f"task/{folder.name}/children").read_text().split())


def memory_of(process: subprocess.Popen[str]) -> list[int]:
    """Private bytes of the processes of a server: first the host, then workers in descending order."""
    sizes: list[int] = []
    for folder in processes_of(process):
        with suppress(OSError):  # it has ended meanwhile
            text = (folder / "smaps_rollup").read_text()
            sizes.append(1024 * sum(int(kb) for kb in re.findall(r"^Pss_(?:Anon|File): +(\d+)", text, re.M)))
    return [*sizes[:1], *sorted(sizes[1:], reverse=True)]


def is_loader(pid: int) -> bool:
    """Whether a process of a server loads versions: no other one runs only while a processor is idle."""
    with suppress(OSError):  # it has ended meanwhile
        return os.sched_getscheduler(pid) == os.SCHED_IDLE
    return False


class CoreTimes(NamedTuple):
    """Cumulated seconds of the main threads of a server."""

    run_s: float
    waited_s: float  # runnable, but waiting for a core


def core_times(process: subprocess.Popen[str]) -> CoreTimes:
    """The times of all running processes of a server."""
    seconds = [0.0, 0.0]
    for folder in processes_of(process):
        with suppress(OSError):  # it has ended meanwhile
            for k, ns in enumerate((folder / "schedstat").read_text().split()[:2]):
                seconds[k] += int(ns) / 1e9
    return CoreTimes(*seconds)

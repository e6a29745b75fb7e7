"""A small disk for out-of-space drills: a tmpfs in a user namespace, or a limit on file sizes if that is forbidden.

A shell keeps the namespace (user and mounts) alive; commands enter it, and this process reads their files through the
shell's root in /proc. Known limit: without Linux namespaces files are limited, not the disk.
"""

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SCRIPT = """
mount -t tmpfs -o size="$2" rowwise "$1" && echo mounted && read -r line &&
mount -o remount,size=1g "$1" && echo grown && read -r line
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallDisk:
    """Paths of the disk, the command prefix for using it, and a function that enlarges it."""

    folder: Path  # path for commands
    path_here: Path  # path for this process
    description: str
    enter: tuple[str, ...]  # prefix of commands
    limit: Callable[[], None] | None  # preexec_fn of processes
    grow: Callable[[], None]


@contextmanager
def small_disk(folder: Path, size_bytes: int, file_bytes: int) -> Iterator[SmallDisk]:
    """A disk of `size_bytes`, or, if users cannot mount, files of at most `file_bytes`."""
    folder.mkdir(parents=True)
    shell = _mount(folder, size_bytes)
    if shell is None:
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))  # noqa: E731
        description = f"files limited to {file_bytes >> 10} kB, as this system does not let users mount"
        paths = {"folder": folder, "path_here": folder}
        yield SmallDisk(**paths, description=description, enter=(), limit=limit, grow=lambda: None)
        return
    paths = {"folder": folder, "path_here": Path(f"/proc/{shell.pid}/root{folder.resolve()}")}
    enter = ("nsenter", f"--target={shell.pid}", "--user", "--mount", "--preserve-credentials")
    description = f"a tmpfs of {size_bytes >> 10} kB"
    with shell:
        try:
            grow = lambda: _send_line(shell, "grown")  # noqa: E731
            yield SmallDisk(**paths, description=description, enter=enter, limit=None, grow=grow)
        finally:
            shell.kill()  # removes the disk, too


def _mount(folder: Path, size_bytes: int) -> subprocess.Popen[str] | None:
    """The shell that keeps the disk mounted, or None if users cannot mount."""
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("nsenter") is None:
        return None
    command = [unshare, "--user", "--map-root-user", "--mount", "sh", "-c", SCRIPT, "sh", str(folder), str(size_bytes)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    shell = subprocess.Popen(command, text=True, **pipes)
    assert shell.stdout is not None
    if shell.stdout.readline() == "mounted\n":
        return shell
    with shell:
        shell.kill()
    return None


def _send_line(shell: subprocess.Popen[str], answer: str) -> None:
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write("go on\n")
    shell.stdin.flush()
    if shell.stdout.readline() != f"{answer}\n":
        raise OSError(f"the small disk could not be {answer}")

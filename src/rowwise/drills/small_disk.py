"""A disk that is soon full: a small tmpfs that only this user sees, or where that is not allowed a limit on files.

The tmpfs is mounted in a namespace of its own (user and mounts) that a shell keeps alive; commands enter it, and what
they left is read through the shell's entry in /proc. Known limits: systems other than Linux have the limit only, by
which files, not disks, are too large.
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
    """A file system of limited size: its folder, and a way to enlarge it."""

    folder: Path  # for commands
    seen: Path  # for this process
    how: str  # for people
    enter: tuple[str, ...]  # what a command begins with
    limit: Callable[[], None] | None  # to be called in a process before it begins
    grow: Callable[[], None]


@contextmanager
def small_disk(folder: Path, size_bytes: int, file_bytes: int) -> Iterator[SmallDisk]:
    """A disk of a size; where there can be none, files of at most another size."""
    folder.mkdir(parents=True)
    shell = _mount(folder, size_bytes)
    if shell is None:
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))  # noqa: E731
        how = f"files limited to {file_bytes >> 10} kB, as this system mounts nothing for a user"
        yield SmallDisk(folder=folder, seen=folder, how=how, enter=(), limit=limit, grow=lambda: None)
        return
    seen = Path(f"/proc/{shell.pid}/root{folder.resolve()}")
    enter = ("nsenter", f"--target={shell.pid}", "--user", "--mount", "--preserve-credentials")
    how = f"a tmpfs of {size_bytes >> 10} kB"
    with shell:
        try:
            yield SmallDisk(
                folder=folder, seen=seen, how=how, enter=enter, limit=None, grow=lambda: _tell(shell, "grown")
            )
        finally:
            shell.kill()  # the disk goes with it


def _mount(folder: Path, size_bytes: int) -> subprocess.Popen[str] | None:
    """The shell that holds the disk, or nothing where there can be none."""
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


def _tell(shell: subprocess.Popen[str], answer: str) -> None:
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write("go on\n")
    shell.stdin.flush()
    if shell.stdout.readline() != f"{answer}\n":
        raise OSError(f"the small disk could not be {answer}")

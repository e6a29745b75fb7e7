"""Processes and what they start, by what the system tells of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path


def memory_bytes(pid: int) -> int:
    """Of a process and its descendants; pages that several share count once."""
    return _sum_of(pid, lambda folder: 1024 * _kilobytes(folder / "smaps_rollup"))


def processor_s(pid: int, *, ended: bool = False) -> float:
    """Of a process and its descendants; `ended`: of those that have ended, too."""

    def ticks(folder: Path) -> int:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11 : 15 if ended else 13]))

    return _sum_of(pid, ticks) / os.sysconf("SC_CLK_TCK")


def descriptors(pid: int) -> int:
    """Open files of a process and its descendants."""
    return _sum_of(pid, lambda folder: len(os.listdir(folder / "fd")))


def children_of(pid: int) -> list[int]:
    """Processes that a process has started."""
    found: list[int] = []
    with suppress(OSError):  # it has ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _kilobytes(path: Path) -> int:
    return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("Pss:")), 0)


def _sum_of(pid: int, count: Callable[[Path], int]) -> int:
    total = 0
    for folder in _family_of(pid):
        with suppress(OSError):  # it has ended meanwhile
            total += count(folder)
    return total


def _family_of(pid: int) -> Iterator[Path]:
    """The folders in /proc of a process and its descendants."""
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        yield Path(f"/proc/{one}")
        waiting += children_of(one)

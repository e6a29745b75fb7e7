"""Processes and what they start, by what the system tells of them."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def family_of(pid: int) -> Iterator[Path]:
    """The folders in /proc of a process and its descendants."""
    waiting = [pid]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        yield folder
        with suppress(OSError):  # it has ended meanwhile
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())


def memory_of(folder: Path) -> int:
    """Bytes of a process; pages that several share count once in all of them together."""
    lines = (folder / "smaps_rollup").read_text().splitlines()
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def ticks_of(folder: Path, *, ended: bool = False) -> int:
    """Ticks of the processor that a process took; `ended`: and its children that have ended."""
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if ended else 13]))

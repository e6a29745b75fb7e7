"""How much memory this process can still have: what the machine has free, within the limits of its control groups.

Read from files of Linux, whose place is an argument; where there are none nothing is known. Pages that only cache files
count as free, as the kernel gives them up, and so does swap.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def free_bytes(root: Path = ROOT) -> int | None:
    """The least of all limits; None: nobody says."""
    found = [size for size in (_of_machine(root), *_of_groups(root)) if size is not None]
    return max(min(found), 0) if found else None


def _of_machine(root: Path) -> int | None:
    lines = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdecimal()}
    return sizes["MemAvailable:"] + sizes.get("SwapFree:", 0) if "MemAvailable:" in sizes else None


def _of_groups(root: Path) -> Iterator[int | None]:
    """What the control group of this process and all that it is inside of leave, by both versions of them."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds:
            names = ("memory.max", "memory.current", "")
            tops = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified")
        elif "memory" in kinds.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            tops = (root / "sys/fs/cgroup/memory",)
        else:
            continue
        for top in tops:
            # In a container the path may be that of the host, of which only the top is seen here.
            inside = top / path.strip("/")
            for folder in (inside, *inside.parents):
                yield _left(folder, *names)
                if folder == top:
                    break


def _left(folder: Path, most: str, used: str, prefix: str) -> int | None:
    limit, now = _text(folder / most).strip(), _text(folder / used).strip()
    if not limit.isdecimal() or not now.isdecimal():  # "max", or no such file
        return None
    words = (line.split() for line in _text(folder / "memory.stat").splitlines())
    cached = {f"{prefix}inactive_file", f"{prefix}active_file"}
    return int(limit) - int(now) + sum(int(count) for name, count in words if name in cached)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

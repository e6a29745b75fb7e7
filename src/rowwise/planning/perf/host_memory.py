"""Memory available to this process: free memory of the machine, within the limits of its control groups.

Read from files of Linux under `root`; unknown on other systems. Pages that only cache files count as free, as the
kernel evicts them, and so does swap.
"""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
IN_MEMORY = ("tmpfs", "ramfs")  # kinds of file systems


def free_bytes(root: Path = ROOT) -> int | None:
    """The least of all limits; None if the system reports none."""
    limits = [size for size in (_free_of_machine(root), *_free_of_cgroups(root)) if size is not None]
    return max(min(limits), 0) if limits else None


def is_in_memory(folder: Path, root: Path = ROOT) -> bool:
    """Whether files in a folder are in memory: its file system is a tmpfs."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    device = existing.stat().st_dev
    lines = (line.split() for line in _read_text(root / "proc/self/mountinfo").splitlines())
    kinds = {words[2]: words[words.index("-") + 1] for words in lines if "-" in words}
    return kinds.get(f"{os.major(device)}:{os.minor(device)}") in IN_MEMORY


def _free_of_machine(root: Path) -> int | None:
    lines = (line.split() for line in _read_text(root / "proc/meminfo").splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdecimal()}
    return sizes["MemAvailable:"] + sizes.get("SwapFree:", 0) if "MemAvailable:" in sizes else None


def _free_of_cgroups(root: Path) -> Iterator[int | None]:
    """Bytes left in the control group of this process and in those that contain it, cgroup v1 and v2."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
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
            # In a container the path may be the host's, of which only the top is mounted here.
            inside = top / path.strip("/")
            for folder in (inside, *inside.parents):
                yield _free_of_cgroup(folder, *names)
                if folder == top:
                    break


def _free_of_cgroup(folder: Path, limit_name: str, usage_name: str, prefix: str) -> int | None:
    limit, usage = _read_text(folder / limit_name).strip(), _read_text(folder / usage_name).strip()
    if not limit.isdecimal() or not usage.isdecimal():  # "max", or no such file
        return None
    words = (line.split() for line in _read_text(folder / "memory.stat").splitlines())
    cached = {f"{prefix}inactive_file", f"{prefix}active_file"}
    return int(limit) - int(usage) + sum(int(count) for name, count in words if name in cached)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

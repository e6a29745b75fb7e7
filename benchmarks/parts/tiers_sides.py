"""One side of `tiers.py` in a process of its own: `python -m parts.tiers_sides WORK` takes JSON, and prints it.

rowwise in memory and on disk take turns in one process.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from parts.command import run_part
from parts.tiers_peers import MemoryMapped, RocksRows
from parts.tiers_rowwise import Rowwise
from parts.tiers_work import RowsSide, Size, ids_by_table, random_reads_s, time_rows
from rowwise.train.recorder import peak_memory_bytes

OURS, MAPPED, ROCKS = "rowwise", "memory-mapped", "RocksDB"
PEERS = (MAPPED, ROCKS)
RATE_s, RATE_bytes = 2.0, 1 << 30  # of the random reads that the disk is measured by
THREADS = 2


class Steps(NamedTuple):
    """Numbers of steps: of rows alone, of rows by peers, of training that is not timed, and that is."""

    rows: int
    peers: int
    settle: int
    train: int


def run_side(side: str, size: Size, steps: Steps, folder: Path) -> dict:
    """The side's numbers, from its own process."""
    work = json.dumps({"side": side, "size": size, "steps": steps, "folder": str(folder)})
    return json.loads(run_part("tiers_sides", work))


def measure_peer(side: str, size: Size, steps: Steps, folder: Path) -> dict:
    begin_s = time.perf_counter()
    peer = (MemoryMapped if side == MAPPED else RocksRows)(size, folder)
    filled_s = time.perf_counter() - begin_s
    seconds = [time_rows(peer, size, step) for step in range(steps.peers)]
    sums = sums_of(peer, size, steps) | {"cache_bytes": peer.cache_bytes}
    peer.close()
    return {"fill_s": filled_s, "rows_s": [one[0] for one in seconds], "end_s": [one[1] for one in seconds], **sums}


def sums_of(side: RowsSide, size: Size, steps: Steps) -> dict[str, float]:
    """Of the rows of a batch, after as many steps as peers take: by these sides are compared."""
    with torch.no_grad():
        last = side.look_up(ids_by_table(size, steps.peers - 1)).detach().double()
    return {"sum": float(last.sum()), "squares": float(last.square().sum())}


def measure_rowwise(size: Size, steps: Steps, folder: Path) -> dict:
    begin_s = time.perf_counter()
    memory, disk = Rowwise(size.in_memory(), None), Rowwise(size, folder)
    disk.fill()
    found: dict = {"fill_s": time.perf_counter() - begin_s, "memory_rows_s": [], "rows_s": []}
    reads = random_reads_s(folder, RATE_s, min(RATE_bytes, size.budget_bytes))
    for step in range(steps.rows):
        found["memory_rows_s"].append(time_rows(memory, memory.size, step)[0])
        found["rows_s"].append(time_rows(disk, size, step)[0])
        if step == steps.peers - 1:
            found |= sums_of(disk, size, steps)
    return (
        found
        | measure_training(memory, disk, steps)
        | {
            "reads_s": max(reads, random_reads_s(folder, RATE_s, min(RATE_bytes, size.budget_bytes))),
            "disk_bytes": disk.disk.disk_bytes,
            "direct": bool(fcntl.fcntl(disk.disk.file, fcntl.F_GETFL) & os.O_DIRECT),
        }
    )


def measure_training(memory: Rowwise, disk: Rowwise, steps: Steps) -> dict:
    for step in range(steps.rows, steps.rows + steps.settle):
        disk.train(step)
    before, first = disk.counts(), steps.rows + steps.settle
    memory_s, disk_s = [], []
    for step in range(first, first + steps.train):
        memory_s.append(memory.train(step))
        disk_s.append(disk.train(step))
    counts = {name: (count - before[name]) / steps.train for name, count in disk.counts().items()}
    return {"memory_train_s": memory_s, "train_s": disk_s, **counts}


def main() -> None:
    work = json.loads(sys.argv[1])
    side, size, steps, folder = work["side"], Size(*work["size"]), Steps(*work["steps"]), Path(work["folder"])
    torch.set_num_threads(THREADS)
    found = measure_peer(side, size, steps, folder) if side in PEERS else measure_rowwise(size, steps, folder)
    print(json.dumps(found | {"peak_bytes": peak_memory_bytes()}))


if __name__ == "__main__":
    main()

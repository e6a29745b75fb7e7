"""How fast are checkpoints beside plain copies of the same files, and how long does a save in the background block?

    python benchmarks/checkpoint.py [--quick | --smoke] [--only files] [--save]

About a gigabyte of tables (fp32, fp16 and int8 rows; row-wise Adagrad, Adagrad and Adam), one process. The two sides
take turns (A B A B), as disks are noisy; both leave the same bytes, and either both make sure that these are on the
disk or neither does. Ratios are of medians, and of the best. Sections:

    files       writing, and copying the files that were written; reading into memory that is there, and copying
    background  the time that training stands still in a save, over the time of a whole one, once buffers are there

The last printed line is one JSON object.

Takes: 3 minutes; --quick 20 seconds
Needs: 4 GB of disk
"""

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from parts.report import at_least, at_most, exactly, finish, options, parsed, show
from parts.timer import timed_s
from torch import nn

from rowwise import Adagrad, Adam, Embeddings, RowWiseAdagrad, Table
from rowwise.checkpoint import files
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import write
from rowwise.train.saved import CheckpointFolder
from rowwise.train.snapshot import collect, restore

AT_LEAST = {"write": 0.70, "read": 0.70}
AT_MOST = 0.15  # of a whole save
SECTIONS = ("files", "background")


class Net(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        k = 400 if args.smoke else 60_000 if args.quick else 1_000_000
        self.embeddings = Embeddings(
            (
                Table(name="long", rows=k, dim=64, optimizer=RowWiseAdagrad()),
                Table(name="half", rows=2 * k, dim=64, optimizer=RowWiseAdagrad(), row_type="fp16"),
                Table(name="codes", rows=2 * k, dim=64, optimizer=RowWiseAdagrad(), row_type="int8"),
                Table(name="wide", rows=k // 4, dim=128, optimizer=Adam()),
                Table(name="old", rows=k // 8, dim=64, optimizer=Adagrad()),
            )
        )
        self.top = nn.Linear(512, 256)


def seconds(call: Callable[[], object]) -> float:
    os.sync()  # what was written or removed before is nobody's burden
    return timed_s(call)


@contextmanager
def unsynced(wanted: bool):
    """Without waiting for the disk, on our side, too."""
    real = os.fsync
    files.os.fsync = (lambda _: None) if wanted else real
    try:
        yield
    finally:
        files.os.fsync = real


def copy(source: Path, target: Path, sync: bool) -> None:
    """As plainly as it goes."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        if sync:
            files.sync(target / path.name)
    if sync:
        files.sync(target)


def read_plainly(folder: Path, buffer: bytearray) -> None:
    at = 0
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(memoryview(buffer)[at : at + (4 << 20)]):
                at += count


def contents(model: Net) -> list[torch.Tensor]:
    """Rows, optimizer state and dense parameters."""
    arena = model.embeddings.arena
    return [arena.rows, arena.state, *(p.detach() for p in model.top.parameters())]


def measure_files(args: argparse.Namespace) -> list[dict]:
    model, rounds = Net(args), 2 if args.quick else 6
    parts, data = collect(model, {})
    before = [tensor.clone() for tensor in contents(model)]
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(call))

    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        at = Path(name)
        write(at / "kept", parts, data)
        size = sum(path.stat().st_size for path in (at / "kept").iterdir())
        buffer, found = bytearray(size), Checkpoint.open(at / "kept")
        for _ in range(rounds):
            for sync in (True, False):
                end = "" if sync else ", no fsync"
                with unsynced(not sync):
                    timed(f"write{end}", lambda: write(at / "ours", parts, data))
                shutil.rmtree(at / "ours")
                timed(f"copy{end}", lambda s=sync: copy(at / "kept", at / "copy", s))
                shutil.rmtree(at / "copy")
            timed("read", lambda: restore(found, model, {}))
            if any(not torch.equal(a, b) for a, b in zip(before, contents(model), strict=True)):
                raise AssertionError("what was read is not what was written")
            timed("copy to read", lambda: copy(at / "kept", at / "copy", False))
            shutil.rmtree(at / "copy")
            timed("read plainly", lambda: read_plainly(at / "kept", buffer))
    return [row("files", name, size, found) for name, found in times.items()]


def row(kind: str, name: str, size: int, times: list[float]) -> dict:
    median, best = statistics.median(times), min(times)
    found = {"kind": kind, "name": name, "bytes": size, "median_s": median, "best_s": best, "rounds": len(times)}
    show(found)
    return found


def measure_background(args: argparse.Namespace) -> list[dict]:
    model, rounds = Net(args), 2 if args.quick else 5
    whole, blocked, first = [], [], []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        here, behind = CheckpointFolder(Path(name) / "here"), CheckpointFolder(Path(name) / "behind", background=True)
        for step in range(rounds + 1):
            whole.append(seconds(lambda s=step: here.save(s, *collect(model, {}))))
            here.remove_after(-1)
            blocked.append(seconds(lambda s=step: behind.save(s, *collect(model, {}))))
            size = sum(part.size_bytes for part in collect(model, {})[0])
            behind.wait()
            behind.remove_after(-1)
    first, blocked = blocked[:1], blocked[1:]
    named = {"whole save": whole[1:], "blocked": blocked, "blocked by the first": first}
    return [row("background", what, size, found) for what, found in named.items()]


MEASURES = {"files": measure_files, "background": measure_background}


def floors_of(rows: list[dict]) -> list[dict]:
    found = {r["name"]: r for r in rows}
    floors = []
    if "write" in found:
        pairs = (
            ("write", "copy", "write"),
            ("write, no fsync", "copy, no fsync", "write"),
            ("read", "copy to read", "read"),
        )
        for ours, theirs, kind in pairs:
            for which in ("median_s", "best_s"):
                value = found[theirs][which] / found[ours][which]
                least = AT_LEAST[kind] if which == "median_s" else None
                name = f"{ours} over a plain copy, {which.removesuffix('_s')}"
                floors.append(at_least(name, value, least))
        value = found["read plainly"]["median_s"] / found["read"]["median_s"]
        floors.append(at_least("read over a plain read", value, None))
    if "blocked" in found:
        value = found["blocked"]["median_s"] / found["whole save"]["median_s"]
        floors.append(at_most("blocked by a save in the background, of a whole one", value, AT_MOST))
    return floors


def smoke_floors(rows: list[dict]) -> list[dict]:
    """What was read is compared with what was written."""
    return [exactly("ways to write and read", len(rows), 10)]


def main() -> None:
    parser = options("checkpoint", __doc__)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--folder", type=Path, help="the disk to write to; default: where temporary files go")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parsed(parser)
    torch.set_num_threads(args.threads)
    rows = [r for name in SECTIONS if args.only in (None, name) for r in MEASURES[name](args)]
    floors = smoke_floors(rows) if args.smoke else floors_of(rows)
    finish("checkpoint", rows, floors, args, threads=args.threads)


if __name__ == "__main__":
    main()

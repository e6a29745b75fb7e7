"""How fast do checkpoints travel to an S3 server and back, beside plain objects of the same sizes by the same client?

    python benchmarks/storage.py [--quick | --smoke] [--save]

The server is a process of this machine (`parts/s3_server.py`), on the same cores, with its objects in memory where
/dev/shm is. Sides take turns. What is measured:

    write   a checkpoint that is copied to the server, every byte verified on the way; and its files, put as they are
    read    a checkpoint that is read into tensors, every byte verified; and its files, fetched into memory

There is no network and no cloud here: the figures show what checkpoints add to their client.

The last printed line is one JSON object.

Takes: 3 minutes; --quick 40 seconds
Needs: 2 GB of memory
"""

import argparse
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from parts.report import at_least, exactly, finish, options, parsed, show
from parts.s3_server import s3_server
from parts.timer import timed_s

from rowwise.base.storage.cloud import CONCURRENCY, CloudStorage, PART_bytes, RANGE_bytes
from rowwise.base.storage.folder import StorageFolder
from rowwise.checkpoint.copy import copy_checkpoint
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.read import STORE_THREADS, Checkpoint
from rowwise.checkpoint.write import write

AT_LEAST = 0.80  # of what the client reaches with plain objects
KEYS = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
FILES = 2  # at once, on both sides
THREADS = STORE_THREADS * CONCURRENCY  # of plain reads, as many requests as rowwise has


def ranges_of(lead: str, files: list[Path]) -> list[tuple[str, int, int, int]]:
    """Objects with a range each, and where its bytes go."""
    found, done = [], 0
    for path in files:
        size = path.stat().st_size
        spans = [(at, min(at + RANGE_bytes, size)) for at in range(0, size, RANGE_bytes)]
        found += [(f"{lead}/{path.name}", begin, end, done + begin) for begin, end in spans]
        done += size
    return found


class Plain:
    """The client alone: obstore, with as many requests at once as rowwise has."""

    def __init__(self, endpoint: str) -> None:
        import obstore

        self.client = obstore
        self.store = obstore.store.S3Store("bucket", endpoint=endpoint, client_options={"allow_http": True}, **KEYS)

    def put(self, files: list[Path]) -> None:
        def one(path: Path) -> None:
            self.client.put(self.store, f"plain/{path.name}", path, chunk_size=PART_bytes, max_concurrency=CONCURRENCY)

        with ThreadPoolExecutor(FILES) as pool:
            list(pool.map(one, files))

    def get(self, files: list[Path], into: memoryview) -> None:
        def one(key: str, begin: int, end: int, at: int) -> None:
            into[at : at + end - begin] = memoryview(self.client.get_range(self.store, key, start=begin, end=end))

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(one, *zip(*ranges_of("plain", files), strict=True)))


def measure(args: argparse.Namespace) -> list[dict]:
    rows, rounds = (4_000, 1) if args.smoke else (400_000, 5) if args.quick else (1_500_000, 5)
    torch.manual_seed(0)
    times: dict[str, list[float]] = {}
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name, s3_server(Path(name)) as server:
        table = torch.randn(rows, 64)
        write(Path(name) / "step-000000001", [LocalShard.whole("model/x", table)], {})
        one = Checkpoint.open(Path(name) / "step-000000001")
        files = sorted(Path(name, "step-000000001").glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        storage = CloudStorage("s3://bucket", endpoint=server.endpoint, **KEYS)
        out = torch.zeros_like(table)
        plain_out = bytearray(size)
        shard = LocalShard.whole("model/x", out)
        plain = Plain(server.endpoint)
        for k in range(rounds + 1):
            took = {"rowwise write": timed_s(lambda k=k: copy_checkpoint(one, StorageFolder(storage, f"{k}")))}
            there = Checkpoint.open(StorageFolder(storage, f"{k}/step-000000001"))
            out.zero_()
            took["rowwise read"] = timed_s(lambda source=there: source.fill_all([shard]))
            if not torch.equal(out, table):
                raise AssertionError("what was read is not what was written")
            took["obstore write"] = timed_s(lambda: plain.put(files))
            took["obstore read"] = timed_s(lambda: plain.get(files, memoryview(plain_out)))
            for path in (Path(name) / "bucket").glob(f"{k}%2F*"):
                path.unlink()
            if k or args.smoke:  # the first round opens connections
                for what, s in took.items():
                    times.setdefault(what, []).append(s)
    return [row(what, size, found) for what, found in times.items()]


def row(name: str, size: int, times: list[float]) -> dict:
    median, best = statistics.median(times), min(times)
    found = {"name": name, "bytes": size, "median_s": median, "best_s": best, "rounds": len(times)}
    show(found)
    return found


def floors_of(rows: list[dict]) -> list[dict]:
    found = {r["name"]: r["median_s"] for r in rows}
    return [
        at_least(f"{kind} over plain objects", found[f"obstore {kind}"] / found[f"rowwise {kind}"], AT_LEAST)
        for kind in ("write", "read")
    ]


def main() -> None:
    args = parsed(options("storage", __doc__))
    rows = measure(args)
    floors = [exactly("equal tensors", 1, 1)] if args.smoke else floors_of(rows)
    finish("storage", rows, floors, args)


if __name__ == "__main__":
    main()

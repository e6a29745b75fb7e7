"""How fast do files become batches, beside decoding alone and what others make of the same files?

    python benchmarks/ingest.py [--quick | --smoke] [--only worker kernels] [--save]

Rows have 13 numbers, 26 ids, 4 lists of ids and a label. `worker` reads, transforms and encodes them, in turns with
only decoding the same file, and with others that do the same work (`parts/ingest_peers.py`); `kernels` are its inner
loops; `handoff` is a batch from process to process; `store` is a map of features laid out as columns; `scaling` is
how many workers a service comes to.

All rates are of a second of a processor, of all threads and processes that take part; ways take turns in one run, and
the best of the repeats counts; Ray, which has processes of its own, comes last. The last printed line is one JSON
object.

Takes: 20 minutes; --quick 2 minutes
Needs: the extras `peers` and `cluster` for DuckDB and Ray; what is missing is left out
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["POLARS_MAX_THREADS"] = "1"  # Arrow's threads too
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pyarrow as pa
import torch
from parts import ingest_data as data
from parts import ingest_handoff, ingest_kernels, ingest_scaling, ingest_store
from parts import ingest_peers as peers
from parts.report import at_least, at_most, exactly, finish, options, parsed, show

from rowwise import Table
from rowwise.ingest import Batcher, Batching
from rowwise.ingest.batcher import EncodedSplit
from rowwise.ingest.block import Bytes, allocate
from rowwise.ingest.parquet import ParquetReader
from rowwise.ingest.prepare import PreparationTask
from rowwise.ingest.service.local import Service, Workers

SECTIONS = ("worker", "kernels", "handoff", "store", "scaling")
LEAST = {"zstd": 0.75, "snappy": 0.80}  # of the speed of decoding
OVER = {"Polars": 1.4, "pyarrow and numpy": 2.2, "DuckDB": 2.5, "Ray Data": 4, "Dataset of rows, DataLoader": 25}
KERNELS = {"SigridHash": 200, "FirstX and hash": 250, "Bucketize": 40}  # million a second
DECODE = "decode only"
BATCH = 8192
SMOKE_ROWS = 1 << 10


class Slot:
    """Memory that is used again, as a worker has it."""

    def __init__(self) -> None:
        self._room = allocate(1 << 20)

    def __call__(self, count: int) -> Bytes:
        if len(self._room) < count:
            self._room = allocate(count + (1 << 20))
        return self._room[:count]


def prepare(task: PreparationTask, slot: Slot) -> int:
    """All splits of an epoch, as a worker does them."""
    return sum(task.open(index, 0).encode(allocator=slot).rows for index in task.order(0))


def worker(args: argparse.Namespace) -> Iterator[dict]:
    groups, repeats = (1, 1 if args.smoke else 3) if args.quick else (6, 5)
    with tempfile.TemporaryDirectory() as folder:
        paths = data.write(Path(folder), groups, SMOKE_ROWS if args.smoke else data.GROUP_ROWS)
        ways = worker_ways(paths)
        rates, counts = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
        for _ in range(repeats):
            for name, way in ways.items():
                ways[name[0], DECODE]()  # untimed: Arrow's memory is as a reader leaves it, whoever ran before
                begin_s = time.process_time()
                counts[name] = way()
                rates[name] = max(rates[name], counts[name] / (time.process_time() - begin_s))
        if not args.quick and peers.there("Ray Data"):  # it takes half a minute to start
            rates["zstd", "Ray Data"] = peers.ray_rate(paths["zstd"], repeats)
        yield from service(paths["zstd"])
    for (file, way), rate in rates.items():
        if rate:
            row = {"file": file, "way": way, "rows_s": rate, "of_decode": rate / rates[file, DECODE]}
            yield row | {"rows": counts.get((file, way))}
    for name in peers.PACKAGES:
        if not rates.get(("zstd", name)):
            note = "left out: not installed, it does not start here, or the run is a quick one"
            yield {"file": "zstd", "way": name, "note": note}


def worker_ways(paths: dict[str, Path]) -> dict[tuple[str, str], Callable[[], int]]:
    """File, and who reads it: gives how many rows there were."""
    ways: dict[tuple[str, str], Callable[[], int]] = {}
    for file, path in paths.items():
        make, slot = partial(data.tasks, path, verify=file == "checksums"), Slot()
        ways[file, DECODE] = lambda path=path: sum(table.num_rows for table in data.decoded(path))
        ways[file, "rowwise"] = partial(prepare, make(), slot)
        ways[file, "rowwise, shuffled"] = partial(prepare, make(shuffle=True), slot)
        if file != "checksums":
            ways[file, "rowwise, as transforms"] = partial(prepare, make(as_transforms=True), slot)
            shuffled = make(as_transforms=True, shuffle=True)
            ways[file, "rowwise, as transforms, shuffled"] = partial(prepare, shuffled, slot)
    for name, way in peers.ways().items():
        ways["zstd", name] = lambda way=way: sum(way(paths["zstd"]))
    return ways


def service(path: Path) -> Iterator[dict]:
    """The whole way: a worker's process, memory slots, batches of tensors in this one."""
    tables = [Table(name=name, rows=data.ROWS, dim=16) for name in (*data.IDS, *data.LISTS)]
    batcher = Batcher(ParquetReader(path), data.COLUMNS, tables, Batching(size=BATCH))
    with Service(batcher.task, Workers(count=1)) as ours:
        client = ours.client()
        batcher.use_splits(lambda epoch, at: map(EncodedSplit, client.splits(epoch, at, batcher.splits)))
        sum(len(batch.labels_BK) for batch in batcher)  # the slots have their memory from now on
        before = client.health.times
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        rows = sum(len(batch.labels_BK) for batch in batcher)
        wall_s, here_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        there_s = client.health.times.cpu_s - before.cpu_s
    row = {"file": "zstd", "way": "service to batches, shuffled", "rows_s": rows / (here_s + there_s)}
    yield row | {"rows_wall_s": rows / wall_s, "trainer_share": here_s / (here_s + there_s)}


def kernels(args: argparse.Namespace) -> Iterator[dict]:
    cases = ingest_kernels.cases(SMOKE_ROWS if args.smoke else ingest_kernels.COUNT)
    best: dict[tuple[str, str], float] = {}
    for _ in range(1 if args.smoke else 5 if args.quick else 25):
        for kernel, side, count, call in cases:
            begin_s = time.process_time()
            call()
            rate = count / (time.process_time() - begin_s) / 1e6
            best[kernel, side] = max(best.get((kernel, side), 0.0), rate)
    for (kernel, side), rate in best.items():
        yield {"kernel": kernel, "side": side, "million_s": rate}


def handoff(args: argparse.Namespace) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder:
        path = data.write(Path(folder), 1, SMOKE_ROWS if args.smoke else data.GROUP_ROWS)["zstd"]
        repeats, count = (1, 4 if args.smoke else 30) if args.quick else (4, 60)
        yield from ingest_handoff.measure(path, repeats, count, () if args.smoke else ingest_handoff.WAYS[1:])


def store(args: argparse.Namespace) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder:
        yield ingest_store.measure(Path(folder), *((100, 1) if args.smoke else (2000, 2) if args.quick else (4000, 5)))


def scaling(args: argparse.Namespace) -> Iterator[dict]:
    run_s, most = (1, 2) if args.smoke else (10 if args.quick else 30, ingest_scaling.MOST)
    yield ingest_scaling.measure(run_s, most)


RUN = {f.__name__: f for f in (worker, kernels, handoff, store, scaling)}


def of_worker(rows: list[dict]) -> Iterator[dict]:
    shares = {(r["file"], r["way"]): r["of_decode"] for r in rows if "of_decode" in r}
    for file, least in LEAST.items():
        for way in ("rowwise", "rowwise, shuffled"):
            yield at_least(f"worker, {file}: {way}, share of decoding", shares[file, way], least)
    for way, least in OVER.items():
        if shares.get(("zstd", way)):
            factor = shares["zstd", "rowwise"] / shares["zstd", way]
            yield at_least(f"worker, zstd: times as fast as {way}", factor, least)


def of_kernels(rows: list[dict]) -> Iterator[dict]:
    for row in rows:
        if row["side"] == "rowwise":
            yield at_least(f"{row['kernel']}: million a second", row["million_s"], KERNELS[row["kernel"]])


def of_handoff(rows: list[dict]) -> Iterator[dict]:
    rates = {row["way"]: row["gb_cpu_s"] for row in rows}
    slots, few, many = ingest_handoff.WAYS
    yield at_least("hand-off over memory slots: GB for each second of a processor", rates[slots], 8)
    yield at_least("hand-off: times as fast as torch's queue, 60 tensors", rates[slots] / rates[many], 10)
    yield at_least("hand-off: times as fast as torch's queue, 3 tensors", rates[slots] / rates[few], None)


def of_store(rows: list[dict]) -> Iterator[dict]:
    row = rows[0]
    speed = {one["step"]: one["speed"] for one in row["disk"]}
    name = "a tenth of the features: times less of a processor than the map"
    yield at_least(name, row["cpu_s"]["map"] / row["cpu_s"]["large groups"], 5)
    yield at_most("disk, of the map: flattened", speed["flattened"], 0.5)
    yield at_least("disk, times the flattened: coalesced", speed["coalesced"] / speed["flattened"], 1.5)
    yield at_least("disk, times the coalesced: reordered", speed["reordered"] / speed["coalesced"], 1)
    yield at_least("disk, of the map: reordered, large groups", speed["large groups"], 1)


def of_scaling(rows: list[dict]) -> Iterator[dict]:
    (row,) = rows
    yield at_most("scaling: workers, where three are needed", row["workers"], 4)
    yield at_least("scaling: workers", row["workers"], 3)
    yield at_most("scaling: share of the second half that the trainer waits", row["waits"], 0.05)


FLOORS = {
    "worker": of_worker,
    "kernels": of_kernels,
    "handoff": of_handoff,
    "store": of_store,
    "scaling": of_scaling,
}


SMOKE_WAYS = {"kernels": 9, "handoff": 1, "store": 1, "scaling": 1}  # rows of these sections


def smoke_floors(rows: list[dict], sections: list[str]) -> Iterator[dict]:
    """Every way of each section, and all rows by each of ours."""
    counts = Counter(row["section"] for row in rows)
    for section, wanted in SMOKE_WAYS.items():
        if section in sections:
            yield exactly(f"rows of {section}", counts[section], wanted)
    if "worker" in sections:
        ours = [row for row in rows if row["section"] == "worker" and row["way"].startswith("rowwise")]
        yield exactly("files and ways of ours", len(ours), 10)
        yield exactly("their rows", sum(row["rows"] for row in ours), 10 * SMOKE_ROWS)


def main() -> None:
    args = parsed(options("ingest", __doc__, only=SECTIONS))
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    rows, floors = [], []
    for section in args.only:
        begin_s = time.perf_counter()
        found = list(RUN[section](args))
        print(f"{section}: {time.perf_counter() - begin_s:.0f} s", flush=True)
        for row in found:
            show(row)
        rows += [{"section": section, **row} for row in found]
        floors += [] if args.smoke else [{**floor, "section": section} for floor in FLOORS[section](found)]
    if args.save and args.save.exists():
        before = json.loads(args.save.read_text())
        rows += [row for row in before["rows"] if row["section"] not in args.only]
        floors += [floor for floor in before["floors"] if floor["section"] not in args.only]
    if args.smoke:
        floors = list(smoke_floors(rows, args.only))
    finish("ingest", rows, floors, args)


if __name__ == "__main__":
    main()

"""The work of `ingest_data.py` as others would have it done: a generator of batches of tensors for each.

Each gives, for a row group or more, numbers as rows of a matrix, all ids in one array and where lists begin in
another: what our workers make. `arrow` stops earlier, at columns, which is all that Polars and DuckDB do themselves.
All use one thread. Apart from the measuring, and nothing is imported before it is asked for: a peer may not be there.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import parquet as pq

from parts import BENCHMARKS
from parts.ingest_data import DENSE, FIRST, IDS, LISTS, NAMES, ROWS
from parts.process_tree import processor_s

TRIES = 3  # of starting Ray, which somebody else on the machine may stop
PACKAGES = {"Polars": "polars", "DuckDB": "duckdb", "Ray Data": "ray"}
ITEMS = 1 << 14  # rows that are read one by one
BATCH = 8192
TIMES = 3  # that Ray reads a file, as its clock ticks a hundred times a second
Rows = Iterator[int]  # of one batch after another
Way = Callable[[Path], Rows]


def there(name: str) -> bool:
    """Whether a peer is installed."""
    try:
        version(PACKAGES.get(name, "torch"))
    except PackageNotFoundError:
        return False
    return True


def tensors(table: pa.Table) -> tuple:
    """Columns, with everything done to them, as one matrix and one jagged array of ids."""
    import torch

    dense = [torch.from_numpy(_numpy(table[name]).astype(np.float32, copy=False)) for name in DENSE]
    arrays = [_whole(table[name]) for name in LISTS]
    ids = [torch.from_numpy(_numpy(table[name]).astype(np.int64, copy=False)) for name in IDS]
    ids += [torch.from_numpy(_numpy(array.flatten())) for array in arrays]
    lengths = [torch.from_numpy(np.diff(_numpy(array.offsets)).astype(np.int64)) for array in arrays]
    labels = torch.from_numpy(_numpy(table["label"]).astype(np.float32))
    return torch.stack(dense, 1), torch.cat(ids), torch.cat(lengths), labels


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _numpy(array: pa.Array | pa.ChunkedArray) -> np.ndarray:
    if isinstance(array, pa.ChunkedArray):
        array = _whole(array)
    return array.to_numpy(zero_copy_only=False)


def with_numpy(path: Path) -> Rows:
    """Row groups, Arrow's compute functions and numpy."""
    with pq.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number, columns=list(NAMES), use_threads=False)
            yield len(tensors(_computed(table))[0])


def _computed(table: pa.Table) -> pa.Table:
    made: dict[str, pa.Array] = {"label": table["label"]}
    for name in DENSE:
        x_R = _numpy(pc.fill_null(table[name], pa.scalar(0, pa.float32())))
        made[name] = pa.array(np.log1p(np.maximum(x_R, np.float32(0))))
    for name in IDS:
        made[name] = pa.array(hashed(_numpy(table[name])))
    for name in LISTS:
        short = _whole(pc.list_slice(table[name], 0, FIRST))
        made[name] = pa.ListArray.from_arrays(short.offsets, pa.array(hashed(_numpy(short.flatten()))))
    return pa.table(made)


def hashed(ids: np.ndarray) -> np.ndarray:
    """As `rowwise.ingest.mix` has it: splitmix64 and a remainder."""
    x = ids.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) % np.uint64(ROWS)).view(np.int64)


def polars_arrow(path: Path) -> Iterator[pa.Table]:
    """Polars' expressions, its hash, row group by row group."""
    import polars as pl

    numbers = [pl.col(name).fill_null(0).clip(0).log1p().cast(pl.Float32) for name in DENSE]
    ids = [(pl.col(name).hash() % ROWS).cast(pl.Int64) for name in IDS]
    element = (pl.element().hash() % ROWS).cast(pl.Int64)
    lists = [pl.col(name).list.head(FIRST).list.eval(element) for name in LISTS]
    scan = pl.scan_parquet(path)
    for begin, rows in _groups(path):
        made = scan.slice(begin, rows).select("label", *numbers, *ids, *lists).collect()
        yield made.to_arrow()


def duckdb_arrow(path: Path) -> Iterator[pa.Table]:
    """SQL, row group by row group."""
    import duckdb

    numbers = [f"ln(1 + greatest(coalesce({n}, 0), 0))::float as {n}" for n in DENSE]
    ids = [f"(hash({n}) % {ROWS})::bigint as {n}" for n in IDS]
    lists = [f"list_transform({n}[1:{FIRST}], lambda x: (hash(x) % {ROWS})::bigint) as {n}" for n in LISTS]
    chosen = ", ".join(["label", *numbers, *ids, *lists])
    with duckdb.connect(config={"threads": 1}) as db:
        relation = db.sql(f"select {chosen} from read_parquet('{path}')")
        for batch in relation.to_arrow_reader(1 << 16):
            yield pa.Table.from_batches([batch])


def _groups(path: Path) -> list[tuple[int, int]]:
    footer = pq.read_metadata(path)
    rows = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
    return [(sum(rows[:number]), rows[number]) for number in range(len(rows))]


def with_items(path: Path) -> Rows:
    """A row-wise Dataset, and a DataLoader that collates; the rows were decoded before."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    with pq.ParquetFile(path) as file:
        table = file.read_row_group(0, columns=list(NAMES), use_threads=False).slice(0, ITEMS)
    dense = np.stack([_numpy(table[name]) for name in DENSE], 1)  # NaN where there is nothing
    ids = np.stack([_numpy(table[name]) for name in IDS], 1)
    lists = [np.split(_numpy(a.flatten()), _numpy(a.offsets)[1:-1]) for a in (_whole(table[n]) for n in LISTS)]
    labels = _numpy(table["label"])

    class Items(Dataset):
        def __len__(self) -> int:
            return len(labels)

        def __getitem__(self, row: int) -> tuple:
            x = np.log1p(np.maximum(np.nan_to_num(dense[row]), 0))
            return x, hashed(ids[row]), [hashed(one[row][:FIRST]) for one in lists], labels[row]

    def collate(items: list[tuple]) -> tuple:
        numbers, singles, several, labels = zip(*items, strict=True)
        bags = [bag for feature in zip(*several, strict=True) for bag in feature]
        return (
            torch.from_numpy(np.stack(numbers)),
            torch.from_numpy(np.concatenate([np.stack(singles, 1).reshape(-1), *bags])),
            torch.tensor([len(bag) for bag in bags]),
            torch.tensor(labels, dtype=torch.float32),
        )

    for batch in DataLoader(Items(), BATCH, shuffle=True, collate_fn=collate):
        yield len(batch[0])


def to_tensors(arrow: Callable[[Path], Iterator[pa.Table]]) -> Way:
    """What a peer leaves as columns, as tensors."""
    return lambda path: (len(tensors(table)[0]) for table in arrow(path))


def to_arrow(arrow: Callable[[Path], Iterator[pa.Table]]) -> Way:
    return lambda path: (table.num_rows for table in arrow(path))


def ways() -> dict[str, Way]:
    """Those that run in this process."""
    found = {"pyarrow and numpy": with_numpy, "Dataset of rows, DataLoader": with_items}
    if there("Polars"):
        found |= {"Polars": to_tensors(polars_arrow), "Polars, to columns": to_arrow(polars_arrow)}
    if there("DuckDB"):
        found |= {"DuckDB": to_tensors(duckdb_arrow), "DuckDB, to columns": to_arrow(duckdb_arrow)}
    return found


class Ray:
    """Ray Data in a process of its own, whose processes are counted too."""

    def __init__(self) -> None:
        """Start it; the first pass is not measured."""
        command = [sys.executable, "-W", "ignore", "-m", "parts.ingest_peers"]
        self._process = subprocess.Popen(
            command, cwd=BENCHMARKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def rate(self, path: Path) -> float:
        """Rows for each second of a processor; 0 where it does not run here."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(path, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return 0.0
        answer = self._process.stdout.readline().split()
        return int(answer[0]) / float(answer[1]) if answer else 0.0

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def ray_rate(path: Path, repeats: int) -> float:
    """The best of the repeats; 0 where Ray does not run here."""
    best = 0.0
    for _ in range(TRIES):
        ray = Ray()
        for _ in range(repeats):
            best = max(best, ray.rate(path))
        ray.close()
        if best:
            break
    return best


def serve_ray() -> None:
    """Read files that are named on standard input."""
    import ray

    # Its threads look for this at once, and meet it half imported.
    sys.modules.setdefault("fsspec.implementations.http", None)  # type: ignore[arg-type]
    out = os.dup(1)
    os.dup2(2, 1)  # Ray talks
    with os.fdopen(out, "w") as answers:
        # A process that ends takes its seconds along: none may.
        stay = {"idle_worker_killing_time_threshold_ms": 600_000}
        ray.init(
            "local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _system_config=stay,
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        warm = False
        for line in sys.stdin:
            for _ in range(1 if warm else 2):
                begin_s = processor_s(os.getpid(), ended=True)
                data = ray.data.read_parquet([line.strip()] * TIMES).select_columns(list(NAMES))
                batches = data.iter_batches(batch_size=1 << 15, batch_format="pyarrow")
                rows = sum(len(tensors(_computed(table))[0]) for table in batches)
                took_s = processor_s(os.getpid(), ended=True) - begin_s
            warm = True
            print(rows, took_s, file=answers, flush=True)
        ray.shutdown()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    pa.set_cpu_count(1)
    serve_ray()

"""Batches from a service of processes are those that are made here, whoever is killed on the way."""

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from ingest.test_batcher import same
from pyarrow import parquet as pq

from rowwise import DataError, SpecError, Table
from rowwise.ingest import Batcher, Batching, BatchShard, Columns, Dense, GeneratorReader, ParquetReader, Sparse
from rowwise.ingest.batcher import EncodedSplit
from rowwise.ingest.service.local import Service, Workers, make_client
from rowwise.ingest.share import Share

COLUMNS = Columns(
    labels=("label",), dense=(Dense(column="x"),), sparse=(Sparse(column="id"), Sparse(column="bag")), key="row"
)
TABLES = (Table(name="id", rows=1000, dim=4), Table(name="bag", rows=97, dim=4))
ROWS = 3000


def make(first, count):
    rows = np.arange(first, first + count)
    bags = pa.array([[int(r), int(r) + 1][: r % 3] for r in rows], pa.list_(pa.int64()))
    return pa.table({"row": rows, "label": rows % 2, "x": rows / 2, "id": rows * 7, "bag": bags})


def files_in(folder):
    for index in range(3):
        pq.write_table(make(index * 1000, 1000), folder / f"{index}.parquet", row_group_size=170)
    return ParquetReader(folder)


@pytest.fixture
def reader(tmp_path):
    return files_in(tmp_path)


def batches(reader, *, size=256, **how):
    return Batcher(reader, COLUMNS, TABLES, Batching(size=size, **how))


def served(batcher, client):
    return batcher.use_splits(lambda epoch, at: map(EncodedSplit, client.splits(epoch, at, batcher.splits)))


def children_of(pid):
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("share", [Share(), Share(end=0.5, group="id")])
def test_the_batches_are_those_made_here(reader, workers, shuffle, share):
    here = batches(reader, shuffle=shuffle, share=share)
    expected = [*here, *here]
    there = batches(reader, shuffle=shuffle, share=share)
    with Service(there.task, Workers(count=workers)) as service:
        served(there, service.client())
        assert same([*there, *there], expected)
        assert there.state() == here.state()
    assert not Path(f"/proc/{service.pid}").exists()


@pytest.mark.slow
def test_batches_that_are_kept_stay_as_they_are(reader):
    there = batches(reader, size=100)
    with Service(there.task, Workers(count=2)) as service:
        client = service.client()
        splits = [split for _, split in zip(range(2), client.splits(0, 0, 18), strict=False)]
        before = [split.block.copy() for split in splits]
        time.sleep(0.5)  # for workers to go on as far as they may
        assert all(np.array_equal(a, split.block) for a, split in zip(before, splits, strict=True))


@pytest.mark.slow
def test_trainers_share_what_workers_prepare(reader):
    whole = list(batches(reader, size=600))
    dealt = [batches(reader, size=600, shard=BatchShard(rank=rank, world=2)) for rank in range(2)]
    with Service(dealt[0].task, Workers(count=2), clients=2) as service:
        clients = [service.client(0), make_client(service.address, 1)]
        with ThreadPoolExecutor(2) as threads:
            parts = list(threads.map(lambda rank: list(served(dealt[rank], clients[rank])), range(2)))
        clients[1].close()
    for batch, a, b in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([a.keys_B, b.keys_B]), batch.keys_B)


@pytest.mark.slow
def test_workers_and_the_host_are_killed_all_the_time(reader):
    expected = list(batches(reader, size=64))
    there = batches(reader, size=64)
    draw, kills = random.Random(0), []
    with Service(there.task, Workers(count=2)) as service:
        got = []
        for batch in served(there, service.client()):
            got.append(batch)
            if draw.random() < 0.3:
                victims = [service.pid, *children_of(service.pid)]
                victim = draw.choice(victims)
                kills.append(victim == service.pid)
                os.kill(victim, signal.SIGKILL)
    assert sum(kills) > 1
    assert len(kills) - sum(kills) > 3
    assert same(got, expected)


@pytest.mark.slow
def test_nobody_is_left_when_the_owner_is_killed(reader, tmp_path):
    code = f"""
import sys, time
sys.path[:0] = {sys.path!r}
import test_service as t
there = t.batches(t.ParquetReader({str(tmp_path)!r}))
service = t.Service(there.task, t.Workers(count=2))
next(iter(t.served(there, service.client())))
print(service.pid, *t.children_of(service.pid), flush=True)
time.sleep(60)
"""
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": here}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(pids) == 3
    end_s = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.slow
def test_a_bad_row_ends_the_run_where_it_is(tmp_path):
    table = make(0, 1000)
    labels = table["label"].to_pylist()
    labels[777] = 3
    pq.write_table(table.set_column(1, "label", pa.array(labels)), tmp_path / "a.parquet", row_group_size=100)
    there = batches(ParquetReader(tmp_path), size=50, shuffle=False)
    with Service(there.task, Workers(count=2)) as service:
        given = iter(served(there, service.client()))
        assert [len(next(given).labels_BK) for _ in range(14)] == [50] * 14
        with pytest.raises(DataError, match="777, column 'label': 3"):
            next(given)


def make_slowly(first, count):
    time.sleep(30 if first == 100 and count else 0)
    return make(first, count)


def make_deadly(first, count):
    if first == 100 and count:
        os.kill(os.getpid(), signal.SIGKILL)
    return make(first, count)


DEADLY = [(make_slowly, "killed by SIGKILL"), (make_deadly, "when memory runs out")]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "message"), DEADLY)
def test_a_split_that_no_worker_survives(function, message):
    there = batches(GeneratorReader(function, 1000, split_rows=100), shuffle=False, size=100)
    with Service(there.task, Workers(count=1, lease_s=5)) as service:  # a busy machine makes a split in less
        given = iter(served(there, service.client()))
        next(given)
        with pytest.raises(DataError, match=f"3 workers ended while preparing this split: .*{message}"):
            next(given)


def test_what_cannot_be_sent_to_workers():
    reader = GeneratorReader(lambda first, count: make(first, count), 100)
    want = r"GeneratorReader cannot be sent to workers: .*expected functions at the top"
    with pytest.raises(SpecError, match=want):
        Service(batches(reader).task)


def test_a_worker_loads_no_torch():
    code = "import sys, rowwise.ingest.service.worker, rowwise.ingest.service.host; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"

"""Reads ahead of a lookup hide the disk and change nothing else: bits, counts, errors, and how a process ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables.store.test_disk_rows import Model, bags, flip, make, make_table

from rowwise.base.errors import StoreError

ROWS = 3000
CALLS = ("ahead", "change", "look up", "write", "forget", "flush")


def one_table(row_bytes=100, cached=64):
    return make_table(rows=ROWS, row_bytes=row_bytes, width=2, cached=cached, overflow=ROWS)


def written(folder, **settings):
    """A table on disk, and what is in it, whose rows were all changed; most are in full segments."""
    table = one_table()
    disk, model = make(folder, [table], **settings), Model([table])
    for number, rows_U in enumerate(torch.arange(ROWS).split(100)):
        model.change(disk, [rows_U], number)
    disk.written(0, 0, ROWS)
    return disk, model


def read_ahead(disk, *ids):
    disk.read_ahead(bags([torch.cat(ids)]))


@pytest.mark.parametrize("uring", [True, False])
def test_rows_that_were_read_ahead_are_not_read_again(tmp_path, uring):
    disk, model = written(tmp_path, uring=uring)
    ids = torch.arange(0, 1000, 7)
    read_ahead(disk, ids)
    read_ahead(disk, ids, ids + 1)  # of a later batch: only what the first has not
    started = disk.use().reads
    assert started > 0
    model.change(disk, [ids], 1)
    model.change(disk, [ids + 1], 2)
    assert disk.use().reads == started


def test_a_copy_that_is_out_of_date_is_not_used(tmp_path):
    disk, model = written(tmp_path)
    ids, others = torch.arange(100), torch.arange(1000, 1100)
    read_ahead(disk, ids)
    for step, looked_up in enumerate([ids, others, ids]):  # changed, not in memory, and compared
        model.change(disk, [looked_up], step)


def test_a_copy_of_a_place_that_has_another_record_now_is_not_used(tmp_path):
    """A table is forgotten, and rows are written again in the order in which segments are used again."""
    of_segment, segments = 16 * 31, 8  # records of 128 bytes in blocks of 4,096, and these in segments of 64 KiB
    table = make_table(rows=of_segment * segments, row_bytes=100, width=2, cached=64, overflow=ROWS)
    disk, model = make(tmp_path, [table]), Model([table])
    every = torch.arange(table.rows).view(segments, of_segment)
    disk.write(0, every.flatten(), model.stored[0], model.state[0])
    before = disk.use().reads
    read_ahead(disk, every.flatten())
    assert disk.use().reads - before == 16 * 5  # the rows of three segments are in memory
    disk.forget(0)
    model.stored[0] += 1
    rows_U = every[[5, 6, 7, 4, 3, 2, 1, 0]].flatten()
    disk.write(0, rows_U, model.stored[0][rows_U], model.state[0][rows_U])
    for ids in every:
        with disk.pin(bags([ids]), changes=False, counts=True) as slots:
            assert torch.equal(table.row_memory[slots], model.stored[0][ids])


@given(
    seed=st.integers(0, 999),
    steps=st.lists(st.sampled_from(CALLS), min_size=5, max_size=30),
    uring=st.booleans(),
)
def test_any_order_of_calls_has_the_rows_of_a_table_in_memory(tmp_path_factory, seed, steps, uring):
    disk, model = written(tmp_path_factory.mktemp("rows"), uring=uring)
    rng = torch.Generator().manual_seed(seed)
    for number, step in enumerate(steps):
        ids = torch.randint(ROWS // 5, (120,), generator=rng)
        match step:
            case "ahead":
                read_ahead(disk, ids)
            case "change":
                model.change(disk, [ids], number)
            case "look up":
                with disk.pin(bags([ids]), changes=False, counts=False) as slots:
                    assert torch.equal(disk.tables[0].row_memory[slots], model.stored[0][ids])
            case "write":
                rows_U = ids.unique()
                model.stored[0][rows_U] = number
                disk.write(0, rows_U, model.stored[0][rows_U], model.state[0][rows_U])
            case "forget":
                disk.forget(0)
                model = Model(disk.tables)
            case "flush":
                disk.written(0, 0, ROWS)
    model.check(disk)


@pytest.mark.slow
@given(seed=st.integers(0, 99), depth=st.integers(0, 3))
def test_counts_do_not_depend_on_how_fast_the_disk_is(tmp_path_factory, seed, depth):
    def train(uring):
        table = one_table()
        disk, model = make(tmp_path_factory.mktemp("rows"), [table], uring=uring), Model([table])
        rng = torch.Generator().manual_seed(seed)
        batches = [(torch.rand(150, generator=rng) ** 2 * ROWS).long() for _ in range(60)]
        for step, ids in enumerate(batches[: len(batches) - depth]):
            if depth:
                read_ahead(disk, batches[step + depth])
            if not uring:
                time.sleep(step % 3 / 1000)  # reads and writes end before they are needed
            model.change(disk, [ids], step)
        io = disk.use()
        return io.reads, io.read_bytes, io.written_bytes, disk.disk_bytes, disk.counters(0)

    assert train(True) == train(False)


@pytest.mark.parametrize("uring", [True, False])
def test_a_damaged_record_that_was_read_ahead_is_an_error_when_its_row_is_needed(tmp_path, uring):
    disk, model = written(tmp_path, uring=uring)
    flip(disk, 16 + 40)  # of the first record of the file
    read_ahead(disk, torch.arange(1000))
    model.change(disk, [torch.arange(2000, 2100)], 1)  # rows without damage
    with pytest.raises(StoreError, match=r"table 't', row \d+"):
        model.change(disk, [torch.arange(1000)], 1)


def test_intervals_of_reads_are_apart_and_add_up(tmp_path):
    begin_s = time.perf_counter()
    disk, model = written(tmp_path)
    for step, first in enumerate(range(0, 1500, 100)):
        read_ahead(disk, torch.arange(first + 100, first + 200))
        model.change(disk, [torch.arange(first, first + 100)], step)
    model.change(disk, [torch.arange(1500, 1600)], 15)  # waits for the last reads
    io, intervals, end_s = disk.use(), disk.read_intervals(begin_s), time.perf_counter()
    times = [begin_s, *(time_s for interval in intervals for time_s in interval), end_s]
    assert times == sorted(times)
    assert io.busy_s == pytest.approx(sum(end - begin for begin, end in intervals))
    assert io.busy_s > 0
    assert io.read_bytes == 4096 * io.reads
    assert io.written_bytes > 0
    assert 0 <= io.read_wait_s <= end_s - begin_s
    assert disk.read_intervals(intervals[-2][1]) == intervals[-1:]
    assert not disk.read_intervals(end_s)


ENDS = """
import os
import sys
from pathlib import Path

import torch

from rowwise.base.errors import StoreError
from tables.store.test_reads_ahead import read_ahead, written

disk, model = written(Path(sys.argv[1]))
read_ahead(disk, torch.arange(3000))
if sys.argv[2] == "exception":
    raise ValueError("an error of the caller")
if sys.argv[2] == "fork":
    model.change(disk, [torch.arange(3000)], 1)  # the thread rests: a sanitizer's allocator has no locks for forks
    child = os.fork()
    if not child:
        try:
            disk.read(0, torch.arange(10))
        except StoreError as error:
            print(error, flush=True)
        del disk
        os._exit(3)  # at its end torch frees memory, too
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    model.check(disk)
if sys.argv[2] == "delete":
    del disk
print("end", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exit", "delete", "exception", "fork"])
def test_a_process_ends_while_rows_are_read(tmp_path, way):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "ignore", "-c", ENDS, str(tmp_path), way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.endswith("end\n") == (way != "exception"), done.stderr
    assert done.returncode == (way == "exception")
    assert ("by a fork of their process; make tables in the fork" in done.stdout) == (way == "fork")

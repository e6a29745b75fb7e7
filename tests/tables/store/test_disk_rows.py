"""Rows on disk behind a cache: what was written is what is read, whatever was evicted, compacted or damaged since."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.errors import SpecError, StoreError
from rowwise.recipes.drills.small_disk import small_disk
from rowwise.tables.store.disk import DiskRows
from rowwise.tables.store.row_store import RecordStream, RowPart, SlotIds, SlotTable
from rowwise.tables.store.sizes import cache_slots

LEAST = 64 << 10  # bytes of a segment, so that few rows fill several


def initial(rows_U, row_bytes, width):
    """A function of the row, as initial values are."""
    stored = (rows_U.unsqueeze(1) * 31 + torch.arange(row_bytes)) % 251
    return stored.to(torch.uint8), (rows_U.unsqueeze(1) + torch.arange(width)).float()


def make_table(name="t", rows=5000, row_bytes=24, width=2, cached=64, overflow=64, pinned=()):
    slots = cache_slots(cached) + len(pinned) + overflow
    return SlotTable(
        name=name,
        rows=rows,
        row_memory=torch.zeros(slots, row_bytes, dtype=torch.uint8),
        state_memory=torch.zeros(slots, width),
        slot_rows=torch.empty(slots, dtype=torch.int64),
        overflow=overflow,
        pinned_rows=torch.tensor(pinned, dtype=torch.int64),
        initial=lambda rows_U: initial(rows_U, row_bytes, width),
    )


def make(folder, tables, **settings):
    return DiskRows(tables, folder, segment_bytes=LEAST, **settings)


def bags(ids_T, dtype=torch.int64):
    """Ids of one feature for each table."""
    bounds_F1 = torch.tensor([0, *map(len, ids_T)]).cumsum(0)
    return SlotIds(torch.cat(ids_T).to(dtype), bounds_F1, range(len(ids_T)))


class Model:
    """Rows and state of tables as they should be."""

    def __init__(self, tables):
        every = [initial(torch.arange(t.rows), t.row_bytes, t.state_width) for t in tables]
        self.stored, self.state = ([one[k] for one in every] for k in (0, 1))

    def change(self, disk, ids_T, salt, dtype=torch.int64):
        """Look ids up, compare, and change their rows, on disk and here."""
        with disk.pin(bags(ids_T, dtype), changes=True, counts=True) as slots_N:
            assert slots_N.dtype == dtype
            slots_T = slots_N.long().split([len(ids) for ids in ids_T])
            for k, (ids, slots, table) in enumerate(zip(ids_T, slots_T, disk.tables, strict=True)):
                assert torch.equal(table.row_memory[slots], self.stored[k][ids])
                assert torch.equal(table.state_memory[slots], self.state[k][ids])
                for memory, rows in ((table.row_memory, self.stored[k]), (table.state_memory, self.state[k])):
                    memory[slots] = rows[ids] = (rows[ids] + (ids.unsqueeze(1) % 7 + salt)).to(rows.dtype)

    def check(self, disk):
        for k, table in enumerate(disk.tables):
            stored, state = disk.read(k, torch.arange(table.rows))
            assert torch.equal(stored, self.stored[k])
            assert torch.equal(state, self.state[k])


@given(
    seed=st.integers(0, 999),
    row_bytes=st.sampled_from([1, 24, 100, 5000]),
    width=st.integers(0, 3),
    cached=st.integers(0, 200),
    policy=st.sampled_from(["lru", "lfu"]),
    uring=st.booleans(),
    depth=st.integers(0, 3),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    pinned=st.sampled_from([(), (0,), (63, 64, 2999), tuple(range(100, 400, 3))]),
)
def test_rows_are_those_of_a_table_in_memory(
    tmp_path_factory, seed, row_bytes, width, cached, policy, uring, depth, dtype, pinned
):
    tables = [
        make_table("a", 3000, row_bytes, width, cached, 200, pinned),
        make_table("b", 900, 40, 1, 32, 200),
    ]
    disk = make(tmp_path_factory.mktemp("rows"), tables, policy=policy, uring=uring)
    model, rng = Model(tables), torch.Generator().manual_seed(seed)
    changed = [set(), set()]

    def draw():
        return [(torch.rand(n, generator=rng) ** 3 * t.rows).long() for n, t in zip((150, 60), tables, strict=True)]

    following = [draw() for _ in range(depth)]
    for step in range(40):
        following.append(draw())
        if depth:  # batches before it are not looked up yet
            disk.read_ahead(bags(following[-1], dtype))
        ids_T = following.pop(0)
        model.change(disk, ids_T, step, dtype)
        for k, ids in enumerate(ids_T):
            changed[k] |= set(ids.tolist())
        if step % 16 == 7:
            rows_U = torch.randperm(tables[0].rows, generator=rng)[:100].sort().values
            model.stored[0][rows_U] = (model.stored[0][rows_U] + 1).to(torch.uint8)
            disk.write(0, rows_U, model.stored[0][rows_U], model.state[0][rows_U])
            changed[0] |= set(rows_U.tolist())
    model.check(disk)
    for k, table in enumerate(tables):
        assert set(disk.written(k, 0, table.rows).tolist()) == changed[k]
    live = sum(len(ids) * (t.row_bytes + 4 * t.state_width + 32) for ids, t in zip(changed, tables, strict=True))
    assert disk.disk_bytes < 6 * live + 16 * LEAST * 4 * max(1, row_bytes // 4096 + 1)
    disk.forget(0)
    again = Model(tables)
    again.stored[1], again.state[1] = model.stored[1], model.state[1]
    again.check(disk)


def test_rows_and_state_of_a_table_are_restored_by_two_threads(tmp_path):
    """They are one record: a thread that reads it between another's read and write would lose its change."""
    disk = make(tmp_path, [make_table()])
    rows, both, read = torch.arange(100), threading.Barrier(2), disk.read

    def read_slowly(*given):
        found = read(*given)
        try:
            both.wait(0.05)
        except threading.BrokenBarrierError:  # the other one waits for this one's write
            both.reset()
        return found

    disk.read = read_slowly
    values = torch.full((100, 24), 7, dtype=torch.uint8), torch.full((100, 2), 9.0)
    streams = [disk.part(0, RowPart(*part)) for part in ((torch.uint8, None), (torch.float32, None, slice(0, 2)))]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(RecordStream.write_rows, streams, (rows, rows), values))
    assert all(map(torch.equal, read(0, rows), values))


def flip(disk, at):
    """Flip a bit of the file, past the cache of the disk."""
    path = f"/proc/self/fd/{disk.file}"
    with open(path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 16]), at)
        os.fsync(file.fileno())


@pytest.mark.parametrize("uring", [True, False])
@pytest.mark.parametrize("at", [16, 40, 60, 700])
def test_a_flipped_bit_is_an_error_with_table_and_row(tmp_path, at, uring):
    table = make_table(rows=4000, row_bytes=100)
    disk, model = make(tmp_path, [table], uring=uring), None
    model = Model([table])
    for step in range(30):
        model.change(disk, [torch.arange(step * 60, step * 60 + 60)], step)
    disk.written(0, 0, table.rows)
    flip(disk, at)
    with pytest.raises(StoreError, match=r"table 't', row \d+"):
        disk.read(0, torch.arange(table.rows))
    with pytest.raises(StoreError, match="does not match"):  # nothing is read after that
        model.change(disk, [torch.tensor([1])], 0)


def test_the_file_has_no_name_and_ends_with_the_process(tmp_path):
    table = make_table()
    disk = make(tmp_path, [table])
    Model([table]).change(disk, [torch.arange(100)], 1)
    assert not list(tmp_path.iterdir())
    assert disk.disk_bytes > 0


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"read or written: .*"):
        make(tmp_path / "file", [make_table()])
    with pytest.raises(StoreError, match="written, by `disk`"):
        make(type(tmp_path)("/proc"), [make_table()])


def test_a_batch_larger_than_the_cache_is_refused_with_numbers(tmp_path):
    disk = make(tmp_path, [make_table(cached=32, overflow=8)])
    with (
        pytest.raises(SpecError, match="rows of table 't'"),
        disk.pin(bags([torch.arange(1000)]), changes=False, counts=False),
    ):
        pass


FILL = """
import sys
from pathlib import Path

import torch

from rowwise.base.errors import StoreError
from tables.store.test_disk_rows import make_table
from rowwise.tables.store.disk import DiskRows

table = make_table(rows=200_000, row_bytes=200)
disk = DiskRows([table], Path(sys.argv[1]), segment_bytes=1 << 18)
try:
    for rows in torch.arange(200_000).split(1000):
        disk.write(0, rows, *table.initial(rows))
except StoreError as error:
    print(error)
    try:
        disk.read(0, torch.arange(10))
    except StoreError as again:
        print(again)
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_with_numbers_and_nothing_is_read_after_it(tmp_path):
    with small_disk(tmp_path / "disk", 4 << 20, 4 << 20) as disk:
        command = [*disk.enter, sys.executable, "-c", FILL, str(disk.folder)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            command, env=environment, preexec_fn=disk.limit, capture_output=True, text=True, timeout=120, check=False
        )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith(f"{disk.folder}: rows could not be read or written: ")
    if disk.limit is None:
        assert "No space left on device; the rows take" in lines[0]
        assert "are free: expected more space, or another folder by `disk`" in lines[0]
    assert "rows could not be read or written" in lines[1]

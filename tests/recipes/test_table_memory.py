"""Tables for which there is no memory are refused in one line, with ways out that fit; unknown memory refuses none."""

import os
import re

import pytest

from rowwise import Adam, Plan, RowType, RowWiseAdagrad, RowWiseAdam, Table, Topology
from rowwise.base.errors import TableMemoryError, one_line
from rowwise.parallel.plan import Tile
from rowwise.planning.perf.host_memory import free_bytes, is_in_memory
from rowwise.recipes import table_memory
from rowwise.recipes.table_memory import TableMemory, find_memory_notes, find_remedies, raise_if_short, single_rank_plan

GB = 10**9
TABLES = (
    Table(name="user", rows=100_000_000, dim=64, optimizer=RowWiseAdagrad()),
    Table(name="item", rows=20_000_000, dim=64, optimizer=Adam()),
)
USER, ITEM = 100_000_000 * (256 + 4), 20_000_000 * (256 + 512)


def asked(tables=TABLES, free=30 * GB, **more):
    return TableMemory(
        **{"tables": tables, "plan": single_rank_plan(tables), "topology": Topology(), "free_H": (free,)} | more
    )


def taken(tables):
    """Written out a second time."""
    row = {RowType.FP32: lambda d: 4 * d, RowType.FP16: lambda d: 2 * d, RowType.INT8: lambda d: 8 + -(-d // 4) * 4}
    state = {RowWiseAdagrad: lambda _: 1, Adam: lambda d: 2 * d, RowWiseAdam: lambda d: d + 1}
    return sum(t.rows * (row[t.row_type](t.dim) + 4 * state[type(t.optimizer)](t.dim)) for t in tables)


def test_what_is_needed_and_what_there_is_are_said():
    with pytest.raises(TableMemoryError) as caught:
        raise_if_short(asked())
    line = one_line(caught.value)
    assert line.startswith(
        "the tables need 41.4 GB of memory here (30.7 GB of rows and 10.6 GB of optimizer state;"
        " the largest is 'user' with 100,000,000 x 64), and 30.0 GB are free: expected "
    )
    assert line.count("; or ") == 2
    assert "\n" not in line


@pytest.mark.parametrize("free", [2 * GB, 12 * GB, 30 * GB, 41 * GB])
def test_each_way_out_fits_and_the_least_change_is_first(free):
    ways = find_remedies(asked(free=free), 0)
    assert len(ways) >= 3
    assert [way.needed_bytes for way in ways] == sorted((way.needed_bytes for way in ways), reverse=True)
    assert all(way.needed_bytes <= 0.9 * free for way in ways)


@pytest.mark.parametrize("free", [2 * GB, 12 * GB, 30 * GB, 41 * GB])
def test_rows_that_fit_are_as_many_as_two_digits_say(free):
    (words,) = [
        way.change for way in find_remedies(asked(free=free), 0) if "rows=" in way.change or "in each" in way.change
    ]
    rows = int(re.search(r"(?:at most |rows=)([\d,]+)", words)[1].replace(",", ""))
    cut = lambda most: [Table(name=t.name, rows=min(t.rows, most), dim=64, optimizer=t.optimizer) for t in TABLES]  # noqa: E731
    assert taken(cut(rows)) <= 0.9 * free < taken(cut(int(rows * 1.11)))


def test_narrower_rows_are_the_widest_that_fit():
    def narrower(free, **more):
        return [
            w.change for w in find_remedies(asked(free=free, **more), 0) if re.search(r"row_type|dim|state", w.change)
        ]

    assert narrower(41 * GB) == ["row-wise optimizer state"]  # 36.2 GB; fp16 rows and all of the state take 26.0
    assert narrower(15 * GB) == ["tables.all.dim=20"]
    assert narrower(30 * GB, purpose="resume") == ["tables.all.row_type=fp16"]
    assert narrower(22 * GB, purpose="resume") == ["tables.all.row_type=int8"]


def test_a_run_that_goes_on_keeps_its_rows_and_dims():
    words = " ".join(way.change for way in find_remedies(asked(purpose="resume"), 0))
    assert "ranks on 2 hosts" in words
    assert not re.search(r"in each table|rows=|dim|compress|state", words)


def test_one_that_is_only_used_runs_where_there_is_room():
    with pytest.raises(TableMemoryError, match=r"machine with 41\.4 GB"):
        raise_if_short(asked(purpose="use"))


def test_a_copy_in_the_background_counts_and_is_a_way_out():
    raise_if_short(asked(free=50 * GB))
    with pytest.raises(TableMemoryError, match=r"82\.7 GB .* twice"):
        raise_if_short(asked(free=50 * GB, background=True))


def test_nothing_is_refused_where_memory_is_unknown_or_enough():
    raise_if_short(asked(free=None))
    raise_if_short(asked(free=USER + ITEM))
    with pytest.raises(TableMemoryError):
        raise_if_short(asked(free=USER + ITEM - 1))


def test_ranks_of_a_host_share_its_memory_and_copies_count_each():
    def tiles(*ranks):
        return [Tile(table="user", rank=r, rows=(n * 25_000_000, (n + 1) * 25_000_000), cols=(0, 64)) for n, r in ranks]

    items = [Tile(table="item", rank=rank, rows=(0, 20_000_000), cols=(0, 64)) for rank in range(4)]
    plan = Plan(world=4, tiles=tuple(tiles((0, 0), (1, 1), (2, 3), (3, 3)) + items))
    one, two = Topology(devices=4), Topology(hosts=2, devices=2)
    raise_if_short(asked(plan=plan, topology=one, free=USER + 4 * ITEM))
    with pytest.raises(TableMemoryError, match=r"87\.4 GB of memory"):
        raise_if_short(asked(plan=plan, topology=one, free=USER + 4 * ITEM - 1))
    half = USER // 2 + 2 * ITEM
    raise_if_short(asked(plan=plan, topology=two, free_H=(half, half)))
    with pytest.raises(TableMemoryError, match=r"43\.7 GB of memory"):
        raise_if_short(asked(plan=plan, topology=two, free_H=(None, half - 1)))


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_free_memory_is_what_the_machine_and_all_control_groups_leave(tmp_path):
    assert free_bytes(tmp_path) is None
    write(tmp_path, proc__meminfo="MemTotal: 9000 kB\nMemAvailable: 4000 kB\nSwapFree: 96 kB\n")
    assert free_bytes(tmp_path) == 4096 * 1024
    write(tmp_path, proc__self__cgroup="4:memory:/outer/inner\n3:cpuset:/\n0::/\n")
    assert free_bytes(tmp_path) == 4096 * 1024
    first = tmp_path / "sys/fs/cgroup/memory"
    write(first, **{"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "123\n"})
    assert free_bytes(tmp_path) == 4096 * 1024
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 500\ntotal_active_file 200\n"
    write(first / "outer", **{"memory.limit_in_bytes": "9000", "memory.usage_in_bytes": "5000", "memory.stat": stat})
    assert free_bytes(tmp_path) == 9000 - 5000 + 700


@pytest.mark.parametrize("top", ["sys/fs/cgroup", "sys/fs/cgroup/unified"])
@pytest.mark.parametrize("group", ["job", "seen/only/on/the/host"])
def test_control_groups_of_version_2(tmp_path, top, group):
    write(tmp_path, proc__self__cgroup=f"0::/{group}\n")
    write(tmp_path / top, **{"memory.max": "max", "memory.current": "10"})
    assert free_bytes(tmp_path) is None
    for folder in (tmp_path / top, tmp_path / top / "job"):
        write(folder, **{"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": "inactive_file 50\n"})
    assert free_bytes(tmp_path) == 150
    write(tmp_path / top, **{"memory.current": "2000\n"})
    assert free_bytes(tmp_path) == 0


def test_a_file_system_in_memory_is_known_by_its_device(tmp_path):
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    assert not is_in_memory(tmp_path, tmp_path / "nothing")
    line = "36 35 {} / /some\\040place rw,noatime shared:1 - {} source rw\n"
    write(tmp_path, proc__self__mountinfo=line.format("0:0", "tmpfs") + line.format(number, "ext4"))
    assert not is_in_memory(tmp_path / "not" / "yet", tmp_path)
    write(tmp_path, proc__self__mountinfo=line.format(number, "tmpfs") + "of another kind\n")
    assert is_in_memory(tmp_path / "not" / "yet", tmp_path)


def test_memory_that_is_not_there_and_disks_in_memory_are_said(tmp_path, monkeypatch):
    short, enough = asked(free=3 * GB), asked(free=8 * GB, limited=True)
    assert find_memory_notes(short, None, None) == find_memory_notes(enough, 8 * GB, None) == ()
    (note,) = find_memory_notes(short, 8 * GB, tmp_path)
    assert note == "memory=8.0 GB: only 3.0 GB are free, which limits the tables"
    monkeypatch.setattr(table_memory, "is_in_memory", lambda _: True)
    (note,) = find_memory_notes(enough, 8 * GB, tmp_path)
    assert note.startswith(f"{tmp_path} is a tmpfs, so its tables are in memory: expected --set disk=FOLDER")

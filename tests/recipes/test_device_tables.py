"""Which tables a GPU caches: within its memory, the smallest whole, and as many rows as there is room for."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rowwise import Embeddings, Managed, RowWiseAdagrad, Table
from rowwise.base.errors import TableMemoryError
from rowwise.base.quantity import format_percent
from rowwise.recipes.device_tables import describe_cached, move_to_device
from rowwise.recipes.placement import cached_bytes, choose_cached, table_bytes
from rowwise.tables.store.policy import WAYS

SIZES = st.lists(st.integers(1, 200_000), min_size=1, max_size=6)


def make_tables(rows_T, dim=8):
    return [Table(name=f"t{k}", rows=rows, dim=dim, optimizer=RowWiseAdagrad()) for k, rows in enumerate(rows_T)]


def used_bytes(tables, cached, samples):
    return sum(
        cached_bytes(table, cached[table.name], samples) if table.name in cached else table_bytes(table)
        for table in tables
    )


def rows_on_gpu(tables, cached):
    return sum(min(cached.get(table.name, table.rows), table.rows) for table in tables)


@example(rows_T=[1744, 6072], share=0.375, samples=0)
@given(rows_T=SIZES, share=st.floats(0.05, 1.2), samples=st.sampled_from([0, 1000]))
def test_tables_fit_and_the_smallest_are_whole(rows_T, share, samples):
    tables = make_tables(rows_T)
    total = sum(map(table_bytes, tables))
    room = int(share * total)
    try:
        cached = choose_cached(tables, room, samples)
    except TableMemoryError:
        assert sum(min(cached_bytes(table, 0, samples), table_bytes(table)) for table in tables) > room
        return
    assert bool(cached) == (total > room)
    assert used_bytes(tables, cached, samples) <= room
    worth = [table for table in tables if cached_bytes(table, 0, samples) < table_bytes(table)]
    whole = [table_bytes(table) for table in worth if table.name not in cached]
    assert max(whole, default=0) <= min((table_bytes(t) for t in tables if t.name in cached), default=total)
    # With more room whole tables stay whole, and no fewer rows are on the GPU, whole ones counted.
    more = choose_cached(tables, int(room * 1.1), samples)
    assert more.keys() <= cached.keys()
    assert rows_on_gpu(tables, more) >= rows_on_gpu(tables, cached) - WAYS * len(more)


def test_a_managed_table_is_whole():
    managed = Table(name="m", rows=50_000, dim=8, optimizer=RowWiseAdagrad(), managed=Managed())
    tables = [managed, *make_tables([60_000])]
    assert choose_cached(tables, 5_000_000, 0).keys() == {"t0"}
    with pytest.raises(TableMemoryError, match=r"need at least .*"):
        choose_cached(tables, 3_000_000, 0)


def test_a_cpu_caches_nothing():
    module = Embeddings(make_tables([100]))
    assert move_to_device(module, "cpu", 1, 0) is module
    assert describe_cached(module) == ""
    module.cache_on("cpu", {"t0": 32}, samples=5)
    shown = f"t0 in 3.6 kB of host memory; {format_percent(0.32)} of their rows cached in 51.7 kB"
    assert describe_cached(module) == shown


def test_small_tables_are_whole_where_a_cache_would_be_larger():
    tables = make_tables([*[40] * 300, 200_000])
    cached = choose_cached(tables, 2_000_000, 0)
    assert cached.keys() == {"t300"}
    assert used_bytes(tables, cached, 0) <= 2_000_000

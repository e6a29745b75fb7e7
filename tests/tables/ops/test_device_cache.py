"""Tables in host memory with a cache of rows on a device: the bits of uncached tables, whatever fits into the cache."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import OPTIMIZERS, ROW_TYPES

from rowwise import Embeddings, Jagged, Pooling, Table
from rowwise.base.errors import IdError, SpecError, StateError

FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def make_tables(pooling, optimizer, row_type, dim):
    kind, group = row_type
    return [
        Table(name="a", rows=3000, dim=dim, features=("a0", "a1"), pooling=pooling, optimizer=optimizer, row_type=kind,
              column_group=group),
        Table(name="b", rows=700, dim=dim, pooling=pooling, optimizer=optimizer, row_type=kind, column_group=group),
        Table(name="c", rows=5, dim=4, pooling=Pooling.SUM, optimizer=optimizer),
    ]  # fmt: skip


def make_batch(tables, rng, batch=40, most=4):
    rows = {name: table.rows for table in tables for name in table.feature_names}
    lengths = torch.randint(0, most, (len(rows), batch), generator=rng)
    values = [
        (torch.rand(int(n.sum()), generator=rng) ** 3 * r).long() for n, r in zip(lengths, rows.values(), strict=True)
    ]
    values = torch.cat(values)
    return Jagged(
        features=tuple(rows), values_N=values, lengths_FB=lengths.flatten(), weights_N=torch.rand(len(values))
    )


def train(module, batch):
    vectors = module(batch)
    (vectors.matrix_BS.sin().sum() + sum(x.cos().sum() for x in vectors.sequences.values())).backward()
    module.update()
    return vectors.matrix_BS.detach()


def check_equal(module, plain):
    for table in plain.tables:
        assert torch.equal(module.table(table.name), plain.table(table.name))
        for name, state in plain.optimizer_state()[table.name].items():
            assert torch.equal(module.optimizer_state()[table.name][name], state)


@pytest.mark.slow
@FEW
@given(
    seed=st.integers(0, 999),
    cached=st.sampled_from([{"a": 0}, {"a": 64, "b": 32}, {"a": 500, "b": 700, "c": 5}]),
    pooling=st.sampled_from([Pooling.SUM, Pooling.MEAN, Pooling.WEIGHTED, Pooling.SEQUENCE]),
    optimizer=st.sampled_from(OPTIMIZERS),
    row_type=st.sampled_from(ROW_TYPES),
    dim=st.sampled_from([3, 8, 20]),
)
def test_rows_are_those_of_tables_without_a_cache(seed, cached, pooling, optimizer, row_type, dim):
    tables, rng = make_tables(pooling, optimizer, row_type, dim), torch.Generator().manual_seed(seed)
    plain, module = Embeddings(tables, seed=seed), Embeddings(tables, seed=seed).cache_on("cpu", cached)
    for step in range(6):
        batch = make_batch(tables, rng)
        assert torch.equal(train(module, batch), train(plain, batch))
        if step == 3:
            check_equal(module, plain)
            with torch.no_grad():
                for one in (module, plain):
                    one.table("a")[7] = 1
                    one.arena.mark_all()
    check_equal(module, plain)
    counters = module.arena.store.counters(0)
    assert counters.misses > 0
    assert counters.writes <= counters.evictions <= counters.misses


@pytest.mark.slow
def test_a_batch_that_has_more_rows_than_slots_is_an_error():
    tables = make_tables(Pooling.SUM, OPTIMIZERS[0], ROW_TYPES[0], 8)
    module = Embeddings(tables).cache_on("cpu", {"a": 32})
    values = torch.arange(2900)
    batch = Jagged(
        features=("a0", "a1", "b", "c"), values_N=values, lengths_FB=torch.tensor([2900, 0, 0, 0]), weights_N=None
    )
    with pytest.raises(SpecError, match="rows of table 'a'"):
        module(batch)
    few = Jagged(features=batch.features, values_N=torch.arange(40), lengths_FB=torch.tensor([40, 0, 0, 0]))
    assert torch.equal(module(few).matrix_BS, Embeddings(tables)(few).matrix_BS)  # and the next batch has its rows


def test_rows_that_are_only_looked_up_are_read_in_host_memory_where_they_find_no_slots():
    tables = make_tables(Pooling.MEAN, OPTIMIZERS[0], ROW_TYPES[0], 8)
    plain, module = Embeddings(tables), Embeddings(tables, device="meta")
    module.reserve(lambda table: 40)
    module.arena.attach(torch.zeros(module.arena.rows.numel(), dtype=torch.uint8))
    for index in range(len(tables)):
        module.arena.table(index).copy_(plain.arena.table(index))
    module.serve_on("cpu", {"a": 32}, samples=1, newer={"a": 3, "c": 7})
    for count, fits in ((40, True), (2900, False), (30, True)):
        lengths = torch.tensor([count, 0, 0, 1])
        batch = Jagged(
            features=("a0", "a1", "b", "c"), values_N=torch.cat([torch.arange(count), torch.tensor([3])]),
            lengths_FB=lengths, weights_N=None,
        )  # fmt: skip
        with torch.no_grad():
            assert torch.equal(module(batch).matrix_BS, plain(batch).matrix_BS)
        assert any(module.arena.store.take_counts()) == fits


def test_ids_outside_are_named():
    tables = make_tables(Pooling.SUM, OPTIMIZERS[0], ROW_TYPES[0], 8)
    module = Embeddings(tables).cache_on("cpu", {"a": 32})
    for bad in (-1, 3000):
        batch = Jagged(
            features=("a0", "a1", "b", "c"), values_N=torch.tensor([1, bad]), lengths_FB=torch.tensor([2, 0, 0, 0])
        )
        with pytest.raises(IdError, match=f"feature 'a0'.*id {bad}|id {bad}.*feature 'a0'"):
            module(batch)


def test_what_cannot_be_cached_is_refused():
    tables = make_tables(Pooling.SUM, OPTIMIZERS[0], ROW_TYPES[0], 8)
    with pytest.raises(SpecError, match="no table 'x'"):
        Embeddings(tables).cache_on("cpu", {"x": 1})
    module = Embeddings(tables).cache_on("cpu", {"a": 32})
    with pytest.raises(StateError, match="tables in host memory"):
        module.cache_on("cpu", {"b": 32})
    with pytest.raises(StateError, match="cannot be copied"):
        copy.deepcopy(module)

"""Lookups that read newer rows in place of a table's own: equal to lookups of tables that have those rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems

from rowwise import Embeddings, IdError, Jagged, Pooling, Table
from rowwise.tables.batch import SharedBags
from rowwise.tables.ops import reference
from rowwise.tables.ops.newer import NewerRows, NewerRowsOfTable


def with_newer_rows(tables, seed: int, share: float) -> tuple[Embeddings, Embeddings, Embeddings]:
    """Tables, tables of which some rows are others, and those again as newer rows behind the first ones."""
    g = torch.Generator().manual_seed(seed)
    old, new, both = Embeddings(tables, seed=1), Embeddings(tables, seed=1), Embeddings(tables, device="meta")
    other = Embeddings(tables, seed=2)
    both.reserve(lambda table: table.rows + 3)
    memory = torch.full((both.arena.rows.numel(),), 255, dtype=torch.uint8)
    both.arena.attach(memory)
    found = []
    for index, table in enumerate(tables):
        ids = torch.randperm(table.rows, generator=g)[: round(share * table.rows)]
        both.arena.table(index).copy_(old.arena.table(index))
        new.arena.table(index)[ids] = other.arena.table(index)[ids]
        places = table.rows + torch.randperm(table.rows + 3, generator=g)[: len(ids)]
        base, width = both.arena.offsets[index].base, table.row_bytes
        block = memory[base : base + (2 * table.rows + 3) * width].view(-1, width)
        block[places] = other.arena.table(index)[ids].contiguous().view(torch.uint8).view(len(ids), width)
        order = ids.argsort()
        found.append(NewerRowsOfTable(base=base, rows=table.rows, ids_C=ids[order], places_C=places[order]))
    both.arena.places = NewerRows(found)
    return old, new, both


def same(a, b) -> bool:
    names = [*a.keys(), *a.sequences]
    return all(
        torch.equal(a[name].contiguous().view(torch.int32), b[name].contiguous().view(torch.int32)) for name in names
    )


@settings(max_examples=60)
@given(problems(poolings=tuple(Pooling)), st.integers(0, 1000), st.sampled_from((0.0, 0.1, 0.6, 1.0)))
def test_lookups_read_newer_rows(problem, seed, share):
    _, new, both = with_newer_rows(problem.tables, seed, share)
    with torch.no_grad():
        assert same(both(problem.jagged), new(problem.jagged))


@settings(max_examples=40)
@given(problems(poolings=tuple(Pooling)), st.integers(0, 1000))
def test_the_operator_is_its_reference(problem, seed):
    _, _, both = with_newer_rows(problem.tables, seed, 0.5)
    jagged, newer, group = problem.jagged, both.arena.places, both._tiles.pooled
    features = newer._make_features(group.for_sources(jagged.features).numpy().tobytes())
    offsets = torch.ops.rowwise.offsets(jagged.lengths_FB)
    args = jagged.values_N, offsets, features, newer._ids_C, newer._places_C, jagged.batch_size
    found = torch.ops.rowwise.find_newer(*args)
    assert found.dtype == torch.int64
    assert torch.equal(found, reference.find_newer(*args))
    torch.library.opcheck(torch.ops.rowwise.find_newer.default, args, test_utils=("test_schema", "test_faketensor"))


def test_wrong_features_are_refused():
    ids, offsets, none = torch.arange(4), torch.tensor([0, 2, 4]), torch.empty(0, dtype=torch.int64)
    for feature in ([2, 9, 0, 0], [-1, 9, 0, 0], [0, 9, 0, 1], [0, 9, -1, 0]):
        with pytest.raises(RuntimeError, match=r"no feature|no ids"):
            torch.ops.rowwise.find_newer(ids, offsets, torch.tensor([feature]), none, none, 1)


def test_shared_bags_read_newer_rows():
    tables = [Table(name="a", rows=300, dim=8, pooling=Pooling.MEAN), Table(name="b", rows=40, dim=4)]
    old, new, both = with_newer_rows(tables, 5, 0.5)
    g = torch.Generator().manual_seed(1)
    lists = [torch.randint(0, 300, (n,), generator=g).tolist() for n in (3, 0, 7)]
    shared = SharedBags(jagged=Jagged.from_lists({"a": lists}), inverse_B=torch.tensor([0, 0, 1, 2, 2]))
    own = Jagged.from_lists({"b": [[1], [2], [], [39], [5, 6]]})
    batch = Jagged(features=own.features, values_N=own.values_N, lengths_FB=own.lengths_FB, shared=shared)
    with torch.no_grad():
        assert same(both(batch), new(batch.expanded()))
        assert not same(both(batch), old(batch))


@pytest.mark.parametrize("bad", [-1, 40, 60])
def test_ids_outside_a_table_do_not_reach_its_room(bad):
    batch = Jagged.from_lists({"a": [[1, 2], [bad]]})
    _, _, both = with_newer_rows([Table(name="a", rows=40, dim=4)], 2, 0.5)
    with pytest.raises(IdError, match=f"table 'a': feature 'a', sample 1, position 0: id {bad}"), torch.no_grad():
        both(batch)
    _, new, both = with_newer_rows([Table(name="a", rows=40, dim=4, unknown="last_row")], 2, 0.5)
    with torch.no_grad(), pytest.warns(match="outside 0..39"):
        assert same(both(batch), new(Jagged.from_lists({"a": [[1, 2], [39]]})))

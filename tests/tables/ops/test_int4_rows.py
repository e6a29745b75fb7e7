"""Rows of int4 are looked up with the bits of the floats that they stand for, and are never updated."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import Embeddings, Jagged, Pooling, RowType, Sgd, Table
from rowwise.base.errors import SpecError
from rowwise.tables.ops import rowtype

from problems import DIMS, make_problem  # isort: skip

ops = torch.ops.rowwise
POOLINGS = (Pooling.SUM, Pooling.MEAN, Pooling.WEIGHTED)


def both_arenas(dim: int, pooling: Pooling, seed: int):
    """A table of int4, and one of the floats that its rows are read as."""
    tables = [Table(name="t", rows=300, dim=dim, pooling=pooling, row_type=kind) for kind in ("int4", "fp32")]
    narrow, wide = (make_problem((table,), batch=70, most=9, seed=seed) for table in tables)
    arenas = narrow.arena(), wide.arena()
    arenas[1].table(0).copy_(rowtype.unpack(arenas[0].table(0), dim, RowType.INT4))
    return (narrow, arenas[0]), (wide, arenas[1])


@given(dim=st.sampled_from(DIMS), pooling=st.sampled_from(POOLINGS), seed=st.integers(0, 100))
def test_lookups_have_the_bits_of_the_floats(isa, dim, pooling, seed):
    found = []
    for problem, arena in both_arenas(dim, pooling, seed):
        jagged, group = problem.jagged, problem.group(arena)
        bags = problem.sources(group), jagged.values_N, ops.offsets(jagged.lengths_FB), jagged.weights_N, 70
        grad = torch.rand(70, dim, generator=torch.Generator().manual_seed(seed))
        found.append(
            (
                ops.pool(arena.rows, *bags, group.columns),
                ops.gather(arena.rows, *bags[:3], 70),
                ops.pool_weight_grad(arena.rows, *bags[:4], grad, 70),
            )
        )
    for narrow, wide in zip(*found, strict=True):
        assert torch.equal(narrow.view(torch.int32), wide.view(torch.int32))


@pytest.mark.parametrize("dim", [1, 3, 16, 64])
def test_a_table_takes_an_eighth_of_its_floats(dim):
    table = Table(name="t", rows=1000, dim=dim, row_type="int4")
    assert table.row_bytes == 8 + -(-dim // 8) * 4
    assert Embeddings([table]).arena.rows.numel() == -(-1000 * table.row_bytes // 64) * 64


def test_rows_are_not_updated():
    embeddings = Embeddings([Table(name="t", rows=10, dim=8, row_type="int4", optimizer=Sgd(lr=1.0))])
    before = embeddings.table("t").clone()
    batch = Jagged(features=("t",), values_N=torch.tensor([1, 2]), lengths_FB=torch.tensor([1, 1]))
    embeddings(batch)["t"].sum().backward()
    with pytest.raises(SpecError, match="int4, which are only"):
        embeddings.update()
    assert torch.equal(embeddings.table("t"), before)
    embeddings.update()  # the gradients are gone


def test_the_operator_refuses_to_update():
    problem = make_problem((Table(name="t", rows=10, dim=8, row_type="int4"),), batch=4, most=2, seed=0)
    arena = problem.arena()
    group, jagged = problem.group(arena), problem.jagged
    offsets = ops.offsets(jagged.lengths_FB)
    hyper, keys = torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64)
    bags = problem.sources(group), jagged.values_N, offsets, None
    with pytest.raises(RuntimeError, match="rows of type int4"):
        ops.update(arena.rows, arena.state, group.tables_TC, hyper, keys, *bags, torch.zeros(4, 8), 4, False)

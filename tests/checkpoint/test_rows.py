"""Rows of one type are read as rows of another, through float32, wherever either are cut."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise import CheckpointError, Embeddings, RowType, Table
from rowwise.checkpoint import files
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import FileSizes, write
from rowwise.parallel.shard.apply import cut_columns
from rowwise.tables.ops.rowtype import pack, unpack
from rowwise.train.snapshot import collect, restore_model

KINDS = [(RowType.FP32, None), (RowType.FP16, None), (RowType.BF16, None), (RowType.INT8, None), (RowType.INT8, 16),
         (RowType.INT8, 32)]  # fmt: skip


def unit(kind):
    """Columns that stay together, of 64."""
    return {RowType.INT8: kind[1] or 64}.get(kind[0], 4)


def spans(draw, size, unit):
    cuts = sorted({0, size, *draw(st.lists(st.integers(0, size // unit).map(lambda k: k * unit), max_size=3))})
    return list(pairwise(cuts))


@given(st.data(), st.sampled_from(KINDS), st.sampled_from(KINDS), st.integers(0, 9))
def test_any_rectangle_in_any_type(tmp_path_factory, data, saved, wanted, seed):
    rows, dim = data.draw(st.integers(1, 20)), 64
    weights = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    folder = tmp_path_factory.mktemp("rows") / "one"
    whole = pack(weights, *saved)
    table = Table(name="t", rows=rows, dim=dim, row_type=saved[0], column_group=saved[1])
    parts = [
        LocalShard(
            name="t", tensor=cut_columns(whole[slice(*r)], table, slice(*c)), shape=(rows, dim), rows=r,
            cols=c, row_type=saved[0], column_group=saved[1],
        )
        for c in spans(data.draw, dim, unit(saved))
        for r in spans(data.draw, rows, 1)
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BUFFER_bytes", 256)
        write(folder, parts, {}, sizes=FileSizes(data.draw(st.sampled_from([300, 1 << 20]))))
    row, col = (data.draw(st.sampled_from(spans(data.draw, n, u))) for n, u in ((rows, 1), (dim, unit(wanted))))
    floats = unpack(whole, dim, *saved)[slice(*row), slice(*col)]
    want = pack(floats, *wanted)
    part = LocalShard(
        name="t", tensor=torch.empty_like(want), shape=(rows, dim), rows=row, cols=col, row_type=wanted[0],
        column_group=wanted[1],
    )  # fmt: skip
    Checkpoint.open(folder).fill(part)
    if saved == wanted:  # as they are: codes are not made anew
        assert torch.equal(unpack(part.tensor, col[1] - col[0], *wanted), floats)
    else:
        assert torch.equal(part.tensor, want)


@pytest.mark.parametrize("there", RowType)
@pytest.mark.parametrize("here", RowType)
def test_a_model_takes_rows_of_another_type(tmp_path, there, here):
    def make(row_type, seed):
        return Embeddings([Table(name="t", rows=50, dim=32, row_type=row_type)], seed=seed)

    saved, model = make(there, 1), make(here, 2)
    write(tmp_path / "one", *collect(saved, {}))
    restore_model(Checkpoint.open(tmp_path / "one"), model)
    want = saved.table("t") if there == here else pack(saved.weights("t"), here)
    assert torch.equal(model.table("t"), want)


def test_a_tensor_that_is_no_table_has_one_type(tmp_path):
    write(tmp_path / "one", [LocalShard.whole("w", torch.ones(3))], {})
    with pytest.raises(CheckpointError, match=r"\(3,\) of float16; warm-start"):
        Checkpoint.open(tmp_path / "one").fill(LocalShard.whole("w", torch.ones(3).half()))


def test_a_tensor_that_is_not_in_a_row_is_filled_where_it_is(tmp_path):
    tensor = torch.arange(24.0).view(2, 3, 4)
    write(
        tmp_path / "one", [LocalShard.whole("w", tensor.transpose(1, 2)), LocalShard.whole("v", tensor[:, 0, :2])], {}
    )
    out, small = torch.zeros(2, 3, 4), torch.zeros(4, 2).t()
    found = Checkpoint.open(tmp_path / "one")
    found.copy_into(out.transpose(1, 2), "w")
    found.copy_into(small[:, 1:3], "v")
    assert torch.equal(out, tensor)
    assert torch.equal(small[:, 1:3], tensor[:, 0, :2])
    assert not small[:, 0].any()


def test_one_number_of_many_that_lie_apart(tmp_path):
    """Such as the state of a single row: in a row with itself, whatever its stride."""
    many = torch.arange(15.0).view(3, 5)
    write(tmp_path / "one", [LocalShard.whole("w", many[1:2, 2])], {})
    Checkpoint.open(tmp_path / "one").fill(LocalShard.whole("w", many[2:, 4]))
    assert many[2, 4] == many[1, 2] == 7

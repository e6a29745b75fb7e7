"""What the exchange does to memory equals the reference, and nothing outside a tensor is read or written."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.errors import IdError
from rowwise.tables.ops import reference

ops = torch.ops.rowwise
WIDTHS = (1, 3, 16, 20, 32, 64, 100, 128)


@given(
    batch=st.sampled_from((0, 1, 5, 128, 300)),
    widths=st.lists(st.lists(st.sampled_from(WIDTHS), max_size=4), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_columns_are_placed_and_added_as_the_reference_does(batch, widths, seed):
    g = torch.Generator().manual_seed(seed)
    blocks = [torch.randn(batch, sum(w), generator=g) for w in widths]
    columns = 4 + max(sum(w) for w in widths)
    segments = []
    for block, parts in enumerate(widths):
        source = 0
        for width in parts:
            target = int(torch.randint(0, columns - width + 1, (1,), generator=g))
            segments.append((block, source, target, width, len(segments) % 2))
            source += width
    segments_RC = torch.tensor(segments, dtype=torch.int64).view(-1, 5)
    found, wanted = torch.zeros(batch, columns), torch.zeros(batch, columns)
    ops.place(blocks, segments_RC, found)
    reference.place(blocks, segments_RC, wanted)
    assert torch.equal(found, wanted)


@given(
    batch=st.sampled_from((0, 1, 7, 300)),
    features=st.integers(1, 4),
    messages=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=4),
    types=st.tuples(*[st.sampled_from((torch.int32, torch.int64))] * 2),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_ids_are_packed_as_the_reference_does(batch, features, messages, types, weighted, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (features * batch,), generator=g).to(types[0])
    values = torch.randint(0, 1000, (int(lengths.sum()),), generator=g).to(types[1])
    weights = torch.randn(len(values), generator=g) if weighted else None
    picked = torch.randint(0, features, (sum(n for n, _, _ in messages),), generator=g).tolist()
    slices = torch.tensor([(feature * batch, 1000) for feature in picked], dtype=torch.int64).view(-1, 2)
    rows = [(n, wide, more and weighted) for n, wide, more in messages]
    given_ = values, lengths, weights, slices, torch.tensor(rows, dtype=torch.int64), batch
    for found, wanted in zip(ops.pack_ids(*given_), reference.pack_ids(*given_), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("bad", [-1, 10, 1 << 40])
def test_an_id_outside_its_rows_is_not_packed(bad):
    values, lengths = torch.tensor([3, bad, 9]), torch.tensor([1, 2])
    given_ = values, lengths, None, torch.tensor([[0, 10]]), torch.tensor([[1, 0, 0]]), 2
    with pytest.raises(RuntimeError, match="id is outside"):
        ops.pack_ids(*given_)
    with pytest.raises(IdError, match="id is outside"):
        reference.pack_ids(*given_)


PACKED = {
    "values": torch.tensor([3, 1, 9]),
    "lengths": torch.tensor([1, 2]),
    "weights": None,
    "slices": torch.tensor([[0, 10]]),
    "messages": torch.tensor([[1, 0, 0]]),
    "batch": 2,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([1, 3])}, "lengths do not add up to 3 values"),
        ({"lengths": torch.tensor([4, -1])}, "lengths do not add up"),
        ({"lengths": torch.tensor([1 << 62, 1 << 62])}, "lengths do not add up"),
        ({"slices": torch.tensor([[1, 10]])}, "slice 0 reaches past the 2 bags"),
        ({"slices": torch.tensor([[-1, 10]])}, "slice 0 reaches past the 2 bags"),
        ({"slices": torch.tensor([[0, 10, 1]])}, "slices must be"),
        ({"messages": torch.tensor([[2, 0, 0]])}, "messages have more than 1 slices"),
        ({"messages": torch.tensor([[-1, 0, 0], [2, 0, 0]])}, "messages have more than 1 slices"),
        ({"messages": torch.tensor([[0, 0, 0]])}, "messages have 0 of 1 slices"),
        ({"messages": torch.tensor([[1, 0, 1]])}, "a rank wants weights, and there are none"),
        ({"weights": torch.ones(2)}, "2 weights for 3 values"),
        ({"batch": 3}, "slice 0 reaches past the 2 bags"),
        ({"batch": -1}, "slices must be"),
    ],
)
def test_what_does_not_fit_is_not_packed(change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.pack_ids(*(PACKED | change).values())


@pytest.mark.parametrize(
    "segment",
    [
        (1, 0, 0, 4, 0),
        (-1, 0, 0, 4, 0),
        (0, 5, 0, 4, 0),
        (0, -1, 0, 4, 0),
        (0, 0, 5, 4, 0),
        (0, 0, 0, 9, 0),
        (0, 0, 0, -1, 1),
        (0, 1 << 62, 0, 4, 0),
        (0, 0, 1 << 62, 4, 0),
    ],
)
def test_columns_outside_a_block_are_not_placed(segment):
    out = torch.zeros(3, 8)
    with pytest.raises(RuntimeError, match="segment 0 reaches past"):
        ops.place([torch.ones(3, 8)], torch.tensor([segment]), out)
    assert not out.any()


def test_blocks_of_other_batches_are_not_placed():
    with pytest.raises(RuntimeError, match="blocks must be"):
        ops.place([torch.ones(2, 8)], torch.tensor([(0, 0, 0, 4, 0)]), torch.zeros(3, 8))
    with pytest.raises(RuntimeError, match="segments"):
        ops.place([torch.ones(3, 8)], torch.tensor([(0, 0, 0, 4)]), torch.zeros(3, 8))


@pytest.mark.parametrize("count", [0, 1, 1 << 16, (1 << 16) + 1, 1 << 22])
def test_bytes_are_memory_of_their_own(count):
    one, two = ops.empty_bytes(count), ops.empty_bytes(count)
    one.fill_(1)
    two.fill_(2)
    assert torch.equal(one, torch.ones(count, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="tensor of -1 bytes"):
        ops.empty_bytes(-1)

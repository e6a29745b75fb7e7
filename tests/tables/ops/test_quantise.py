"""Rows rounded to 8 and 4 bits: as the reference says, within half a step, never worse than the plain range."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise.base.errors import StateError
from rowwise.tables.ops import quantise as ops_quantise
from rowwise.tables.ops import reference
from rowwise.tables.ops.operators import OPERATORS
from rowwise.tables.ops.quantise import dequantise
from rowwise.tables.spec import quantised_bytes

ops = torch.ops.rowwise


def quantise(w_ND, bits):
    return ops_quantise.quantise(w_ND, bits, "table 'item'", range(100, 100 + len(w_ND)))


DIMS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 33, 64, 100, 128, 1100)
KINDS = {
    "normal": lambda x: x,
    "far from zero": lambda x: 1 + x / 20,
    "heavy tails": lambda x: x**5,
    "constant": lambda x: x[:, :1].expand_as(x).clone(),
    "two values": lambda x: (x > 0).float() - 0.25,
    "zeros of both signs": lambda x: torch.where(x > 0, 0.0, -0.0),
    "tiny": lambda x: x * 1e-41,
    "huge": lambda x: x.clamp(-4, 4) * 2e37,
}
rows = st.builds(
    lambda n, dim, kind, seed: KINDS[kind](torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))),
    st.sampled_from((0, 1, 5, 300)),
    st.sampled_from(DIMS),
    st.sampled_from(list(KINDS)),
    st.integers(0, 1000),
)


@given(w_ND=rows)
def test_four_bits_are_packed_as_the_reference_does(isa, w_ND):
    packed = ops.pack4(w_ND)
    assert torch.equal(packed, reference.pack4(w_ND))
    assert packed.shape == (len(w_ND), quantised_bytes(w_ND.shape[1], 4))
    found, wanted = ops.unpack4(packed, w_ND.shape[1]), reference.unpack4(packed, w_ND.shape[1])
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@given(w_ND=rows.filter(lambda w_ND: w_ND.shape[1] <= 256), share=st.floats(0, 1), holes=st.booleans())
def test_the_largest_numbers_are_kept_as_the_reference_does(isa, w_ND, share, holes):
    if holes and w_ND.numel():
        w_ND.view(-1)[:: max(w_ND.numel() // 7, 1)] = torch.nan
        w_ND.view(-1)[3::29] = -torch.inf
    kept = max(1, round(share * w_ND.shape[1]))
    coded = ops.keep_largest(w_ND, kept)
    assert torch.equal(coded, reference.keep_largest(w_ND, kept))
    assert coded.shape == (len(w_ND), 5 * kept)
    assert (coded[:, 4 * kept :].int().diff(dim=1) > 0).all()


def plain(w_ND):
    """Four bits between the ends of each row."""
    low, high = w_ND.aminmax(dim=1, keepdim=True)
    step = (high - low) / 15
    return torch.where(step == 0, low, ((w_ND - low) / step).round() * step + low)


@given(w_ND=rows)
def test_searching_for_the_range_is_never_worse_than_the_plain_one(w_ND):
    def error(found):
        return ((found.double() - w_ND.double()) ** 2).sum(1).sqrt()

    found, wanted = error(dequantise(quantise(w_ND, 4), w_ND.shape[1], 4)), error(plain(w_ND.double()))
    # What 32-bit floats lose by themselves, beside numbers far from zero; subnormal ones lose all.
    own = w_ND.shape[1] ** 0.5 * (w_ND.double().abs().amax(1) * 2**-20 + 2.0**-122) if len(w_ND) else 0
    assert bool((found <= wanted * (1 + 1e-5) + own).all())


def test_searching_for_the_range_takes_a_sixth_off_the_squared_error():
    w_ND = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    found = ((dequantise(quantise(w_ND, 4), 64, 4) - w_ND) ** 2).sum()
    assert 0.8 < float(found / ((plain(w_ND) - w_ND) ** 2).sum()) < 0.86


@given(w_ND=rows)
def test_eight_bits_are_within_half_a_step(w_ND):
    found = dequantise(quantise(w_ND, 8), w_ND.shape[1], 8)
    if len(w_ND):
        step_N1 = (w_ND.amax(1, keepdim=True) - w_ND.amin(1, keepdim=True)) / 255
        assert bool(((found - w_ND).abs() <= step_N1 / 2 * 1.001 + w_ND.abs() * 2**-21 + 1e-37).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_any_number_of_threads_gives_the_same_bits(bits, threads):
    w_ND = torch.randn(3000, 40)
    found = []
    for count in (1, 2, 5):
        threads(count)
        found.append(quantise(w_ND, bits))
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_sixteen_bits_go_through_floats(bits, dtype):
    w_ND = torch.randn(10, 12).to(dtype)
    assert torch.equal(quantise(w_ND, bits), quantise(w_ND.float(), bits))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2e38])
def test_a_row_without_a_range_is_refused_by_table_and_number(bits, bad):
    w_ND = torch.zeros(5, 3)
    w_ND[3, 1] = bad
    with pytest.raises(StateError, match=r"table 'item': row 103 holds (nan|-?inf|1\.99.*e\+38), .* save with 32 bits"):
        quantise(w_ND, bits)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.pack4(torch.zeros(3)), "rows must be"),
        (lambda: ops.pack4(torch.zeros(3, 0)), "rows must be"),
        (lambda: ops.pack4(torch.zeros(3, 4, dtype=torch.float64)), "rows must be"),
        (lambda: ops.pack4(torch.zeros(4, 3).T), "rows must be"),
        (lambda: ops.keep_largest(torch.zeros(3), 1), "rows must be"),
        (lambda: ops.keep_largest(torch.zeros(3, 257), 1), "of at most 256 columns"),
        (lambda: ops.keep_largest(torch.zeros(3, 4), 5), "5 numbers of rows of 4"),
        (lambda: ops.keep_largest(torch.zeros(3, 4), 0), "0 numbers of rows of 4"),
        (lambda: ops.unpack4(torch.zeros(3, 12, dtype=torch.uint8), 9), "rows of 9 columns take 16 bytes"),
        (lambda: ops.unpack4(torch.zeros(3, 12, dtype=torch.uint8), 0), "rows of 0 columns"),
        (lambda: ops.unpack4(torch.zeros(37, dtype=torch.uint8)[1:].view(3, 12), 8), "not aligned"),
    ],
)
def test_what_cannot_be_packed_is_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


@given(
    ids=st.lists(st.integers(-3, 12), max_size=40),
    wide=st.booleans(),
    lengths=st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_marks_are_set_as_the_reference_does(ids, wide, lengths):
    """Two features of a table of ten rows that begin at row 5 of all; what is outside the table marks nothing."""
    ids = (ids + [0] * sum(lengths))[: sum(lengths)]
    bags = [torch.tensor(ids).to(torch.int64 if wide else torch.int32), ops.offsets(torch.tensor(lengths))]
    features = torch.tensor([[2, 0, 0, 10, 4, 0, 0, 0, 0], [0, 0, 0, 10, 4, 0, 0, 0, 0]])
    found, wanted = torch.zeros(20, dtype=torch.uint8), torch.zeros(20, dtype=torch.uint8)
    ops.mark(found, torch.tensor([5, 5]), torch.zeros(160, dtype=torch.uint8), features, *bags, 1)
    reference.mark(wanted, torch.tensor([5, 5]), reference.FeatureBags(features, *bags, None, 1))
    assert torch.equal(found, wanted)
    inside = [i for i in ids[: lengths[0]] + ids[sum(lengths[:2]) :] if 0 <= i < 10]
    assert found.nonzero().flatten().tolist() == sorted({i + 5 for i in inside})


def test_marks_outside_their_tensor_are_refused():
    arena, features = torch.zeros(160, dtype=torch.uint8), torch.tensor([[0, 0, 0, 10, 4, 0, 0, 0, 0]])
    bags = torch.tensor([1]), torch.tensor([0, 1]), 1
    for starts, marks in (([11], 20), ([-1], 20), ([0], 9)):
        with pytest.raises(RuntimeError, match="reach past"):
            ops.mark(torch.zeros(marks, dtype=torch.uint8), torch.tensor(starts), arena, features, *bags)
    with pytest.raises(RuntimeError, match="rows of each feature"):
        ops.mark(torch.zeros(20, dtype=torch.uint8), torch.tensor([0, 0]), arena, features, *bags)


@pytest.mark.slow
def test_opcheck():
    marks = torch.zeros(20, dtype=torch.uint8), torch.tensor([0]), torch.zeros(160, dtype=torch.uint8)
    bags = torch.tensor([[0, 0, 0, 10, 4, 0, 0, 0, 0]]), torch.tensor([1]), torch.tensor([0, 1]), 1
    torch.library.opcheck(ops.mark.default, (*marks, *bags))
    torch.library.opcheck(ops.pack4.default, (torch.randn(4, 9),))
    torch.library.opcheck(ops.unpack4.default, (torch.zeros(4, 16, dtype=torch.uint8), 9))
    torch.library.opcheck(ops.keep_largest.default, (torch.randn(4, 9), 2))


def test_operators_of_devices_without_kernels():
    """What is registered for such devices gives what the kernels give."""
    rows_ND = torch.randn(50, 24, generator=torch.Generator().manual_seed(1))
    packed = ops.pack4(rows_ND)
    assert packed.equal(OPERATORS["pack4"].reference(rows_ND))
    assert ops.unpack4(packed, 24).equal(OPERATORS["unpack4"].reference(packed, 24))
    assert ops.keep_largest(rows_ND, 5).equal(OPERATORS["keep_largest"].reference(rows_ND, 5))

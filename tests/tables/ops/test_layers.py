"""Packed layers: close to the reference and to float64, with the same bits of a row in any batch."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowwise.tables.ops import reference
from rowwise.tables.ops.interact import interact
from rowwise.tables.ops.linear import LinearLayer, pack_layers

ops = torch.ops.rowwise
ROWS = 150  # several tasks, the last of which is short


def make(sizes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        LinearLayer(
            torch.randn(out, into, generator=g) / max(1, into) ** 0.5,
            torch.randn(out, generator=g) if k % 2 else None,
            k < len(sizes) - 2,
        )
        for k, (into, out) in enumerate(pairwise(sizes))
    ]


def in_float64(layers, x_BI):
    """The layers as the books write them."""
    x = x_BI.double().numpy()
    for weight_OI, bias_O, relu in layers:
        x = x @ weight_OI.double().numpy().T + (0 if bias_O is None else bias_O.double().numpy())
        x = np.maximum(x, 0) if relu else x
    return torch.from_numpy(x)


@pytest.mark.usefixtures("isa")
@given(
    st.lists(st.one_of(st.integers(1, 20), st.sampled_from([16, 33, 64, 130, 257])), min_size=2, max_size=4),
    st.integers(0, ROWS - 1),
    st.integers(0, ROWS),
)
def test_a_row_has_the_same_bits_in_any_batch(sizes, begin, size):
    layers, x_BI = make(sizes), torch.randn(ROWS, sizes[0])
    packed = pack_layers(layers)
    whole = packed(x_BI)
    torch.testing.assert_close(whole.double(), in_float64(layers, x_BI), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole, reference.layers(x_BI, *packed), rtol=1e-4, atol=1e-5)
    assert torch.equal(packed(x_BI[begin : begin + size]), whole[begin : begin + size])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("first", "dim", "features"), [(2, 8, 3), (1, 16, 26), (0, 5, 1)])
def test_layers_around_the_interaction_are_those_of_its_parts(first, dim, features):
    bottom = make([7, 20, dim][: 1 + first] if first == 2 else [7, dim][: 1 + first])
    top = make([dim + features * (features + 1) // 2, 40, 2])
    x_BI, pooled_BS = torch.randn(ROWS, 7 if first else dim), torch.randn(ROWS, features * dim)
    x_BI[20:60], x_BI[100:103] = x_BI[20], x_BI[100]  # equal neighbours, also of two tasks
    packed = pack_layers([*bottom, *top])
    whole = packed.around_pairs(x_BI, pooled_BS, first)
    apart = pack_layers(bottom)(x_BI) if first else x_BI
    assert torch.equal(whole, pack_layers(top)(interact(apart, pooled_BS)))
    torch.testing.assert_close(whole, reference.layers(x_BI, *packed, pooled_BS, first), rtol=1e-3, atol=1e-4)
    for begin, size in ((0, 1), (19, 3), (45, 10), (58, 90), (149, 1), (7, 0)):
        span = slice(begin, begin + size)
        assert torch.equal(packed.around_pairs(x_BI[span], pooled_BS[span], first), whole[span])


@pytest.mark.usefixtures("isa")
def test_the_same_bits_for_any_number_of_threads(threads):
    packed, x_BI = pack_layers(make([30, 50, 3])), torch.randn(1000, 30)
    threads(1)
    wanted = packed(x_BI)
    for n in (2, 5):
        threads(n)
        assert torch.equal(packed(x_BI), wanted)


@pytest.mark.usefixtures("isa")
def test_what_is_not_finite_shows():
    packed = pack_layers(make([3, 17, 5]))
    for bad in (torch.nan, torch.inf):
        x_BI = torch.randn(5, 3)
        x_BI[2, 1] = bad
        finite_B = packed(x_BI).isfinite().all(1).tolist()
        assert finite_B == [True, True, False, True, True] or bad == torch.inf
        assert [finite_B[k] for k in (0, 1, 3, 4)] == [True] * 4
    assert packed(torch.full((1, 3), torch.nan)).isnan().all()


def test_bad_arguments():
    packed = pack_layers(make([4, 6, 2]))
    x_BI = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="layer 0 has 4 inputs and gets 3"):
        packed(x_BI[:, :3])
    with pytest.raises(RuntimeError, match="layers wants pooled"):
        packed.around_pairs(x_BI, torch.randn(3, 7), 1)
    with pytest.raises(RuntimeError, match="layer 1 has 6 inputs and gets 9"):
        packed.around_pairs(x_BI, torch.randn(3, 12), 1)
    for weights in (packed.weights[:-1], packed.weights[:20]):
        with pytest.raises(RuntimeError, match="no room"):
            ops.layers(x_BI, packed.layers_LC, weights)
    with pytest.raises(RuntimeError, match="belong to no layer"):
        ops.layers(x_BI, packed.layers_LC[:1], packed.weights)
    with pytest.raises(RuntimeError, match="no room"):
        ops.layers(x_BI, torch.tensor([[1 << 61, 1 << 61, 1]]), packed.weights)


@pytest.mark.slow
def test_operators_behave():
    packed = pack_layers(make([4, 6, 2]))
    torch.library.opcheck(ops.layers.default, (torch.randn(3, 4), *packed), test_utils=("test_schema",))

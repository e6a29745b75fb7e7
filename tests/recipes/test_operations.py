"""Multiplications in closed form are those that the made model is seen to do."""

import pytest
from clicks import DENSE, make_clicks, make_tables
from hypothesis import given
from hypothesis import strategies as st

from rowwise import Embeddings
from rowwise.models.cost import model_cost
from rowwise.models.dhen import INTERACTIONS
from rowwise.recipes.families import make_click_model
from rowwise.recipes.model_configs import (
    AutoIntConfig,
    DhenConfig,
    DienConfig,
    DinConfig,
    FinalMlpConfig,
    MaskNetConfig,
    MmoeConfig,
    UserModel,
    WukongConfig,
    XDeepFmConfig,
)
from rowwise.recipes.operations import mlp, multiplications

SIZE = 7
WIDTH, FEW = st.integers(1, 9), st.integers(1, 3)
WIDTHS = st.lists(WIDTH, max_size=2).map(tuple)
SOME = st.lists(WIDTH, min_size=1, max_size=3).map(tuple)
EVEN = st.lists(WIDTH.map(lambda n: 2 * n), min_size=1, max_size=2).map(tuple)
KINDS = st.lists(st.sampled_from(sorted(INTERACTIONS)), min_size=1, max_size=3).map(tuple)
VECTORS = st.none() | st.integers(3, 8)
CONFIGS = st.one_of(
    st.builds(
        DhenConfig, top=WIDTHS, layers=FEW, interactions=KINDS, vectors=VECTORS,
        ensemble=st.sampled_from(["concat", "sum", "weighted_sum"]), heads=st.sampled_from([1, 2]), ffn_ratio=FEW,
        kernel=st.sampled_from([1, 3]), rank=WIDTH, hidden=WIDTHS,
    ),
    st.builds(WukongConfig, top=WIDTHS, layers=FEW, vectors=VECTORS, rank=WIDTH, hidden=WIDTHS),
    st.builds(
        MaskNetConfig, top=WIDTHS, blocks=SOME, structure=st.sampled_from(["parallel", "serial"]), reduction_ratio=FEW
    ),
    st.builds(FinalMlpConfig, first=EVEN, second=EVEN, gate=WIDTH),
    st.builds(AutoIntConfig, deep=WIDTHS, layers=FEW, width=WIDTH.map(lambda n: 2 * n)),
    st.builds(XDeepFmConfig, deep=WIDTHS, products=SOME),
)  # fmt: skip


@given(CONFIGS, st.sampled_from([2, 8]))
def test_multiplications_are_those_of_the_model(config, dim):
    tables = make_tables(dim)
    model = make_click_model(config, Embeddings(tables), DENSE, 1)
    once = 0  # for a batch
    if isinstance(config, FinalMlpConfig):
        once = 2 * mlp(dim, config.gate, 5 * dim)
    found = model_cost(model, make_clicks(SIZE)).flops
    assert found == (2 * SIZE * multiplications(config, tables, DENSE) + 2 * once) // SIZE


@pytest.mark.parametrize(
    "config",
    [
        DienConfig(), DinConfig(),
        MmoeConfig(), UserModel(module="mine.py:Net"), FinalMlpConfig(first=()), FinalMlpConfig(heads=0),
        MaskNetConfig(blocks=(), structure="serial"),
    ],
)  # fmt: skip
def test_those_of_other_models_and_of_refused_ones_are_not_known(config):
    assert multiplications(config, make_tables(), DENSE) is None

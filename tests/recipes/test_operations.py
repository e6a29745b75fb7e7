"""Multiplications without memory for weights are those that the made model is seen to do."""

import pytest
from clicks import DENSE, make_clicks, make_tables

from rowwise import Embeddings
from rowwise.models.cost import model_cost
from rowwise.recipes.families import make_click_model
from rowwise.recipes.model_configs import (
    AutoIntConfig,
    DhenConfig,
    DinConfig,
    FinalMlpConfig,
    MaskNetConfig,
    MmoeConfig,
    UserModel,
    WukongConfig,
    XDeepFmConfig,
)
from rowwise.recipes.operations import multiplications

SIZE, DIM = 7, 8


@pytest.mark.parametrize(
    ("config", "once"),  # multiplications for a batch
    [
        (DhenConfig(top=(5,), interactions=("attention", "dot"), ensemble="weighted_sum", norm="batch"), 0),
        (WukongConfig(layers=3, vectors=4), 0),
        (MaskNetConfig(blocks=(6, 4), structure="serial"), 0),
        (FinalMlpConfig(first=(6,), second=(8, 4), gate=3), 2 * (DIM * 3 + 3 * 5 * DIM)),
        (AutoIntConfig(deep=(), layers=1, width=6), 0),
        (XDeepFmConfig(deep=(7, 3), products=(4, 5)), 0),
    ],
)
def test_multiplications_are_those_of_the_model(config, once):
    tables = make_tables(DIM)
    found = model_cost(make_click_model(config, Embeddings(tables), DENSE, 1), make_clicks(SIZE)).flops
    assert found == (2 * SIZE * multiplications(config, tables, DENSE) + 2 * once) // SIZE


@pytest.mark.parametrize(
    "config",
    [
        DinConfig(), MmoeConfig(), UserModel(module="mine.py:Net"), FinalMlpConfig(first=()), FinalMlpConfig(heads=0),
        MaskNetConfig(blocks=(), structure="serial"),
    ],
)  # fmt: skip
def test_those_of_other_models_and_of_refused_ones_are_not_known(config):
    assert multiplications(config, make_tables(), DENSE) is None

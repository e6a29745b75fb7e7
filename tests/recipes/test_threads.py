"""The threads of a run whose recipe leaves them open: one for a small step, all for others."""

import pytest

from rowwise import Table
from rowwise.base.processor import Processor
from rowwise.recipes.model_configs import (
    AutoIntConfig,
    DcnConfig,
    DeepFmConfig,
    DhenConfig,
    DlrmConfig,
    UserModel,
    WukongConfig,
)
from rowwise.recipes.processor import choose_threads

TABLES = [Table(name=f"t{n}", rows=1000, dim=16) for n in range(10)]
WIDE, NARROW = (Processor(flags=frozenset(flags)) for flags in (("avx512f", "avx2"), ("avx2",)))


def choose(model=DeepFmConfig(deep=(128, 64)), batch=1024, processor=WIDE, tables=TABLES):  # noqa: B008 - frozen
    return choose_threads(model, tables, 0, batch, processor, 8)


def test_small_steps_take_one_thread_and_others_all():
    chosen = [choose(batch=1 << n) for n in range(6, 20)]
    assert chosen == sorted(chosen)
    assert set(chosen) == {1, 8}
    assert choose(batch=1024) == 1
    assert choose(batch=8192) == 8


@pytest.mark.parametrize(
    "larger",
    [
        {"processor": NARROW},
        {"processor": Processor()},
        {"model": DeepFmConfig(deep=(512, 256))},
        {"model": WukongConfig()},
        {"model": DhenConfig(interactions=("attention", "cross"))},
        {"model": AutoIntConfig()},
        {"model": DcnConfig(deep=(128, 64), crosses=6)},
        {"model": DlrmConfig(bottom=(512,), top=(512, 256))},
        {"tables": [Table(name="t", rows=9, dim=16, features=tuple(f"f{n}" for n in range(40)))]},
    ],
)
def test_more_work_or_a_slower_processor_takes_all_threads_earlier(larger):
    def smallest(**change):
        return next(1 << n for n in range(4, 24) if choose(batch=1 << n, **change) == 8)

    assert smallest(**larger) < smallest()


def test_layers_of_a_users_model_are_unknown():
    assert choose(UserModel(module="mine.py:Net"), batch=1) == 8

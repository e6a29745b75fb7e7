"""Folds of samples: the same wherever a sample is, and while rows train each is looked up by the map of its own."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import make_problem
from shared_batches import draw_copies, make_shared

from rowwise import BatchError, Jagged, MappedEmbeddings, Normal, Pooling, SpecError, Table
from rowwise.tables.ids.arrays import add_maps, entry_map, fold_maps, make_folds, ranked_map
from rowwise.tables.ids.folds import assign_folds
from rowwise.tables.ids.rows import look_up_rows
from rowwise.tables.ops.jagged import permute, split

TABLES = [Table(name="a", rows=50, dim=4, init=Normal(std=1.0)), Table(name="b", rows=30, dim=4, init=Normal(std=1.0))]
NAMES = ("a", "b")
COUNT, SEED = 3, 4


def learned(ids, seed=0, rows=5):
    generator = np.random.default_rng(seed)
    one, *others = (entry_map(ids, generator.integers(-1, rows, ids), rows, unseen_rows=2) for _ in range(1 + COUNT))
    return make_folds(one, others, NAMES, SEED)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_sample_is_in_the_same_fold_wherever_it_is(seed):
    """In a part of the batch, with features in another order, or sharing its bags with neighbours."""
    draws = random.Random(seed)
    kinds = {name: draws.choice((torch.int32, torch.int64)) for name in ("ids", "lengths")}
    batch = make_shared(TABLES, draws.sample(NAMES, draws.randint(1, 2)), draw_copies(draws, 40), seed, **kinds)
    folds_B = assign_folds(batch, NAMES, COUNT, SEED)
    assert folds_B.shape == (40,)
    assert torch.equal(folds_B, assign_folds(batch.expanded(), NAMES, COUNT, SEED))
    plain = permute(batch.expanded(), ("b", "not used", "a"))
    parts = [assign_folds(part, NAMES, COUNT, SEED) for part in split(plain, (7, 0, 33))]
    assert torch.equal(folds_B, torch.cat(parts))
    assert folds_B.min() >= 0
    assert folds_B.max() < COUNT


def test_folds_are_about_as_large_and_follow_from_all_ids():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 1000, (2, 3000), generator=generator)
    lengths = torch.ones(6000, dtype=torch.int64)
    batch = Jagged(features=NAMES, values_N=ids.flatten(), lengths_FB=lengths)
    folds_B = assign_folds(batch, NAMES, 4, 0)
    assert (folds_B.bincount(minlength=4) - 750).abs().max() < 120
    again = Jagged(features=NAMES, values_N=torch.cat([ids[0], ids[0]]), lengths_FB=lengths)
    assert not torch.equal(folds_B, assign_folds(again, NAMES, 4, 0))
    assert not torch.equal(folds_B, assign_folds(batch, NAMES, 4, 1))
    with pytest.raises(BatchError, match="batch has features a"):
        assign_folds(batch, ("a", "c"), 4, 0)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_samples_are_trained_by_the_map_of_their_fold(pooling):
    tables = [Table(name=t.name, rows=t.rows, dim=4, init=t.init, pooling=pooling) for t in TABLES]
    made = learned(50)
    module = MappedEmbeddings(tables, {"a": made}, seed=2)
    batch = permute(make_problem(tables, 30, 3, 5).jagged, NAMES)
    folds_B = assign_folds(batch, NAMES, COUNT, SEED)
    assert len(folds_B.unique()) == COUNT
    found = module(batch)["a"]
    own = [MappedEmbeddings(tables, {"a": one}, seed=2)(batch)["a"] for one in fold_maps(made)]
    counts_B = batch.lengths_FB[:30]
    where = folds_B if pooling is not Pooling.SEQUENCE else folds_B.repeat_interleave(counts_B)
    wanted = torch.stack(own)[where, torch.arange(len(where))]
    assert torch.allclose(found, wanted, atol=1e-6)
    module.eval()
    assert torch.equal(module(batch)["a"], MappedEmbeddings(tables, {"a": made}, seed=2).eval()(batch)["a"])
    rows_N = torch.from_numpy(look_up_rows(made, np.arange(50))[:, 0])
    assert torch.equal(module.weights("a"), module.stored.weights("a")[rows_N])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_shared_bags_are_trained_as_bags_of_their_own(seed):
    draws = random.Random(seed)
    module = MappedEmbeddings(TABLES, {"a": learned(50)}, seed=2)
    batch = make_shared(TABLES, draws.sample(NAMES, draws.randint(1, 2)), draw_copies(draws, 20), seed)
    assert torch.equal(module(batch).matrix_BS, module(batch.expanded()).matrix_BS)


def test_maps_of_folds_are_added_with_the_map():
    both = add_maps(learned(50), ranked_map(50, [np.arange(0, 50, 3)], 0, dims=[2]))
    assert both.folding.count == COUNT
    for fold, (one, mine) in enumerate(zip(fold_maps(both), fold_maps(learned(50)), strict=True)):
        rows_NC = look_up_rows(one, np.arange(50))
        assert (rows_NC[:, 0] == look_up_rows(mine, np.arange(50))[:, 0]).all(), fold
        assert one.shape.parts == both.shape.parts
    with pytest.raises(SpecError, match="fold 0: 50 ids"):
        make_folds(learned(50), [learned(50, rows=6)], NAMES, SEED)
    with pytest.raises(SpecError, match="folds of the samples"):
        add_maps(learned(50), make_folds(learned(50), fold_maps(learned(50)), NAMES, SEED + 1))

"""Batches: their parts fit together or are refused, and TorchRec's keyed tensors go in and come out."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import Keyed

from rowwise import Batch, BatchError, Jagged

bags = st.integers(0, 6).flatmap(
    lambda batch: st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4), min_size=batch, max_size=batch),
        min_size=1,
        max_size=4,
    )
)


def jagged(values, lengths, features=("a", "b"), weights=None) -> Jagged:
    return Jagged(features=features, values_N=values, lengths_FB=lengths, weights_N=weights)


@given(bags)
def test_lists_are_feature_major(lists):
    made = Jagged.from_lists(lists)
    samples = len(next(iter(lists.values())))
    assert made.features == tuple(lists)
    assert made.batch_size == made.stride() == samples
    assert made.values_N.dtype == made.lengths_FB.dtype == torch.int64
    offsets = made.offsets().tolist()
    assert offsets[0] == 0
    assert offsets[-1] == made.values_N.numel()
    back = [made.values_N[b:e].tolist() for b, e in pairwise(offsets)]
    assert back == [bag for name in lists for bag in lists[name]]
    for name in lists:
        assert made.ids_of(name).tolist() == [i for bag in lists[name] for i in bag]


def test_lists_of_different_lengths():
    with pytest.raises(BatchError, match=r"samples: {'a': 2, 'b'"):
        Jagged.from_lists({"a": [[1], [2]], "b": [[1]]})


def test_no_features():
    with pytest.raises(BatchError, match="batch has no features"):
        Jagged.from_lists({})


def test_feature_named_twice():
    with pytest.raises(BatchError, match="feature is named twice"):
        jagged(torch.tensor([1]), torch.tensor([1, 0, 0]), features=("a", "b", "a"))


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        (torch.tensor([1.0, 2.0]), r"torch.float32 \(2,\)"),
        (torch.tensor([[1, 2]]), r"torch.int64 \(1, 2\)"),
        (torch.tensor(3), r"torch.int64 \(\)"),
        (torch.tensor([True, False]), r"torch.bool \(2,\)"),
        (torch.tensor([1, 2], dtype=torch.int16), r"torch.int16 \(2,\)"),
        (torch.tensor([1, 2], dtype=torch.uint8), r"torch.uint8 \(2,\)"),
    ],
)
def test_values_and_lengths_are_integers_in_one_dimension(bad, got):
    good = torch.tensor([1, 1])
    with pytest.raises(BatchError, match=f"values: got {got}: expected one dimension of int32 or int64"):
        jagged(bad, good)
    with pytest.raises(BatchError, match=f"lengths: got {got}: expected one dimension of int32 or int64"):
        jagged(good, bad)


@pytest.mark.parametrize("values", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [torch.int32, torch.int64])
def test_integer_types_are_kept(values, lengths):
    made = jagged(torch.tensor([1, 2, 3], dtype=values), torch.tensor([2, 1], dtype=lengths))
    assert made.values().dtype == values
    assert made.offsets().dtype == made.lengths().dtype == lengths
    assert made.offsets().tolist() == [0, 2, 3]


def test_lengths_divide_among_features():
    with pytest.raises(BatchError, match="divide among 2 features"):
        jagged(torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1]))


@pytest.mark.parametrize(
    ("weights", "got"),
    [
        (torch.ones(3), r"torch.float32 \(3,\)"),
        (torch.ones(2, 1), r"torch.float32 \(2, 1\)"),
        (torch.ones(2, dtype=torch.int64), r"torch.int64 \(2,\)"),
    ],
)
def test_weights_fit_the_ids(weights, got):
    with pytest.raises(BatchError, match=f"weights: got {got}: expected one float for each of the 2 ids"):
        jagged(torch.tensor([1, 2]), torch.tensor([1, 1]), weights=weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_may_be_any_float(dtype):
    weights = torch.ones(2, dtype=dtype)
    assert jagged(torch.tensor([1, 2]), torch.tensor([1, 1]), weights=weights).weights_or_none() is weights


def test_batches_do_not_change():
    made = jagged(torch.tensor([1]), torch.tensor([1, 0]))
    with pytest.raises(AttributeError, match="assign to field 'features'"):
        made.features = ("x",)


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 1.0, 2.0])])
def test_keyed_round_trip(weights):
    values, lengths = torch.tensor([7, 8, 9]), torch.tensor([1, 0, 0, 2])
    made = Jagged.from_keyed(Keyed(keys=["a", "b"], values=values, weights=weights, lengths=lengths))
    assert made.features == ("a", "b")
    assert made.batch_size == 2
    keyed = made.to_keyed(Keyed)
    assert isinstance(keyed, Keyed)
    assert keyed.keys() == made.keys() == ["a", "b"]
    assert keyed.values() is made.values() is values
    assert keyed.lengths() is made.lengths() is lengths
    assert keyed.weights_or_none() is made.weights_or_none() is weights


def test_a_jagged_stands_in_for_a_keyed():
    made = jagged(torch.tensor([1]), torch.tensor([1, 0]))
    assert Jagged.from_keyed(made) is made
    assert Jagged.from_keyed(made.to_keyed(Keyed)) == made


def test_a_keyed_is_checked():
    with pytest.raises(BatchError, match="lengths do not divide"):
        Jagged.from_keyed(Keyed(keys=["a", "b"], values=torch.tensor([7]), lengths=torch.tensor([1, 0, 0])))


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5])])
def test_to_device(weights):
    made = jagged(torch.tensor([1]), torch.tensor([1, 0]), weights=weights)
    moved = made.to("meta")
    assert moved.features == made.features
    assert {t.device.type for t in (moved.values_N, moved.lengths_FB)} == {"meta"}
    assert (moved.weights_N is None) == (weights is None)
    assert moved.batch_size == 1
    assert torch.equal(made.to(torch.device("cpu")).values_N, made.values_N)


def test_batch_parts_hold_the_same_samples():
    sparse = Jagged.from_lists({"a": [[1], []]})
    Batch(dense_BF=torch.zeros(2, 3), sparse=sparse, labels_BK=torch.zeros(2, 1))
    Batch(dense_BF=torch.zeros(2, 0), sparse=sparse, labels_BK=torch.zeros(2, 4))
    with pytest.raises(BatchError, match="3, 'sparse': 2, 'labels'"):
        Batch(dense_BF=torch.zeros(3, 3), sparse=sparse, labels_BK=torch.zeros(2, 1))
    with pytest.raises(BatchError, match="2, 'sparse': 2, 'labels'"):
        Batch(dense_BF=torch.zeros(2, 3), sparse=sparse, labels_BK=torch.zeros(1, 1))
    for part in ("weights_B", "keys_B", "times_B"):
        Batch(dense_BF=torch.zeros(2, 3), sparse=sparse, labels_BK=torch.zeros(2, 1), **{part: torch.zeros(2)})
        with pytest.raises(BatchError, match=f"different numbers of samples: .*'{part[:-2]}': 3"):
            Batch(dense_BF=torch.zeros(2, 3), sparse=sparse, labels_BK=torch.zeros(2, 1), **{part: torch.zeros(3)})


def test_ids_that_are_not_whole_are_refused():
    with pytest.raises(BatchError, match=r"values: got torch\.float32"):
        Jagged.from_lists({"a": [[1.5]]})


@pytest.mark.parametrize("value", ["x", None, 1 << 63])
def test_values_that_are_no_ids_are_named(value):
    with pytest.raises(BatchError, match=r"1, position 2: .*"):
        Jagged.from_lists({"a": [[1], [2]], "b": [[], [3, 4, value]]})


@pytest.mark.parametrize("full", [True, False])
def test_a_batch_moves_as_a_whole(full):
    """To the device without memory, where only shapes and types are left to compare."""
    more = {"weights_B": torch.ones(2), "keys_B": torch.arange(2), "times_B": torch.arange(2)} if full else {}
    sparse = jagged(torch.tensor([1, 2, 3]), torch.tensor([1, 0, 1, 1]), weights=torch.ones(3) if full else None)
    batch = Batch(dense_BF=torch.zeros(2, 3), sparse=sparse, labels_BK=torch.zeros(2, 1), **more)
    moved, back = batch.to("meta"), batch.to("cpu")
    for name in ("dense_BF", "labels_BK", "weights_B", "keys_B", "times_B"):
        mine, theirs = getattr(batch, name), getattr(moved, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert (theirs.device.type, theirs.shape, theirs.dtype) == ("meta", mine.shape, mine.dtype)
            assert torch.equal(getattr(back, name), mine)
    assert moved.sparse.features == batch.sparse.features
    assert moved.sparse.values_N.device.type == moved.sparse.lengths_FB.device.type == "meta"
    assert (moved.sparse.weights_N is None) == (not full)

"""Metrics equal scikit-learn's, whatever is split, merged, saved or windowed; bounds hold for any scores."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rowwise import BatchError, SpecError, StateError
from rowwise.train.auc import AXIS, Auc, BinnedAuc, RecentAuc
from rowwise.train.metrics import Metrics
from rowwise.train.ranking import Ranking
from rowwise.train.samples import Samples
from rowwise.train.slices import Slices, most_common

CLOSE = {"rel": 1e-9, "abs": 1e-12, "nan_ok": True}
ROUNDING = 1e-12  # of sums in float64, beside the bounds that bins state


@st.composite
def scored(draw, extreme=False, min_size=0, max_size=60):
    """Logits with many ties, labels, and weights or None: tensors of one task."""
    size = draw(st.integers(min_size, max_size))
    few = st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e-3, 1.0009765625])
    wild = st.sampled_from([math.inf, -math.inf, 3e38, -3e38, 1e-45, AXIS, -AXIS, np.nextafter(AXIS, 0)])
    # In steps: scikit-learn clips probabilities, so there is nothing to compare in the tails.
    number = few | st.floats(-12, 12) | (wild | st.floats(allow_nan=False) if extreme else few)
    logits = draw(arrays.arrays(np.float64, size, elements=number))
    labels = draw(arrays.arrays(np.float32, size, elements=st.sampled_from([0.0, 1.0])))
    weight = st.sampled_from([0.0, 1.0, 2.5]) | st.floats(0.01, 100)
    weights = draw(st.none() | arrays.arrays(np.float64, size, elements=weight))
    return tuple(None if array is None else torch.from_numpy(array) for array in (logits, labels, weights))


def made(metric, *batches):
    for batch in batches:
        if isinstance(metric, RecentAuc):
            metric.add_batches(Samples.of(*batch), [len(batch[0])])
        else:
            metric.add(Samples.of(*batch))
    return metric


def fit_of(*batches):
    return made(Metrics(), *batches).value()["label"].fit


def area_of(*batches):
    """Exact, as there are few samples."""
    return made(Auc(), *batches).value()[0]


def pieces(samples, cuts):
    """The samples in some batches, empty ones among them."""
    edges = [0, *sorted(round(cut * len(samples[0])) for cut in cuts), len(samples[0])]
    return [tuple(None if t is None else t[a:b] for t in samples) for a, b in itertools.pairwise(edges)]


def rows(value):
    """All numbers of what value() returned, in one list."""
    if isinstance(value, (int, float)) or value is None:
        return [] if value is None else [value]
    if isinstance(value, dict):
        return [number for v in value.values() for number in rows(v)]
    if isinstance(value, (list, tuple)):
        return [number for v in value for number in rows(v)]
    return [number for name in value.__slots__ for number in rows(getattr(value, name))]


def reference_auc(logits, labels, weights):
    """Every pair looked at, for scores that scikit-learn refuses."""
    weights = torch.ones_like(logits) if weights is None else weights
    above = (logits.unsqueeze(1) > logits).double() + (logits.unsqueeze(1) == logits).double() / 2
    mass = (weights * labels).unsqueeze(1) * (weights * (1 - labels))
    return ((above * mass).sum() / mass.sum()).item()


def both_classes(samples):
    _, labels, weights = samples
    counted = labels if weights is None else labels[weights > 0]
    return len(counted.unique()) == 2


cuts = st.lists(st.floats(0, 1), max_size=4)
METRICS = {
    "binned": lambda: BinnedAuc(bins=64),
    "auc": lambda: Auc(keep=20, bins=64),
    "recent auc": lambda: RecentAuc(3, most=30),
    "metrics": lambda: Metrics(window=2),
}


@pytest.mark.slow
@given(scored())
def test_entropy_is_that_of_scikit_learn(samples):
    from sklearn.metrics import log_loss  # takes three seconds

    logits, labels, weights = samples
    fit = fit_of(samples)
    kept = torch.ones(len(logits), dtype=torch.bool) if weights is None else weights > 0
    weights = np.ones(len(logits)) if weights is None else weights.numpy()
    assert fit.count == int(kept.sum())
    assert fit.weight == pytest.approx(weights.sum(), **CLOSE)
    if not fit.count:
        assert all(map(math.isnan, (fit.base_rate, fit.log_loss, fit.ne, fit.calibration)))
        return
    predicted = logits.sigmoid().numpy()
    loss = log_loss(labels.numpy(), predicted, sample_weight=weights, labels=[0, 1])
    rate = float(np.average(labels.double().numpy(), weights=weights))
    assert fit.log_loss == pytest.approx(loss, **CLOSE)
    assert fit.base_rate == pytest.approx(rate, **CLOSE)
    if not both_classes(samples):
        assert math.isnan(fit.ne)
        assert math.isnan(fit.calibration) == (rate == 0)
        return
    always = np.full(len(logits), rate)
    assert fit.ne == pytest.approx(
        loss / log_loss(labels.numpy(), always, sample_weight=weights, labels=[0, 1]), **CLOSE
    )
    assert fit.calibration == pytest.approx((predicted * weights).sum() / (labels.numpy() * weights).sum(), **CLOSE)


def test_the_loss_is_right_where_probabilities_round():
    logits = torch.tensor([40.0, -40.0, 800.0, -800.0])
    fit = fit_of((logits, torch.tensor([1.0, 0.0, 0.0, 1.0])))
    assert fit.log_loss == pytest.approx((800 + 800 + 2 * math.exp(-40)) / 4, rel=1e-15)
    logits = torch.tensor([math.inf, -math.inf, 0.0])
    fit = fit_of((logits, torch.tensor([1.0, 0.0, 1.0])))
    assert fit.log_loss == pytest.approx(math.log(2) / 3, rel=1e-15)
    fit = fit_of((logits, torch.tensor([0.0, 0.0, 1.0])))
    assert fit.log_loss == fit.ne == math.inf
    fit = fit_of((logits, torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0])))
    assert fit.log_loss == pytest.approx(math.log(2) / 2, rel=1e-15)


@pytest.mark.slow
@given(scored())
def test_exact_auc_is_that_of_scikit_learn(samples):
    from sklearn.metrics import roc_auc_score  # takes three seconds

    area = area_of(samples)
    if not both_classes(samples):
        assert math.isnan(area.auc)
        assert math.isnan(area.bound)
        return
    logits, labels, weights = samples
    assert area.auc == pytest.approx(roc_auc_score(labels, logits, sample_weight=weights), **CLOSE)
    assert area.bound == 0


@given(scored(extreme=True), st.integers(1, 100))
@example((torch.full((4,), math.inf), torch.tensor([1.0, 0.0, 1.0, 0.0]), None), 8)
@example((torch.arange(40).double() * 1e-9, (torch.arange(40) < 20).float(), None), 1 << 15)
def test_the_bound_of_bins_holds(samples, bins):
    binned, exact = made(BinnedAuc(bins=bins), samples).value()[0], area_of(samples)
    if not both_classes(samples):
        assert all(map(math.isnan, (binned.auc, binned.bound, exact.auc)))
        return
    assert exact.auc == pytest.approx(reference_auc(*samples), **CLOSE)
    assert abs(binned.auc - exact.auc) <= binned.bound + ROUNDING
    assert 0 <= binned.bound <= 0.5 + ROUNDING


def test_the_bound_is_reached_and_no_more():
    worst = (torch.arange(40).double() * 1e-9, (torch.arange(40) < 20).float())  # in one bin, in the wrong order
    area = made(BinnedAuc(), worst).value()[0]
    assert (area.auc, area.bound, area_of(worst).auc) == (0.5, 0.5, 0.0)


@pytest.mark.slow
def test_bins_are_fine_enough():
    from sklearn.metrics import roc_auc_score  # takes three seconds

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50_000, generator=generator) * 1.5 - 3
    labels = (torch.rand(50_000, generator=generator) < logits.sigmoid()).float()
    area = made(BinnedAuc(), (logits, labels)).value()[0]
    assert area.auc == pytest.approx(roc_auc_score(labels, logits), abs=2e-6)
    assert area.bound < 2e-4


@given(scored(extreme=True), cuts)
def test_auc_is_exact_until_it_outgrows_what_it_keeps(samples, at):
    auc = made(Auc(keep=20, bins=64), *pieces(samples, at))
    want = made(Auc() if len(samples[0]) <= 20 else BinnedAuc(bins=64), samples)
    assert rows(auc.value()) == pytest.approx(rows(want.value()), **CLOSE)


def test_auc_keeps_as_many_as_it_says():
    worst = (torch.arange(20).double() * 1e-9, (torch.arange(20) < 10).float())
    auc = made(Auc(keep=20), *pieces(worst, [0.5]))
    assert auc.value()[0].auc == 0
    assert made(auc, (torch.zeros(1), torch.ones(1))).value()[0].bound == 0.5
    halves = [made(Auc(keep=20), half) for half in pieces(worst, [0.5])]
    halves[0].merge(halves[1])
    assert halves[0].value()[0].auc == 0


def test_bins_divide_the_axis():
    edges = [-math.inf, -AXIS - 1e-3, -AXIS, -1e-3, 0.0, AXIS - 1e-3, AXIS, math.inf]
    auc = made(BinnedAuc(bins=2), (torch.tensor(edges, dtype=torch.float64), torch.ones(8)))
    assert auc.counts().tolist() == [[[0, 0, 0, 0], [2, 2, 2, 2]]]


def test_windows_merge_newest_with_newest():
    batch = {n: (torch.zeros(2 * n), torch.arange(2 * n) % 2) for n in (1, 2, 4, 8)}
    for short_first in (False, True):
        a, b = made(Metrics(window=3), batch[1], batch[2], batch[4]), made(Metrics(window=3), batch[8])
        first, second = (b, a) if short_first else (a, b)
        first.merge(second)
        assert recent_counts(first) == (30, 30)
        assert recent_counts(made(first, batch[1])) == (30, 30)
        assert recent_counts(made(first, batch[1])) == (28, 28)


def recent_counts(metrics):
    """Samples of the window, as its sums and its scores have them."""
    return metrics.value()["label"].recent_fit.count, metrics.state()["recent_auc.logits"].shape[0]


@pytest.mark.parametrize("name", METRICS)
@settings(max_examples=15)
@given(samples=scored(), at=cuts, order=st.randoms(use_true_random=False))
def test_parts_make_the_whole(name, samples, at, order):
    batches = pieces(samples, at)
    if name.startswith("recent") or name == "metrics":  # windows merge step by step: ranks hold parts of each batch
        parts = [[tuple(None if t is None else t[r::2] for t in batch) for batch in batches] for r in range(2)]
    else:
        order.shuffle(batches)
        parts = [batches[::2], batches[1::2]]
    merged, other = (made(METRICS[name](), *part) for part in parts)
    kept = other.state()
    merged.merge(other)
    whole = made(METRICS[name](), *batches)
    assert rows(merged.value()) == pytest.approx(rows(whole.value()), **CLOSE)
    assert_same(other.state(), kept)


def assert_same(a, b):
    assert list(a) == list(b)
    for key in a:
        if isinstance(a[key], torch.Tensor):
            assert a[key].dtype == b[key].dtype
            assert torch.equal(a[key], b[key])
        else:
            assert a[key] == b[key]


def through_json(state):
    plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    return json.loads(json.dumps(plain))


@pytest.mark.few(4)
@pytest.mark.parametrize("way", [dict, through_json])
@pytest.mark.parametrize("name", METRICS)
@settings(max_examples=8)
@given(samples=scored(), at=cuts, stop=st.integers(0, 4))
def test_resumed_is_uninterrupted_bit_for_bit(name, way, samples, at, stop):
    batches = pieces(samples, at)
    first = made(METRICS[name](), *batches[:stop])
    saved = first.state()
    before = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in saved.items()}
    resumed = made(type(first).from_state(way(saved)), *batches[stop:])
    made(first, *batches[stop:])
    assert_same(saved, before)  # a state does not change under whoever writes it
    assert_same(resumed.state(), first.state())
    assert repr(resumed.value()) == repr(first.value())


@settings(max_examples=20)
@given(st.lists(scored(max_size=12), max_size=8), st.integers(1, 4))
def test_windows_are_the_newest_batches(batches, window):
    of_all = made(Metrics(window=window), *batches).value()["label"]
    of_newest = made(Metrics(), *batches[-window:]).value()["label"]
    assert rows(of_all.recent) == pytest.approx(rows(of_newest.all), **CLOSE)


def test_a_window_of_scores_is_bounded():
    batch = (torch.zeros(4), torch.tensor([0.0, 1.0, 0.0, 1.0]))
    auc = made(RecentAuc(batches=10, most=9), batch, batch, batch)
    assert auc.state()["sizes"].tolist() == [4, 4]
    assert made(auc, (torch.zeros(20), torch.ones(20))).state()["sizes"].tolist() == [20]  # one is always kept


@given(scored(), st.lists(st.integers(-3, 3), unique=True), st.data())
def test_slices_are_masks(samples, chosen, data):
    size = len(samples[0])
    ids = torch.tensor(data.draw(st.lists(st.integers(-4, 4), min_size=size, max_size=size)), dtype=torch.int64)
    logits, labels, weights = samples
    slices = Slices(chosen, bins=64)
    half = size // 2
    for part in (slice(0, half), slice(half, None)):
        slices.add(Samples.of(logits[part], labels[part], None if weights is None else weights[part]), ids[part])
    top = data.draw(st.none() | st.integers(1, 3))
    shown = slices.value(top)
    named = [one.id for one in shown[:-1]]
    assert shown[-1].id is None
    assert sorted((one.count for one in shown[:-1]), reverse=True) == [one.count for one in shown[:-1]]
    masks = {i: ids == i for i in chosen}
    masks[None] = ~torch.isin(ids, torch.tensor(named, dtype=torch.int64))
    for one in shown:
        masked = tuple(None if t is None else t[masks[one.id]] for t in samples)
        assert rows(one.fits) == pytest.approx(rows(fit_of(masked)), **CLOSE)
        assert rows(one.areas) == pytest.approx(rows(made(BinnedAuc(bins=64), masked).value()), **CLOSE)
    counts = {i: fit_of(tuple(None if t is None else t[masks[i]] for t in samples)).count for i in chosen}
    assert len(named) == min(len(chosen) if top is None else top, sum(count > 0 for count in counts.values()))
    assert all(counts[i] <= counts[named[-1]] for i in set(chosen) - set(named) if named)


def test_slices_of_two_tasks_merge_and_resume():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 2, generator=generator)
    labels = (torch.rand(300, 2, generator=generator) < logits.sigmoid()).float()
    ids = torch.randint(0, 5, (300,), generator=generator)
    whole, a, b = (Slices([4, 1], tasks=2) for _ in range(3))
    whole.add(Samples.of(logits, labels), ids)
    a.add(Samples.of(logits[:100], labels[:100]), ids[:100])
    b.add(Samples.of(logits[100:], labels[100:]), ids[100:].int())
    a.merge(b)
    assert rows(a.value()) == pytest.approx(rows(whole.value()), **CLOSE)
    back = Slices.from_state(through_json(a.state()))
    assert_same(back.state(), a.state())
    assert back.value() == a.value()
    one = next(one for one in whole.value() if one.id == 4)
    of_task = fit_of((logits[ids == 4, 1], labels[ids == 4, 1]))
    assert rows(one.fits[1]) == pytest.approx(rows(of_task), **CLOSE)


def test_most_common_ids():
    assert most_common(torch.tensor([5, 5, 7, 7, 7, -1, 3, 3]), 3) == [7, 3, 5]
    assert most_common(torch.tensor([], dtype=torch.int64), 3) == []


@given(
    st.integers(1, 3), st.integers(0, 20), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]), st.data()
)
def test_tasks_are_independent(tasks, size, per_task, dtype, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    logits = torch.randn(size, tasks, generator=generator, requires_grad=True).to(dtype)
    labels = torch.randint(0, 2, (size, tasks), generator=generator)
    weights = torch.rand((size, tasks) if per_task else (size,), generator=generator)
    names = [f"task{k}" for k in range(tasks)]
    together = made(Metrics(names), (logits, labels, weights)).row()
    for k, name in enumerate(names):
        alone = made(Metrics([name]), (logits[:, k], labels[:, k], weights[:, k] if per_task else weights)).row()
        assert {key: together[key] for key in alone} == pytest.approx(alone, **CLOSE)
    assert len(together) == 14 * tasks


def test_updates_keep_no_memory_of_the_caller():
    logits, labels = torch.tensor([1.0, -1.0]).double(), torch.tensor([1.0, 0.0]).double()
    auc = made(Auc(), (logits, labels))
    logits.neg_()
    assert auc.value()[0].auc == 1


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 3), st.data())
def test_ranking_is_that_of_scikit_learn(lists, candidates, most, data):
    from sklearn.metrics import ndcg_score  # takes three seconds

    score = st.sampled_from([0.0, 1.0, 2.0, -math.inf]) | st.floats(-3, 3, width=32)
    scores = data.draw(arrays.arrays(np.float32, (lists, candidates), elements=score))
    most = min(most, candidates)
    places = [data.draw(st.lists(st.integers(0, candidates - 1), unique=True, max_size=most)) for _ in range(lists)]
    positives = torch.tensor([p + [-1] * (most - len(p)) for p in places], dtype=torch.int64).reshape(lists, most)
    weights = data.draw(st.none() | arrays.arrays(np.float64, lists, elements=st.sampled_from([0.0, 1.0, 2.5])))
    ks = (1, 3, 10)
    whole, a, b = (Ranking(ks) for _ in range(3))
    tensors = (torch.from_numpy(scores), positives, None if weights is None else torch.from_numpy(weights))
    whole.update(*tensors)
    for part, metric in ((slice(0, 2), a), (slice(2, None), b)):
        metric.update(*(None if t is None else t[part] for t in tensors))
    a.merge(b)
    value = whole.value()
    assert rows(a.value()) == pytest.approx(rows(value), **CLOSE)
    assert rows(Ranking.from_state(through_json(whole.state())).value()) == pytest.approx(
        rows(value), abs=0, nan_ok=True
    )
    mass = np.ones(lists) if weights is None else weights
    counted = [i for i in range(lists) if places[i] and mass[i]]
    assert value.lists == len(counted)
    if not counted:
        assert all(map(math.isnan, rows(value)[1:]))
        return
    truth = np.zeros((lists, candidates))
    for i in counted:
        truth[i, places[i]] = 1
    finite = np.where(np.isinf(scores), -9, scores)
    for k in ks:
        if candidates > 1:
            want = ndcg_score(truth[counted], finite[counted], k=k, sample_weight=mass[counted])
            assert value.ndcg[k] == pytest.approx(want, **CLOSE)
        recalls = [expected(scores[i], places[i], lambda hits, k=k: (hits < k).mean()) for i in counted]
        assert value.recall[k] == pytest.approx(np.average(recalls, weights=mass[counted]), **CLOSE)
    first = [expected(scores[i], places[i], lambda hits: 1 / (1 + hits.min())) for i in counted]
    assert value.mrr == pytest.approx(np.average(first, weights=mass[counted]), **CLOSE)


def expected(scores, positives, measure):
    """Mean over all orders of what is tied, of a measure of the positives' ranks (from 0)."""
    above = [(scores > scores[p]).sum() for p in positives]
    groups = {}
    for a, p in zip(above, positives, strict=True):
        groups.setdefault((a, (scores == scores[p]).sum()), []).append(p)
    choices = [[[a + n for n in c] for c in itertools.combinations(range(g), len(m))] for (a, g), m in groups.items()]
    return np.mean([measure(np.array(list(itertools.chain(*hits)))) for hits in itertools.product(*choices)])


def test_a_model_of_equal_scores_ranks_like_chance():
    ranking = Ranking((10,))
    ranking.update(torch.zeros(5, 100), torch.arange(5))
    value = ranking.value()
    assert value.recall[10] == pytest.approx(0.1)
    assert value.mrr == pytest.approx(sum(1 / n for n in range(1, 101)) / 100)


GOOD = (torch.zeros(4, 2), torch.zeros(4, 2), torch.ones(4, 2))
NAN_AT_2_1 = torch.tensor([[0.0, 0], [0, 0], [0, math.nan], [math.nan, 0]])


@pytest.mark.parametrize(
    ("at", "bad", "message"),
    [
        (0, NAN_AT_2_1, r"logit of sample 2, task 1 is nan \(and 1 more\): expected a number; look for an overflow"),
        (
            1,
            torch.full((4, 2), 0.5),
            r"label of sample 0, task 0 is 0.5 \(and 7 more\): expected 0 or 1; where there is no",
        ),
        (1, NAN_AT_2_1, r"label of sample 2, task 1 is nan"),
        (1, torch.full((4, 2), 2), r"label of sample 0, task 0 is 2 "),
        (2, torch.tensor([1.0, -1, 1, 1]), r"weight of sample 1, task 0 is -1.0 .*: expected a finite number"),
        (2, torch.full((4, 2), math.inf), r"weight of sample 0, task 0 is inf"),
        (0, torch.zeros(4, 2, dtype=torch.int64), r"logits: got torch.int64 \(4, 2\): expected floats of shape"),
        (0, torch.tensor(1.0), r"logits: got torch.float32 \(\)"),
        (1, torch.zeros(4), r"labels: got shape \(4,\) beside logits \(4, 2\): expected the same shape"),
        (2, torch.ones(4, 1), r"weights: got shape \(4, 1\) beside logits \(4, 2\): expected one weight"),
        (1, torch.zeros(4, 2, device="meta"), r"labels: got meta beside logits on cpu: expected one device"),
    ],
)
def test_bad_samples(at, bad, message):
    parts = [*GOOD]
    parts[at] = bad
    metrics = Metrics(["a", "b"])
    with pytest.raises(BatchError, match=message):
        metrics.update(*parts)
    assert metrics.row() == pytest.approx(Metrics(["a", "b"]).row(), nan_ok=True)  # nothing of it was counted


def test_one_task_is_named_without_its_number():
    with pytest.raises(BatchError, match=r"^logit of sample 1"):
        Samples.of(torch.tensor([0.0, math.nan]), torch.zeros(2))


def test_the_number_of_tasks_is_held_to():
    with pytest.raises(BatchError, match="logits of 1 tasks"):
        Metrics(["a", "b"]).update(torch.zeros(3), torch.zeros(3))


@pytest.mark.parametrize("make", [BinnedAuc, lambda: Auc(bins=8), Metrics])
def test_unchecked_samples_do_no_harm(make):
    bad = Samples.of(torch.tensor([math.nan, 0.0]), torch.tensor([7.0, -9e9]), check=False)
    metric = make()
    metric.add(bad)
    metric.value()


@pytest.mark.parametrize(
    ("scores", "positives", "weights", "message"),
    [
        (
            torch.zeros(3),
            torch.zeros(3).long(),
            None,
            r"scores: got torch.float32 \(3,\): expected floats \[lists, cand",
        ),
        (
            torch.zeros(3, 4),
            torch.zeros(2).long(),
            None,
            r"positives: got torch.int64 \(2, 1\): expected .* \[3\] or \[3, any",
        ),
        (torch.zeros(3, 4), torch.zeros(3), None, r"positives: got torch.float32 \(3, 1\)"),
        (
            torch.zeros(3, 4),
            torch.tensor([0, 4, 1]),
            None,
            r"positive of list 1 is 4: expected .* among the 4 candidates",
        ),
        (torch.zeros(3, 4), torch.tensor([0, 1, -2]), None, r"positive of list 2 is -2"),
        (
            torch.zeros(1, 4),
            torch.tensor([[2, -1, -1, 2]]),
            None,
            r"positive of list 0 is 2: expected each positive once",
        ),
        (torch.full((3, 4), math.nan), torch.zeros(3).long(), None, r"score of list 0 is nan: expected a number"),
        (torch.zeros(3, 4), torch.zeros(3).long(), torch.ones(2), r"weights: got shape \(2,\): expected \(3,\)"),
        (torch.zeros(3, 4), torch.zeros(3).long(), -torch.ones(3), r"weight of list 0 is -1.0"),
    ],
)
def test_bad_lists(scores, positives, weights, message):
    with pytest.raises(BatchError, match=message):
        Ranking().update(scores, positives, weights)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BinnedAuc(0), r"tasks=0: expected a whole number of at least 1"),
        (lambda: Metrics(window=1.5), r"batches=1.5: expected a whole number"),
        (lambda: BinnedAuc(bins=0), r"bins=0"),
        (lambda: Metrics(["a", "a"]), r"tasks=\('a', 'a'\): expected at least one name"),
        (lambda: Metrics([]), r"tasks=\(\)"),
        (lambda: Slices([1, 1]), r"2 slice ids, of which 1 are distinct"),
        (lambda: Slices(["x"]), r"slice id 'x': expected a whole number of 64 bits; hash strings first"),
        (lambda: Slices([1]).value(top=0), r"top=0: expected a whole number of at least 1"),
        (lambda: Ranking([5, 5]), r"ks=\(5, 5\): expected each k once"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_bad_slice_ids():
    for ids in (torch.zeros(3).long(), torch.zeros(2)):
        with pytest.raises(BatchError, match=r"int64 of shape \(2,\)"):
            Slices([1]).add(Samples.of(torch.zeros(2), torch.zeros(2)), ids)


def test_a_state_is_small_and_that_of_version_0_1_is_read():
    logits, labels = torch.randn(10_240), torch.arange(10_240) % 2
    for metric in (Auc(), RecentAuc(4)):
        metric = made(metric, (logits, labels.float()))
        state = metric.state()
        assert sum(x.numel() * x.element_size() for x in state.values() if isinstance(x, torch.Tensor)) < 200_000
        prefix = "exact." if "exact.logits" in state else ""
        parts = [state.pop(f"{prefix}{name}").double() for name in ("logits", "masses")]
        older = {**state, f"{prefix}scores": torch.cat([parts[0][None], parts[1]])}
        assert type(metric).from_state(older).value() == metric.value()


def test_bad_states():
    state = Metrics().state()
    without = {name: x for name, x in state.items() if name not in ("entropy.totals", "entropy.parts")}
    with pytest.raises(StateError, match="'totals'; it has 'tasks'"):
        Metrics.from_state(without)
    with pytest.raises(StateError, match=r"shape \(5, 1\)"):
        Metrics.from_state({**state, "tasks": 2, "task.1": "other"})
    with pytest.raises(StateError, match="'totals' in the state"):
        Metrics.from_state({**state, "entropy.totals": "x"})
    with pytest.raises(StateError, match="'tasks' in the state"):
        Metrics.from_state({"tasks": 1.5})
    with pytest.raises(StateError, match=r"names the tasks \['label'"):
        Metrics.from_state({**state, "tasks": 2})


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        (BinnedAuc(bins=8), BinnedAuc(bins=9), r"\(tasks, 2, bins\) \(1, 2, 10\) and \(1, 2, 11\)"),
        (Auc(keep=8), Auc(keep=9), "keep 8 and 9"),
        (RecentAuc(3, most=8), RecentAuc(3, most=9), "most 8 and 9"),
        (Slices([1]), Slices([2]), r"ids \[1\] and \[2\]"),
        (Ranking([1]), Ranking([2]), r"ks \(1,\) and \(2,\)"),
        (Slices([1], bins=8), Slices([1], bins=9), r"\(tasks, 2, bins\) \(2, 2, 10\) and \(2, 2, 11\)"),
        (Metrics(window=3), Metrics(window=4), "batches 3 and 4"),
        (Metrics(["a"]), Metrics(["b"]), r"tasks \('a',\) and \('b',\)"),
    ],
)
def test_only_equals_merge(a, b, what):
    before = a.state()
    count_something(b)
    with pytest.raises(StateError, match=f"metrics with {what} do not merge"):
        a.merge(b)
    assert_same(a.state(), before)


def count_something(metric):
    match metric:
        case Ranking():
            metric.update(torch.zeros(1, 2), torch.zeros(1).long())
        case Slices():
            metric.add(Samples.of(torch.zeros(3), torch.ones(3)), torch.ones(3).long())
        case _:
            made(metric, (torch.zeros(3), torch.ones(3)))


@pytest.mark.gpu
def test_a_gpu_counts_the_same():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, 2, generator=generator)
    labels = (torch.rand(1000, 2, generator=generator) < logits.sigmoid()).float()
    ids = torch.randint(0, 5, (1000,), generator=generator)
    host, device = Metrics(["a", "b"]), Metrics.from_state(Metrics(["a", "b"]).state())
    slices, device_slices = Slices([1, 3], tasks=2), Slices([1, 3], tasks=2)
    for part in (slice(0, 300), slice(300, None)):
        host.update(logits[part], labels[part])
        device.update(logits[part].cuda(), labels[part].cuda())
        slices.add(Samples.of(logits[part], labels[part]), ids[part])
        device_slices.add(Samples.of(logits[part].cuda(), labels[part].cuda()), ids[part].cuda())
    assert rows(device.row()) == pytest.approx(rows(host.row()), **CLOSE)
    assert rows(device_slices.value()) == pytest.approx(rows(slices.value()), **CLOSE)
    host.merge(device)
    assert host.value()["a"].fit.count == 2000

"""Groups of rows by their probability."""

import torch

from rowwise.train.auc import BinnedAuc
from rowwise.train.metrics import Metrics
from rowwise.train.reliability import rate_groups
from rowwise.train.samples import Samples


def test_groups_are_tenths_of_the_rows_by_probability():
    torch.manual_seed(0)
    logits = torch.randn(5000, 2) * 3
    labels = torch.bernoulli(logits.sigmoid())
    metrics = Metrics(("a", "b"), window=1)
    for part in range(5):
        metrics.update(logits[part::5], labels[part::5])
    found = metrics.rates()
    for k, task in enumerate(("a", "b")):
        groups = [one for one in found if one.task == task]
        order = logits[:, k].argsort()
        assert len(groups) == 10
        for one, rows in zip(groups, order.chunk(10), strict=True):
            assert abs(one.count - 500) <= 5  # rows of one bin stay together
            assert abs(one.predicted - float(logits[rows, k].sigmoid().mean())) < 0.01
            assert abs(one.observed - float(labels[rows, k].mean())) < 0.02


def test_weights_count_and_equal_rows_are_one_group():
    auc = BinnedAuc()
    logits, labels, weights = torch.tensor([[0.0, 0, 100, 100], [1, 0, 1, 1], [3, 1, 2, 0]])
    auc.add(Samples.of(logits, labels, weights))
    low, high = rate_groups(["a"], auc.counts())
    assert (low.count, low.observed, high.count, high.observed) == (4, 0.75, 2, 1)
    assert abs(low.predicted - 0.5) < 1e-3
    assert high.predicted > 0.999
    assert rate_groups(["a"], BinnedAuc().counts()) == ()

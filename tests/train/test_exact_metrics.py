"""Metrics are the same bits however samples were cut into batches of ranks, and in whatever order they were merged."""

import math

import pytest
import torch

from rowwise.train.auc import exact_areas
from rowwise.train.exact import UNITS, carry, parts_of, to_float64
from rowwise.train.metrics import Metrics
from rowwise.train.samples import Samples
from rowwise.train.slices import Slices


def make_batches(seed, weighted, count=4, tasks=2):
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        size = int(torch.randint(1, 700, (1,), generator=generator))
        logits = (torch.randn(size, tasks, generator=generator) * 3).round(decimals=1)  # with ties
        labels = (torch.rand(size, tasks, generator=generator) < 0.3).float()
        weights = torch.rand(size, generator=generator) * 10 ** torch.randint(-6, 6, (size,), generator=generator)
        batches.append((logits, labels, weights if weighted else None))
    return batches


def part_of(batch, rank, world):
    """Whole blocks, but for the end; none for some ranks."""
    size = len(batch[0])
    blocks = -(-size // 256)
    first, last = (min(size, 256 * (blocks * end // world)) for end in (rank, rank + 1))
    return [None if x is None else x[first:last] for x in batch]


def counted(batches, world, told_every):
    """By ranks that now and then tell the first what they have counted, and begin anew."""
    metrics = [Metrics(("a", "b"), window=3) for _ in range(world)]
    for number, batch in enumerate(batches, 1):
        for rank, one in enumerate(metrics):
            one.update(*part_of(batch, rank, world))
        if number % told_every == 0 or number == len(batches):
            for other in metrics[1:]:
                metrics[0].merge(Metrics.from_state(other.state()))
            metrics[1:] = [Metrics(("a", "b"), window=3) for _ in metrics[1:]]
    return metrics[0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_any_number_of_ranks(seed, weighted, threads):
    threads(1)
    batches = make_batches(seed, weighted)
    want = counted(batches, 1, 1).row()
    for world, told_every in ((1, 3), (2, 1), (2, 4), (4, 2)):
        assert counted(batches, world, told_every).row() == want


@pytest.mark.parametrize("weighted", [False, True])
def test_batches_that_wait_are_counted_as_one_by_one(weighted):
    batches = make_batches(3, weighted, count=40) + make_batches(4, weighted=True, count=3)
    together, singly = Metrics(("a", "b"), window=9), Metrics(("a", "b"), window=9)
    for batch in batches:
        together.update(*batch)
        singly.update(*batch)
        singly.value()  # counts what waits
    got, want = together.state(), singly.state()
    assert got.keys() == want.keys()
    assert all(torch.equal(torch.as_tensor(got[k]), torch.as_tensor(want[k])) for k in got if not k.startswith("task."))
    assert together.row() == singly.row()


@pytest.mark.parametrize("weighted", [False, True])
def test_slices_too(weighted):
    def counted(world):
        slices = [Slices((1, 5), tasks=2) for _ in range(world)]
        for logits, labels, weights in make_batches(1, weighted):
            ids = (logits[:, 0] * 10).long() % 7
            for rank, one in enumerate(slices):
                logits_N, labels_N, weights_N, ids_N = part_of((logits, labels, weights, ids), rank, world)
                one.add(Samples.of(logits_N, labels_N, weights_N), ids_N)
        for other in slices[1:]:
            slices[0].merge(other)
        return [(part.id, part.fits) for part in slices[0].value(top=1)]

    assert counted(1) == counted(2) == counted(4)


def test_the_sum_is_the_exact_one_rounded():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(5000, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(-9, 7, (5000,))
    want = math.fsum(numbers.tolist())
    total = torch.zeros(3, dtype=torch.float64)
    for part in numbers[torch.randperm(5000, generator=generator)].split(77):
        total = carry(total + parts_of(part).sum(1))
    assert float(to_float64(total)) == pytest.approx(want, rel=1e-15, abs=5000 * UNITS[2])
    assert torch.equal(total, carry(parts_of(numbers).sum(1)))
    assert (total[1:] < 2.0**32).all()


@pytest.mark.parametrize("number", [0.0, 2.0**-76, 1 / 3, 0.1, 1e6 + 1e-6, 2.0**40, 1e15, math.inf])
def test_one_number_is_what_its_parts_say(number):
    assert float(to_float64(parts_of(torch.tensor(number, dtype=torch.float64)))) == pytest.approx(number, rel=2**-52)


def test_a_state_of_sums_alone_is_read():
    """As versions wrote it that kept no parts."""
    one = Metrics(("a", "b"), window=3)
    for batch in make_batches(0, weighted=True):
        one.update(*batch)
    again = Metrics.from_state({name: x for name, x in one.state().items() if not name.endswith(".parts")})
    assert again.row() == pytest.approx(one.row(), rel=1e-14)


def test_an_infinite_loss_stays_infinite():
    one = Metrics()
    one.update(torch.tensor([math.inf, 0.5]), torch.tensor([0.0, 1.0]))
    one.update(torch.tensor([0.5]), torch.tensor([1.0]))
    fit = one.value()["label"].fit
    assert fit.log_loss == math.inf
    assert fit.calibration < math.inf


def test_weights_of_tied_scores_add_up_alike_in_any_order():
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(999, 1, generator=generator, dtype=torch.float64)
    scores = torch.stack([torch.arange(999.0).double().unsqueeze(1) // 50, positive, positive.flip(0)])
    want = exact_areas(scores)
    for _ in range(5):
        assert exact_areas(scores[:, torch.randperm(999, generator=generator)]) == want

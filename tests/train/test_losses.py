"""Losses for labels that may be wrong: their formulas, gradients and second pass; ranks train as one with each."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranked import Ranked, tensors, train
from small import check_resumed, same
from torch import nn
from trainings import fast

from rowwise import DLRM, Batch, Embeddings, Jagged, SpecError, Table
from rowwise.recipes.text import decode
from rowwise.train.loss_settings import Bootstrap, GeneralisedCrossEntropy, LogLoss, Smc
from rowwise.train.losses import bootstrap_loss, generalised_cross_entropy, log_loss, smc_loss, smc_weight
from rowwise.train.objective import Clicks
from rowwise.train.settings import DenseSgd, Saving

OTHERS = [Bootstrap(beta=0.8), Bootstrap(beta=0.6, hard=True), GeneralisedCrossEntropy(q=0.7), Smc(steps=6)]
numbers = st.floats(-8, 8, allow_subnormal=False)
labels = st.sampled_from([0.0, 0.05, 0.95, 1.0])
shares = st.floats(0.05, 1)


def entropy(y, p):
    return -y * math.log(p) - (1 - y) * math.log(1 - p)


def one(z):
    return torch.tensor([[z]], dtype=torch.float64)


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


@given(z=numbers, y=labels, beta=shares, hard=st.booleans())
def test_bootstrap_is_the_log_loss_of_labels_mixed_with_probabilities(z, y, beta, hard):
    p = sigmoid(z)
    own = float(z > 0) if hard else p
    want = entropy(beta * y + (1 - beta) * own, p)
    assert bootstrap_loss(one(z), one(y), beta, hard=hard).item() == pytest.approx(want, rel=1e-9, abs=1e-12)


@given(z=numbers, y=labels, q=shares)
def test_generalised_cross_entropy_is_a_power_of_the_label_s_probability(z, y, q):
    p = sigmoid(z)
    want = y * (1 - p**q) / q + (1 - y) * (1 - (1 - p) ** q) / q
    assert generalised_cross_entropy(one(z), one(y), q).item() == pytest.approx(want, rel=1e-9, abs=1e-12)


@given(z=numbers, soft=numbers, y=labels, weight=st.floats(0, 1), temperature=st.floats(0.5, 4))
def test_smc_adds_the_divergence_from_the_soft_labels(z, soft, y, weight, temperature):
    p, t, s = sigmoid(z), sigmoid(soft / temperature), sigmoid(z / temperature)
    divergence = t * math.log(t / s) + (1 - t) * math.log((1 - t) / (1 - s))
    want = (1 - weight) * entropy(y, p) + weight * divergence
    found = smc_loss(one(z), one(soft), one(y), weight, temperature)
    assert found.item() == pytest.approx(want, rel=1e-12, abs=1e-12)


@given(z=numbers, y=labels)
def test_each_is_the_log_loss_at_one_end(z, y):
    want = pytest.approx(log_loss(one(z), one(y)).item(), rel=1e-3, abs=1e-6)
    assert bootstrap_loss(one(z), one(y), 1.0).item() == want
    assert generalised_cross_entropy(one(z), one(y), 1e-5).item() == want
    assert smc_loss(one(z), one(1.5), one(y), 0.0, 1.5).item() == want


def test_gradients_are_those_of_the_formulas():
    torch.manual_seed(0)
    logits_BK = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    labels_BK = torch.tensor([0.0, 0.1, 1.0], dtype=torch.float64).repeat(4).view(6, 2)
    soft_BK = logits_BK.detach() * 0.5 + 0.3  # fixed, as the second pass has no gradient
    for loss in (
        lambda z_BK: bootstrap_loss(z_BK, labels_BK, 0.7),
        lambda z_BK: bootstrap_loss(z_BK, labels_BK, 0.7, hard=True),
        lambda z_BK: generalised_cross_entropy(z_BK, labels_BK, 0.7),
        lambda z_BK: smc_loss(z_BK, soft_BK, labels_BK, 0.6, 1.5),
    ):
        assert torch.autograd.gradcheck(loss, logits_BK)


@pytest.mark.parametrize("loss", [LogLoss(), *OTHERS])
@pytest.mark.parametrize("z", [-200.0, 200.0])
def test_certain_logits_have_finite_losses_and_gradients(loss, z):
    class Certain(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits_BK = nn.Parameter(torch.tensor([[z], [z]]))

        def forward(self, batch):
            return self.logits_BK

    model = Certain()
    for label in (0.0, 1.0):  # a batch with labels of one class, too
        outcome = Clicks(model, loss=loss)(make_batch([label, label]), 5)
        assert outcome.loss.isfinite()
        outcome.loss.backward()
        assert model.logits_BK.grad.isfinite().all()


def make_batch(labels_B):
    ids = Jagged.from_lists({"user": [[n % 3] for n in range(len(labels_B))]})
    return Batch(dense_BF=torch.randn(len(labels_B), 2), sparse=ids, labels_BK=torch.tensor(labels_B).unsqueeze(1))


def test_weights_of_samples_and_labels_are_factors_of_every_loss():
    class Two(nn.Module):
        def forward(self, batch):
            return torch.tensor([[1.0, -2.0], [0.5, 3.0]])

    batch = make_batch([1.0, 0.0])
    labels_BK = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    weighted = Batch(
        dense_BF=batch.dense_BF, sparse=batch.sparse, labels_BK=labels_BK, weights_B=torch.tensor([2.0, 3.0])
    )
    outcome = Clicks(Two(), [1.0, 0.5], loss=GeneralisedCrossEntropy(q=0.5))(weighted)
    of_each_BK = generalised_cross_entropy(outcome.logits_BK, labels_BK, 0.5)
    want = (of_each_BK[0] @ torch.tensor([1.0, 0.5]) * 2 + of_each_BK[1] @ torch.tensor([1.0, 0.5]) * 3) / 2
    torch.testing.assert_close(outcome.loss, want)


def test_the_weight_of_smc_rises_from_none_to_alpha_as_half_a_cosine():
    weights = [smc_weight(0.8, step, 8) for step in (1, 5, 9, 100)]
    assert weights == pytest.approx([0.0, 0.4, 0.8, 0.8])


@pytest.mark.parametrize("norm", ["batch", "layer", None])
def test_the_second_pass_draws_other_dropout_and_counts_no_statistics(norm):
    """Against a step by hand: two passes, of which the second has no gradient and leaves running statistics."""
    tables = [Table(name="user", rows=3, dim=4)]

    def make():
        torch.manual_seed(3)
        return DLRM(Embeddings(tables), 2, (8, 4), (8, 1), dropout=0.5, norm=norm)

    ours, plain = make(), make()
    torch.manual_seed(0)
    batch = make_batch([1.0, 0.0, 1.0, 1.0])
    torch.manual_seed(4)
    outcome = Clicks(ours, loss=Smc(steps=4))(batch, 3)
    torch.manual_seed(4)
    logits_BK = plain(batch)
    buffers = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    soft_BK = plain(batch).detach()
    assert not torch.equal(soft_BK, logits_BK)
    want = smc_loss(logits_BK, soft_BK, batch.labels_BK, smc_weight(0.9, 3, 4), 1.5).mean()
    torch.testing.assert_close(outcome.loss, want)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in ours.named_buffers())
    outcome.loss.backward()
    assert len(ours.embeddings.staged) == 1


@pytest.mark.few(2)
@pytest.mark.parametrize("loss", OTHERS)
@pytest.mark.parametrize("where", ["on disk", 0, 2])
def test_three_ranks_train_as_one(tmp_path, loss, where):
    how = {"dropout": 0.0, "valid": False}
    how |= {"on_disk": ("user", "words"), "cache_rows": 3} if where == "on disk" else {"plan": where}
    training = {"objective": loss, "optimizer": DenseSgd(lr=0.1), "label_smoothing": 0.1}
    for world in (1, 3):
        train(Ranked(fast(train=training), tmp_path / str(world), **how), world)
    found, expected = tensors(tmp_path / "3"), tensors(tmp_path / "1")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_steps_in_flight_leave_the_bits_of_one_after_another(tmp_path, staleness):
    for depth in (1, 3):
        training = {"objective": Smc(steps=4), "epochs": 2, "pipeline_depth": depth, "staleness": staleness}
        how = fast(train=training, save=Saving(every=2))
        train(Ranked(how, tmp_path / str(depth), dropout=0.0, valid=False), 2)
    assert same(tensors(tmp_path / "3"), tensors(tmp_path / "1"))


@pytest.mark.slow
@pytest.mark.parametrize("loss", [{"kind": "smc", "steps": 20}, {"kind": "bootstrap"}, {"kind": "gce"}])
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_went_on(tmp_path, loss):
    model = {"kind": "dlrm", "bottom": [8], "top": [8], "dropout": 0.3}
    check_resumed(tmp_path, 5, {"epochs": 2, "batch": 256, "objective": loss}, model=model)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"kind": "bootstrap", "beta": 0.0}, r"train\.objective\.beta=0.0: expected more than 0 and at most 1"),
        ({"kind": "gce", "q": 0.0}, r"train\.objective\.q=0.0: expected more than 0 and at most 1"),
        ({"kind": "gce", "q": 1.5}, r"train\.objective\.q=1.5: expected more than 0"),
        ({"kind": "smc", "steps": 0}, r"train\.objective\.steps=0: expected at least 1"),
        ({"kind": "smc", "steps": 9, "alpha": 1.5}, r"train\.objective\.alpha=1.5: expected 0 to 1"),
        ({"kind": "smc", "steps": 9, "temperature": 0}, r"train\.objective\.temperature=0.0: expected a finite number"),
        ({"kind": "smc"}, "steps"),
        (
            {"kind": "smc", "steps": 9},
            r"kind=smc with model\.dropout=0 and no train.augment: .* expected dropout, such as 0.2, or train\.augment",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(loss, message):
    model = {"kind": "dlrm", "dropout": 0.0}
    with pytest.raises(SpecError, match=message):
        decode({"data": {"dataset": "synthetic"}, "train": {"objective": loss}, "model": model}, "my.yaml")

"""torch's own samples of `nn.functional.embedding_bag` (its OpInfo), each against `Embeddings`.

What `Embeddings` has not is refused by name, and has another way: `docs/tutorials/own-loop.md` lists both.
"""

import warnings
from importlib.util import find_spec

import pytest
import torch
from torch.nn.functional import embedding_bag

from rowwise import Embeddings, Jagged, Pooling, Sgd, SpecError, Table

pytestmark = [
    pytest.mark.slow,  # the import of all of torch's samples
    pytest.mark.skipif(find_spec("expecttest") is None, reason="needs the extra 'frameworks'"),
]
POOLINGS = {"sum": Pooling.SUM, "mean": Pooling.MEAN, "max": Pooling.SEQUENCE}


@pytest.fixture(scope="module")
def samples():
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # of torch, about itself
        torch.manual_seed(0)
        from torch.testing._internal.common_methods_invocations import op_db

        (op,) = [op for op in op_db if op.name == "nn.functional.embedding_bag"]
        return list(op.sample_inputs("cpu", torch.float32, requires_grad=True))


def as_bags(ids, rows, offsets=None, include_last_offset=False, padding_idx=None, per_sample_weights=None, mode="mean"):
    """The ids of the bags, their lengths, and the weights. Ids of `padding_idx` are left out of the bags."""
    if offsets is None:
        lengths = torch.full((len(ids),), ids.shape[1])
    else:
        ends = offsets if include_last_offset else torch.cat([offsets, torch.tensor([len(ids)])])
        lengths = ends.diff()
    flat = ids.flatten()
    kept = torch.ones(len(flat), dtype=torch.bool) if padding_idx is None else flat != padding_idx % rows
    lengths = torch.tensor([int(bag.sum()) for bag in kept.split(lengths.tolist())])
    return flat[kept], lengths, None if per_sample_weights is None else per_sample_weights.flatten()[kept]


def look_up(embeddings, jagged, mode):
    vectors = embeddings(jagged)["t"]
    if mode != "max":
        return vectors
    bags = vectors.split(jagged.lengths_FB.tolist())  # the rows of a sequence, of which the layers take the largest
    return torch.stack([bag.amax(0) if len(bag) else vectors.new_zeros(vectors.shape[1]) for bag in bags])


def step_of_torch(sample, up):
    """The pooled vectors, the rows after a step of SGD, and the gradient of the weights."""
    weight, kwargs = sample.input.detach().clone().requires_grad_(), dict(sample.kwargs)
    if (weights := kwargs.get("per_sample_weights")) is not None:
        kwargs["per_sample_weights"] = weights = weights.detach().clone().requires_grad_()
    out = embedding_bag(sample.args[0], weight, **kwargs)
    (out * up(out)).sum().backward()
    return out.detach(), weight.detach() - weight.grad, None if weights is None else weights.grad


def step_of_rowwise(sample, up):
    rows, kwargs = sample.input.detach(), dict(sample.kwargs)
    if (weights := kwargs.get("per_sample_weights")) is not None:
        kwargs["per_sample_weights"] = weights = weights.detach().clone().requires_grad_()
    pooling = POOLINGS[kwargs["mode"]] if weights is None else Pooling.WEIGHTED
    table = Table(name="t", rows=len(rows), dim=rows.shape[1], pooling=pooling, optimizer=Sgd(lr=1.0))
    embeddings = Embeddings([table], update_in_backward=True)
    embeddings.load_state_dict({"t": rows})
    ids, lengths, kept_weights = as_bags(sample.args[0], len(rows), **kwargs)
    jagged = Jagged(features=("t",), values_N=ids, lengths_FB=lengths, weights_N=kept_weights)
    out = look_up(embeddings, jagged, kwargs["mode"])
    (out * up(out)).sum().backward()
    return out.detach(), embeddings.weights("t"), None if weights is None else weights.grad


def test_every_sample(samples):
    """Vectors, rows after a step, and gradients of weights, to float rounding."""
    assert len(samples) >= 32
    for sample in samples:
        steps = (
            step(sample, lambda out: torch.linspace(-1, 1, out.numel()).view(out.shape))
            for step in (step_of_rowwise, step_of_torch)
        )
        for ours, wanted in zip(*steps, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", ["padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"])
def test_arguments_that_a_table_has_not(name):
    with pytest.raises(TypeError, match=name):
        Table(name="t", rows=4, dim=2, **{name: 1})


def test_pooling_by_the_largest_is_refused():
    with pytest.raises(
        SpecError, match=r"table 't': pooling='max': expected one of 'sum', 'mean', 'weighted', 'sequence'"
    ):
        Embeddings([Table(name="t", rows=4, dim=2, pooling="max")])

"""Compiled layers: the losses of those that are not, the same bits in each run, and few compilations."""

import pytest
import torch
from clicks import DENSE, make_clicks, make_tables
from small import check_resumed, recipe, write_rows
from train import compiled_ranks
from train.dense_ranks import DIM, MODELS
from trainings import work_of

from rowwise import DCN, Embeddings, GradientError, NativeError, SpecError
from rowwise.models.inference import autocast
from rowwise.parallel.comm.spawn import run_processes
from rowwise.recipes.runs import TrainingRun
from rowwise.train.compiled import check_compiler, compile_dense
from rowwise.train.settings import DenseParallel, Training
from rowwise.train.step import step

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler runs into warnings that it ignores
SIZES = (48, 48, 31, 48)  # the third is the last of an epoch


def make_dcn(dropout=0.0):
    torch.manual_seed(3)
    return DCN(Embeddings(make_tables(DIM), seed=1), DENSE, (64, 32, 1), dropout=dropout)


def train(model, *, compiled, precision="fp32", sizes=SIZES):
    """Losses of steps, and logits of an evaluation after each."""
    context = work_of(model, compile=compiled, precision=precision, batch=48)
    found = []
    for number, size in enumerate(sizes, 1):
        model.train()
        found.append(torch.tensor(step(context, [make_clicks(size, seed=number)], number).loss))
        model.eval()
        with torch.no_grad(), autocast("cpu", precision):
            found.append(model(make_clicks(size, seed=100)).float())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_without(name, threads):
    threads(2)
    results = []
    for compiled in (False, True):
        torch.manual_seed(3)
        model = MODELS[name](Embeddings(make_tables(DIM), seed=1))
        names = list(model.state_dict())
        results.append(train(model, compiled=compiled, sizes=SIZES[1:3]))
        assert list(model.state_dict()) == names
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16_always"])
def test_two_runs_have_the_same_bits(precision, threads):
    threads(2)
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        found.append(train(make_dcn(dropout=0.5), compiled=True, precision=precision))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_batches_of_other_sizes_compile_nothing(threads):
    threads(1)
    torch._dynamo.reset()
    from torch._dynamo.utils import counters  # which takes seconds to import

    counters.clear()
    train(make_dcn(), compiled=True, sizes=(48, 48))
    once = counters["stats"]["unique_graphs"]
    assert 0 < once < 4  # three layers, of which some are alike, and an MLP
    train(make_dcn(), compiled=True, sizes=(48, *range(1, 60, 7), 48))
    assert counters["stats"]["unique_graphs"] == once  # another model has other weights, but the same code


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("parallel", [DenseParallel(), DenseParallel(kind="full", recompute=True)])
def test_several_ranks(parallel):
    plain, compiled = (
        run_processes(2, compiled_ranks.losses, parallel, "dcn", compiled, timeout_s=240) for compiled in (False, True)
    )
    assert compiled[0] == compiled[1] == pytest.approx(plain[0], rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    write_rows(tmp_path / "rows.parquet", 1000)
    settings = {"compile": True, "batch": 300, "epochs": 2}  # epochs end with a shorter batch
    check_resumed(tmp_path, 1, settings, before_resuming=torch._dynamo.reset)


@pytest.mark.slow
def test_the_layer_of_a_bad_number_is_found(tmp_path):
    write_rows(tmp_path / "rows.parquet", 400)
    training = {"compile": True, "optimizer": {"kind": "sgd", "lr": 1e30}}
    with pytest.raises(GradientError, match=r"weights of 'bottom|it begins in '(bottom|top)"):
        TrainingRun.start(recipe(tmp_path, train=training), tmp_path / "runs").go()


class Keyed(torch.nn.Module):
    """A layer that is called with an option and a number."""

    def __init__(self):
        super().__init__()
        self.map = torch.nn.Linear(3, 2)

    def forward(self, x_BF, times, *, shift=0.0):
        return self.map(x_BF) * times + shift


@pytest.mark.slow
def test_layers_that_take_more_than_tensors_are_not_compiled():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Keyed())
    x_BF = torch.randn(48, 3)
    wanted = model[0](x_BF, 2, shift=1.0)
    compile_dense(model, 48)
    assert torch.equal(model[0](x_BF, 2, shift=1.0), wanted)


def test_a_machine_without_a_compiler():
    import torch._inductor.config

    named = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with named, pytest.raises(NativeError, match=r"train\.compile=true"):
        check_compiler()
    check_compiler()


def test_what_is_refused_with_compiled_layers():
    with pytest.raises(SpecError, match=r"train\.compile=true"):
        Training(compile=True, determinism="elastic")
    with pytest.raises(SpecError, match=r"train\.compile=true"):
        Training(compile=True, device="cuda")

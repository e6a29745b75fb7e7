"""Co-teaching: each copy learns from the other's easy samples; ranks train as one, and one copy is exported."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import check_resumed, recipe, sections, trained
from torch import nn
from torch.nn import functional as F

from rowwise import Batch, Jagged, SpecError, Table
from rowwise.checkpoint.manifest import CheckpointManifest
from rowwise.models.second_copy import add_second_copy, second_tables
from rowwise.parallel.comm.thread import run_threads
from rowwise.recipes.export import export
from rowwise.recipes.families import MODELS as CLICK_MODELS
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.served import load_model, read_model
from rowwise.recipes.text import decode
from rowwise.recipes.trained import evaluate, predict_rows
from rowwise.train.loss_settings import CoTeaching
from rowwise.train.objective import TwoCopies, forgotten_share
from rowwise.train.saved import CheckpointFolder

STEPS = 4


class Logits(nn.Module):
    """Logits that are parameters, those of the samples of a batch, whose dense number is their place."""

    def __init__(self, values_BK):
        super().__init__()
        self.values_BK = nn.Parameter(values_BK.clone())

    def forward(self, batch):
        return self.values_BK[batch.dense_BF[:, 0].long()]


def pair(first_BK, second_BK):
    return add_second_copy(Logits(first_BK), Logits(second_BK))


def make_batch(labels_BK, begin=0, end=None, weights_B=None):
    places = torch.arange(len(labels_BK))[begin:end]
    ids = Jagged.from_lists({"user": [[0]] * len(places)})
    weights_B = None if weights_B is None else weights_B[begin:end]
    return Batch(dense_BF=places.float().unsqueeze(1), sparse=ids, labels_BK=labels_BK[begin:end], weights_B=weights_B)


def random_pair(samples, labels, seed):
    draw = torch.Generator().manual_seed(seed)
    logits = [torch.randn(samples, labels, generator=draw) for _ in range(2)]
    return logits, torch.randint(2, (samples, labels), generator=draw).float(), torch.rand(samples, generator=draw)


@given(
    samples=st.integers(1, 12), labels=st.integers(1, 3), step=st.integers(1, 9), forget=st.floats(0, 0.99),
    seed=st.integers(0, 99), weighted=st.booleans(),
)  # fmt: skip
def test_a_copy_learns_the_mean_loss_of_the_samples_that_the_other_finds_easiest(
    samples, labels, step, forget, seed, weighted
):
    logits, labels_BK, weights_B = random_pair(samples, labels, seed)
    task_weights, smoothing = [1.0, 0.5, 2.0][:labels], 0.1
    model = pair(*logits)
    objective = TwoCopies(model, CoTeaching(steps=STEPS, forget=forget), task_weights, smoothing)
    outcome = objective(make_batch(labels_BK, weights_B=weights_B if weighted else None), step)
    outcome.loss.backward()

    leaves = [one_BK.clone().requires_grad_() for one_BK in logits]
    targets_BK = labels_BK * (1 - smoothing) + smoothing / 2
    losses = [
        F.binary_cross_entropy_with_logits(one_BK, targets_BK, reduction="none") @ torch.tensor(task_weights)
        for one_BK in leaves
    ]
    left_out = int(samples * forgotten_share(CoTeaching(steps=STEPS, forget=forget), step))
    chosen = [
        sorted(range(samples), key=one_B.detach().tolist().__getitem__)[: max(1, samples - left_out)]
        for one_B in losses
    ]
    factors_B = weights_B if weighted else torch.ones(samples)
    want = sum((x * factors_B)[of_other].mean() for x, of_other in zip(losses, chosen[::-1], strict=True))
    want.backward()
    torch.testing.assert_close(outcome.loss, want)
    torch.testing.assert_close(outcome.logits_BK, logits[0])
    torch.testing.assert_close(model.values_BK.grad, leaves[0].grad)
    torch.testing.assert_close(model.second_copy.values_BK.grad, leaves[1].grad)


def test_the_share_left_out_rises_to_its_end_as_a_line():
    settings = CoTeaching(steps=8, forget=0.4)
    assert [forgotten_share(settings, step) for step in (1, 5, 9, 100)] == pytest.approx([0.0, 0.2, 0.4, 0.4])


@pytest.mark.parametrize("cuts", [(0, 5, 9), (0, 0, 9), (0, 9, 9)])
def test_samples_are_chosen_from_the_batch_of_all_ranks(cuts):
    """Ranks' losses, times their shares of samples, add up to that of one process; a rank may have no samples."""
    logits, labels_BK, weights_B = random_pair(9, 2, 3)
    settings = CoTeaching(steps=STEPS, forget=0.4)
    whole = pair(*logits)
    want = TwoCopies(whole, settings)(make_batch(labels_BK, weights_B=weights_B), 9).loss
    want.backward()

    def on_a_rank(comm):
        model, part = pair(*logits), cuts[comm.rank : comm.rank + 2]
        loss = TwoCopies(model, settings, comm=comm)(make_batch(labels_BK, *part, weights_B=weights_B), 9).loss
        (loss * ((part[1] - part[0]) / 9)).backward()
        return [one.grad for one in model.parameters()]

    for parts, of_whole in zip(
        zip(*run_threads(2, on_a_rank, timeout_s=60), strict=True), whole.parameters(), strict=True
    ):
        torch.testing.assert_close(sum(part.nan_to_num() for part in parts), of_whole.grad)


def test_equal_losses_are_chosen_from_the_first_samples_on():
    model = pair(torch.zeros(4, 1), torch.zeros(4, 1))
    TwoCopies(model, CoTeaching(steps=1, forget=0.5))(make_batch(torch.ones(4, 1)), 2).loss.backward()
    assert model.values_BK.grad.flatten().ne(0).tolist() == [True, True, False, False]


TRAIN = {"objective": {"kind": "co_teaching", "steps": 6, "forget": 0.25}}


@pytest.mark.slow
@pytest.mark.usefixtures("models_one_after_the_other")
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_train_as_one(tmp_path, world):
    train = TRAIN | {"optimizer": {"kind": "sgd", "lr": 0.1}, "batch": 256}

    def on_a_rank(comm):
        run = TrainingRun.start(recipe(tmp_path, train=train), tmp_path / f"{world}", comm=comm)
        run.go()
        return run.folder.path

    alone, _ = trained(tmp_path, train=train)
    place = run_threads(world, on_a_rank, timeout_s=60)[0]
    found, want = (CheckpointFolder(path / "ckpt").open() for path in (place, alone.folder.path))
    names = [name for name in want.names() if name.startswith(("model/", "rows/"))]
    assert any("second_copy.embeddings.user_second" in name for name in names)
    for name in names:
        torch.testing.assert_close(found.load(name), want.load(name), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_where_nothing_is_left_out_the_first_copy_is_the_model_alone(tmp_path):
    plain, _ = trained(tmp_path, train={"optimizer": {"kind": "sgd", "lr": 0.1}})
    train = {"objective": {"kind": "co_teaching", "steps": 6, "forget": 0.0}, "optimizer": {"kind": "sgd", "lr": 0.1}}
    both, _ = trained(tmp_path, train=train)
    found, want = (CheckpointFolder(run.folder.path / "ckpt").open() for run in (both, plain))
    for name in want.names():
        if name.startswith("model/"):
            torch.testing.assert_close(found.load(name), want.load(name), rtol=1e-5, atol=1e-6, msg=name)
    first, second = (found.load(f"model/{name}") for name in ("embeddings.user", "second_copy.embeddings.user_second"))
    assert not torch.equal(first, second)


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_went_on(tmp_path):
    model = {"kind": "dlrm", "bottom": [8], "top": [8], "dropout": 0.3}
    check_resumed(tmp_path, 5, TRAIN, model=model)


@pytest.mark.slow
def test_the_first_copy_alone_is_measured_and_exported(tmp_path):
    run, _ = trained(tmp_path, train=TRAIN, model={"kind": "deepfm", "deep": [8]})
    assert evaluate(run.folder.path, which="last").tasks["label"]["ne"] > 0
    version = export(run.folder.path, tmp_path / "models", which="last")
    served = load_model(version.folder.path, read_model(version.folder.path))
    checkpoint = CheckpointFolder(run.folder.path / "ckpt").open("last")
    state = served.state_dict()
    assert not [name for name in state if "second" in name]
    assert not [name for name in CheckpointManifest.read(version.folder.path).tensors if "second" in name]
    assert torch.equal(state["embeddings.user"], checkpoint.load("model/embeddings.user"))
    assert predict_rows(run.folder.path, tmp_path / "out.parquet", which="last") > 0


CLICK_KINDS = sorted(kind.__struct_config__.tag for kind in CLICK_MODELS)
IDS = {"managed": {}, "id_map": {"kind": "hash", "rows": 20}}


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", CLICK_KINDS)
def test_any_model_of_labels_has_a_second_copy(tmp_path, kind):
    config = {"kind": kind, "vectors": 4, "interactions": ["dot"]} if kind == "dhen" else {"kind": kind}
    _, result = trained(tmp_path, train=TRAIN | {"steps": 2}, model=config)
    assert result.steps == 2


@pytest.mark.slow
@pytest.mark.parametrize("ids", ["managed", "id_map"])
def test_tables_whose_ids_are_mapped_have_a_map_for_each_copy(tmp_path, ids):
    tables = sections(tmp_path)["tables"]["list"]
    tables = [tables[0] | {ids: IDS[ids]}, *tables[1:]]
    run, _ = trained(tmp_path, train=TRAIN, tables={"list": tables})
    assert evaluate(run.folder.path, which="last").tasks["label"]["ne"] > 0
    export(run.folder.path, tmp_path / "models", which="last")


def test_tables_of_a_second_copy_have_names_of_their_own():
    tables = second_tables([Table(name="film", rows=3, dim=2), Table(name="seen", rows=3, dim=2, features=("a", "b"))])
    assert [(table.name, table.feature_names) for table in tables] == [
        ("film_second", ("film",)),
        ("seen_second", ("a", "b")),
    ]


def test_what_cannot_be_taught_by_two_is_refused(tmp_path):
    with pytest.raises(SpecError, match="least 0 and less"):
        CoTeaching(steps=3, forget=1.0)
    with pytest.raises(SpecError, match="least 0"):
        CoTeaching(steps=3, forget=-0.1)
    with pytest.raises(SpecError, match="least 1"):
        CoTeaching(steps=0)
    for train, message in (
        (
            {"determinism": "elastic", "batch": 2048},
            r"co_teaching with train\.determinism=elastic: .* expected determinism=run",
        ),
        ({"dense_parallel": {"kind": "full"}}, r"co_teaching with train\.dense_parallel: .* expected the defaults"),
    ):
        with pytest.raises(SpecError, match=message):
            decode(sections(tmp_path, train=TRAIN | train), "my.yaml")
    model = Logits(torch.zeros(1, 1))
    with pytest.raises(SpecError, match="Logits has no second"):
        TwoCopies(model, CoTeaching(steps=1))
    add_second_copy(model, Logits(torch.zeros(1, 1)))
    with pytest.raises(SpecError, match="'second_copy'"):
        add_second_copy(model, Logits(torch.zeros(1, 1)))

"""Sharded dense parameters: the losses, weights and checkpoints of whole ones, with the bytes of the formulas."""

import json

import pytest
import torch
from ranked import tensors
from small import RECIPE, recipe, write_rows
from train import dense_ranks

from rowwise import DCN, SpecError, Table, Topology, make_embeddings
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.spawn import RanksFailed, run_processes
from rowwise.parallel.comm.thread import run_threads
from rowwise.planning.perf.dense_parallel import DenseSide, DenseUnits
from rowwise.recipes.runs import TrainingRun
from rowwise.tables.idmaps import QuotientRemainderIds
from rowwise.tables.ids.mapped import MappedTable
from rowwise.train.dense_parallel import ShardedConstruction, find_units, shard_dense
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseParallel, DenseSgd, Training

REPLICATE, FULL = DenseParallel(), DenseParallel(kind="full")
HYBRID = DenseParallel(kind="hybrid", shards=2)
SGD = DenseSgd(lr=0.02)
pytestmark = [pytest.mark.slow, pytest.mark.dist]


def run(world, parallel, *args, **options):
    return run_processes(world, dense_ranks.train, parallel, *args, timeout_s=60, **options)


@pytest.fixture(scope="module")
def replicated():
    return run(4, REPLICATE, "dhen", 50, None, SGD)


@pytest.mark.parametrize(
    ("parallel", "shared_memory"),
    [
        (FULL, True),
        (FULL, False),
        (HYBRID, False),
        (DenseParallel(kind="full", reshard=False, prefetch=2, recompute=True), True),
    ],
)
def test_losses_and_weights_are_those_of_whole_parameters(replicated, parallel, shared_memory):
    """By SGD, also of rows: where a ReLU is on for one side only, Adam and Adagrad would take whole steps."""
    found = run(4, parallel, "dhen", 50, None, SGD, shared_memory=shared_memory)
    firsts = [dense_ranks.joined(results, "first") for results in (replicated, found)]
    assert firsts[0].keys() == firsts[1].keys()
    assert all(firsts[0][name].equal(firsts[1][name]) for name in firsts[0]), "initial weights"
    for step, (one, other) in enumerate(zip(replicated[0]["found"], found[0]["found"], strict=True)):
        # On some processors rounding turns a ReLU off on one side only, after some steps.
        assert other[0] == pytest.approx(one[0], abs=1e-6 if step < 5 else 1e-4)
        assert other[1] == pytest.approx(one[1], rel=1e-3 if step < 5 else 1e-2)
    lasts = [dense_ranks.joined(results, "last") for results in (replicated, found)]
    for name in lasts[0]:
        torch.testing.assert_close(lasts[1][name], lasts[0][name], rtol=1e-3, atol=1e-3)


def test_a_step_whose_backward_raised_adds_nothing_to_the_next():
    wanted, found = (run_processes(2, dense_ranks.train_after_an_error, FULL, f, timeout_s=60) for f in (False, True))
    assert found == wanted


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (4, REPLICATE),
        (2, FULL),
        (4, DenseParallel(kind="full", reshard=False)),
        (4, HYBRID),
        (4, DenseParallel(kind="full", params="bf16")),
    ],
)
def test_bytes_sent_and_held_are_those_of_the_formulas(world, parallel):
    found = run(world, parallel, "dhen", 2)
    units, own = found[0]["shapes"]
    assert len(units) >= 4
    side = DenseSide(
        shapes=DenseUnits(tuple(map(tuple, units)), tuple(own)), state_slots=2, kind=parallel.kind,
        shards=parallel.shards, reshard=parallel.reshard, bf16=parallel.params == "bf16",
    )  # fmt: skip
    wanted = side.cost(Topology(devices=world))
    few = 4 * 2 * (len(own) + sum(map(len, units)))  # which parameters have gradients, and the rounding of ring steps
    assert found[0]["sent"] == pytest.approx(wanted.sent_bytes, abs=few)
    assert max(one["held"] for one in found) == pytest.approx(wanted.resident_bytes, rel=0.15)


@pytest.fixture(scope="module")
def every_model():
    return run_processes(2, dense_ranks.train_all, REPLICATE, timeout_s=60)


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_every_model(every_model, params):
    parallel = DenseParallel(kind="full", params=params)
    full = run_processes(2, dense_ranks.train_all, parallel, timeout_s=60)
    close = {"rel": 1e-4, "abs": 1e-5} if params == "fp32" else {"rel": 0.1, "abs": 0.02}
    for name in dense_ranks.MODELS:
        whole, found = every_model[1][name], full[1][name]
        for one, other in zip(whole["found"], found["found"], strict=True):
            assert other == pytest.approx(one, **close), name
        if params == "fp32":
            torch.testing.assert_close(found["logits"], whole["logits"], rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize(
    "optimizer", [DenseSgd(lr=0.1, momentum=0.9), DenseSgd(lr=0.1), DenseAdagrad(lr=0.1), DenseAdam(lr=1e-3)]
)
def test_every_optimizer(optimizer):
    whole, found = (run(2, parallel, "dcn", 4, None, optimizer) for parallel in (REPLICATE, FULL))
    for name, tensor in dense_ranks.joined(whole, "last").items():
        torch.testing.assert_close(dense_ranks.joined(found, "last")[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def trained(comm, folder, parallel, steps):
    return folder_of(TrainingRun.start(recipe_of(folder, parallel, steps), folder / "runs", comm=comm))


def resumed(comm, path, parallel, steps):
    changes = [f"train.dense_parallel={json.dumps(parallel)}", f"train.steps={steps}"]
    return folder_of(TrainingRun.resume(path, changes, comm=comm))


def folder_of(run):
    run.go()
    return run.folder.path


def recipe_of(folder, parallel, steps):
    """By SGD, with momentum as its state: where rounding turns a ReLU off, Adam and Adagrad would take whole steps."""
    model = {"kind": "dhen", "top": [64], "layers": 2}
    sgd = {"kind": "sgd", "lr": 0.02}
    training = {"batch": 512, "epochs": 50, "steps": steps, "dense_parallel": parallel}
    training["optimizer"] = {**sgd, "momentum": 0.9}
    tables = {"list": [{**table, "optimizer": sgd} for table in RECIPE["tables"]["list"]]}
    return recipe(folder, model=model, train=training, save={"every": 5}, tables=tables)


KINDS = {"replicate": {}, "full": {"kind": "full"}, "hybrid": {"kind": "hybrid", "shards": 2}}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_rows(folder / "rows.parquet", 2000)
    return tensors(run_processes(2, trained, folder, {}, 12, timeout_s=60)[0])


@pytest.mark.parametrize(
    ("first", "second", "world"),
    [("replicate", "full", 2), ("full", "hybrid", 4), ("hybrid", "replicate", 1), ("full", "full", 2)],
)
def test_a_checkpoint_of_one_kind_continues_as_another(uninterrupted, first, second, world, tmp_path):
    write_rows(tmp_path / "rows.parquet", 2000)
    path = run_processes(4, trained, tmp_path, KINDS[first], 6, timeout_s=60)[0]
    resume = run_processes(world, resumed, path, KINDS[second], 12, timeout_s=60)[0]
    found = tensors(resume)
    assert found.keys() == uninterrupted.keys()
    for name, tensor in uninterrupted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_construction_holds_its_part_and_the_largest_layer():
    width, layers, world = 3000, 6, 4  # layers of 36 MB: freed memory of so much goes back to the system
    for taken, held in run_processes(world, dense_ranks.memory, FULL, layers, width, timeout_s=120):
        layer = 4 * width * width
        assert held == pytest.approx(layer * (layers - 1) / world, rel=0.05)
        assert taken < (held + layer) * 1.15


def test_what_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"train.determinism='elastic'"):
        Training(determinism="elastic", dense_parallel=FULL)
    with pytest.raises(SpecError, match="shards=2 with kind=full"):
        DenseParallel(kind="full", shards=2)
    with pytest.raises(SpecError, match="shards=0"):
        DenseParallel(kind="hybrid", shards=0)
    with pytest.raises(RanksFailed, match="3 ranks: expected one of"):
        run(3, HYBRID, "dhen", 1)


def test_parameters_that_are_changed_after_their_module_are_refused():
    def on_a_rank(comm):
        construction = ShardedConstruction(comm, 2)
        with construction:
            model = torch.nn.Sequential(torch.nn.Linear(80, 80))
            torch.nn.init.zeros_(model[0].weight)
        construction.rows_by_name(model)

    with pytest.raises(SpecError, match=r"parameter 0\.weight was changed"):
        run_threads(1, on_a_rank, timeout_s=20)


def test_parameters_that_cannot_be_sharded():
    def refused(model):
        with pytest.raises(SpecError) as caught:
            run_threads(2, lambda comm: shard_dense(model(), FULL, comm), timeout_s=20)
        return str(caught.value)

    def scalar():
        model = torch.nn.Linear(80, 80)
        model.temperature = torch.nn.Parameter(torch.tensor(1.0))
        return model

    def mapped():
        model = DCN(make_embeddings([Table(name="t", rows=40, dim=8, id_map=QuotientRemainderIds(rows=20))]), 0, (8, 1))
        (table,) = (module for module in model.modules() if isinstance(module, MappedTable))
        table.register_parameter("projection_0", torch.nn.Parameter(torch.zeros(8, 4)))  # as maps of narrow parts have
        return model

    assert "parameter temperature is a single number, and cannot be sharded: expected a shape of (1,)" in refused(
        scalar
    )
    assert "projects vectors of an id map, and cannot be sharded" in refused(mapped)


def test_settings_that_do_not_go_together(tmp_path):
    with pytest.raises(SpecError, match="kind=full on cuda"):
        Training(device="cuda", dense_parallel=FULL)
    with pytest.raises(SpecError, match=r"model\.norm=batch"):
        recipe(tmp_path, model={"kind": "dlrm", "norm": "batch"}, train={"dense_parallel": {"recompute": True}})


def test_one_rank_has_all_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.Linear(80, 1))
    before = list(model.parameters())
    shard_dense(model, FULL, solo())
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert find_units(model) == [model[0]]

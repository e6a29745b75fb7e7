"""A run's checkpoint whose data beside the tensors a stranger has written: resuming and predicting end in one line."""

import shutil
from dataclasses import replace
from random import Random

import pytest
from campaign import Campaign
from checkpoint.crafted import plain, put
from mutations import mutate_tree
from small import trained

from rowwise.base.errors import CheckpointError, RowwiseError, one_line
from rowwise.checkpoint.listing import list_checkpoints
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.named import checkpoints_of
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import write
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.trained import load_trained


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    trained(place, train={"epochs": 1})
    return place / "runs" / "small" / "1"


def crafted(made, to, change):
    """A copy of the run; its newest checkpoint has other data."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(made, to)
    newest = checkpoints_of(to)[0]
    manifest = plain(newest)
    change(manifest["data"])
    put(newest, manifest)
    return to


def resumed(path):
    run = TrainingRun.resume(path, ["train.epochs=2"])
    run.folder.release()


CHANGES = {
    "no data": dict.clear,
    "progress is text": lambda data: data.update(progress="far"),
    "progress is negative": lambda data: data["progress"].update(position=[]),
    "products": lambda data: data.update(products={"a": 1}),
    "no products": lambda data: data.pop("products"),
    "positions": lambda data: data.update(positions={"a": 1}),
    "no recorder": lambda data: data.pop("recorder"),
    "losses": lambda data: data["recorder"].update(losses={"newest": [["x", "y"]], "sum": "a", "samples": []}),
    "metrics": lambda data: data["recorder"].update(metrics=[1]),
    "traffic": lambda data: data["recorder"].update(traffic={"user": 7}),
    "optimizers": lambda data: data.update(optimizers=[]),
    "counts below 0": lambda data: next(iter(data["recorder"]["traffic"].values())).update(ids=-1),
    "too many counted": lambda data: next(iter(data["recorder"]["traffic"].values())).update(kept=7),
    "no slots": lambda data: data["optimizers"]["dense"].update(numbers=[7]),
    "a slot that is no tensor": lambda data: data["optimizers"]["dense"].update(
        numbers={"top.layers.0.weight": {"step": []}}
    ),
    "groups": lambda data: data["optimizers"]["dense"].update(groups=[7]),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", CHANGES)
def test_data_that_are_not_those_of_a_run_are_one_line(made, tmp_path, kind):
    path = crafted(made, tmp_path / "1", CHANGES[kind])
    with pytest.raises(
        RowwiseError, match=r"data are not those|is not a checkpoint of a training run|int64 numbers each"
    ) as raised:
        resumed(path)
    line = one_line(raised.value)
    assert line is not None
    assert line.isprintable()
    list_checkpoints(path)


STEP, AVERAGE = "optimizer/dense/top.layers.0.weight/step", "optimizer/dense/top.layers.0.weight/exp_avg"
TENSORS = {
    "a step of many": (STEP, lambda x: x.expand(3).clone(), r"step: got \(3,\)"),
    "an average of one": (AVERAGE, lambda x: x[:1], r"exp_avg: got \(1, "),
    "an average of whole numbers": (AVERAGE, lambda x: x.long(), "exp_avg: got .* of torch.int64"),
    "random numbers that are cut": ("rng/torch", lambda x: x[:, :9], r"torch.get_rng_state"),
    "random numbers that are text": ("rng/torch", lambda x: x.float(), r"torch.get_rng_state"),
    "an average that is not there": (AVERAGE, lambda x: None, "exp_avg is missing"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_a_step_would_fail_at_are_refused(made, tmp_path, kind):
    path = crafted(made, tmp_path / "1", lambda data: None)
    newest = checkpoints_of(path)[0]
    there, (name, change, want) = Checkpoint.open(newest), TENSORS[kind]
    tensors = {one: there.load(one) for one in there.names()}
    changed = {one: change(x) if one == name else x for one, x in tensors.items()}
    assert name in tensors
    parts = [LocalShard.whole(one, x, shared=False) for one, x in changed.items() if x is not None]
    rows = {one: entry for one, entry in there.manifest.tensors.items() if entry.row_type is not None}
    parts = [replace(part, row_type=rows[part.name].row_type) if part.name in rows else part for part in parts]
    shutil.rmtree(newest)
    write(newest, parts, there.manifest.data)
    with pytest.raises(CheckpointError, match=want):
        resumed(path)


def test_the_best_checkpoint_is_one_of_the_run(made, tmp_path):
    """Its step was put into a path as it stood there."""
    path = crafted(made, tmp_path / "1", lambda data: data["progress"].update(best={"step": "../../../x"}))
    load_trained(path)
    assert list_checkpoints(path)[0].marks == ("last",)


@pytest.mark.slow
def test_crafted_data(made, tmp_path):
    campaign = Campaign("data of runs")
    for seed in range(120):
        random = Random(seed)

        def change(data, random=random):
            mutated = mutate_tree(data, random)
            data.clear()
            data.update(mutated if isinstance(mutated, dict) else {"it": mutated})

        path = crafted(made, tmp_path / "1", change)
        campaign.take(seed, lambda path=path: resumed(path), lambda _: None)
    campaign.finish()

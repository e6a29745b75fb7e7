"""A run's checkpoint whose data beside the tensors a stranger has written: resuming and predicting end in one line."""

import shutil
from random import Random

import pytest
from campaign import Campaign
from checkpoint.crafted import plain, put
from mutations import mutate_tree
from small import trained

from rowwise.checkpoint.listing import list_checkpoints
from rowwise.checkpoint.named import checkpoints_of
from rowwise.errors import RowwiseError, one_line
from rowwise.recipes.runs import Run, load_trained


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
    run = Run.resume(path, ["train.epochs=2"])
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
    "groups": lambda data: data["optimizers"]["dense"].update(groups=[7]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_data_that_are_not_those_of_a_run_are_one_line(made, tmp_path, kind):
    path = crafted(made, tmp_path / "1", CHANGES[kind])
    with pytest.raises(RowwiseError, match=r"data are not those|is not of a run|no library") as raised:
        resumed(path)
    line = one_line(raised.value)
    assert line is not None
    assert line.isprintable()
    list_checkpoints(path)


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

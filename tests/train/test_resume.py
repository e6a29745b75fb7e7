"""A run that was stopped, killed and resumed leaves the bits of one that was not."""

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launching import ENVIRONMENT, PYTHON
from trainings import Killed, World, fast, left, lines, make_tables

from rowwise import Adagrad, Adam, CheckpointError, Ftrl, Lamb, RowWiseAdagrad, RowWiseAdam, Sgd
from rowwise.tables.ops import linear
from rowwise.tables.row_optimizers import Schedule
from rowwise.train.saved import CheckpointFolder
from rowwise.train.settings import DenseAdagrad, DenseAdam, DenseSgd, Log, Saving

ROWS = (Sgd(lr=0.1), Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(), RowWiseAdam(), Lamb(), Ftrl(lr=0.1))
DENSE = (DenseSgd(momentum=0.9), DenseSgd(lr=0.1), DenseAdagrad(), DenseAdam(weight_decay=0.1))


@st.composite
def worlds(draw):
    train = {
        "epochs": draw(st.integers(1, 3)),
        "accumulate": draw(st.integers(1, 3)),
        "optimizer": draw(st.sampled_from(DENSE)),
        "ahead": draw(st.sampled_from((0, 2))),
        "shuffle": draw(st.booleans()),
        "steps": draw(st.none() | st.integers(1, 12)),
        "schedule": draw(st.sampled_from((None, Schedule(warmup_steps=3, decay_steps=5)))),
    }
    how = fast(
        train=train,
        evaluate={"every": draw(st.sampled_from((0, 2, 3))), "patience": draw(st.sampled_from((None, 2)))},
        save=Saving(every=draw(st.sampled_from((0, 1, 2, 3))), keep=draw(st.integers(1, 2))),
        log=Log(every=draw(st.integers(1, 3)), window=3),
    )
    tables = make_tables(
        draw(st.sampled_from(ROWS)), draw(st.sampled_from(ROWS)), draw(st.sampled_from(("fp32", "bf16", "int8")))
    )
    # The last batch has more than one sample: running statistics want as many.
    count, keep_last = draw(st.sampled_from((10, 16, 27, 40, 45))), draw(st.booleans())
    return {"settings": how, "tables": tables, "count": count, "keep_last": keep_last, "seed": draw(st.integers(0, 5))}


def stops(draws: list[tuple[int, bool]]):
    """Hears of every step; stops or kills the run at the next of these."""
    after, kills = draws[0]

    def tell(shown):
        if tell.at is None:
            tell.at = shown.progress.step + after - 1
        if shown.progress.step == tell.at:
            if kills:
                raise Killed
            tell.trainer.stop()

    tell.at = None
    return tell


def run_with_stops(world: World, draws: list[tuple[int, bool]]) -> None:
    for draw in draws:
        tell = stops([draw])
        begun = bool(CheckpointFolder(world.folder / "ckpt").steps())
        trainer = world.resume(tell=tell) if begun else world.start(tell=tell)
        if not begun:
            trainer.folder.drop_after(0)
        tell.trainer = trainer
        try:
            if trainer.run().finished:
                return
        except Killed:
            pass
    begun = bool(CheckpointFolder(world.folder / "ckpt").steps())
    trainer = world.resume() if begun else world.start()
    if not begun:
        trainer.folder.drop_after(0)
    assert trainer.run().finished


@settings(max_examples=12)
@given(worlds(), st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=3))
@example(  # the last update of an epoch is short, and both a checkpoint's step and the place of an evaluation
    {"settings": fast(train={"epochs": 2, "accumulate": 2}, save=Saving(every=3)), "count": 40}, [(3, True)]
)
@example(  # a checkpoint is due at the step at which the epoch ends, where an evaluation finds a new best
    {"settings": fast(train={"epochs": 2}, save=Saving(every=1)), "count": 16}, [(3, True)]
)
def test_stopped_and_resumed_is_uninterrupted(tmp_path_factory, world, draws):
    check_resumed(tmp_path_factory.mktemp("runs"), world, draws)


@pytest.mark.slow
@settings(max_examples=300)
@given(worlds(), st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=3))
def test_stopped_and_resumed_is_uninterrupted_in_many_ways(tmp_path_factory, world, draws):
    check_resumed(tmp_path_factory.mktemp("runs"), world, draws)


def check_resumed(folder: Path, world, draws) -> None:
    whole, cut = World(folder=folder / "whole", **world), World(folder=folder / "cut", **world)
    assert whole.start().run().finished
    run_with_stops(cut, draws)
    # Which checkpoints are kept may differ: one more was written at a stop.
    expected, found = left(whole.folder), left(cut.folder)
    assert found.pop("steps")[-1] == expected.pop("steps")[-1]
    assert found == expected


def test_an_ended_run_changes_nothing(tmp_path):
    world = World(fast(), tmp_path)
    assert world.start().run().finished
    before = left(tmp_path)
    assert world.resume().run().finished
    assert left(tmp_path) == before


def test_an_ended_run_can_be_given_more_epochs(tmp_path):
    short, long = World(fast(), tmp_path / "cut"), World(fast(train={"epochs": 2}), tmp_path / "cut")
    whole = World(fast(train={"epochs": 2}), tmp_path / "whole")
    for world in (short, whole):
        assert world.start().run().finished
    assert long.resume().run().finished
    expected, found = left(whole.folder), left(long.folder)
    assert {k: v for k, v in found.items() if "/" in k} == {k: v for k, v in expected.items() if "/" in k}


def test_from_an_older_checkpoint_the_later_ones_go(tmp_path):
    world = World(fast(save=Saving(every=2, keep=9)), tmp_path)
    world.start().run()
    expected = left(tmp_path)
    assert CheckpointFolder(tmp_path / "ckpt").steps() == [2, 4, 6]
    trainer = world.resume(which="step-2")
    assert CheckpointFolder(tmp_path / "ckpt").steps() == [2]
    assert trainer.run().finished
    assert left(tmp_path) == expected


def test_settings_of_the_optimizer_can_change(tmp_path):
    world = World(fast(train={"steps": 2}), tmp_path)
    world.start().run()
    world.settings = fast(train={"steps": 3, "optimizer": DenseAdam(weight_decay=0.5, beta1=0.8)})
    group = world.resume()._context.optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.8, 0.999))
    world.settings = fast(train={"steps": 3, "optimizer": DenseSgd()})
    with pytest.raises(CheckpointError, match="optimizer 'dense' is AdamW"):
        world.resume()


@pytest.mark.skipif(not linear.has_onednn(), reason="there is one library only")
def test_products_stay_with_their_library(tmp_path):
    """The two round differently, and a run may go on where the other one would be chosen."""
    before = linear.current_library()
    try:
        linear.choose_library("onednn")
        World(fast(train={"steps": 2}), tmp_path).start().run()
        linear.choose_library("torch")
        World(fast(train={"steps": 3}), tmp_path).resume()
        assert linear.current_library() == "onednn"
    finally:
        linear.choose_library(before)


def test_a_checkpoint_without_a_run(tmp_path):
    world = World(fast(), tmp_path)
    trainer = world.start()
    CheckpointFolder(tmp_path / "ckpt").save(3, [], {})
    with pytest.raises(CheckpointError, match="checkpoint of a training"):
        trainer.resume(CheckpointFolder(tmp_path / "ckpt").open())


def test_a_stop_before_the_first_step_can_be_resumed(tmp_path):
    cut, whole = World(fast(), tmp_path / "cut"), World(fast(), tmp_path / "whole")
    trainer = cut.start()
    trainer.stop()
    assert trainer.run().step == 0
    assert CheckpointFolder(cut.folder / "ckpt").steps() == [0]
    assert cut.resume().run().finished
    whole.start().run()
    assert left(cut.folder)["metrics.csv"] == left(whole.folder)["metrics.csv"]


def test_a_stop_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """A signal comes at any moment, also between the steps."""
    world = World(fast(save=Saving(every=2)), tmp_path)
    trainer = world.start()
    write = CheckpointFolder.prune
    monkeypatch.setattr(CheckpointFolder, "prune", lambda *given: (write(*given), trainer.stop()))
    assert trainer.run().step == 2
    assert CheckpointFolder(tmp_path / "ckpt").steps() == [2]


# A process that trains as the command does: from the last checkpoint, if there is one.
SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import CheckpointFolder
from rowwise.checkpoint import write as writing
from test_resume import killable
writing.SIZES = writing.FileSizes(file_bytes=1000)  # many files, so that a kill finds one half written
world = killable(Path(sys.argv[2]))
world.folder.mkdir(exist_ok=True)
folder = RunFolder(world.folder)
folder.hold()
saved = CheckpointFolder(world.folder / "ckpt")
saved.clean()
tell = lambda shown: print(shown.progress.step, flush=True)
if saved.steps():
    trainer = world.resume(tell=tell)
else:
    trainer = world.start(tell=tell)
    folder.drop_after(0)
print("ready", flush=True)
trainer.run()
"""


def process(script: str, folder: Path) -> list[str]:
    return [*PYTHON, "-c", script, str(Path(__file__).parent), str(folder)]


def killable(folder: Path) -> World:
    how = fast(train={"epochs": 3, "ahead": 2}, evaluate={"every": 3}, save=Saving(every=1), log=Log(every=1, window=5))
    return World(how, folder, count=100)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_moments(tmp_path, threads):
    threads(1)  # as the process has that is killed
    whole = killable(tmp_path / "whole")
    whole.start().run()
    command = process(SCRIPT, tmp_path / "cut")
    chance, kills, caught = random.Random(0), 0, []
    while True:
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as child:
            assert child.stdout.readline() == b"ready\n"
            if kills < 10:
                for _ in range(chance.randint(1, 3)):
                    child.stdout.readline()
                time.sleep(chance.random() * 0.03)
                child.send_signal(signal.SIGKILL)
            else:
                child.stdout.read()
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL
        kills += 1
        names = [path.name for path in (tmp_path / "cut" / "ckpt").iterdir()]
        caught.append(any(name.endswith(".part") for name in names))
        for step in CheckpointFolder(tmp_path / "cut" / "ckpt").steps():  # whatever counts is whole
            CheckpointFolder(tmp_path / "cut" / "ckpt").open(f"step-{step}").verify()
    assert kills >= 10
    assert any(caught), "no kill found a checkpoint half written: make them larger"
    assert left(tmp_path / "cut") == left(whole.folder)
    assert lines(tmp_path / "cut" / "steps.csv")[-1]["step"] == "39"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["write_file", "rename", "unlink", "rmtree"])
def test_killed_inside_a_write_and_inside_pruning(tmp_path, threads, where):
    """The same, at the very places at which files come and go."""
    threads(1)
    whole = killable(tmp_path / "whole")
    whole.start().run()
    aimed = f"""
import os, signal, shutil
from pathlib import Path
from rowwise.checkpoint import write as writing
left = [7]
def aim(call, name):
    def deadly(*given, **more):
        left[0] -= name != "rmtree" or any(Path(given[0]).glob("*"))
        if left[0] == 0:
            if name == "write_file":
                Path(given[0]).write_bytes(b"half")
            if name == "rmtree":
                next(Path(given[0]).iterdir()).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **more)
    return deadly
where = {where!r}
if where == "write_file":
    writing.write_file = aim(writing.write_file, where)
elif where == "rmtree":
    shutil.rmtree = aim(shutil.rmtree, where)
else:
    setattr(Path, where, aim(getattr(Path, where), where))
"""
    cut = tmp_path / "cut"
    killed = subprocess.run(process(aimed + SCRIPT, cut), env=ENVIRONMENT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert CheckpointFolder(cut / "ckpt").steps()
    subprocess.run(process(SCRIPT, cut), env=ENVIRONMENT, check=True, capture_output=True)
    assert left(cut) == left(whole.folder)

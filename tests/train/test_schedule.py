"""What happens after which step: evaluations, checkpoints, lines, early stops, the end."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainings import Net, World, fast, lines

from rowwise import DataError, SpecError
from rowwise.ingest import Position
from rowwise.train.evaluate import Scores
from rowwise.train.progress import BestEvaluation, Progress
from rowwise.train.run_folder import RunFolder
from rowwise.train.saved import CheckpointFolder
from rowwise.train.settings import Evaluation, Log, Saving, Training
from rowwise.train.trainer import Trainer


class Scripted:
    """Says what it is told to say."""

    metrics = ("ne", "auc")

    def __init__(self, metric: str, values) -> None:
        self.metric, self.values = metric, iter(values)

    def __call__(self) -> Scores:
        value = next(self.values, 0.5)
        return Scores({task: {self.metric: value} for task in ("click", "buy")})


def scripted(folder, how, values=(), **world):
    """A trainer whose evaluations are made up."""
    made = World(how, folder, **world)
    job = replace(made.job(Net(made.tables)), evaluate=Scripted(how.evaluate.metric, values))
    return Trainer(job, how, RunFolder(folder))


def evaluated(folder, split="valid") -> list[int]:
    if not (folder / "metrics.csv").exists():
        return []
    return [int(row["step"]) for row in lines(folder / "metrics.csv") if (row["split"], row["task"]) == (split, "buy")]


@settings(max_examples=15)
@given(
    batches=st.integers(1, 6),
    accumulate=st.integers(1, 4),
    epochs=st.integers(1, 3),
    steps=st.none() | st.integers(1, 20),
    every=st.integers(0, 4),
    saves=st.integers(0, 4),
    logs=st.integers(1, 4),
)
def test_everything_happens_when_it_is_due(tmp_path_factory, batches, accumulate, epochs, steps, every, saves, logs):
    folder = tmp_path_factory.mktemp("run")
    how = fast(
        train={"epochs": epochs, "accumulate": accumulate, "steps": steps, "batch": 2},
        evaluate={"every": every},
        save=Saving(every=saves, keep=99),
        log=Log(every=logs),
    )
    told = []
    trainer = scripted(folder, how, itertools.repeat(0.5), count=2 * batches)
    trainer._on_step = told.append
    progress = trainer.run()
    an_epoch = -(-batches // accumulate)
    total = min(epochs * an_epoch, steps or 10**9)
    ends = [n for n in range(1, total + 1) if n % an_epoch == 0]
    due = [n for n in range(1, total + 1) if (n % every == 0 if every else n in ends) or n == total]
    assert evaluated(folder) == due
    saved = {n for n in range(1, total + 1) if (n % saves == 0 if saves else n in ends) or n == total}
    assert CheckpointFolder(folder / "ckpt").steps() == sorted(saved | {due[0]})  # the first evaluation is the best
    assert [int(row["step"]) for row in lines(folder / "steps.csv")] == sorted({*range(logs, total + 1, logs), total})
    assert progress.finished
    assert [shown.progress.step for shown in told] == list(range(1, total + 1))
    whole, part = divmod(total, an_epoch)
    assert progress.samples == 2 * (whole * batches + part * accumulate)
    assert (progress.position.epoch, progress.best.step, progress.evaluated) == (whole, due[0], total)


@given(
    values=st.lists(st.sampled_from((0.1, 0.2, 0.21, 0.5, 0.9, float("nan"), float("inf"))), min_size=8, max_size=8),
    metric=st.sampled_from(("ne", "auc")),
    patience=st.none() | st.integers(1, 3),
    min_gain=st.sampled_from((0.0, 0.05)),
)
@settings(max_examples=15)
def test_the_best_is_kept_and_patience_ends(tmp_path_factory, values, metric, patience, min_gain):
    folder = tmp_path_factory.mktemp("run")
    how = fast(
        train={"epochs": 8}, evaluate={"metric": metric, "patience": patience, "min_gain": min_gain, "task": "buy"}
    )
    trainer = scripted(folder, how, values, count=10)  # two steps an epoch
    progress = trainer.run()
    best, worse, epoch = None, 0, 0
    for epoch, value in enumerate(values, 1):
        sign = -1 if metric == "ne" else 1
        if abs(value) < 1e9 and (best is None or sign * (value - best[1]) > min_gain):
            best, worse = (2 * epoch, value), 0
        else:
            worse += 1
        if patience is not None and worse >= patience:
            break
    assert progress.step == 2 * epoch
    assert progress.worse == worse
    assert progress.best == (
        None if best is None else BestEvaluation(step=best[0], task="buy", metric=metric, value=best[1])
    )
    kept = {progress.step} | ({best[0]} if best else set())
    assert CheckpointFolder(folder / "ckpt").steps() == sorted(kept)
    opened = CheckpointFolder(folder / "ckpt").open("best")
    assert opened.manifest.data["progress"]["step"] == (best[0] if best else progress.step)


def test_decisions_are_functions_of_numbers():
    progress = Progress(position=Position(epoch=2), step=10)
    assert progress.is_over(Training(epochs=2), Evaluation())
    assert not progress.is_over(Training(epochs=3), Evaluation())
    assert progress.is_over(Training(epochs=3, steps=10), Evaluation())
    assert not progress.is_over(Training(epochs=3, steps=11), Evaluation())
    assert not progress.wants_evaluation(Evaluation(every=4), epoch_end=True, over=False)
    assert progress.wants_evaluation(Evaluation(every=5), epoch_end=False, over=False)
    assert progress.wants_evaluation(Evaluation(every=4), epoch_end=False, over=True)
    done = Progress(position=Position(), step=10, evaluated=10)
    assert not done.wants_evaluation(Evaluation(every=5), epoch_end=True, over=True)
    assert progress.wants_saving(Saving(), epoch_end=True, over=False)
    assert not progress.wants_saving(Saving(), epoch_end=False, over=False)
    assert progress.wants_saving(Saving(every=3), epoch_end=False, over=True)


@pytest.mark.parametrize(
    ("metric", "falls"),
    [("loss", 1), ("ne", 1), ("rmse", 1), ("mae", 1), ("poisson_deviance", 1), ("auc", 0), ("r2", 0)],
)
def test_metrics_of_errors_get_better_by_falling(metric, falls):
    better = Evaluation(metric=metric).is_better
    assert (better(1.0, 2.0), better(2.0, 1.0)) == (falls, not falls)


@pytest.mark.parametrize(("rows", "split_rows"), [(5, 5), (8, 3)])
def test_epochs_without_a_batch(tmp_path, rows, split_rows):
    world = World(fast(train={"batch": 9}), tmp_path, count=rows, keep_last=False, split_rows=split_rows)
    with pytest.raises(DataError, match="rows to train on"):
        world.start().run()


def test_without_validation_rows_every_checkpoint_is_of_an_epoch(tmp_path):
    world = World(fast(train={"epochs": 3}), tmp_path, valid=False)
    progress = world.start().run()
    assert progress.best is None
    assert CheckpointFolder(tmp_path / "ckpt").steps() == [18]
    assert CheckpointFolder(tmp_path / "ckpt").open("best").manifest.data["progress"]["step"] == 18
    assert not evaluated(tmp_path)


def test_nothing_is_written_without_a_folder():
    shown = []
    progress = World(fast(), None).start(tell=shown.append).run()
    assert progress.finished
    assert progress.best is not None
    assert len(shown) == progress.step == 6
    assert shown[-1].splits == 3
    assert shown[-1].settings == fast()


def test_what_would_come_to_light_after_an_epoch_is_refused_before():
    world = World(fast(evaluate={"metric": "acc"}), None)
    with pytest.raises(SpecError, match="one of loss, ne"):
        world.start()
    world.settings = fast(evaluate={"task": "like"})
    with pytest.raises(SpecError, match="one of click, buy"):
        world.start()


def test_what_settings_refuse():
    for make, want in [
        (lambda: Evaluation(every=-1), "evaluate: every=-1, batch=8192, slice_ids=10: expected every of"),
        (lambda: Evaluation(patience=0), r"evaluate\.patience=0: expected at least 1, or null to never stop early"),
        (lambda: Saving(keep=0), "save: every=0, keep=0: expected every of"),
        (lambda: Log(every=0), "log: every=0, window=100: expected at least 1"),
        (lambda: Log(profile="5"), r"log\.profile='5': expected the first and last step, such as '10:20'"),
        (lambda: Log(profile="9:5"), r"log\.profile='9:5': expected the first and last"),
        (lambda: Log(profile="0:5"), r"log\.profile='0:5': expected the first and last"),
    ]:
        with pytest.raises(SpecError, match=want):
            make()
    assert Log(profile="steps=3:5").profiled() == range(3, 6)

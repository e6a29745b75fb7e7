"""What each rank took for each phase is in stages.csv, beside what the plan's forecast says of it."""

from dataclasses import replace

import pytest
from ranked import Ranked, train
from trainings import World, fast, read_csv

from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.plan import Forecast
from rowwise.train.breakdown import PHASES
from rowwise.train.settings import Log, Saving
from rowwise.train.trainer import Trainer

EXPECTED = {"lookup": (0.25, 0.5), "exchange": (0.125, 0.0625), "wait": (1.25, 0.0), "update": (1.0, 2.0)}


def rows(folder):
    return read_csv(folder / "stages.csv")


def forecast(batch, **stages_s):
    return Forecast(model="by hand", batch=batch, step_s=1.0, stages_s=stages_s or EXPECTED)


def trained(world, ranks, expected):
    """As `ranked.train`, with a forecast."""
    net = world.net()

    def on_a_rank(comm):
        plain = world.on(comm, net)
        trainer = Trainer(replace(plain.job, forecast=expected), world.settings, plain.folder, None, comm)
        trainer.run()

    run_threads(ranks, on_a_rank, 60)


def test_all_ranks_and_their_forecast(tmp_path):
    how = fast(train={"epochs": 2}, log=Log(every=5), save=Saving(every=3))
    trained(Ranked(how, tmp_path, dropout=0.0), 2, forecast(how.train.batch))
    found = rows(tmp_path)
    keys = [(row["step"], row["rank"], row["phase"]) for row in found]
    assert keys == [(s, r, phase) for s in ("5", "10", "12") for r in "01" for phase in PHASES]
    for row in found:
        here = EXPECTED.get(row["phase"])
        assert row["predicted_s"] == ("" if here is None else repr(here[int(row["rank"])]))
    for line, steps in zip(read_csv(tmp_path / "steps.csv"), (5, 5, 2), strict=True):
        for phase in PHASES:
            mine = next(r for r in found if (r["step"], r["rank"], r["phase"]) == (line["step"], "0", phase))
            assert float(mine["measured_s"]) * steps == pytest.approx(float(line[f"{phase}_s"]), rel=1e-9)
    for rank in "01":
        for phase in ("route", "lookup", "exchange", "forward", "backward", "update"):
            assert all(float(r["measured_s"]) > 0 for r in found if (r["rank"], r["phase"]) == (rank, phase))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_forecast_of_other_batches_is_none(tmp_path, accumulate):
    how = fast(train={"accumulate": accumulate}, log=Log(every=2))
    for name, batch in (("same", how.train.batch * accumulate), ("other", how.train.batch * accumulate + 1)):
        world = World(how, tmp_path / name)
        plain = world.start()
        expected = forecast(batch, lookup=(0.5,))
        Trainer(replace(plain.job, forecast=expected), how, plain.folder).run()
        told = {row["predicted_s"] for row in rows(tmp_path / name) if row["phase"] == "lookup"}
        assert told == {"0.5" if name == "same" else ""}


def test_without_a_forecast_times_are_written(tmp_path):
    train(Ranked(fast(log=Log(every=2)), tmp_path, dropout=0.0), 2)
    assert {row["predicted_s"] for row in rows(tmp_path)} == {""}
    assert {row["rank"] for row in rows(tmp_path)} == {"0", "1"}


def test_lines_after_a_checkpoint_are_cut_off(tmp_path):
    """A run that goes on has each line once."""
    how = fast(train={"epochs": 2, "steps": 7}, log=Log(every=2), save=Saving(every=3, keep=9))
    World(how, tmp_path).start().run()
    longer = fast(train={"epochs": 2}, log=Log(every=2), save=Saving(every=3, keep=9))
    World(longer, tmp_path).resume(which="step-6").run()
    steps = [int(row["step"]) for row in rows(tmp_path) if row["phase"] == "lookup"]
    assert steps == [2, 4, 6, 8, 10, 12]

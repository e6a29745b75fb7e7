"""What is written down along the way is what anybody would compute from the same batches."""

import json
import math
import warnings
from collections import deque
from dataclasses import replace
from time import sleep

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainings import Net, World, fast, lines, read_csv

from rowwise import Batch, Embeddings, Jagged, Pooling, Table
from rowwise.ingest.service.client import ServiceHealth
from rowwise.train.breakdown import PHASES
from rowwise.train.feeding import DataWait, describe_wait
from rowwise.train.metrics import Metrics
from rowwise.train.pipeline import Pipeline
from rowwise.train.recorder import memory_bytes, peak_memory_bytes
from rowwise.train.run_folder import HEADERS, RunFolder
from rowwise.train.trackers import Log, Tracker
from rowwise.train.traffic import TableTraffic
from rowwise.train.trainer import Trainer


@pytest.mark.parametrize(("every", "window", "accumulate"), [(1, 1, 1), (2, 3, 1), (3, 2, 2), (100, 5, 1)])
def test_train_and_lifetime_are_those_of_the_batches(tmp_path, monkeypatch, every, window, accumulate):
    how = fast(train={"epochs": 2, "accumulate": accumulate}, log=Log(every=every, window=window))
    world = World(how, tmp_path, valid=False)
    newest, everything, expected = deque(maxlen=window), [], []

    run = Pipeline.run

    def counted(pipeline, prepared):
        stepped, number = run(pipeline, prepared), prepared.number
        for outcome, batch in zip(stepped.outcomes, prepared.batches, strict=True):
            given_ = outcome.logits_BK.detach().clone(), batch.labels_BK, batch.weights_B
            newest.append(given_)
            everything.append(given_)
        for split, samples in (("train", newest), ("lifetime", everything)):
            metrics = Metrics(("click", "buy"), window=1)
            metrics.update(*(torch.cat(parts) for parts in zip(*samples, strict=True)))
            for task, found in metrics.value().items():
                fit = found.fit
                values = {"loss": fit.log_loss, "ne": fit.ne, "calibration": fit.calibration, "auc": found.area.auc}
                values |= {"base_rate": fit.base_rate, "count": fit.count, "auc_bound": found.area.bound}
                expected.extend(((number, split, task, name), value) for name, value in values.items())
        return stepped

    monkeypatch.setattr(Pipeline, "run", counted)
    progress = world.start().run()
    wanted = {(n, *rest): v for (n, *rest), v in expected if n % every == 0 or n == progress.step}
    rows = read_csv(tmp_path / "metrics.csv")
    found = {(int(r["step"]), r["split"], r["task"], r["metric"]): float(r["value"]) for r in rows}
    assert found == pytest.approx(wanted, rel=1e-9, nan_ok=True)


def test_lines_of_steps(tmp_path):
    progress = World(fast(train={"epochs": 2}, log=Log(every=5)), tmp_path).start().run()
    rows = read_csv(tmp_path / "steps.csv")
    assert tuple(rows[0]) == HEADERS["steps.csv"]
    assert [int(row["step"]) for row in rows] == [5, 10, 12]
    assert [int(row["samples"]) for row in rows] == [40, 77, 90]
    spent = [[float(row[f"{phase}_s"]) for phase in PHASES] for row in rows]
    assert all(part >= 0 for parts in spent for part in parts)
    for row in rows:
        assert float(row["rate"]) == 0.001
        assert float(row["gradient_norm"]) > 0
        assert 1e6 < int(row["memory_bytes"]) <= 1e12
    # Between them the lines cover all of the training: no pause is in them, and no moment twice.
    total = sum(map(sum, spent))
    assert float(rows[-1]["time_s"]) <= total + 2e-3
    assert total <= progress.time_s + 0.05
    assert float(rows[0]["samples_s"]) == pytest.approx(40 / sum(spent[0]), rel=1e-6)


def test_lines_of_workers(tmp_path):
    """How those keep up that prepare the rows, where there are any."""
    world = World(fast(log=Log(every=2)), tmp_path, valid=False)
    told, seen = [], []

    def health():
        told.append(ServiceHealth(workers=2, ready=len(told), restarts=1))
        return told[-1]

    model = Net(world.tables)
    trainer = Trainer(replace(world.job(model), health=health), world.settings, RunFolder(tmp_path), seen.append)
    trainer.run()
    rows = read_csv(tmp_path / "steps.csv")
    assert {(row["workers"], row["restarts"]) for row in rows} == {("2", "1")}
    assert [int(row["ready"]) for row in rows] == sorted(int(row["ready"]) for row in rows)
    assert all(shown.health in told for shown in seen)
    assert describe_wait(0.034, ServiceHealth(workers=2, ready=4)) == "data wait 3% (2 workers, 4 ready)"
    assert describe_wait(0.5, ServiceHealth(workers=1)) == "data wait 50% (1 worker, 0 ready)"
    assert describe_wait(0.5, None) == "data wait 50%"


def test_without_workers_their_cells_are_empty(tmp_path):
    World(fast(), tmp_path, valid=False).start().run()
    rows = read_csv(tmp_path / "steps.csv")
    assert {row[name] for row in rows for name in ("workers", "ready", "restarts")} == {""}


def test_the_wait_of_a_run(tmp_path):
    """Neither what the first step waited for counts, nor what came after the last."""
    world = World(fast(train={"epochs": 1}), tmp_path, valid=False)
    batches = world.batcher

    class Slow:
        def __init__(self, inner):
            self.inner, self.splits, self.state = inner, inner.splits, inner.state

        def __iter__(self):
            for n, batch in enumerate(self.inner):
                sleep(0.3 if n == 0 else 0.05)
                yield batch

    shown = []
    job = replace(world.job(Net(world.tables)), batches=lambda p: Slow(batches(p)))
    trainer = Trainer(job, world.settings, on_step=shown.append)
    assert trainer.data_wait == DataWait()
    steps = trainer.run().step
    wait = trainer.data_wait
    sleep(0.1)
    assert trainer.data_wait == wait
    # Batches are asked for two ahead, so the third is there when the first step ends.
    assert 0.05 * (steps - 3) <= wait.seconds < 0.05 * steps + 0.25
    assert wait.seconds < wait.of_s
    assert shown[-1].data_wait == wait  # the live line and the last line say the same


def test_a_loss_without_logits(tmp_path):
    """Two towers have no logit for each label: then the loss alone is written."""
    world = World(fast(log=Log(every=2, window=2)), tmp_path, valid=False, count=40)
    trainer = world.start()
    inner, losses = trainer._context.objective, []

    def objective(batch, step):
        outcome = inner(batch, step)
        losses.append(outcome.loss.item())
        return type(outcome)(outcome.loss)

    object.__setattr__(trainer._context, "objective", objective)
    trainer.run()
    rows = [(int(r["step"]), r["split"], r["task"], r["metric"]) for r in lines(tmp_path / "metrics.csv")]
    assert rows == [(n, split, "click", "loss") for n in (2, 4, 5) for split in ("train", "lifetime")]
    values = [float(r["value"]) for r in lines(tmp_path / "metrics.csv")]
    means = [(sum(losses[max(0, n - 2) : n]) / min(n, 2), sum(losses[:n]) / n) for n in (2, 4, 5)]
    assert values == pytest.approx([m for pair in means for m in pair])


@st.composite
def traffic(draw):
    features = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    batch = draw(st.integers(1, 12))
    bag = st.lists(st.integers(0, 9), max_size=4)
    return {f: draw(st.lists(bag, min_size=batch, max_size=batch)) for f in features}


OLDER = ("samples", "ids", "looked_at", "different", "in_top")


def same_repeats(one, other):
    same = one.ids_D.equal(other.ids_D) and one.counts_D.equal(other.counts_D)
    return same and (one.looked_at, one.level) == (other.looked_at, other.level)


@settings(max_examples=25)
@given(st.lists(traffic(), min_size=1, max_size=3))
def test_traffic_is_counted_as_by_hand(drawn):
    features = sorted(set.intersection(*(set(bags) for bags in drawn)))
    if not features:
        return
    first = Table(name="first", rows=10, dim=4, features=(features[0],), pooling=Pooling.SEQUENCE, row_type="int8")
    rest = [Table(name="rest", rows=10, dim=3, features=tuple(features[1:]))] if features[1:] else []
    tables = Embeddings([first, *rest])
    counted = TableTraffic()
    for bags in drawn:
        sparse, size = Jagged.from_lists(bags), len(next(iter(bags.values())))
        counted.add([tables], Batch(dense_BF=torch.zeros(size, 0), sparse=sparse, labels_BK=torch.zeros(size, 0)))
    again = TableTraffic()
    again.restore(json.loads(json.dumps(counted.state())), counted.tensors())
    assert counted.rows([tables]) == again.rows([tables])
    older = TableTraffic()  # a checkpoint of a version that counted no single ids
    older.restore({name: {key: sums[key] for key in OLDER} for name, sums in counted.state().items()}, {})
    assert older.rows([tables]) == counted.rows([tables])
    for row, table in zip(counted.rows([tables]), tables.tables, strict=True):
        samples, ids, different, top = 0, 0, 0, 0
        for bags in drawn:
            samples += len(next(iter(bags.values())))
            for feature in table.feature_names:
                flat = [i for bag in bags[feature] for i in bag]
                counts = sorted((flat.count(i) for i in set(flat)), reverse=True)
                ids, different = ids + len(flat), different + len(counts)
                top += sum(counts[: math.ceil(len(counts) / 100)])
        assert row["ids_per_sample"] == pytest.approx(ids / samples)
        assert row["unique_share"] == pytest.approx(different / max(ids, 1))
        assert row["top_share"] == pytest.approx(top / max(ids, 1))
        assert row["traffic_bytes"] == pytest.approx(ids / samples * table.row_bytes)
        assert (row["table"], row["rows"], row["dim"]) == (table.name, 10, table.dim)
        assert row["bytes"] == tables.table(table.name).nbytes
        assert same_repeats(counted.repeats(table.name), again.repeats(table.name))
        assert counted.repeats(table.name).looked_at == ids
        assert int(counted.repeats(table.name).counts_D.sum()) == ids
        assert older.repeats(table.name).looked_at == 0
        assert row["features"] == " ".join(table.feature_names)
        assert row["state_bytes"] == sum(x.nbytes for x in tables.optimizer_state()[table.name].values())
        assert set(row) == set(HEADERS["tables.csv"])


def test_tables_are_seen_however_short_the_run(tmp_path):
    World(fast(train={"steps": 1}), tmp_path).start().run()
    rows = lines(tmp_path / "tables.csv")
    assert [row["table"] for row in rows] == ["user", "words"]
    assert float(rows[0]["ids_per_sample"]) == 1.0
    assert {row["split"] for row in lines(tmp_path / "metrics.csv")} == {"train", "lifetime", "valid"}


class JsonLines(Tracker):
    """A tracker that `rowwise` does not know: a line of JSON for each call."""

    def __init__(self, path):
        self.path = path

    def log(self, values, step):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def test_tensorboard_and_a_tracker_of_another_module_have_what_metrics_csv_has(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that tensorboard imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        trainer = World(fast(log=Log(every=3, tensorboard=True)), tmp_path).start()
        trainer.trackers.active.append(JsonLines(tmp_path / "lines.jsonl"))
        trainer.run()
        found = EventAccumulator(str(tmp_path / "tb"))
        found.Reload()
    names = found.Tags()["scalars"]
    assert {"click/auc/train", "buy/ne/lifetime", "click/loss/valid", "run/samples_s", "seconds/data"} <= set(names)
    written = {(int(r["step"]), key(r)): float(r["value"]) for r in read_csv(tmp_path / "metrics.csv")}
    wanted = {step: value for (step, name), value in written.items() if name == "click/loss/train"}
    assert {e.step: e.value for e in found.Scalars("click/loss/train")} == pytest.approx(wanted, rel=1e-6)
    assert list(wanted) == [3, 6]
    rows = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    got = {(row["step"], name): value for row in rows for name, value in row.items() if name.count("/") == 2}
    assert got == {at: value for at, value in written.items() if math.isfinite(value)}


def key(row: dict[str, str]) -> str:
    return f"{row['task']}/{row['metric']}/{row['split']}"


@pytest.mark.few(1)
@pytest.mark.parametrize(("profile", "name"), [("2:3", "steps-2-3.json"), ("5:99", "steps-5-99.json")])
def test_a_trace_of_some_steps(tmp_path, profile, name):
    World(fast(log=Log(profile=profile)), tmp_path).start().run()
    assert [path.name for path in (tmp_path / "trace").iterdir()] == [name]
    events = json.loads((tmp_path / "trace" / name).read_text())["traceEvents"]
    lookups = [event for event in events if event.get("name") == "rowwise::pool"]
    assert len(lookups) >= 2


def test_recording_changes_no_result(tmp_path):
    plain, logged = World(fast(), tmp_path / "a"), World(fast(log=Log(every=1, window=1)), tmp_path / "b")
    found = []
    for world in (plain, logged):
        trainer = world.start()
        trainer.run()
        found.append(trainer.job.model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_memory_of_this_process():
    assert 1e7 < memory_bytes() <= 1.1 * peak_memory_bytes()

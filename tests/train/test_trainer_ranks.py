"""A run on several ranks is the run of one: same weights, lines and decisions; what stops one stops all."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from msgspec import structs
from ranked import ELASTIC, ELASTIC_ROWS, STATEFUL, TIMEOUT_S, Ranked, tensor_bits, tensors, train
from trainings import COLUMNS, bits, fast, lines, make_rows, with_cell

from rowwise import DataError, GradientError, SpecError, Topology, Wire
from rowwise.base.errors import AgreedError, CheckpointError, PeerError, RowwiseError, UpdateError
from rowwise.ingest import Batcher, Batching, FrameReader
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.thread import run_threads
from rowwise.train.objective import InBatch
from rowwise.train.saved import CheckpointFolder
from rowwise.train.settings import DenseAdam, DenseSgd, Log, Saving
from rowwise.train.trainer import Trainer


def whereabouts(trainer):
    return structs.replace(trainer.progress, time_s=0.0)


def check_same_progress(ranks):
    """On all ranks, bit for bit."""
    assert len({str(whereabouts(trainer)) for trainer in ranks}) == 1


def check_same_lines(one, other, name):
    """The same cells, but for rounding."""
    found, expected = lines(one / name), lines(other / name)
    assert len(found) == len(expected)
    for row, there in zip(found, expected, strict=True):
        assert row.keys() == there.keys()
        assert list(map(number, row.values())) == pytest.approx(
            list(map(number, there.values())), rel=1e-5, abs=1e-6, nan_ok=True
        )


def number(text):
    try:
        return float(text)
    except ValueError:
        return float(sum(map(ord, text)))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("plan", "accumulate", "worlds"), [(0, 1, (2, 3, 4)), (1, 2, (3,)), (2, 1, (4,))])
def test_any_number_of_ranks_trains_as_one(tmp_path, plan, accumulate, worlds):
    """With evaluations, best checkpoints, lines and early stopping; ranks may have no samples of a batch."""
    how = fast(
        train={"epochs": 3, "accumulate": accumulate, "optimizer": DenseSgd(lr=0.1, momentum=0.9)},
        evaluate={"every": 4, "patience": 2},
        save=Saving(every=3, keep=2),
        log=Log(every=3, window=4),
    )
    whole = Ranked(how, tmp_path / "1", dropout=0.0, plan=plan)
    (one,) = train(whole, 1)
    assert one.progress.finished
    for world in worlds:
        mine = Ranked(how, tmp_path / str(world), dropout=0.0, plan=plan)
        ranks = train(mine, world)
        check_same_progress(ranks)
        best = ranks[0].progress.best
        assert best.value == pytest.approx(one.progress.best.value, rel=1e-5)
        rounded = structs.replace(best, value=one.progress.best.value)
        assert structs.replace(whereabouts(ranks[0]), best=rounded) == whereabouts(one)
        assert CheckpointFolder(mine.folder / "ckpt").steps() == CheckpointFolder(whole.folder / "ckpt").steps()
        found, expected = tensors(mine.folder), tensors(whole.folder)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
        for name in ("metrics.csv", "slices.csv"):
            check_same_lines(mine.folder, whole.folder, name)
        steps = [[row["step"], row["samples"]] for row in lines(mine.folder / "steps.csv")]
        assert steps == [[row["step"], row["samples"]] for row in lines(whole.folder / "steps.csv")]
        counted = ("table", "ids_per_sample", "traffic_bytes")
        tables = [[row[name] for name in counted] for row in lines(mine.folder / "tables.csv")]
        assert tables == [[row[name] for name in counted] for row in lines(whole.folder / "tables.csv")]


def elastic(folder, plan=0, **more) -> Ranked:
    how = fast(train=ELASTIC | {"optimizer": DenseAdam(lr=0.01)} | more.pop("train", {}), **more)
    return Ranked(how, folder, dropout=0.0, plan=plan, tables=STATEFUL, valid_rows=600, **ELASTIC_ROWS)


@pytest.mark.slow
def test_elastic_ranks_train_as_one_to_the_bit(tmp_path):
    how = {"train": {"epochs": 2}, "log": Log(every=2), "evaluate": {"every": 3}}
    found = {}
    for world, plan in ((1, 0), (2, 1), (4, 2)):
        run = elastic(tmp_path / str(world), plan, **how)
        ranks = train(run, world)
        check_same_progress(ranks)
        found[world] = tensor_bits(run.folder), whereabouts(ranks[0])
    for world in (2, 4):
        assert found[world][0] == found[1][0]
        assert structs.replace(found[world][1], best=None) == structs.replace(found[1][1], best=None)
        check_same_lines(tmp_path / str(world), tmp_path / "1", "metrics.csv")


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [(4, 2), (1, 4), (2, 1)])
def test_elastic_goes_on_at_another_world_size_and_plan_to_the_bit(tmp_path, fifty, worlds):
    """Fifty steps at once are twenty-five, and twenty-five more on other ranks with other tiles."""
    first, second = worlds
    folder, how = tmp_path, FIFTY
    train(elastic(folder, 0, train={"epochs": 99, "steps": 25}, **how), first)
    ranks = train(elastic(folder, 2, train={"epochs": 99, "steps": 50}, **how), second, which="step-25")
    check_same_progress(ranks)
    assert whereabouts(ranks[0]).step == 50
    assert tensor_bits(folder) == fifty


FIFTY = {"save": Saving(every=25, keep=9), "log": Log(every=50), "evaluate": {"every": 25}}


@pytest.fixture(scope="module")
def fifty(tmp_path_factory):
    whole = elastic(tmp_path_factory.mktemp("whole"), train={"epochs": 99, "steps": 50}, **FIFTY)
    train(whole, 1)
    return tensor_bits(whole.folder)


@pytest.mark.slow
@pytest.mark.parametrize("far", ["int8", "topk:2%"])
def test_a_killed_run_goes_on_with_what_its_sums_between_groups_hold_back(tmp_path, far):
    """The same bits as without the kill: weights, optimizers, and the residuals of ranks with a share and without."""
    topology, wire = Topology(hosts=3, groups=(2, 1)), Wire(far=far, error_feedback=True)
    world = Ranked(fast(train={"epochs": 9, "steps": 6}, save=Saving(every=3, keep=9)), tmp_path, dropout=0.0)
    net = world.net()

    def whole(comm):
        trainer = world.on(comm, net, wire=wire)
        trainer.run()
        return residuals_of(trainer)

    def rest(comm):
        trainer = world.resumed(comm, net, which="step-3", wire=wire)
        held = residuals_of(trainer)
        trainer.run()
        return held, residuals_of(trainer)

    held_W, after = run_threads(topology, whole, TIMEOUT_S), tensor_bits(tmp_path)
    resumed_W = run_threads(topology, rest, TIMEOUT_S)
    assert [held for _, held in resumed_W] == held_W
    assert [before != held for before, held in resumed_W] == [True, False, True]  # the second rank has no share
    assert tensor_bits(tmp_path) == after


def residuals_of(trainer):
    return {bucket: bits(x) for bucket, x in trainer._context.gradients.residuals.items()}


@pytest.mark.slow
def test_a_run_goes_on_at_another_world_size(tmp_path):
    """The same samples, in `run`: and the metrics of all that was counted before."""
    how = partial(fast, log=Log(every=3, window=5), save=Saving(every=2, keep=9))
    whole = Ranked(how(train={"epochs": 3}), tmp_path / "whole", dropout=0.0)
    train(whole, 1)
    cut = Ranked(how(train={"epochs": 3, "steps": 5}), tmp_path / "cut", dropout=0.0)
    train(cut, 3)
    cut.settings, cut.plan = how(train={"epochs": 3, "steps": 10}), 1
    train(cut, 2, which="last")
    cut.settings, cut.plan = how(train={"epochs": 3}), 2
    train(cut, 4, which="step-8")
    expected = tensors(whole.folder)
    for name, tensor in tensors(cut.folder).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    folders = [[r for r in lines(w.folder / "metrics.csv") if int(r["step"]) % 3 == 0] for w in (cut, whole)]
    for row, there in zip(*folders, strict=True):
        assert number(row["value"]) == pytest.approx(number(there["value"]), rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("guilty", [0, 2])
@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_stop_on_one_rank_stops_all_after_the_same_step(tmp_path, guilty, step):
    """Before the first step, in the middle, and at the end of an epoch; the run then goes on as if it had not been."""
    how = fast(train={"epochs": 2}, log=Log(every=2))
    cut, whole = Ranked(how, tmp_path / "cut", dropout=0.0), Ranked(how, tmp_path / "whole", dropout=0.0)

    def prepare(comm, trainer):
        if comm.rank == guilty:
            if step == 0:
                trainer.stop()
            trainer.job.model.register_forward_hook(
                lambda *_: trainer.stop() if trainer.progress.step == step - 1 else None
            )

    ranks = train(cut, 3, prepare=prepare)
    check_same_progress(ranks)
    assert not ranks[0].progress.finished
    assert ranks[0].progress.step == (step + how.train.pipeline_depth if step not in (0, 6) else step)
    assert CheckpointFolder(cut.folder / "ckpt").steps()[-1] == ranks[0].progress.step
    assert train(cut, 3, which="last")[0].progress.finished
    train(whole, 3)
    assert tensor_bits(cut.folder) == tensor_bits(whole.folder)


class Own(Ranked):
    """Each rank has rows of its own."""

    sizes = (45, 20, 9)

    def batches_of(self, comm, position=None):
        rows = make_rows(self.sizes[comm.rank], comm.rank)
        reader = FrameReader(rows, split_rows=self.split_rows, name=f"rows of {comm.rank}")
        batching = Batching(size=self.settings.train.batch, seed=self.seed)
        return Batcher(reader, COLUMNS, self.tables, batching, position)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_whose_data_ends_early_end_the_epoch_with_the_others(tmp_path, accumulate):
    how = fast(train={"epochs": 2, "accumulate": accumulate}, log=Log(every=1))
    ranks = train(Own(how, tmp_path, dropout=0.0), 3)
    check = {(t.progress.step, t.progress.samples, t.progress.position.epoch) for t in ranks}
    assert check == {(2 * -(-6 // accumulate), 2 * sum(Own.sizes), 2)}
    assert all(t.progress.finished for t in ranks)
    rows = [r for r in lines(tmp_path / "metrics.csv") if (r["split"], r["metric"]) == ("lifetime", "count")]
    assert float(rows[-1]["value"]) == 2 * sum(Own.sizes)


@pytest.mark.slow
def test_ranks_with_data_of_their_own_go_on_where_each_was(tmp_path):
    """Also from the middle of an epoch in which one of them has no more."""
    how = partial(fast, log=Log(every=2), save=Saving(every=4, keep=9))
    whole = Own(how(train={"epochs": 2}), tmp_path / "whole", dropout=0.0)
    train(whole, 3)
    cut = Own(how(train={"epochs": 2, "steps": 4}), tmp_path / "cut", dropout=0.0)
    train(cut, 3)
    cut.settings = how(train={"epochs": 2})
    ranks = train(cut, 3, which="step-4")
    assert {(t.progress.step, t.progress.samples) for t in ranks} == {(12, 2 * sum(Own.sizes))}
    assert tensor_bits(cut.folder) == tensor_bits(whole.folder)
    with pytest.raises(CheckpointError, match="each of 3 ranks"):
        train(cut, 2, which="step-4")


def test_a_rank_without_any_rows(tmp_path):
    class Idle(Own):
        sizes = (20, 7, 20)

        def batches_of(self, comm, position=None):
            made = super().batches_of(comm, position)
            made._batching = structs.replace(made._batching, keep_last=False)
            return made

    errors = failing(Idle(fast(), tmp_path), 3)
    want = "no rows to train on for rank 1, but other ranks have some: expected rows for each rank, or fewer ranks"
    assert [(type(error), str(error)) for error in errors] == [(DataError, want)] * 3


def failing(world, ranks, prepare=None):
    """What each rank raises."""
    net = world.net()

    def rank(comm):
        trainer = world.on(comm, net)
        if prepare is not None:
            prepare(comm, trainer)
        with pytest.raises(RowwiseError) as raised:
            trainer.run()
        return raised.value

    errors = run_threads(ranks, rank, TIMEOUT_S)
    assert "waited" not in str(errors)
    return errors


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("bad", [3, 27, 42])
def test_a_row_that_one_rank_cannot_read_ends_all_at_once(tmp_path, bad, ahead):
    how = fast(train={"epochs": 2, "ahead": ahead, "shuffle": False}, save=Saving(every=1))
    errors = failing(Ranked(how, tmp_path, dropout=0.0, bad_row=bad), 3)
    want = f"rows: row {bad}, column 'click': 7: expected a label of 0 or 1"
    assert isinstance(errors[1], DataError)
    assert str(errors[1]) == want
    for error in (errors[0], errors[2]):
        assert isinstance(error, AgreedError)
        assert str(error).endswith(f": DataError: {want}")
        assert str(error).startswith("rank 1 (")
    # Steps before the trouble was met are saved, and whole.
    for step in CheckpointFolder(tmp_path / "ckpt").steps():
        CheckpointFolder(tmp_path / "ckpt").open(f"step-{step}").verify()


@pytest.mark.few(1)
@pytest.mark.parametrize("folder", [True, False])
def test_a_bad_number_on_one_rank_is_explained_and_can_be_met_again(tmp_path, folder):
    """A forward that all have to take part in is not run again; what is known without is said."""

    class Broken(Ranked):
        def rows(self):
            return with_cell(super().rows(), "x", 28, 3e38)  # the fourth batch's samples 4 and 5 are those of rank 2

    def prepare(_, trainer):
        with torch.no_grad():
            trainer.job.model.layers[0].weight.mul_(100)

    how = fast(train={"shuffle": False, "optimizer": DenseSgd(lr=0.0)}, save=Saving(every=1, keep=9))
    world = Broken(how, tmp_path / "run" if folder else None, dropout=0.0)
    errors = failing(world, 4, prepare)
    again = f"; repeat the step: rowwise resume {tmp_path / 'run'} --from failed" if folder else ""
    said = str(errors[2])
    assert isinstance(errors[2], GradientError)
    assert said.startswith("step 4 (epoch 0, from row 8 of split 1 on): the loss is ")
    assert "batch 0 of the step, sample 0, key 28, whose largest number is 3e+38 in dense column 0" in said
    assert said.endswith(again)
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], AgreedError)
        assert str(errors[rank]).startswith("rank 2 (step 4): GradientError: the loss is ")
        assert str(errors[rank]).endswith(again)
    if folder:
        saved = CheckpointFolder(world.folder / "ckpt")
        assert saved.steps() == [1, 2, 3]
        assert tensor_bits(world.folder, "failed") == tensor_bits(world.folder)
        net = world.net()

        def resume(comm):
            with pytest.raises((GradientError, AgreedError)) as raised:
                world.resumed(comm, net, which="failed").run()
            return str(raised.value)

        assert run_threads(4, resume, TIMEOUT_S) == [str(error) for error in errors]


def test_rows_that_fail_in_an_update_on_one_rank_end_the_run_on_all(tmp_path):
    """Nothing is saved after it."""

    def prepare(comm, trainer):
        def overflow(module, args, output):
            if trainer.progress.step == 2:
                output.values().register_hook(lambda grad_BS: torch.full_like(grad_BS, 3e38))

        (tables,) = trainer._context.tables
        tables.register_forward_hook(overflow)

    errors = failing(Ranked(fast(save=Saving(every=3)), tmp_path, dropout=0.0), 3, prepare)
    want = r"step 3: table '\w+', row \d+: the sum of its gradients overflows float32"
    assert UpdateError in map(type, errors)
    for error in errors:
        assert isinstance(error, UpdateError | AgreedError)
        assert re.search(want, str(error))
    assert not CheckpointFolder(tmp_path / "ckpt").steps()


def test_a_rank_that_is_gone_is_no_agreement(tmp_path):
    def rank(comm):
        trainer = world.on(comm, net)
        if comm.rank == 1:
            trainer.job.model.register_forward_hook(fail)
        if comm.rank == 1:
            trainer.run()
        with pytest.raises(PeerError) as raised:
            trainer.run()
        assert not isinstance(raised.value, AgreedError)

    def fail(*_):
        raise MemoryError("no more")

    world = Ranked(fast(), tmp_path, dropout=0.0)
    net = world.net()
    with pytest.raises(MemoryError, match="no more"):
        run_threads(2, rank, TIMEOUT_S)


def test_data_that_one_rank_cannot_open_ends_all(tmp_path):
    class Closed(Ranked):
        def batches_of(self, comm, position=None):
            if comm.rank == 1:
                raise DataError("rows.parquet: no such file or folder")
            return super().batches_of(comm, position)

    world = Closed(fast(), tmp_path, dropout=0.0)
    net = world.net()

    def rank(comm):
        want = "rows.parquet: no such file" if comm.rank == 1 else r"rank 1 \(opening the data\): DataError: rows"
        with pytest.raises(DataError if comm.rank == 1 else AgreedError, match=want):
            world.on(comm, net)

    run_threads(3, rank, TIMEOUT_S)


def test_only_the_first_rank_writes_and_tells(tmp_path):
    told = []

    def rank(comm):
        world.on(comm, net, tell=lambda shown: told.append((comm.rank, shown.progress.step))).run()

    world = Ranked(fast(), tmp_path, dropout=0.0)
    net = world.net()
    run_threads(3, rank, TIMEOUT_S)
    assert told == [(0, step) for step in range(1, 7)]
    assert [row["step"] for row in lines(tmp_path / "steps.csv")] == ["6"]


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_saving_in_the_background_leaves_the_same(tmp_path, background):
    how = fast(train={"epochs": 2}, save=Saving(every=2, keep=9, background=background))
    world = Ranked(how, tmp_path, dropout=0.0)
    train(world, 2)
    assert CheckpointFolder(tmp_path / "ckpt").steps() == [2, 4, 6, 8, 10, 12]
    for step in CheckpointFolder(tmp_path / "ckpt").steps():
        CheckpointFolder(tmp_path / "ckpt").open(f"step-{step}").verify()
    assert not list((tmp_path / "ckpt").glob("*.part"))


def test_what_compares_samples_of_a_batch_is_not_elastic():
    world = Ranked(fast(train={"determinism": "elastic"}), None)
    job = world.on(solo(), world.net()).job
    job = replace(job, objective=InBatch(job.model, "item", None), evaluate=None)
    with pytest.raises(SpecError, match=r"train.determinism='elastic': .*"):
        Trainer(job, world.settings)

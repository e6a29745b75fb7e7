"""Runs on real processes: what threads cannot show, as they share random numbers and signals."""

import os

import process_ranks
import pytest
from ranked import ELASTIC, ELASTIC_ROWS, Ranked, tensor_bits, train
from trainings import fast

from rowwise.parallel.comm import run_processes
from rowwise.train.loss_settings import Smc
from rowwise.train.saved import CheckpointFolder
from rowwise.train.settings import Augment, Log, Saving

linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name needs Linux")
ways = pytest.mark.parametrize("shared", [False, pytest.param(True, marks=linux)], ids=["gloo", "shared memory"])
pytestmark = pytest.mark.dist
TIMEOUT_S = 100


def elastic(folder, plan=0, **train) -> Ranked:
    """With dropout, which threads would draw from one source."""
    how = ELASTIC | {"epochs": 2, "shuffle": True} | train
    return Ranked(fast(train=how, log=Log(every=2)), folder, plan=plan, **ELASTIC_ROWS)


@ways
@pytest.mark.parametrize("how", [{}, {"objective": Smc(steps=4), "augment": Augment(drop_ids=0.2, crop_lists=0.5)}])
def test_elastic_processes_train_as_one_with_dropout(tmp_path, shared, threads, how):
    """Two processes up to the middle of an epoch, four for the rest, by another plan, against one that does all."""
    threads(1)
    train(elastic(tmp_path / "whole", **how), 1)
    folder = tmp_path / "cut"
    first, later = elastic(folder, 1, steps=2, **how), elastic(folder, 2, **how)
    run_processes(2, process_ranks.run, first, timeout_s=TIMEOUT_S, shared_memory=shared)
    ranks = run_processes(4, process_ranks.run, later, "last", timeout_s=TIMEOUT_S, shared_memory=shared)
    assert len({progress for _, progress, _ in ranks}) == 1
    assert all(finished for _, _, finished in ranks)
    assert tensor_bits(folder) == tensor_bits(tmp_path / "whole")


@pytest.mark.parametrize(
    ("train", "end"), [({}, 4), ({"objective": Smc(steps=4), "augment": Augment(drop_ids=0.2)}, 3)]
)
def test_ranks_draw_numbers_of_their_own_and_the_same_ones_again(tmp_path, train, end):
    """Dropout in `run`: stopped and resumed is uninterrupted. A step of smc meets the signal in its first forward."""
    how = fast(train={"epochs": 2} | train, log=Log(every=2), save=Saving(every=5, keep=9))
    whole, cut = Ranked(how, tmp_path / "whole"), Ranked(how, tmp_path / "cut")
    ranks = run_processes(3, process_ranks.run, whole, timeout_s=TIMEOUT_S)
    assert len({seed for seed, *_ in ranks}) == 3
    assert ranks[0][0] == 0
    assert run_processes(3, process_ranks.stopped_by_a_signal, cut, timeout_s=TIMEOUT_S) == [(end, False)] * 3
    assert CheckpointFolder(cut.folder / "ckpt").steps() == [end]
    run_processes(3, process_ranks.run, cut, "last", timeout_s=TIMEOUT_S)
    assert tensor_bits(cut.folder) == tensor_bits(whole.folder)


@ways
@pytest.mark.parametrize("on_disk", [(), ("user", "words")])
def test_a_hundred_steps_in_flight_have_the_bits_of_one_after_another(tmp_path, shared, on_disk):
    found = {}
    for depth in (1, 2, 3):
        how = fast(train={"epochs": 99, "steps": 100, "pipeline_depth": depth}, log=Log(every=50))
        run = Ranked(how, tmp_path / str(depth), dropout=0.0, on_disk=on_disk, cache_rows=3, count=400)
        run_processes(2, process_ranks.run, run, timeout_s=TIMEOUT_S, shared_memory=shared)
        found[depth] = tensor_bits(run.folder)
    assert found[2] == found[1]
    assert found[3] == found[1]


@ways
def test_a_row_that_one_process_cannot_read_ends_all(tmp_path, shared):
    world = Ranked(fast(train={"shuffle": False}), tmp_path, bad_row=27)
    said = run_processes(3, process_ranks.refused, world, timeout_s=TIMEOUT_S, shared_memory=shared)
    want = "row 27, column 'click': 7: expected a label of 0 or 1"
    assert [kind for kind, _ in said] == ["AgreedError", "DataError", "AgreedError"]
    assert all(text.endswith(want) for _, text in said)
    assert said[0][1].startswith("rank 1 (before step 2): DataError: ")

"""What a run has counted of its tables is what its ids were drawn from, and a planner reads it."""

import json

import numpy as np
import pytest
import torch
from small import recipe, trained

from rowwise import Batch, Embeddings, Jagged, RowWiseAdam, Table
from rowwise.planning.perf.access import Curves, Workload
from rowwise.planning.planner.inputs import read_tables
from rowwise.recipes.access import AccessFile, access_json, fit_access
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.sharding import tables_of
from rowwise.train.repeats import IdSample
from rowwise.train.traffic import TableTraffic

# a, q, rows, rows that are asked for, samples of a batch, batches that were looked at
DRAWN = [
    (1.05, 0.0, 1_000_000, 1_000_000, 65_536, 2),
    (1.05, 0.0, 1_000_000, 1_000_000, 2_048, 1),
    (0.0, 0.0, 100_000, 100_000, 32_768, 1),
    (0.0, 0.0, 1_000_000, 3_000, 2_048, 3),
    (1.2, 50.0, 500_000, 500_000, 65_536, 4),
    (0.8, 0.0, 1_000, 1_000, 65_536, 1),
    (2.0, 0.0, 5_000, 5_000, 8_192, 8),
]


def drawing(a, q, rows, active, seed=0):
    """A function that draws rows by a curve, over any of the table's rows."""
    random = np.random.default_rng(seed)
    weights = (np.arange(1, active + 1) + q) ** -a
    edges, asked = np.cumsum(weights / weights.sum()), random.permutation(rows)[:active]
    return lambda count: asked[np.minimum(np.searchsorted(edges, random.random(count)), active - 1)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("a", "q", "rows", "active", "batch", "batches"), DRAWN)
def test_different_rows_of_a_batch(a, q, rows, active, batch, batches):
    """Predicted for the batch of the run and for smaller and larger ones, against draws that were not looked at."""
    draw, seen = drawing(a, q, rows, active), IdSample()
    for _ in range(batches):
        seen.add(torch.from_numpy(draw(batch)))
    access = fit_access(seen, rows, 1.0, batch)
    for size, off in ((batch, 0.08), (batch // 4, 0.1), (4 * batch, 0.1)):
        (found,) = Curves.of([Workload(table=Table(name="t", rows=rows, dim=4), access=access)], size).unique_T
        want = np.mean([len(np.unique(draw(size))) for _ in range(3)])
        assert found == pytest.approx(want, rel=off), (size, access)


def test_parts_of_ranks_are_one_batch():
    """Ids that come on two ranks are one row; a sum of what each rank has would be far off."""
    table = Table(name="t", rows=5_000, dim=4, features=("x", "y"))
    tables, draw = Embeddings([table]), drawing(1.1, 0.0, 5_000, 5_000)
    first, world, part = TableTraffic(), 4, 1_024
    for rank in range(world):
        mine = TableTraffic()
        ids = torch.from_numpy(draw(3 * part))
        lengths = torch.cat((torch.full((part,), 1), torch.full((part,), 2)))
        sparse = Jagged(features=("x", "y"), values_N=ids, lengths_FB=lengths)
        mine.add([tables], Batch(dense_BF=torch.zeros(part, 0), sparse=sparse, labels_BK=torch.zeros(part, 0)))
        first.merge(mine.state(), mine.tensors()) if rank else first.restore(mine.state(), mine.tensors())
    (found,) = AccessFile([table], world * part).workloads(first, ended=True)
    assert found.access.pooling == 3.0
    (different,) = Curves.of([found], world * part).unique_T
    want = np.mean([len(np.unique(draw(3 * world * part))) for _ in range(3)])
    assert different == pytest.approx(want, rel=0.06)


def test_ids_outside_of_a_table_are_its_last_row():
    table = Table(name="t", rows=10, dim=4, unknown="last_row")
    sparse = Jagged(features=("t",), values_N=torch.tensor([3, 99, -1, 9]), lengths_FB=torch.ones(4, dtype=torch.int64))
    traffic = TableTraffic()
    traffic.add([Embeddings([table])], Batch(dense_BF=torch.zeros(4, 0), sparse=sparse, labels_BK=torch.zeros(4, 0)))
    assert traffic.repeats("t").ids_D.tolist() == [3, 9]
    assert traffic.repeats("t").counts_D.tolist() == [1, 3]


@pytest.mark.parametrize("count", [0, 1, 7])
def test_hardly_any_ids(tmp_path, count):
    """Statistics that can be read and planned with, whatever there is."""
    table, traffic = Table(name="t", rows=20, dim=4), TableTraffic()
    lengths = torch.tensor([0] * 7 + [count])
    sparse = Jagged(features=("t",), values_N=torch.zeros(count, dtype=torch.int64), lengths_FB=lengths)
    (never,) = AccessFile([table], 8).workloads(traffic, ended=True)
    assert never.access.pooling == 1.0
    traffic.add([Embeddings([table])], Batch(dense_BF=torch.zeros(8, 0), sparse=sparse, labels_BK=torch.zeros(8, 0)))
    (found,) = AccessFile([table], 8).workloads(traffic, ended=True)
    assert found.access.pooling == count / 8
    (tmp_path / "access.json").write_text(access_json([found]))
    assert read_tables(tmp_path / "access.json").workloads == (found,)


def test_a_run_leaves_them_and_a_planner_reads_them(tmp_path):
    optimizer = {"kind": "rowwise_adam", "lr": 0.01, "beta2": 0.99}
    run, _ = trained(
        tmp_path, tables={"all": {"optimizer": optimizer, "row_type": "int8"}, "each": {"seen": {"dim": 8}}}
    )
    read = read_tables(run.folder.path / "access.json")
    assert read.notes == ()
    assert tuple(w.table for w in read.workloads) == tables_of(run.model)
    assert read.workloads[0].table.optimizer == RowWiseAdam(lr=0.01, beta2=0.99)
    pooling = {w.table.name: w.access.pooling for w in read.workloads}
    assert (pooling["user"], pooling["item"]) == (1.0, 1.0)
    assert pooling["seen"] > 1.0


@pytest.mark.slow
def test_a_run_that_was_killed_leaves_those_of_its_last_checkpoint_and_counts_on(tmp_path):
    how = {"log": {"every": 1}, "save": {"every": 4, "keep": 9}}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    trained(tmp_path / "whole", **how)

    class Killed(Exception):
        pass

    def kill(shown):
        if shown.progress.step == 11:
            raise Killed

    killed = TrainingRun.start(recipe(tmp_path / "killed", **how), tmp_path / "killed/runs", kill)
    with pytest.raises(Killed):
        killed.go()
    killed.folder.release()  # as the end of a process does
    left = read_tables(tmp_path / "killed/runs/small/1/access.json").workloads
    assert [w.table.name for w in left] == ["user", "item", "seen"]
    assert left[2].access.pooling > 1.0
    assert left[0].access.active is not None or left[0].access.zipf_a > 0
    TrainingRun.resume(tmp_path / "killed/runs/small/1").go()
    one, other = ((tmp_path / name / "runs/small/1/access.json").read_bytes() for name in ("whole", "killed"))
    assert json.loads(one) == json.loads(other)


def test_a_fit_stands_until_twice_as_many_ids_were_looked_at():
    table = Table(name="t", rows=5_000, dim=4)
    tables, traffic, draw = Embeddings([table]), TableTraffic(), drawing(1.1, 0.0, 5_000, 5_000)
    file = AccessFile([table], 1000)

    def look_at(count):
        lengths = torch.ones(count, dtype=torch.int64)
        sparse = Jagged(features=("t",), values_N=torch.from_numpy(draw(count)), lengths_FB=lengths)
        traffic.add([tables], Batch(dense_BF=torch.zeros(count, 0), sparse=sparse, labels_BK=torch.zeros(count, 0)))
        return file.workloads(traffic, ended=False)[0].access

    first = look_at(1000)
    assert look_at(900) == first
    second = look_at(100)
    assert second != first
    assert look_at(1900) == second
    (exact,) = file.workloads(traffic, ended=True)
    assert exact == AccessFile([table], 1000).workloads(traffic, ended=True)[0]
    assert exact.access != second


@pytest.mark.slow
def test_statistics_go_on_after_a_stop(tmp_path):
    """A run that was stopped and resumed has counted what an undisturbed one has."""
    how = {"log": {"every": 2}, "save": {"every": 4, "keep": 9}}
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole, _ = trained(tmp_path / "whole", **how)
    stopped, _ = trained(tmp_path / "stopped", train={"steps": 8}, **how)
    TrainingRun.resume(stopped.folder.path, ["train.steps=null"]).go()
    one, other = ((run.folder.path / "access.json").read_bytes() for run in (whole, stopped))
    assert json.loads(one) == json.loads(other)

"""A run on several ranks from the command line: the same result, and however it ends, one line that says why."""

import json
import os
import signal
import socket
import time

import pytest
from launching import (
    ELASTIC,
    ENVIRONMENT,
    is_there,
    ranks_of,
    rowwise,
    started,
    told,
    wait_for,
    wait_for_step,
    write_recipe,
)
from small import write_rows

from rowwise.checkpoint.read import Checkpoint
from rowwise.parallel.plan import Plan
from rowwise.train.saved import CheckpointFolder

pytestmark = [pytest.mark.dist, pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="wants Linux")]
RUN = "runs/small/1"
LONG = {"train": {**ELASTIC, "epochs": 5000}, "log": {"every": 2}, "save": {"every": 5}}
SHORT = {"train": {**ELASTIC, "epochs": 5}, "log": {"every": 2}, "save": {"every": 5}}


def tensors(run):
    """Of the newest checkpoint, as one device has them; what ranks have of their own is left out."""
    found: Checkpoint = CheckpointFolder(run / "ckpt").open()
    return {name: found.load(name) for name in found.names() if name.startswith(("model/", "rows/", "optimizer/"))}


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def result(run):
    return json.loads((run / "result.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The short run in one process."""
    folder = write_recipe(tmp_path_factory.mktemp("alone"), **SHORT)
    assert rowwise(folder, "train", "small.yaml").returncode == 0
    return folder / RUN


def test_a_rank_that_finds_no_other_ends_with_a_line(tmp_path):
    write_recipe(tmp_path, **SHORT)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **place}
        done = rowwise(tmp_path, "train", "small.yaml", "--timeout", "1", environment=ranks)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]  # torch has logged more before it
    assert line.startswith("rowwise: rank 1: ranks did not meet: ")
    assert "start rank 0 there, or give a larger --timeout" in line


def test_several_ranks_end_with_the_bits_of_one(alone, tmp_path):
    write_recipe(tmp_path, **SHORT)
    done = rowwise(tmp_path, "train", "small.yaml", "--nproc", "2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told_result = json.loads(done.stdout)
    assert told_result == result(tmp_path / RUN)
    assert told_result["test"]["label"] == pytest.approx(result(alone)["test"]["label"], rel=1e-12)
    assert same(tensors(tmp_path / RUN), tensors(alone))
    where = json.loads((tmp_path / RUN / "env.json").read_text())
    assert (where["ranks"], where["hosts"], where["wire"]["dense"]) == (2, 1, "fp32")
    plan = Plan.from_json((tmp_path / RUN / "plan.json").read_text())
    assert plan.world == 2
    # What several have written one can read.
    done = rowwise(tmp_path, "eval", RUN, "--json")
    assert json.loads(done.stdout)["tasks"]["label"] == pytest.approx(told_result["test"]["label"], rel=1e-12)


def test_a_plan_is_executed_as_it_is(alone, tmp_path):
    write_recipe(tmp_path, **SHORT)
    tiles = [
        {"table": "user", "rank": 0, "rows": [0, 50], "cols": [0, 4]},
        {"table": "user", "rank": 1, "rows": [0, 50], "cols": [4, 8]},
        {"table": "item", "rank": 1, "rows": [0, 30], "cols": [0, 8]},
        *({"table": "seen", "rank": rank, "rows": [0, 20], "cols": [0, 8]} for rank in range(2)),
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"world": 2, "tiles": tiles}))
    done = rowwise(tmp_path, "train", "small.yaml", "--nproc", "2", "--plan", "plan.json")
    assert done.returncode == 0, done.stderr
    assert "ranks   2 on 1 host, 1 thread each; rank 1 holds the most rows, " in done.stderr
    assert f"plan: {tmp_path}/plan.json\n" in done.stderr
    executed = Plan.from_json((tmp_path / RUN / "plan.json").read_text())
    assert executed == Plan.from_json((tmp_path / "plan.json").read_text())
    assert same(tensors(tmp_path / RUN), tensors(alone))


def test_a_row_that_cannot_be_read_ends_the_run_with_one_line(tmp_path):
    ids = lambda rows: [99 if n == 1200 else x for n, x in zip(rows["row"].to_pylist(), rows["user"].to_pylist())]  # noqa: B905, E731
    write_rows(tmp_path / "rows.parquet", 2000, user=ids)
    write_recipe(tmp_path, data={"valid_share": 0.0, "test_share": 0.0}, train={"batch": 768, "shuffle": False})
    done = rowwise(tmp_path, "train", "small.yaml", "--nproc", "3")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = told(done.stderr)
    assert line.endswith("expected 0 to 49, the rows of table 'user'; ids='hash' takes any")
    assert f"{tmp_path}/rows.parquet: row 1200, column 'user': id 99: " in line
    assert result(tmp_path / RUN)["status"] == "failed"
    assert "row 1200" in result(tmp_path / RUN)["message"]


OWN = """
import torch
from torch import nn
from rowwise import DataError

class Mine(nn.Module):
    def __init__(self, embeddings, dense_features, tasks):
        super().__init__()
        self.embeddings, self.out = embeddings, nn.Linear(dense_features + 3 * 8, tasks)

    def forward(self, batch):
        if self.training and len(batch.labels_BK) == 200:  # the third part of a batch
            raise ERROR("mine")
        return self.out(torch.cat([batch.dense_BF, self.embeddings(batch.sparse).values()], 1))
"""


@pytest.mark.parametrize("error", ["ZeroDivisionError", "DataError"])
def test_what_one_rank_meets_is_shown_once(tmp_path, error):
    (tmp_path / "own.py").write_text(OWN.replace("ERROR", error))
    write_recipe(tmp_path, model="own.py:Mine", train={"batch": 712}, data={"test_share": 0.0, "valid_share": 0.0})
    begin_s = time.monotonic()
    done = rowwise(tmp_path, "train", "small.yaml", "--nproc", "3")
    assert time.monotonic() - begin_s < 60
    if error == "DataError":
        assert (done.returncode, told(done.stderr)) == (2, ["rowwise: rank 2: mine"])
        assert "Traceback" not in done.stderr
        return
    assert (done.returncode, told(done.stderr)) == (1, [])
    assert done.stderr.count("Traceback") == 1
    assert "rank 2: Traceback" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: mine\n")


@pytest.mark.parametrize("guilty", [0, 2])
def test_a_rank_that_is_killed_ends_the_others_and_the_run_goes_on(tmp_path, guilty):
    write_recipe(tmp_path, **LONG)
    run = tmp_path / RUN
    with started(tmp_path, "train", "small.yaml", "--nproc", "3") as process:
        pids = ranks_of(run)
        wait_for_step(run, 20)
        begin_s = time.monotonic()
        os.kill(pids[guilty], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - begin_s < 15
    assert (process.returncode, out) == (137, "")
    why = f"rowwise: rank {guilty} was killed by SIGKILL (out of memory?)"
    assert told(err) == [f"{why}; resume it with: rowwise resume {RUN} --nproc 3"]
    assert "Traceback" not in err
    assert not any(is_there(pid) for pid in pids)
    done = rowwise(tmp_path, "resume", RUN, "--nproc", "2", "--set", "train.epochs=40")
    assert done.returncode == 0, done.stderr
    assert "resumed at step " in done.stderr
    assert "finished: " in done.stderr


@pytest.mark.parametrize("whom", ["the parent", "the terminal", "one rank"])
def test_stopped_on_all_ranks_after_the_same_step(alone, tmp_path, whom):
    write_recipe(tmp_path, **LONG)
    run = tmp_path / RUN
    with started(tmp_path, "train", "small.yaml", "--nproc", "3") as process:
        pids = ranks_of(run)
        wait_for_step(run, 8)
        if whom == "the terminal":
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(process.pid if whom == "the parent" else pids[1], signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130 if whom == "the terminal" else 143, "")
    assert (told(err), "Traceback" in err) == ([], False)
    assert err.endswith(f"resume it with: rowwise resume {RUN} --nproc 3\n")
    assert ("stopping after this step; Ctrl-C again stops at once\n" in err) == (whom != "one rank")
    stopped = result(run)
    assert stopped["status"] == "stopped"
    assert CheckpointFolder(run / "ckpt").steps()[-1] == stopped["steps"]
    # Stopped and resumed, on another number of ranks, is uninterrupted.
    write_recipe(tmp_path / "whole", **LONG)
    steps = f"train.steps={stopped['steps'] + 7}"
    assert rowwise(tmp_path, "resume", RUN, "--nproc", "2", "--set", steps).returncode == 0
    assert rowwise(tmp_path / "whole", "train", "small.yaml", "--set", steps).returncode == 0
    assert same(tensors(run), tensors(tmp_path / "whole" / RUN))


def test_a_second_ctrl_c_ends_all_ranks_at_once(tmp_path):
    write_recipe(tmp_path, **LONG)
    with started(tmp_path, "train", "small.yaml", "--nproc", "2") as process:
        pids = ranks_of(tmp_path / RUN)
        os.kill(pids[1], signal.SIGSTOP)  # so that no step ends
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert told(err) == ["rowwise: stopped by Ctrl-C"]
    assert "Traceback" not in err
    assert not any(is_there(pid) for pid in pids)


def test_ctrl_c_before_there_is_anything_to_save(tmp_path):
    write_recipe(tmp_path, **LONG)
    with started(tmp_path, "train", "small.yaml", "--nproc", "2") as process:
        time.sleep(0.8)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert told(err) == ["rowwise: stopped by Ctrl-C"]


def test_ranks_end_with_a_parent_that_was_killed(tmp_path, monkeypatch):
    write_recipe(tmp_path, **LONG)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(tmp_path / "tmp"))
    with started(tmp_path, "train", "small.yaml", "--nproc", "2") as process:
        pids = ranks_of(tmp_path / RUN)
        wait_for_step(tmp_path / RUN, 4)
        process.kill()
        process.wait()
        wait_for(lambda: not any(is_there(pid) for pid in pids), seconds=5)
        wait_for(lambda: not any(_group_of(pid) == process.pid for pid in _all()), seconds=5)
    assert not list((tmp_path / "tmp").glob("rowwise-*"))
    done = rowwise(tmp_path, "resume", RUN, "--set", "train.epochs=30")  # nobody holds the run
    assert done.returncode == 0, done.stderr


def test_the_folder_for_temporary_files_may_have_a_long_name(tmp_path):
    write_recipe(tmp_path, **SHORT)
    long = tmp_path / ("folder-" * 15)
    long.mkdir()
    done = rowwise(tmp_path, "train", "small.yaml", "--nproc", "2", environment={"TMPDIR": str(long)})
    assert done.returncode == 0, done.stderr
    assert not list(long.iterdir())


def _all():
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _group_of(pid):
    try:
        return os.getpgid(pid) if is_there(pid) else None
    except ProcessLookupError:
        return None


def test_a_rank_that_hangs_is_given_up_after_the_timeout(tmp_path):
    write_recipe(tmp_path, **LONG)
    with started(tmp_path, "train", "small.yaml", "--nproc", "2", "--timeout", "3") as process:
        pids = ranks_of(tmp_path / RUN)
        wait_for_step(tmp_path / RUN, 4)
        os.kill(pids[1], signal.SIGSTOP)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    (line,) = told(err)
    assert line.startswith("rowwise: rank 0: rank 0 waited 3")
    assert not any(is_there(pid) for pid in pids)


@pytest.fixture
def refused(tmp_path):
    """The one line of a command that several ranks cannot follow."""
    write_recipe(tmp_path, **SHORT)

    def run(*args):
        done = rowwise(tmp_path, *args)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = told(done.stderr)
        assert done.stderr.splitlines()[-1] == line
        assert not (tmp_path / "runs").exists()
        return line.removeprefix("rowwise: ")

    return run


PLAN = '{"world": 2, "tiles": [{"table": "user", "rank": 0, "rows": [0, 50], "cols": [0, 8]}]}'


def test_what_several_ranks_cannot_do(refused, tmp_path):
    train = ("train", "small.yaml", "--dry-run")
    assert refused(*train, "--nproc", "0") == "--nproc 0: expected at least 1"
    wrong = refused(*train, "--nproc", "4")
    assert wrong.startswith("6 virtual shards of elastic training on 4 ranks: expected 1, 2, 3, 6 ranks")
    (tmp_path / "plan.json").write_text(PLAN)
    wrong = refused(*train, "--nproc", "3", "--plan", "plan.json")
    assert wrong.startswith(
        f"{tmp_path}/plan.json is a plan for 2 ranks, but this run has 3: expected --nproc 2, another"
    )
    assert "plan.json is a plan for 2 ranks, but this run has 1" in refused(*train, "--plan", "plan.json")
    assert "none.json: No such file" in refused(*train, "--nproc", "2", "--plan", "none.json")
    (tmp_path / "plan.json").write_text("{}")
    assert "plan.json: not a plan: " in refused(*train, "--nproc", "2", "--plan", "plan.json")
    assert "Invalid enum value 'fp31'" in refused(*train, "--nproc", "2", "--set", "wire.dense=fp31")
    wrong = refused(*train, "--nproc", "2", "--set", "wire.host.forward=fp16")
    assert wrong.startswith("train.determinism=elastic with a wire that rounds")


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "run"])
def test_a_plan_with_a_hole(refused, tmp_path, dry):
    (tmp_path / "plan.json").write_text(PLAN)
    assert refused("train", "small.yaml", *dry, "--nproc", "2", "--plan", "plan.json") == (
        f"{tmp_path}/plan.json: table 'item' (30 x 8): rows 0:30 x columns 0:8 are on no rank: "
        "expected each cell on exactly one rank, or the table replicated, once on every rank"
    )


def test_two_towers_are_not_elastic(refused):
    towers = "{kind: two_tower, item: item, user_features: [user, seen], sizes: [8]}"
    changes = ("--set", f"model={towers}", "--set", "train.determinism=elastic")
    assert "train.determinism=elastic: model.kind=two_tower compares" in refused("train", "small.yaml", *changes)


def test_a_run_can_not_go_on_with_any_number_of_ranks(tmp_path):
    write_recipe(tmp_path, **SHORT)
    assert rowwise(tmp_path, "train", "small.yaml", "--nproc", "2").returncode == 0
    done = rowwise(tmp_path, "resume", RUN, "--nproc", "5", "--set", "train.epochs=11")
    assert done.returncode == 2
    assert told(done.stderr)[0].startswith(
        "rowwise: 6 virtual shards of elastic training on 5 ranks: expected 1, 2, 3, 6"
    )
    done = rowwise(tmp_path, "resume", RUN, "--nproc", "3")
    assert told(done.stderr)[0].startswith(f"rowwise: {RUN} has finished at step ")
    assert result(tmp_path / RUN)["status"] == "finished"


def test_a_dry_run_says_where_tables_would_be(tmp_path):
    write_recipe(tmp_path, **SHORT)
    done = rowwise(tmp_path, "train", "small.yaml", "--nproc", "6", "--dry-run")
    assert done.returncode == 0
    assert "ranks   6 on 1 host, 1 thread each; rank " in done.stderr
    want = "warning a batch of 768 is too small for 6 ranks, which take blocks of 256 samples: 3 of them get no samples"
    assert want in done.stderr

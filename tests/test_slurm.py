"""`rowwise train --on slurm`: its script, and real jobs on a Slurm of three nodes: stopped, queued again, cancelled."""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import (
    FILE_NAMES,
    LONGER,
    PRINTABLE,
    SCHEDULED,
    SMALL_JOB,
    rowwise,
    started,
    wait_for,
    wait_for_step,
    write_recipe,
)
from slurm_cluster import ask, missing, slurm
from test_launch import RUN, result, same, tensors

from rowwise.base.errors import DataError, SpecError
from rowwise.cli import jobs
from rowwise.cli.job import Job, parse_settings, run_program, save_record
from rowwise.cli.jobs import read_log
from rowwise.cli.slurm import make_script, parse_job_id
from rowwise.train.saved import CheckpointFolder

REQUEST = SMALL_JOB
SOON = "StartTime=now+2"  # nodes refuse a job in the second in which they ended it


def directives(script):
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {key: "".join(shlex.split(value)) for key, _, value in (line.partition("=") for line in lines)}


@given(st.lists(PRINTABLE, max_size=3), FILE_NAMES)
def test_any_text_reaches_the_command_as_it_is(words, folder):
    request = replace(REQUEST, command=tuple(words), runs=Path("/") / folder)
    script = make_script(request).replace(f"{sys.executable} -m rowwise", "printf '%s\\n'")
    stubs = 'srun() { while [ "$1" != rank ]; do shift; done; shift; "$@"; }; SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=3\n'
    done = subprocess.run(["bash", "-c", stubs + script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*words, "--run", f"/{folder}/small/slurm-7"]


def test_settings_are_options_of_sbatch():
    script = make_script(replace(REQUEST, settings={"partition": "a b", "nodes": "1-3", "grace": "60"}))
    found = directives(script)
    assert (found["partition"], found["nodes"], found["ntasks-per-node"]) == ("a b", "1-3", "2")
    assert found["signal"] == "TERM@60"
    assert "requeue" in found
    assert "#SBATCH" not in script[script.index("\nrun=") :]  # sbatch reads none after the first command


@pytest.mark.parametrize(
    "pair", ["x", "=1", "A=1", "grace=0", "grace=x", "grace=\u0661", "chdir=/", "ntasks=3", "a=b\nc"]
)
def test_settings_that_cannot_be_are_refused(pair):
    with pytest.raises(SpecError, match="--job"):
        make_script(replace(REQUEST, settings=parse_settings([pair])))


def test_settings_come_from_files_too(tmp_path):
    (tmp_path / "job.yaml").write_text("partition: gpu\ntime: 12:00:00\n")
    path = str(tmp_path / "job.yaml")
    assert parse_settings([path, "partition=cpu"]) == {"partition": "cpu", "time": "12:00:00"}
    (tmp_path / "job.yaml").write_text("- gpu\n")
    with pytest.raises(SpecError, match="a line each"):
        parse_settings([path])


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_in_its_folder_goes_on_and_ends_once(tmp_path):
    write_recipe(tmp_path, **SCHEDULED)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes").touch()
    refused = rowwise(tmp_path, "train", "small.yaml", "--run", "other")
    assert refused.returncode == 2
    assert "other has notes and no recipe.yaml" in refused.stderr
    assert (tmp_path / "other/notes").exists()
    command = ("train", "small.yaml", "--run", "runs/mine")
    with started(tmp_path, *command) as process:
        wait_for_step(tmp_path / "runs/mine", 6)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert rowwise(tmp_path, *command).returncode == 0
    assert result(tmp_path / "runs/mine")["steps"] == 150
    again = rowwise(tmp_path, *command)
    assert (again.returncode, again.stderr) == (0, "runs/mine has finished\n")


def test_without_slurm_a_line_names_the_way_out(tmp_path):
    write_recipe(tmp_path)
    nowhere = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = rowwise(tmp_path, "train", "small.yaml", "--on", "slurm", environment=nowhere)
    assert done.returncode == 2
    assert (
        done.stderr
        == "rowwise: no sbatch on the PATH: expected a login node of the cluster; --dry-run prints the script\n"
    )
    shown = rowwise(tmp_path, "train", "small.yaml", "--on", "slurm", "--nodes", "2", "--dry-run", environment=nowhere)
    assert directives(shown.stdout)["chdir"] == str(tmp_path), shown.stderr
    refused = rowwise(tmp_path, "train", "small.yaml", "--on", "nope", environment=nowhere)
    assert (refused.returncode, "--on nope: expected slurm" in refused.stderr) == (2, True), refused.stderr
    assert "'7' is not a job" in rowwise(tmp_path, "stop", "7", environment=nowhere).stderr


def record(home, cluster, submitted, name="slurm-7"):
    """Note a job of a cluster, as a submission does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        job = Job(name=name, id=name[6:], recipe="small", run="[/r]", log="l", submitted=submitted, cluster=cluster)
        save_record(job)


@pytest.mark.slow
def test_jobs_of_two_clusters_may_have_one_number(tmp_path):
    record(tmp_path, "a", "2026-01-01")
    record(tmp_path, "b", "2026-01-02")
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    listed = rowwise(tmp_path, "ps", environment=environment).stdout.splitlines()
    assert [line.split()[0] for line in listed if line.startswith("slurm")] == ["slurm-7@b", "slurm-7@a"]
    for name, error in (
        ("7", "'7' is a job of 2 clusters: expected one of slurm-7@a, slurm-7@b"),
        ("slurm-7", "'slurm-7' is a job of 2 clusters"),
        ("slurm-7@a", "no scontrol on the PATH"),
    ):
        assert error in rowwise(tmp_path, "stop", name, environment=environment).stderr


def fake_slurm(folder, scontrol):
    """Programs of Slurm of which sbatch takes any job, as number 17."""
    for name, script in (("sbatch", "echo 17"), ("scontrol", scontrol)):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder)}


@pytest.fixture
def scheduler():
    """A scheduler of this process: its next states, None for no answer; and a job of it."""
    states = []

    def find_state(job):
        state = states.pop(0)
        if state is None:
            raise DataError("no answer")
        return state, ""

    jobs.schedulers()["fake"] = jobs.Scheduler(None, None, find_state, None)
    yield states, Job(name="fake-7", id="7", recipe="small", run="r", log="l", submitted="2026-01-01")
    del jobs.schedulers()["fake"]


def test_a_scheduler_that_does_not_answer_is_asked_again_for_a_while(scheduler):
    states, job = scheduler
    waited = []
    states += ["running", None, None, "completed"]
    jobs.follow(job, wait=waited.append)
    assert waited == [jobs.POLL_S] * 3
    waited.clear()
    states += ["running", *[None] * 500]
    with pytest.raises(DataError, match="no answer"):
        jobs.follow(job, wait=waited.append)
    assert jobs.MAX_SILENT_S < sum(waited) <= jobs.MAX_SILENT_S + 3 * jobs.POLL_S


@pytest.mark.slow
def test_a_log_of_a_pattern_is_found(tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "bin").mkdir()
    environment = fake_slurm(tmp_path / "bin", "echo JobState=COMPLETED Reason=None")
    submit = ("train", "small.yaml", "--on", "slurm", "--job", "output=logs/%x-%A.log")
    assert f"log {tmp_path}/logs/small-17.log" in rowwise(tmp_path, *submit, environment=environment).stderr
    (tmp_path / "elsewhere").mkdir()
    told = rowwise(tmp_path / "elsewhere", "ps", "slurm-17", environment=environment).stderr
    assert f"no log {tmp_path}/logs/small-17.log on this host" in told
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/small-17.log").write_text("step 3\n")
    assert "step 3" in rowwise(tmp_path / "elsewhere", "ps", "slurm-17", environment=environment).stderr


def test_a_job_that_cannot_be_noted_is_named(tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "bin").mkdir()
    environment = fake_slurm(tmp_path / "bin", "exit 1") | {"HOME": "/proc"}
    done = rowwise(tmp_path, "train", "small.yaml", "--on", "slurm", "--detach", environment=environment)
    assert done.returncode == 0, done.stderr
    assert "slurm-17 is submitted" in done.stderr
    assert "rowwise ps will not know slurm-17" in done.stderr


@pytest.mark.parametrize(
    ("text", "job_id"), [("17", "17"), ("17;north", "17"), ("../7", None), ("1 7", None), ("-7", None), ("", None),
                         ("\u0661\u0667", None), ("1_7", None), ("17;a b", None), ("17\n18", None), ("9" * 20, None)],
)  # fmt: skip
def test_a_submitted_job_has_a_number(text, job_id):
    if job_id is not None:
        assert parse_job_id(f"{text}\n") == job_id
    else:
        with pytest.raises(SpecError, match="sbatch prints"):
            parse_job_id(f"{text}\n")


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("yes", "prints more than 4 MB"),
        ("yes >&2", "prints more than 4 MB"),
        ("sleep 9 & exec sleep 9", "has not answered in 0.01 s"),
        ("exec >&- 2>&-; sleep 9", "has not ended in 0.01 s"),
        ("printf '\\377' >&2; exit 3", "\N{REPLACEMENT CHARACTER}"),
        ("exit 3", "has failed with code 3"),
        ("head -c 99999 /dev/zero | tr '\\0' x >&2; exit 3", "^x{1000}$"),
    ],
)
def test_a_program_of_a_scheduler_answers_within_bounds(script, error):
    with pytest.raises(DataError, match=error):
        run_program(["sh", "-c", script], "missing", within_s=0.01 if "sleep" in script else 60)


@pytest.mark.parametrize("text", ["", "a\n", "a\nb", "a" * 25, "a" * 7 + "\n" + "b" * 9 + "\n\nc"])
def test_a_log_is_read_in_pieces(text, tmp_path):
    log = tmp_path / "log"
    log.write_text(text)
    assert b"".join(read_log(log, 0, to_end=True, max_bytes=8)).decode() == text
    assert text.startswith(b"".join(read_log(log, 0, to_end=False, max_bytes=8)).decode())
    assert list(read_log(tmp_path / "none", 0, to_end=True)) == []


def test_records_of_strangers_are_shown_as_text(tmp_path):
    record(tmp_path, "[/red]", "now", name="x-1")
    environment = {"HOME": str(tmp_path)}
    shown = rowwise(tmp_path, "ps", environment=environment)
    assert "unknown ('x-1': expected the name of a job of slurm or ray)" in " ".join(shown.stdout.split()), shown.stderr
    refused = rowwise(tmp_path, "stop", "x-1", environment=environment)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing() is not None:
        pytest.skip(f"no {missing()}: tools/slurm.sh installs Slurm")
    with slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.mark.slow
@pytest.mark.dist
def test_a_job_that_is_preempted_ends_with_the_bits_of_a_local_run(cluster, tmp_path):
    alone = write_recipe(tmp_path / "alone", **SCHEDULED)
    assert rowwise(alone, "train", "small.yaml", "--nproc", "2").returncode == 0
    folder = write_recipe(tmp_path / "in a job", **SCHEDULED)
    submit = ("train", "small.yaml", "--on", "slurm", "--nodes", "3", "--detach")
    done = rowwise(folder, *submit, environment=cluster)
    assert done.returncode == 0, done.stderr
    name = done.stderr.split()[0]
    number, run = name.removeprefix("slurm-"), folder / f"runs/small/{name}"
    wait_for_step(run, 8)
    ask(cluster, "scancel", "--signal=TERM", f"{number}.0")  # what a time limit sends, and a preemption
    wait_for(lambda: "JobState=PENDING Reason=BeginTime" in ask(cluster, "scontrol", "show", "job", number), 30)
    stopped = result(run)
    assert (stopped["status"], CheckpointFolder(run / "ckpt").steps()[-1]) == ("stopped", stopped["steps"])
    # Slurm starts it again after two minutes; here soon, and on fewer nodes.
    ask(cluster, "scontrol", "update", f"JobId={number}", "NumNodes=2", "NumTasks=2", SOON)
    followed = rowwise(folder, "ps", name, environment=cluster)
    assert followed.returncode == 0, followed.stderr
    assert f"resumed at step {stopped['steps']}" in followed.stderr
    assert "ranks   2 on 1 host" in followed.stderr
    assert same(tensors(run), tensors(alone / RUN))


@pytest.mark.slow
@pytest.mark.dist
def test_a_job_makes_room_for_one_of_higher_priority(cluster, tmp_path):
    write_recipe(tmp_path, **LONGER)
    command = ("train", "small.yaml", "--on", "slurm", "--nodes", "3", "--detach")
    name = rowwise(tmp_path, *command, environment=cluster).stderr.split()[0]
    number, run = name.removeprefix("slurm-"), tmp_path / f"runs/small/{name}"
    wait_for_step(run, 8)
    other = ("--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 300")
    urgent = ask(cluster, "sbatch", "--parsable", *other).strip()
    wait_for(lambda: "JobState=RUNNING" in ask(cluster, "scontrol", "show", "job", urgent), 60)
    wait_for(lambda: "JobState=PENDING Reason=BeginTime" in ask(cluster, "scontrol", "show", "job", number), 30)
    stopped = result(run)  # ranks had GraceTime to save
    assert (stopped["status"], CheckpointFolder(run / "ckpt").steps()[-1]) == ("stopped", stopped["steps"])
    ask(cluster, "scancel", urgent)
    ask(cluster, "scontrol", "update", f"JobId={number}", SOON)
    wait_for_step(run, stopped["steps"] + 2)
    assert rowwise(tmp_path, "stop", name, environment=cluster).returncode == 0


@pytest.mark.slow
@pytest.mark.dist
def test_a_job_that_is_stopped_saves_and_stays_stopped(cluster, tmp_path):
    write_recipe(tmp_path, **LONGER)
    command = ("train", "small.yaml", "--on", "slurm", "--nodes", "2", "--nproc", "1", "--run", "runs/mine", "--detach")
    name = rowwise(tmp_path, *command, environment=cluster).stderr.split()[0]
    wait_for_step(tmp_path / "runs/mine", 8)
    assert "running" in rowwise(tmp_path, "ps", environment=cluster).stdout
    record(cluster["HOME"], "other", "2026-01-01", name)  # of a cluster with the same numbers
    named = f"{name}@rowwise"
    assert f"'{name}' is a job of 2 clusters" in rowwise(tmp_path, "stop", name, environment=cluster).stderr
    other = rowwise(tmp_path, "stop", f"{name}@other", environment=cluster).stderr
    assert other == (
        "rowwise: the job runs on cluster other, this is a login node of rowwise: expected a login node of other\n"
    )
    assert rowwise(tmp_path, "stop", named, environment=cluster).returncode == 0
    followed = rowwise(tmp_path, "ps", named, environment=cluster)
    assert followed.returncode == 2
    assert f"{name} is cancelled" in followed.stderr
    wait_for(lambda: result(tmp_path / "runs/mine")["status"] == "stopped")
    assert "has ended: cancelled" in rowwise(tmp_path, "stop", named, environment=cluster).stderr


@pytest.mark.slow
@pytest.mark.dist
def test_errors_of_a_job_come_back_as_a_line(cluster, tmp_path):
    write_recipe(tmp_path)
    wrong = rowwise(tmp_path, "train", "small.yaml", "--on", "slurm", "--job", "partition=nope", environment=cluster)
    assert wrong.returncode == 2
    assert "invalid partition specified: nope" in wrong.stderr
    assert "sinfo -s lists partitions" in wrong.stderr
    failing = ("train", "small.yaml", "--on", "slurm", "--nodes", "2", "--set", "init_from=nowhere")
    failed = rowwise(tmp_path, *failing, environment=cluster)
    assert failed.returncode == 2
    assert "nowhere is not a checkpoint" in failed.stderr
    assert "is failed (FAILED): its log is" in failed.stderr

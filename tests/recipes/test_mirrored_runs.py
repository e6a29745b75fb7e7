"""A run that is copied while it trains goes on elsewhere with the same bits, wherever it was killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from base.storage.stores import FAULTS, s3_server
from small import lines, recipe, same, saved, sections, tensors, trained, write_rows

from rowwise.base.errors import DataError, SpecError, StorageError
from rowwise.checkpoint.named import checkpoints_of, open_named
from rowwise.checkpoint.read import Checkpoint
from rowwise.recipes.mirror import OWNER, RunMirror, fetch_run
from rowwise.recipes.runs import TrainingRun
from rowwise.train.run_folder import RunFolder

OFTEN = {"every": 4, "keep": 2}


@pytest.fixture
def mirror(tmp_path):
    return tmp_path / "mirror"


def names(place):
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def steps_of(place):
    return sorted(int(one.name.removeprefix("step-")) for one in checkpoints_of(place))


def small_files(place):
    return {name: (place / name).read_bytes() for name in names(place) if name[:5] not in ("ckpt/", OWNER[:5], ".lock")}


@pytest.mark.few(1)
@pytest.mark.parametrize("save", [{"keep": 1}, {"background": True}, {"incremental": True}])
def test_the_mirror_of_a_run_that_has_ended_is_the_run(save, tmp_path, mirror):
    run, _ = trained(tmp_path, save={**OFTEN, **save, "mirror": str(mirror)}, evaluate={"every": 6})
    assert small_files(mirror) == small_files(run.folder.path)
    assert steps_of(mirror) == steps_of(run.folder.path)
    for one in checkpoints_of(mirror):
        Checkpoint.open(one).verify()
    assert "copied step-" in (run.folder.path / "log.txt").read_text()
    path = fetch_run(str(mirror), tmp_path / "elsewhere")
    assert path == tmp_path / "elsewhere" / "small" / "mirror"
    assert small_files(path) == small_files(run.folder.path)
    with pytest.raises(DataError, match="has finished at step"):
        TrainingRun.resume(path)


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_keeps_its_files(tmp_path, mirror):
    """The resume is refused, and neither the folder nor its mirror loses the lines of the test."""
    run, _ = trained(tmp_path, save={**OFTEN, "mirror": str(mirror)})
    before = small_files(run.folder.path)
    with pytest.raises(DataError, match="has finished at step"):
        TrainingRun.resume(run.folder.path)
    for place in (run.folder.path, mirror):
        assert small_files(place) | {"log.txt": b""} == before | {"log.txt": b""}  # the log names what was copied


def test_a_run_goes_on_from_its_mirror_with_the_same_bits(tmp_path, mirror):
    whole, _ = trained(tmp_path, save=OFTEN)
    shutil.rmtree(stopped(tmp_path, 10))
    path = fetch_run(str(mirror), tmp_path / "elsewhere")
    again = TrainingRun.resume(path)
    assert again.trainer.progress.step == 10
    again.go()
    assert same(saved(path), saved(whole.folder.path))
    assert lines(path) == lines(whole.folder.path)
    assert lines(mirror) == lines(whole.folder.path)
    assert steps_of(mirror) == steps_of(whole.folder.path)
    assert fetch_run(str(mirror), tmp_path / "elsewhere") == path  # it has all that the mirror has


def test_a_checkpoint_that_was_copied_when_it_should_have_left_leaves_at_the_end(tmp_path, mirror):
    run = TrainingRun.start(recipe(tmp_path, save={**OFTEN, "mirror": str(mirror)}), tmp_path / "runs")
    copier, stop = run._mirror, run._mirror.stop
    copier.start, copier.copying = lambda: None, 4
    copier.stop = lambda: (setattr(copier, "copying", None), stop())
    run.go()
    assert steps_of(mirror) == steps_of(run.folder.path) == [16, 20]


def test_a_run_that_was_killed_before_its_mirror_was_complete_completes_it(tmp_path, mirror):
    run, _ = trained(tmp_path, save={**OFTEN, "mirror": str(mirror)})
    (mirror / "result.json").unlink()
    shutil.rmtree(checkpoints_of(mirror)[-1])
    with pytest.raises(DataError, match="has finished at step"):
        TrainingRun.resume(run.folder.path)
    assert (mirror / "result.json").exists()
    assert steps_of(mirror) == steps_of(run.folder.path)
    for one in checkpoints_of(mirror):
        Checkpoint.open(one).verify()
    (mirror / OWNER).write_text(json.dumps({"run": "x", "holder": "y"}))
    with pytest.raises(SpecError, match="mirror of another run"):
        TrainingRun.resume(run.folder.path)


@pytest.mark.slow
def test_a_fetch_brings_what_the_mirror_has_more(tmp_path, mirror):
    """A run went on elsewhere, and comes back to a machine that has an older state of it."""
    run = stopped(tmp_path, 10)
    path = fetch_run(str(mirror), tmp_path / "elsewhere")
    TrainingRun.resume(run).go()
    assert fetch_run(str(mirror), tmp_path / "elsewhere") == path
    assert same(saved(path), saved(run))
    assert lines(path) == lines(run)


@pytest.mark.slow
def test_a_fetch_that_was_killed_goes_on(tmp_path, monkeypatch, mirror):
    run, _ = trained(tmp_path, save={**OFTEN, "mirror": str(mirror)})
    for killed_at in range(3, 12, 4):  # at a write of a file
        left = iter(range(killed_at))
        monkeypatch.setattr("rowwise.base.storage.local.os.fsync", lambda _, left=left: next(left))
        with pytest.raises(StopIteration):
            fetch_run(str(mirror), tmp_path / "elsewhere")
        monkeypatch.undo()
    path = fetch_run(str(mirror), tmp_path / "elsewhere")
    assert small_files(path) == small_files(run.folder.path)
    assert same(saved(path), saved(run.folder.path))


@pytest.mark.slow
def test_a_mirror_is_of_one_run_and_of_the_process_that_holds_it(tmp_path, mirror):
    made = recipe(tmp_path, save={**OFTEN, "mirror": str(mirror)})
    first = TrainingRun.start(made, tmp_path / "runs")
    first._start_mirror()
    first._mirror.start = lambda: None
    with pytest.raises(SpecError, match=rf"save.mirror={mirror} is the mirror of another run: expected another place"):
        TrainingRun.start(made, tmp_path / "runs")
    assert [one.name for one in (tmp_path / "runs" / "small").iterdir()] == ["1"]
    path = fetch_run(str(mirror), tmp_path / "elsewhere")
    TrainingRun.resume(path).go()
    with pytest.raises(StorageError, match="1 is saved, but"):
        first.go()
    assert lines(mirror) == lines(path)
    for inside in ("2", "2/mirror"):
        with pytest.raises(SpecError, match="folder of the run"):
            TrainingRun.start(recipe(tmp_path, save={"mirror": f"{tmp_path}/runs/small/{inside}"}), tmp_path / "runs")


@pytest.mark.slow
def test_a_folder_that_has_a_claim_only_begins_its_run(tmp_path, mirror):
    """The process was killed between the claim and the recipe, and the same command is started again."""
    place = tmp_path / "runs" / "it"
    made = recipe(tmp_path, save={**OFTEN, "mirror": str(mirror)})
    run = TrainingRun.start(made, RunFolder(place))
    run.folder.release()
    (place / "recipe.yaml").unlink()
    for name in names(place) - {OWNER, ".lock"}:
        (place / name).unlink()
    TrainingRun.start(made, RunFolder(place)).go()
    assert small_files(mirror) == small_files(place)


@pytest.mark.slow
def test_a_claim_without_a_run_is_taken_over(tmp_path, mirror):
    """The process was killed before it had copied anything."""
    made = recipe(tmp_path, save={**OFTEN, "mirror": str(mirror)})
    TrainingRun.start(made, tmp_path / "runs").folder.release()
    assert names(mirror) == {OWNER}
    with pytest.raises(DataError, match="mirror is no mirror"):
        fetch_run(str(mirror), tmp_path / "elsewhere")
    TrainingRun.start(made, tmp_path / "runs").go()
    assert open_named(mirror).manifest.data["progress"]["finished"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        (OWNER, b"{", "mirror.json is damaged"),
        (OWNER, b'{"holder":"x"}', "mirror.json is damaged"),
        ("recipe.yaml", b"name: ../x", "its name '../x' cannot name a folder: it has a slash"),
        ("recipe.yaml", b"data: {}", "its name 'None' cannot name a folder: there is none"),
        ("recipe.yaml", b"{", "recipe.yaml: not YAML"),
        (".lock", b"x", "the name '.lock' is not used: it begins with a dot"),
    ],
)
def test_a_damaged_mirror_is_refused_by_name(name, content, error, tmp_path, mirror):
    trained(tmp_path, save={"mirror": str(mirror)})
    (mirror / name).write_bytes(content)
    with pytest.raises((DataError, SpecError, StorageError), match=error.replace("'", ".")):
        fetch_run(str(mirror), tmp_path / "elsewhere")
    assert not (tmp_path / "x").exists()


def test_a_folder_of_something_else_is_not_written_into(tmp_path, mirror):
    trained(tmp_path, save={"mirror": str(mirror)})
    (tmp_path / "elsewhere" / "small" / "mirror").mkdir(parents=True)
    (tmp_path / "elsewhere" / "small" / "mirror" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="exists"):
        fetch_run(str(mirror), tmp_path / "elsewhere")


def command(server, *args):
    keys = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    return [sys.executable, "-m", "rowwise", *args], {**os.environ, **keys, "AWS_REGION": "x"}


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_killed_run_whose_machine_is_lost_ends_with_the_same_bits(nproc, tmp_path):
    """Killed at random while a server fails, each time with its folder; the next machine has the URL only."""
    write_rows(tmp_path / "rows.parquet", 40_000 // nproc)
    changes = {"train": {"batch": 64, "epochs": 1, "determinism": "elastic"}, "save": {"every": 40, "keep": 2}}
    (tmp_path / "small.yaml").write_text(json.dumps(sections(tmp_path, **changes)))  # JSON is YAML
    whole, _ = trained(tmp_path, **changes)
    chance, kills, url, bucket = random.Random(nproc), 0, "s3://bucket/clicks-7", tmp_path / "s3" / "bucket"
    with s3_server(tmp_path / "s3", **FAULTS) as server:
        start = ("train", str(tmp_path / "small.yaml"), "--set", f"save.mirror={url}")
        for machine in range(60):
            folder = tmp_path / f"machine-{machine}"
            folder.mkdir()
            there = any(bucket.glob("*recipe.yaml"))  # the server quotes slashes
            args, environment = command(server, *(("resume", url) if there else start), "--nproc", str(nproc))
            with subprocess.Popen(
                args, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            ) as process:  # fmt: skip
                end = time.monotonic() + 60
                before = set(bucket.glob("*manifest.json"))
                # A kill comes at some moment after another checkpoint has arrived, so that the run gets ahead.
                while process.poll() is None and set(bucket.glob("*manifest.json")) <= before:
                    assert time.monotonic() < end
                    time.sleep(0.02)
                if kills < 3:
                    time.sleep(chance.uniform(0.0, 0.5))
                    os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
                text = process.communicate(timeout=120)[0]
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, text
            kills += 1
            shutil.rmtree(folder)
        assert kills >= 2
        (path,) = folder.glob("runs/small/*")
        assert same(tensors(path), tensors(whole.folder.path))
        assert nproc > 1 or lines(path) == lines(whole.folder.path)


@pytest.mark.slow
def test_a_store_that_is_gone_neither_stops_nor_loses_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("rowwise.base.storage.cloud.RetryPolicy.__new__.__defaults__", (0.5, 0.05))
    with s3_server(tmp_path / "s3") as server:
        for name, value in command(server)[1].items():
            if name.startswith("AWS_"):
                monkeypatch.setenv(name, value)
        url = "s3://bucket/gone"
        run = TrainingRun.start(recipe(tmp_path, save={**OFTEN, "mirror": url}), tmp_path / "runs")
        run.trainer._on_step = lambda shown: server.kill() if shown.progress.step == 2 else None
        with pytest.raises(StorageError, match=f"1 is saved, but its mirror {url} is not: {url}/mirror.json cannot be"):
            run.go()
        assert json.loads((run.folder.path / "result.json").read_text())["status"] == "finished"
        server.start()
        assert not any((tmp_path / "s3" / "bucket").glob("*manifest.json"))


def stopped(tmp_path, step, **save):
    """A run with a mirror that was stopped after a step."""
    made = recipe(tmp_path, save={**OFTEN, "mirror": str(tmp_path / "mirror"), **save})
    run = TrainingRun.start(made, tmp_path / "runs")
    run.trainer._on_step = lambda shown: run.trainer.stop() if shown.progress.step == step else None
    assert run.go().status == "stopped"
    return run.folder.path


@pytest.mark.slow
def test_an_older_folder_does_not_take_a_newer_mirror_back(tmp_path, mirror):
    path = stopped(tmp_path, 6)
    TrainingRun.resume(fetch_run(str(mirror), tmp_path / "elsewhere")).go()
    there = steps_of(mirror)
    with pytest.raises(SpecError, match="step 6"):
        TrainingRun.resume(path)
    assert steps_of(mirror) == there


def test_a_run_that_is_no_mirror_is_not_written_over(tmp_path):
    run, _ = trained(tmp_path, save=OFTEN)
    before = small_files(run.folder.path)
    with pytest.raises(SpecError, match="another place"):
        trained(tmp_path, save={**OFTEN, "mirror": str(run.folder.path)})
    assert small_files(run.folder.path) == before
    assert steps_of(run.folder.path) == [16, 20]


@pytest.mark.slow
def test_a_former_holder_removes_nothing_of_the_next_one(tmp_path, mirror):
    """The next process takes the mirror over while the former one copies its last checkpoint."""
    first = TrainingRun.resume(stopped(tmp_path, 6), ["train.steps=8"])
    copy, taken = first._mirror._copy_checkpoint, []

    def copy_and_lose(step):
        if not taken:
            taken.append(fetch_run(str(mirror), tmp_path / "elsewhere"))
            TrainingRun.resume(taken[0]).go()
        return copy(step)

    first._mirror._copy_checkpoint = copy_and_lose
    with pytest.raises(StorageError, match="another process has resumed"):
        first.go()
    assert steps_of(mirror) == steps_of(taken[0])
    assert lines(mirror) == lines(taken[0])


def test_checkpoints_leave_after_the_newest_has_arrived(tmp_path, mirror):
    """The run removes a checkpoint between the look and the copy: the mirror keeps the one that it has."""
    run = TrainingRun.resume(stopped(tmp_path, 6, keep=1))
    run._start_mirror()
    run._mirror.close()
    before = steps_of(mirror)
    run._mirror._ending.clear()
    run._mirror._copied.clear()
    run._mirror._steps = lambda: [7]
    run._mirror._copy()
    assert steps_of(mirror) == before == [6]


def test_a_checkpoint_that_left_after_the_last_copy_leaves_the_mirror_at_the_end(tmp_path, mirror):
    """The run had both when the newest was copied, and one when it ended."""
    path = stopped(tmp_path, 6, keep=1)
    for older in {4} & {*steps_of(path)}:  # which the mirror was reading when the run would have removed it
        shutil.rmtree(path / "ckpt" / f"step-{older:09d}")
    run = TrainingRun.resume(path)
    run._start_mirror()
    run._mirror.close()
    newest = next(one for one in checkpoints_of(mirror) if one.name.endswith("6"))
    # Its empty folder is there if the mirror had it before.
    shutil.copytree(newest, newest.with_name(newest.name[:-1] + "4"), dirs_exist_ok=True)
    assert steps_of(mirror) == [4, 6]
    assert run._mirror.close() is None
    assert steps_of(mirror) == [6]


class Refusing:
    """A storage that takes no object of a name."""

    def __init__(self, inner, refused):
        self.inner, self.refused = inner, refused

    def write(self, name, *more):
        if self.refused in name:
            raise StorageError(f"{name}: refused")
        return self.inner.write(name, *more)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.few(1)
@pytest.mark.parametrize("refused", ["metrics.csv", "ckpt/"])
def test_the_result_is_the_last_file_that_arrives(tmp_path, refused, mirror):
    """A run that is killed between two files is not taken for a finished one with fewer lines or checkpoints."""
    path = stopped(tmp_path, 6)
    shutil.rmtree(mirror)
    run = TrainingRun.resume(path)
    run.go()
    shutil.rmtree(mirror)
    copies = RunMirror(str(mirror), run.folder)
    copies.place = replace(copies.place, storage=Refusing(copies.place.storage, refused))
    assert "refused" in copies.close()
    assert not (mirror / "result.json").exists()
    copies.place = replace(copies.place, storage=copies.place.storage.inner)
    assert copies.close() is None
    assert small_files(mirror) == small_files(path)


@pytest.mark.slow
def test_the_best_checkpoint_goes_first(tmp_path, mirror):
    run, result = trained(tmp_path, save={**OFTEN, "mirror": str(mirror)}, evaluate={"every": 6})
    assert run._mirror._by_priority([4, result.best.step, 20])[0] == result.best.step


@pytest.mark.slow
def test_steps_that_were_taken_back_leave_the_mirror(tmp_path, mirror):
    """A resume from an earlier checkpoint with another rate writes other checkpoints of the same steps."""
    path = stopped(tmp_path, 10, keep=9)
    again = TrainingRun.resume(path, ["train.optimizer.lr=0.2"], which="step-4")
    again.go()
    assert same(saved(mirror), saved(path))
    assert steps_of(mirror) == steps_of(path)


def test_what_a_former_process_has_said_is_gone(tmp_path, mirror):
    path = stopped(tmp_path, 6)
    assert (mirror / "result.json").exists()
    again = TrainingRun.resume(path)
    again._start_mirror()
    again._mirror.stop()
    assert not (path / "result.json").exists()
    assert not (mirror / "result.json").exists()


@pytest.mark.slow
def test_hidden_folders_are_left_out(tmp_path, mirror):
    run = TrainingRun.start(recipe(tmp_path, save={**OFTEN, "mirror": str(mirror)}), tmp_path / "runs")
    (run.folder.path / ".ipynb_checkpoints").mkdir()
    (run.folder.path / ".ipynb_checkpoints" / "x.txt").touch()
    run.go()
    assert not any("ipynb" in name for name in names(mirror))

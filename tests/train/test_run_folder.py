"""A run's folder holds whole lines and whole files, whatever happens to the process and to the disk."""

import errno
import json
import os
import resource
import subprocess
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import ENVIRONMENT, PYTHON
from trainings import World, fast, left

from rowwise import CheckpointError, DataError
from rowwise.base.errors import one_line
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.train.run_folder import HEADERS, RunFolder
from rowwise.train.saved import CheckpointFolder
from rowwise.train.settings import Log, Saving


def metric(step, value=0.5, split="train", time_s=1.0):
    where = {"step": step, "samples": 8 * step, "time_s": time_s}
    return where | {"split": split, "task": "click", "metric": "auc", "value": value}


def test_the_next_free_number(tmp_path):
    (tmp_path / "ctr" / "7").mkdir(parents=True)
    (tmp_path / "ctr" / "²").mkdir()
    (tmp_path / "ctr" / "notes").mkdir()
    assert [RunFolder.create(tmp_path, "ctr").path.name for _ in range(3)] == ["8", "9", "10"]
    assert RunFolder.create(tmp_path, "other").path == tmp_path / "other" / "1"


def test_two_that_take_a_number_at_once(tmp_path):
    script = "import sys; from pathlib import Path; from rowwise.train.run_folder import RunFolder\n"
    script += "for _ in range(20): print(RunFolder.create(Path(sys.argv[1]), 'ctr').path.name)"
    command = [*PYTHON, "-c", script, str(tmp_path)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) for _ in range(2)]
    names = [child.communicate()[0].split() for child in children]
    assert sorted(int(n) for found in names for n in found) == list(range(1, 41))


def test_only_one_works_on_a_run(tmp_path):
    script = "import sys; from pathlib import Path; from rowwise.train.run_folder import RunFolder\n"
    script += "folder = RunFolder(Path(sys.argv[1])); folder.hold(); print('held', flush=True); sys.stdin.read()"
    command = [*PYTHON, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT) as child:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(DataError, match=f"{tmp_path}: another process is working on this run; wait for it, or"):
            RunFolder(tmp_path).hold()
        child.kill()
    folder = RunFolder(tmp_path)
    folder.hold()
    with pytest.raises(DataError, match="another process"):
        RunFolder(tmp_path).hold()
    folder.release()
    other = RunFolder(tmp_path)
    other.hold()
    del other  # as good as released
    RunFolder(tmp_path).hold()


def test_not_a_run(tmp_path):
    with pytest.raises(DataError, match=r"recipe\.yaml"):
        RunFolder.open(tmp_path)
    (tmp_path / "recipe.yaml").touch()
    assert RunFolder.open(tmp_path).checkpoints == tmp_path / "ckpt"


numbers = st.floats() | st.integers(-(10**12), 10**12)


@given(st.lists(st.tuples(st.integers(0, 30), numbers), max_size=20), st.integers(0, 30), st.integers(0, 200))
def test_what_was_written_up_to_a_step_stays(tmp_path_factory, rows, step, torn):
    """Also where the last line is torn, or the header."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    path = folder.path / "metrics.csv"
    folder.append("metrics.csv", [metric(at, value) for at, value in sorted(rows, key=lambda row: row[0])])
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - torn)])
    lines = whole[: max(0, len(whole) - torn)].decode().splitlines(keepends=True)
    folder.drop_after(step)
    if not lines or not lines[0].endswith("\n"):
        assert not path.exists()
    else:
        kept = [line for line in lines[1:] if line.endswith("\n") and int(line.split(",")[0]) <= step]
        assert path.read_text() == "".join([lines[0], *kept])
    folder.append("metrics.csv", [metric(31)])
    found = folder.rows("metrics.csv")
    assert found[-1]["step"] == "31"
    assert all(set(row) == set(HEADERS["metrics.csv"]) for row in found)


def test_lines_go_on_below_those_of_another_version(tmp_path):
    """Cells stand under their names; what the other version did not count is empty, what was torn is gone."""
    old = "step,samples,time_s,samples_s,data_s,lookup_s,forward_s,backward_s,update_s,other_s,memory_bytes,rate\n"
    (tmp_path / "steps.csv").write_text(f"{old}5,40,1.5,9.0,1.0,2.0,3.0,4.0,5.0,6.0,7,0.1\n9,72,2.5,9.0,1.0")
    folder = RunFolder(tmp_path)
    folder.drop_after(7)
    folder.append("steps.csv", [{"step": 8, "lookup_s": 0.5, "route_s": 0.25}])
    folder.append("steps.csv", [{"step": 9, "lookup_s": 0.75}])
    first, second, third = folder.rows("steps.csv")
    assert tuple(first) == HEADERS["steps.csv"]
    assert (first["lookup_s"], first["memory_bytes"], first["route_s"], first["exchange_s"]) == ("2.0", "7", "", "")
    assert (second["step"], second["lookup_s"], second["route_s"]) == ("8", "0.5", "0.25")
    assert (third["step"], third["lookup_s"], third["route_s"]) == ("9", "0.75", "")


@given(st.floats())
def test_numbers_come_back_bit_by_bit(tmp_path_factory, value):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.append("metrics.csv", [metric(1, value)])
    found = float(folder.rows("metrics.csv")[0]["value"])
    assert repr(found) == repr(value)
    folder.write_json("result.json", {"a": value, "b": [value], "c": {"d": (1, value)}})
    plain = json.loads((folder.path / "result.json").read_text())
    want = value if abs(value) < float("inf") else None
    assert plain == {"a": want, "b": [want], "c": {"d": [1, want]}}


def test_the_test_that_ends_a_run_is_cut_off(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append("metrics.csv", [metric(3), metric(4, split="valid"), metric(4, split="test")])
    folder.drop_after(4)
    assert [(row["step"], row["split"]) for row in folder.rows("metrics.csv")] == [("3", "train"), ("4", "valid")]
    folder.drop_after(0)
    assert not folder.rows("metrics.csv")
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [",".join(HEADERS["metrics.csv"])]


def test_all_lines_are_replaced_in_one_step(tmp_path):
    folder = RunFolder(tmp_path)
    folder.replace("tables.csv", [{"table": "a", "rows": 1}, {"table": "b, c", "rows": 2}])
    first = os.stat(tmp_path / "tables.csv").st_ino
    folder.replace("tables.csv", [{"table": "d", "rows": 3}])
    assert os.stat(tmp_path / "tables.csv").st_ino != first  # another file took its name
    assert [(row["table"], row["rows"]) for row in folder.rows("tables.csv")] == [("d", "3")]
    assert not folder.rows("slices.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["tables.csv"]


def test_a_warning_is_written_once(tmp_path):
    folder = RunFolder(tmp_path)
    for line in ("few rows", "few", "few rows"):
        folder.warn(line)
        folder.log(line)
    assert (tmp_path / "warnings.txt").read_text() == "few rows\nfew\n"
    assert (tmp_path / "log.txt").read_text() == "few rows\nfew\nfew rows\n"


@contextmanager
def room(size: int):
    """No file can grow past so many bytes, as on a disk that is full; needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write("recipe.yaml", "a: 1\n")
    folder.append("metrics.csv", [metric(1)])
    with room(200):
        with pytest.raises(OSError, match="written: File too large") as raised:
            folder.append("metrics.csv", [metric(n) for n in range(2, 20)])
        with pytest.raises(OSError, match="written: File too large"):
            folder.write("recipe.yaml", "a" * 1000)
        with pytest.raises(OSError, match="written: File too large"):
            folder.log("a" * 1000)
    assert raised.value.errno == errno.EFBIG
    assert (tmp_path / "recipe.yaml").read_text() == "a: 1\n"
    folder.drop_after(1)
    assert [row["step"] for row in folder.rows("metrics.csv")] == ["1"]


def test_a_checkpoint_on_a_full_disk(tmp_path):
    saved = CheckpointFolder(tmp_path / "ckpt")
    saved.save(1, [LocalShard.whole("t", torch.arange(50))], {"progress": {}})
    with room(4000):
        with pytest.raises(CheckpointError, match="step-000000002 was not saved"):
            saved.save(2, [LocalShard.whole("t", torch.arange(5000))], {})
        with pytest.raises(CheckpointError, match=r"saved: .*File too large.*"):
            saved.save_failed([], {"a": "b" * 5000})
    assert saved.steps() == [1]
    saved.open().verify()
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["step-000000001"]


@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_with_one_line_and_goes_on_later(tmp_path):
    cut = World(fast(save=Saving(every=1), log=Log(every=1)), tmp_path / "cut")
    whole = World(cut.settings, tmp_path / "whole")
    whole.start().run()
    trainer = cut.start(tell=lambda shown: full(shown.progress.step))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(step):
        if step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))

    try:
        with pytest.raises(OSError, match=r"File too large") as raised:
            trainer.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path / "cut") in str(raised.value)
    assert "\n" not in str(raised.value)
    assert CheckpointFolder(cut.folder / "ckpt").steps()[-1] == 2
    for step in CheckpointFolder(cut.folder / "ckpt").steps():
        CheckpointFolder(cut.folder / "ckpt").open(f"step-{step}").verify()
    cut.resume().run()
    assert left(cut.folder) == left(whole.folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_of_half_a_megabyte(tmp_path):
    """The same where the system says that there is no space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this system mounts nothing")
    try:
        saved, folder = CheckpointFolder(disk / "ckpt"), RunFolder(disk)
        saved.save(1, [LocalShard.whole("t", torch.arange(10_000))], {})
        want = r"step-000000002 was not saved: .*No space left on device.*; earlier checkpoints are"
        with pytest.raises(CheckpointError, match=want):
            saved.save(2, [LocalShard.whole("t", torch.arange(100_000))], {})
        assert saved.steps() == [1]
        saved.open().verify()
        with pytest.raises(OSError, match="written: No space left"):
            folder.append("metrics.csv", [metric(n) for n in range(20_000)])
        with pytest.raises(OSError, match="written: No space left"):
            folder.write("recipe.yaml", "a" * 600_000)
        folder.drop_after(100)
        assert len(folder.rows("metrics.csv")) == 101
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def plant(path, kind, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "a FIFO" else path.symlink_to(target)


@pytest.mark.parametrize("kind", ["a link", "a FIFO"])
@pytest.mark.parametrize("name", ["metrics.csv", "log.txt", ".lock", "tb", "ckpt/step-000000001", ".result.json.part"])
def test_a_folder_with_links_in_it_is_not_held(tmp_path, name, kind):
    """Going on with a run of somebody else would write where a link leads to, or wait for a FIFO."""
    outside, run = tmp_path / "outside", tmp_path / "1"
    outside.write_text("mine\n")
    plant(run / name, kind, outside)
    with pytest.raises(OSError, match=r"this is a link: expected|this is no regular file: remove it") as caught:
        RunFolder(run).hold()
    assert one_line(caught.value).startswith(f"{run / name}: ")
    assert outside.read_text() == "mine\n"


@pytest.mark.parametrize("kind", ["a link", "a FIFO"])
def test_nothing_is_written_through_what_stands_in_the_place_of_a_file(tmp_path, kind):
    outside, folder = tmp_path / "outside", RunFolder(tmp_path / "1")
    outside.write_text(",".join(HEADERS["metrics.csv"]) + "\n1,mine\n")
    before = outside.read_text()
    plant(folder.path / "log.txt", kind, outside)
    plant(folder.path / "metrics.csv", kind, outside)
    plant(folder.path / ".env.json.part", kind, outside)
    plant(folder.path / "env.json", kind, outside)
    with pytest.raises(OSError, match=r"log\.txt"):
        folder.log("a line")
    with pytest.raises(OSError, match=r"metrics\.csv"):
        folder.append("metrics.csv", [metric(1)])
    with pytest.raises(OSError, match=r"metrics\.csv"):
        folder.drop_after(0)
    folder.write("env.json", "{}")
    assert (folder.path / "env.json").read_text() == "{}"
    assert outside.read_text() == before

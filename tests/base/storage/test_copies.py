"""A copied checkpoint is equal to the bit, and one that was interrupted is none, whatever fails."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
import warm
from base.storage.stores import FAULTS, KINDS, MemoryStorage, connect, keys_of, s3_server, storage
from checkpoint.made import flip, saved
from small import sections, trained

from rowwise.base.errors import CheckpointError, StorageError
from rowwise.base.storage.folder import StorageFolder
from rowwise.checkpoint.check import verify
from rowwise.checkpoint.copy import copy_checkpoint
from rowwise.checkpoint.diff import diff
from rowwise.checkpoint.listing import list_checkpoints
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import NAME
from rowwise.checkpoint.named import checkpoints_of, is_checkpoint, open_named
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.write import FileSizes, write, write_data
from rowwise.recipes.runs import TrainingRun

SIZES = FileSizes(chunk_bytes=1 << 20, file_bytes=2 << 20, short_bytes=1 << 20)


@pytest.fixture(params=KINDS)
def home(request, tmp_path):
    with storage(request.param, tmp_path) as found:
        yield StorageFolder(found, "runs/1")


def large(folder: Path, mb: int = 20) -> Checkpoint:
    """A checkpoint of many files."""
    torch.manual_seed(0)
    rows = torch.randn(mb << 12, 64)
    write(folder, [LocalShard.whole("model/x", rows)], {"step": 3}, sizes=SIZES)
    return Checkpoint.open(folder)


@pytest.mark.few(1)
def test_a_copy_is_equal_to_the_bit_and_so_is_its_copy(home, tmp_path):
    one = saved(tmp_path / "step-000000007")
    place = copy_checkpoint(one, home)
    there = open_named(home)
    assert str(place) == str(there.folder)
    assert not diff(one, there).any
    there.check_headers()
    for name in one.names():
        assert torch.equal(one.load(name), there.load(name))
    assert [line.name for line in list_checkpoints(home)] == ["step-000000007"]
    assert verify(home).good
    back = copy_checkpoint(there, tmp_path / "back")
    assert not diff(one, Checkpoint.open(back)).any
    assert copy_checkpoint(Checkpoint.open(back), home) == place  # the same files under the same names


@pytest.mark.few(1)
def test_another_checkpoint_of_that_name_is_kept(home, tmp_path):
    copy_checkpoint(one := saved(tmp_path / "a" / "step-000000007"), home)
    other = saved(tmp_path / "b" / "step-000000007", steps=4)
    with pytest.raises(CheckpointError, match="step-000000007 exists"):
        copy_checkpoint(other, home)
    assert not diff(one, open_named(home)).any


@pytest.mark.few(1)
def test_new_data_of_the_run_replace_the_manifest(home, tmp_path):
    one = saved(tmp_path / "step-000000007")
    copy_checkpoint(one, home)
    write_data(one.folder, {**one.manifest.data, "metrics": {"ne": 0.5}})
    newer = Checkpoint.open(one.folder)
    copy_checkpoint(newer, home)
    assert not diff(newer, open_named(home)).any


def test_damage_in_the_source_is_not_copied(home, tmp_path):
    one = saved(tmp_path / "step-000000007")
    (chunk, *_) = one.entry("model/embeddings.user").chunks
    flip(one.folder, chunk.file, one.header(chunk.file).ranges[chunk.key].begin)
    with pytest.raises(CheckpointError, match=rf"{chunk.file} is damaged: bytes .* do not match their checksum"):
        copy_checkpoint(Checkpoint.open(one.folder), home)
    assert not is_checkpoint(home / "step-000000007")
    assert list(checkpoints_of(home)) == []
    assert [line.problem for line in list_checkpoints(home)] in ([], ["not complete"])


def test_damage_at_the_store_is_found(tmp_path):
    with s3_server(tmp_path / "s3") as server:
        home = StorageFolder(connect(server.endpoint), "runs")
        copy_checkpoint(saved(tmp_path / "step-000000007"), home)
        there = open_named(home)
        (chunk, *_) = there.entry("model/embeddings.user").chunks
        stored = tmp_path / "s3" / "bucket" / f"runs%2Fstep-000000007%2F{chunk.file}"
        flip(stored.parent, stored.name, there.header(chunk.file).ranges[chunk.key].begin)
        result = verify(home)
        assert [(bad.tensor, bad.file) for bad in result.checked[0].damage] == [("model/embeddings.user", chunk.file)]
        stored.unlink()
        with pytest.raises(CheckpointError, match=f"{chunk.file} is missing or damaged: no such object"):
            open_named(home)


def test_every_prefix_of_a_copy_is_no_checkpoint(tmp_path):
    """A copy that ends after any number of objects is continued, and sends each file once."""
    one = large(tmp_path / "step-000000003", mb=8)

    class Failing(MemoryStorage):
        left, sent = 0, 0

        def write(self, name, pieces, size_bytes):
            if not self.left:
                raise StorageError("the connection is gone")
            self.left -= 1
            self.sent += 1
            super().write(name, pieces, size_bytes)

    store = Failing()
    home = StorageFolder(store, "")
    for _ in range(len(one.manifest.files)):
        with pytest.raises(StorageError, match="the connection is gone"):
            copy_checkpoint(one, home)
        assert list(checkpoints_of(home)) == [] if store.objects else True
        store.left = 1
    copy_checkpoint(one, home)
    assert store.sent == len(one.manifest.files)
    assert not diff(one, open_named(home)).any


def test_two_checkpoints_race_for_one_place(tmp_path):
    """One is there in the end, whole."""
    both = [large(tmp_path / "a" / "step-000000003", 4), saved(tmp_path / "b" / "step-000000003")]
    with s3_server(tmp_path / "s3", **FAULTS) as server:
        home = StorageFolder(connect(server.endpoint), "x")

        def copy(which):
            try:
                copy_checkpoint(which, home)
            except CheckpointError as error:
                return str(error)

        with ThreadPoolExecutor(2) as threads:
            said = list(threads.map(copy, both))
        assert said.count(None) == 1
        assert "is another checkpoint; copy to another folder" in "".join(filter(None, said))
        assert not diff(both[said.index(None)], open_named(home)).any
        open_named(home).verify()


@pytest.mark.slow
def test_servers_that_are_killed_and_restarted(tmp_path):
    one, chance = large(tmp_path / "step-000000003", 60), random.Random(1)
    with s3_server(tmp_path / "s3", **FAULTS) as server:
        home = StorageFolder(connect(server.endpoint), "x")
        kills = 0
        with ThreadPoolExecutor(1) as thread:
            copying = thread.submit(copy_checkpoint, one, home)
            while not wait([copying], chance.uniform(0.05, 0.3)).done and kills < 8:
                server.kill()
                kills += 1
                time.sleep(chance.uniform(0, 0.3))
                server.start()
        copying.result()
        assert kills
        there = open_named(home)
        there.verify()
        assert not diff(one, there).any


COPY = """
import sys
from pathlib import Path
from base.storage.stores import connect
from rowwise.checkpoint.copy import copy_checkpoint
from rowwise.checkpoint.read import Checkpoint
from rowwise.base.storage.folder import StorageFolder
print("ready", flush=True)
copy_checkpoint(Checkpoint.open(Path(sys.argv[1])), StorageFolder(connect(sys.argv[2]), "x"))
"""


@pytest.mark.slow
def test_copies_that_are_killed_are_never_taken_for_whole(tmp_path):
    one, chance, kills = large(tmp_path / "step-000000003", 40), random.Random(5), 0
    path = os.pathsep.join(sys.path)
    with s3_server(tmp_path / "s3", slow_s=0.02) as server:
        home = StorageFolder(connect(server.endpoint), "x")
        while not home.relative_names() or not checkpoints_of(home):
            command = [sys.executable, "-c", COPY, str(one.folder), server.endpoint]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True
            ) as process:
                assert process.stdout.readline() == "ready\n"
                try:
                    process.wait(chance.uniform(0.0, 0.25 * (kills + 1)))
                except subprocess.TimeoutExpired:
                    process.kill()
                    kills += 1
            for complete in checkpoints_of(home) if home.relative_names() else ():
                Checkpoint.open(complete).verify()
        assert kills
        assert not diff(one, open_named(home)).any


@pytest.mark.slow
def test_a_run_goes_on_from_a_copy_with_the_same_bits(tmp_path):
    """Copied to a server with faults, brought back into a run whose checkpoints are lost, and resumed."""
    trained(tmp_path, save={"every": 8, "keep": 9})
    run = tmp_path / "runs" / "small" / "1"
    whole = Checkpoint.open(run / "ckpt" / "step-000000020")
    with s3_server(tmp_path / "s3", **FAULTS) as server:
        home = StorageFolder(connect(server.endpoint), "small")
        copy_checkpoint(Checkpoint.open(run / "ckpt" / "step-000000008"), home)
        again = tmp_path / "again" / "small" / "1"
        shutil.copytree(run, again)
        shutil.rmtree(again / "ckpt")
        (again / "result.json").unlink()
        copy_checkpoint(open_named(home), again / "ckpt")
    assert (again / "ckpt" / "step-000000008" / NAME).exists()
    TrainingRun.resume(again).go()
    assert not diff(whole, Checkpoint.open(again / "ckpt" / "step-000000020")).tensors


@pytest.mark.slow
def test_commands_read_and_write_urls(tmp_path):
    """Each command is a process, which finds the server and its keys in the environment."""
    saved(tmp_path / "step-000000007")
    with s3_server(tmp_path / "s3") as server:

        def run(*args, code=0):
            command, environment = [*warm.command(), "ckpt", *args], {**os.environ, **keys_of(server)}
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == code, done.stderr
            assert "secret-2" not in done.stdout + done.stderr
            return done.stdout if not code else done.stderr

        assert run("copy", "step-000000007", "s3://bucket/x").startswith("wrote s3://bucket/x/step-000000007: ")
        assert [line["step"] for line in json.loads(run("ls", "s3://bucket/x", "--json"))] == [7]
        assert "model/embeddings.user" in run("ls", "s3://bucket/x/step-000000007")
        assert run("verify", "s3://bucket/x") == "step-000000007: intact\n"
        assert run("diff", "step-000000007", "s3://bucket/x").startswith("equal: ")
        run("export", "s3://bucket/x", "--torch", "out.pt")
        assert (tmp_path / "out.pt").exists()
        assert run("ls", "s3://bucket/y", code=2).startswith("rowwise: s3://bucket/y has no objects: expected the URL")


@pytest.mark.slow
def test_a_run_starts_from_a_url_as_from_the_folder(tmp_path):
    trained(tmp_path, save={"every": 8, "keep": 9})
    folder = tmp_path / "runs" / "small" / "1" / "ckpt" / "step-000000020"
    (tmp_path / "small.yaml").write_text(json.dumps(sections(tmp_path)))  # JSON is YAML
    with s3_server(tmp_path / "s3") as server:
        copy_checkpoint(Checkpoint.open(folder), StorageFolder(connect(server.endpoint), "x"))
        for source in ("s3://bucket/x", str(folder)):
            command = [*warm.command(), "train", "small.yaml", "--init-from", source]
            environment = {**os.environ, **keys_of(server)}
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    one, two = (open_named(tmp_path / "runs" / "small" / number) for number in "23")
    assert not diff(one, two).tensors
    assert diff(one, Checkpoint.open(folder)).tensors

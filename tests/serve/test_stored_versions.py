"""Versions in an object store: they appear whole, are copied with every byte checked, and outlive outages."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from base.storage.stores import FAULTS, MemoryStorage, connect, s3_server
from launching import ENVIRONMENT, rowwise, wait_for
from serving import Clients, files_of, server
from small import trained

from rowwise.base.errors import CheckpointError, SpecError, StorageError
from rowwise.base.storage.folder import StorageFolder
from rowwise.recipes.export import export
from rowwise.serve.follow_store import StoreFollower
from rowwise.serve.package import list_versions, version_folder
from rowwise.serve.traffic import Canary, Traffic
from rowwise.serve.version_store import StoredFile, VersionStore


class FailingStorage(MemoryStorage):
    """Fails from the write after `left` others on, and at reads once it is `away`."""

    left, away = 10**9, False

    def write(self, name, pieces, size_bytes):
        if not self.left:
            raise StorageError("the connection is gone")
        self.left -= 1
        super().write(name, pieces, size_bytes)

    def create(self, name, content):
        if not self.left:
            raise StorageError("the connection is gone")
        self.left -= 1
        super().create(name, content)

    def _find(self, name):
        if self.away:
            raise StorageError("the store is away")
        return super()._find(name)


@pytest.fixture
def store(tmp_path, increments):
    """A store, and a folder with the four versions of a run that were not sent yet."""
    with VersionStore(StorageFolder(FailingStorage(), "models"), tmp_path / "here") as found:
        shutil.copytree(increments.models / "versions", tmp_path / "here/versions")
        yield found


def elsewhere(store, folder):
    """The same store from another machine."""
    return VersionStore(store.place, folder)


def test_a_fetched_version_has_the_bytes_and_the_digest_of_the_one_that_was_sent(store, tmp_path):
    for number in (1, 2):
        store.send(number)
    assert (store.numbers(), store.read_traffic()) == ([1, 2], Traffic(2))
    with elsewhere(store, tmp_path / "there") as there:
        for number in (2, 1, 2):
            fetched, sent = there.fetch(number), version_folder(store.folder, number)
            assert files_of(fetched.path) == files_of(sent.path)
            assert fetched.digest == sent.digest == there.read_list(number).digest
        shared = {path.stat().st_ino for path in version_folder(there.folder, 1).path.iterdir()}
        assert shared & {path.stat().st_ino for path in version_folder(there.folder, 2).path.iterdir()}
        there.keep({2})
        assert list_versions(there.folder) == [2]
        name = "models/versions/000002.json"
        objects, digest = store.place.storage.objects, there.read_list(2).digest
        objects[name] = bytes(objects[name]).replace(digest.encode(), b"of an earlier rowwise")
        assert there.read_list(2).digest == digest


def test_an_increment_sends_its_own_files_alone(store):
    store.send(1)
    first = sum(map(len, store.place.storage.objects.values()))
    store.send(2)
    both = sum(map(len, store.place.storage.objects.values()))
    assert both - first < first / 3


def test_every_prefix_of_an_export_is_no_version_and_goes_on(store, tmp_path):
    """Each attempt sends one object more; those that were sent stay."""
    storage = store.place.storage
    attempts = 0
    while not store.numbers():
        storage.left, attempts = 1, attempts + 1
        with elsewhere(store, tmp_path / "there") as there, pytest.raises(CheckpointError, match="expected a URL that"):
            there.fetch_current()
        with pytest.raises(StorageError, match="the connection is gone"):
            store.send(1)
    assert attempts > 3
    storage.left = 2
    store.send(1)  # only `current.json` was missing
    with elsewhere(store, tmp_path / "there") as there:
        assert there.fetch_current() == Traffic(1)
        assert files_of(version_folder(there.folder, 1).path) == files_of(version_folder(store.folder, 1).path)


class CountingStorage(FailingStorage):
    """Lets some reads of files through, and remembers them."""

    def __init__(self):
        super().__init__()
        self.allowed, self.found = 10**9, []

    def read(self, name, begin=0, end=None, same=None):
        if "/files/" in name:
            if len(self.found) >= self.allowed:
                raise StorageError("the connection is gone")
            self.found.append(name)
        return super().read(name, begin, end, same)


def test_a_copy_that_ended_goes_on_with_what_has_not_arrived(tmp_path, increments):
    """After any number of files: none is read twice, and nothing is left over."""
    storage = CountingStorage()
    with VersionStore(StorageFolder(storage, "models"), tmp_path / "here") as store:
        shutil.copytree(increments.models / "versions", tmp_path / "here/versions")
        store.send(1)
        files = {file.sha256 for file in store.read_list(1).files.values()}
        with elsewhere(store, tmp_path / "there") as there:
            for storage.allowed in range(len(files)):
                with pytest.raises(StorageError, match="the connection is gone"):
                    there.fetch(1)
                assert list_versions(there.folder) == []
                (there.folder / "arrived").mkdir(exist_ok=True)
                (there.folder / "arrived/x.part").write_bytes(b"of a kill")
            storage.allowed += 1
            there.fetch(1)
            assert sorted(storage.found) == sorted(f"models/files/{one}" for one in files)
            assert files_of(version_folder(there.folder, 1).path) == files_of(version_folder(store.folder, 1).path)
            assert not any((there.folder / "arrived").iterdir())


def test_files_of_the_base_are_not_hashed_again(tmp_path, increments):
    """Their names are those of their bytes all the same."""
    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    with VersionStore(StorageFolder(MemoryStorage(), "models"), tmp_path / "here") as store:
        shutil.copytree(increments.models / "versions", tmp_path / "here/versions", copy_function=os.link)
        store.send(1)
        opened.clear()
        store.send(2)
        own, (base, path) = store.read_list(2).files, (version_folder(store.folder, number).path for number in (1, 2))
        shared = {name for name in own if (base / name).exists() and (path / name).samefile(base / name)}
        assert any(name.endswith(".safetensors") for name in shared)
        assert not {str(path / name) for name in shared} & {*opened}
        assert own == {name: StoredFile.of(path / name) for name in own}


def test_another_export_of_the_same_number_is_refused(store, tmp_path, increments):
    store.send(1)
    with elsewhere(store, tmp_path / "there") as there:
        shutil.copytree(increments.models / "versions/000002", tmp_path / "there/versions/000001")
        with pytest.raises(CheckpointError, match="version 1 of another"):
            there.send(1)


def test_an_export_that_ends_after_a_newer_one_leaves_it_current(store):
    objects = store.place.storage.objects
    store.send(2)
    store.send(1)
    assert (store.numbers(), store.read_traffic()) == ([1, 2], Traffic(2))
    del objects["models/versions/000002.json"]
    objects["models/current.json"] = b"x"
    store.send(2)
    assert store.read_traffic() == Traffic(2)


def test_a_copy_ends_when_it_is_stopped(store, tmp_path):
    store.send(1)
    with elsewhere(store, tmp_path / "there") as there:
        there.stop()
        with pytest.raises(StorageError, match="the copy was stopped"):
            there.fetch(1)
        assert list_versions(there.folder) == []
        assert there.complete() == set()


def test_damage_in_the_store_is_found_and_leaves_no_version(store, tmp_path):
    store.send(1)
    objects = store.place.storage.objects
    name = next(name for name in objects if "/files/" in name and len(objects[name]) > 1000)
    objects[name] = bytes([objects[name][0] ^ 1]) + objects[name][1:]
    with elsewhere(store, tmp_path / "there") as there:
        with pytest.raises(StorageError, match=f"{name} is damaged: its SHA-256 does not match; remove the object"):
            there.fetch(1)
        assert list_versions(there.folder) == []
        objects["models/versions/000001.json"] = b'{"digest": "x", "files": {"../x": {"sha256": "0", "size_bytes": 1}}}'
        with pytest.raises(CheckpointError, match=r"000001.json is damaged: .*"):
            there.fetch(1)
        del objects["models/versions/000001.json"]
        with pytest.raises(CheckpointError, match="URL that `rowwise export`"):
            there.fetch(1)


def test_traffic_names_versions_that_are_there(store):
    store.send(1)
    with pytest.raises(CheckpointError, match="no version 7"):
        store.write_traffic(Traffic(1, Canary(7, 0.5)))
    store.place.storage.objects["models/current.json"] = b"x"
    with pytest.raises(CheckpointError, match=r"current\.json is damaged: .*"):
        store.read_traffic()


def test_a_cache_is_of_one_url_and_of_one_process(store, tmp_path, increments):
    with pytest.raises(SpecError, match="here: another process uses"):
        VersionStore(store.place, store.folder)
    with pytest.raises(SpecError, match="versions of another URL"):
        VersionStore(StorageFolder(store.place.storage, "other"), store.folder)
    with pytest.raises(SpecError, match="models has other files"):
        VersionStore(store.place, increments.models)


def test_a_version_without_room_is_refused(store, tmp_path, monkeypatch):
    store.send(1)
    monkeypatch.setattr("rowwise.serve.version_store.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 9))
    with (
        elsewhere(store, tmp_path / "there") as there,
        pytest.raises(CheckpointError, match="--cache FOLDER"),
    ):
        there.fetch(1)


def test_an_export_goes_on_from_the_newest_version(store, tmp_path, increments):
    for number in (1, 2):
        store.send(number)
    run = increments.run.folder.path
    with elsewhere(store, tmp_path / "there") as there:
        after = there.begin_export(full=False)
        written = export(run, there.folder, which="step-12", after=after)
        assert (written.folder.number, written.base) == (3, 2)
        there.send(3)
        shutil.copytree(written.folder.path, version_folder(there.folder, 4).path)  # was not sent
        after = there.begin_export(full=True)
        written = export(run, there.folder, which="step-16", full=True, after=after)
        assert (written.folder.number, written.base) == (4, None)
        there.send(4)
    assert (store.numbers(), store.read_traffic()) == ([1, 2, 3, 4], Traffic(4))


def test_a_follower_keeps_what_is_in_use_and_outlives_the_store(store, tmp_path, monkeypatch):
    monkeypatch.setattr("rowwise.serve.follow_store.POLL_s", 0.01)
    monkeypatch.setattr("rowwise.serve.follow_store.MAX_BACKOFF_s", 0.02)
    store.send(1)
    lines, storage = [], store.place.storage
    with elsewhere(store, tmp_path / "there") as there:
        with StoreFollower(there, lines.append) as follower:
            assert follower.read_traffic(()) == Traffic(1)
            storage.away = True
            wait_for(lambda: lines == ["the store is away: version 1 goes on answering"])
            assert follower.read_traffic({1}) == Traffic(1)
            storage.away = False
            wait_for(lambda: lines[1:] == ["memory/models: reached again"])
            store.send(2)
            wait_for(lambda: follower.read_traffic({1}) == Traffic(2))
            assert list_versions(there.folder) == [1, 2]
            follower.read_traffic({2})
            wait_for(lambda: list_versions(there.folder) == [2])
        storage.away = True
        with StoreFollower(there, lines.append) as follower:  # a server that starts meanwhile
            assert follower.read_traffic(()) == Traffic(2)
        assert lines[2:] == ["the store is away: version 2 goes on answering"]
    with elsewhere(store, tmp_path / "empty") as there, pytest.raises(StorageError, match="the store is away"):
        StoreFollower(there, lines.append)


def of_store(endpoint):
    keys = {"AWS_ACCESS_KEY_ID": "key-1", "AWS_SECRET_ACCESS_KEY": "secret-2"}
    return {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "x", **keys}


@pytest.mark.slow
def test_each_answer_is_one_version_while_they_change_in_a_store_with_faults(increments, tmp_path):
    with s3_server(tmp_path / "s3", **FAULTS) as s3:
        store = StorageFolder(connect(s3.endpoint), "models")
        with VersionStore(store, tmp_path / "here") as versions:
            shutil.copytree(increments.models / "versions", tmp_path / "here/versions")
            versions.send(1)
            url, environment = "s3://bucket/models", of_store(s3.endpoint)
            with (
                server(url, "--cache", "there", folder=tmp_path, environment=environment) as (netloc, process),
                Clients(netloc, increments) as clients,
            ):
                clients.wait_for(1)
                for number in (2, 3, 4):
                    versions.send(number)
                    clients.wait_for(number)
                for traffic, asked in ((Traffic(1), 1), (Traffic(4, Canary(2, 0.5)), 2), (Traffic(3), 3)):
                    clients.seen.pop(asked, None)
                    versions.write_traffic(traffic)
                    clients.wait_for(asked)
                s3.kill()
                lines = iter(process.stdout.readline, "")
                assert any(line.endswith("version 3 goes on answering\n") for line in lines)
                clients.seen.clear()
                clients.wait_for(3)
                s3.start()
                versions.write_traffic(Traffic(1))
                clients.wait_for(1)
                assert any(line == f"{url}: reached again\n" for line in lines)
            assert (clients.wrong, clients.failed) == (0, [])


@pytest.mark.slow
def test_an_export_that_is_killed_leaves_no_version(tmp_path):
    """At random moments, at a store with faults; in the end the version is that of an export to a folder."""
    run, _ = trained(tmp_path)
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    with s3_server(tmp_path / "s3", **FAULTS) as s3:
        environment = of_store(s3.endpoint)
        store = StorageFolder(connect(s3.endpoint), "models")
        command = [sys.executable, "-m", "rowwise", "export", str(run.folder.path), "s3://bucket/models"]
        for _ in range(6):
            process = subprocess.Popen(command, env={**ENVIRONMENT, **environment}, stdout=subprocess.DEVNULL)
            time.sleep(draw.uniform(1, 4))
            process.send_signal(signal.SIGKILL)
            process.wait()
            with VersionStore(store, tmp_path / "there") as there:
                for number in there.numbers():  # what is there is whole
                    assert there.fetch(number).digest == there.read_list(number).digest
        done = rowwise(tmp_path, *command[3:], environment=environment)
        assert done.returncode == 0, done.stderr
        assert "serve it with: rowwise serve s3://bucket/models" in done.stdout
        listed = json.loads(rowwise(tmp_path, "versions", command[-1], "--json", environment=environment).stdout)
        export(run.folder.path, tmp_path / "models")
        assert listed["versions"][0]["digest"] == version_folder(tmp_path / "models", 1).digest


@pytest.mark.slow
def test_commands_name_the_url_and_the_way_out(tmp_path):
    with s3_server(tmp_path / "s3") as s3:
        environment = of_store(s3.endpoint)
        empty = rowwise(tmp_path, "versions", "s3://bucket/none", environment=environment)
        assert (
            empty.stderr
            == "rowwise: s3://bucket/none has no current.json: expected a URL that `rowwise export` wrote to\n"
        )
        assert empty.returncode
    got = rowwise(tmp_path, "serve", "models", "--cache", "there")
    assert "--cache there with models, which is not a URL" in got.stderr

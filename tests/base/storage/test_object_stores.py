"""Every Storage does the same: in memory, in a folder, at S3 servers, and where requests fail."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from base.storage.stores import KINDS, connect, s3_server, storage

from rowwise.base.errors import StorageError
from rowwise.base.storage.cloud import PART_bytes, RANGE_bytes, RetryPolicy
from rowwise.base.storage.folder import StorageFolder, parse_folder, read_range
from rowwise.base.storage.interface import MissingObjectError, ObjectExistsError


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
    with storage(request.param, tmp_path) as found:
        yield found


def put(store, name, content):
    store.write(name, lambda: [content[: len(content) // 3], content[len(content) // 3 :]], len(content))


def test_many_operations_are_those_of_a_dict(store):
    chance, oracle = random.Random(3), {}
    names = ["a", "b/a", "b/b", "b/c/a", "bb", "c d+%"]
    for _ in range(150):
        name, content = chance.choice(names), chance.randbytes(chance.randrange(60))
        match chance.choice(["write", "create", "delete", "read", "list"]):
            case "write":
                put(store, name, content)
                oracle[name] = content
            case "create" if name in oracle and oracle[name] != content:
                with pytest.raises(ObjectExistsError, match="exists"):
                    store.create(name, content)
            case "create":
                store.create(name, content)
                oracle[name] = content
            case "delete":
                store.delete(name)
                oracle.pop(name, None)
            case "read" if name in oracle:
                begin, end = sorted(chance.choices(range(70), k=2))
                assert bytes(store.read(name)) == oracle[name]
                assert bytes(store.read(name, begin, end)) == oracle[name][begin:end]
                assert store.stat(name).size_bytes == len(oracle[name])
            case "read":
                with pytest.raises(MissingObjectError, match="no such"):
                    store.read(name)
            case "list":
                prefix = chance.choice(["", "b/", "b/c/", "z/"])
                found = {one.name: one.size_bytes for one in store.list(prefix)}
                assert found == {key: len(value) for key, value in oracle.items() if key.startswith(prefix)}


@pytest.mark.few(4)
@pytest.mark.parametrize("size", [0, RANGE_bytes + 1, PART_bytes, 2 * PART_bytes + 5])
def test_large_objects_are_read_by_ranges(store, size):
    content = random.Random(size).randbytes(size)
    store.write("large/one", lambda: (content[at : at + 3_000_001] for at in range(0, size, 3_000_001)), size)
    assert bytes(store.read("large/one")) == content
    begin, end = size // 5, size - size // 7
    assert read_range(StorageFolder(store, "large"), "one", begin, end) == content[begin:end]


def test_one_of_several_creates_an_object(store):
    """Also where the answer to the one that did it is lost."""
    contents = [bytes([k]) * 100 for k in range(6)]
    gate = threading.Barrier(len(contents))

    def create(content):
        gate.wait()
        try:
            store.create("manifest", content)
        except ObjectExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(contents)) as pool:
        created = list(pool.map(create, contents))
    assert created.count(True) == 1
    assert bytes(store.read("manifest")) == contents[created.index(True)]
    store.create("manifest", contents[created.index(True)])  # the same bytes once more change nothing


@pytest.mark.parametrize("size", [100, 2 * PART_bytes])
def test_an_object_whose_source_fails_does_not_appear(store, size):
    def broken():
        yield bytes(size // 2)
        raise StorageError("the source is gone")

    with pytest.raises(StorageError, match="the source is gone"):
        store.write("broken", broken, size)
    with pytest.raises(StorageError, match="was not written"):
        store.write("short", lambda: [bytes(size - 1)], size)
    assert store.list("") == []


@pytest.mark.slow
def test_more_objects_than_one_answer_lists(tmp_path):
    with s3_server(tmp_path) as server:
        store = connect(server.endpoint)
        names = [f"many/{number:05}" for number in range(1234)]
        for name in names:
            (tmp_path / "bucket" / name.replace("/", "%2F")).write_bytes(b"1")
        assert [one.name for one in store.list("many/")] == names


@pytest.mark.slow
def test_a_server_that_starts_again_is_waited_for(tmp_path):
    with s3_server(tmp_path) as server:
        store = connect(server.endpoint)
        put(store, "one", b"content")
        server.kill()
        timer = threading.Timer(1.0, server.start)
        timer.start()
        assert bytes(store.read("one")) == b"content"
        timer.join()


def test_a_server_that_is_gone_is_an_error_after_the_deadline(tmp_path):
    with s3_server(tmp_path) as server:
        store = connect(server.endpoint, RetryPolicy(deadline_s=0.5, first_wait_s=0.05))
        server.kill()
        with pytest.raises(StorageError, match="s3://bucket/one cannot") as raised:
            store.read("one")
        server.start()
    assert "secret-2" not in str(raised.value)


def test_a_bucket_that_is_not_there_is_named_at_once(tmp_path):
    with s3_server(tmp_path, "other") as server, pytest.raises(StorageError, match="there is no bucket"):
        connect(server.endpoint).list("")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://bucket/x", "ftp:// is no known kind"),
        ("s3:/bucket/x", "expected s3://bucket/x, or ./s3:/bucket/x for a folder"),
        ("GS:bucket", "expected gs://bucket, or"),
        ("s3://", "expected a URL such as s3://bucket/folder"),
        ("s3://bucket/a//b", "expected a URL such as"),
        ("s3://bucket/../b", "expected a URL such as"),
        ("s3://me:hidden@bucket/x", "without user, password and query"),
        ("s3://bucket/x?token=hidden", "without user, password and query"),
    ],
)
def test_a_wrong_url_is_refused(url, why):
    with pytest.raises(StorageError, match=why) as raised:
        parse_folder(url)
    assert "hidden" not in str(raised.value)


def test_a_folder_refuses_names_that_lead_out(tmp_path):
    with storage("folder", tmp_path) as store:
        for name in ("../x", "a/../x", "/etc/passwd", ".hidden"):
            with pytest.raises(StorageError, match="is not used"):
                put(store, name, b"1")
        (tmp_path / "objects").mkdir()
        (tmp_path / "objects" / "link").symlink_to("/etc/passwd")
        with pytest.raises(StorageError, match="link"):
            store.read("link")
        assert store.list("") == []

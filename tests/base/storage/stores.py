"""Storages under test: in memory, in a folder, and of S3 servers that are processes of their own."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from from_benchmarks import part

from rowwise.base.storage.cloud import CloudStorage, RetryPolicy
from rowwise.base.storage.folder import _open_bucket
from rowwise.base.storage.interface import MissingObjectError, ObjectExistsError, Pieces, SameObject, StoredObject
from rowwise.base.storage.local import LocalStorage, check_size

s3_server = part("s3_server").s3_server
FAULTS = {"errors": 0.05, "busy": 0.02, "resets": 0.03, "lost": 0.03, "slow_s": 0.05}
KINDS = ["memory", "folder", "s3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("s3 with faults", "moto"))]
PATIENT = RetryPolicy(deadline_s=120, first_wait_s=0.01)


class MemoryStorage:
    """Objects in a dict."""

    def __init__(self) -> None:
        self.url, self.objects = "memory", {}

    def read(self, name: str, begin: int = 0, end: int | None = None, same: SameObject | None = None) -> memoryview:
        return memoryview(self._find(name))[begin:end]

    def stat(self, name: str) -> StoredObject:
        return StoredObject(name, len(self._find(name)), 0.0)

    def write(self, name: str, pieces: Pieces, size_bytes: int) -> None:
        content = b"".join(pieces())
        check_size(name, len(content), size_bytes)
        self.objects[name] = content

    def create(self, name: str, content: bytes) -> None:
        if self.objects.setdefault(name, content) != content:
            raise ObjectExistsError(f"{name} exists")

    def list(self, prefix: str) -> list[StoredObject]:
        return sorted(StoredObject(k, len(v), 0.0) for k, v in self.objects.items() if k.startswith(prefix))

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)

    def _find(self, name: str) -> bytes:
        if name not in self.objects:
            raise MissingObjectError(f"{name}: no such object")
        return self.objects[name]


def connect(endpoint: str, patience: RetryPolicy = PATIENT) -> CloudStorage:
    return CloudStorage(
        "s3://bucket", patience, endpoint=endpoint, access_key_id="key-1", secret_access_key="secret-2", region="x"
    )


def keys_of(server: Any) -> dict[str, str]:
    """The environment in which s3:// URLs mean a server."""
    keys = {"AWS_ACCESS_KEY_ID": "key-1", "AWS_SECRET_ACCESS_KEY": "secret-2", "AWS_REGION": "us-east-1"}
    return {**keys, "AWS_ENDPOINT_URL": server.endpoint}


@contextmanager
def server_of_urls(folder: Path, monkeypatch, **faults: float) -> Iterator[Any]:
    """A server that s3:// URLs of this process and its children mean while the block lasts."""
    with s3_server(folder, **faults) as server:
        for key, value in keys_of(server).items():
            monkeypatch.setenv(key, value)
        _open_bucket.cache_clear()  # another test may have had a server of its own
        try:
            yield server
        finally:
            _open_bucket.cache_clear()


@contextmanager
def storage(kind: str, folder: Path) -> Iterator[MemoryStorage | LocalStorage | CloudStorage]:
    match kind:
        case "memory":
            yield MemoryStorage()
        case "folder":
            yield LocalStorage(folder / "objects")
        case "s3" | "s3 with faults":
            with s3_server(folder / "s3", **(FAULTS if "faults" in kind else {})) as server:
                yield connect(server.endpoint)
        case "moto":
            with moto() as endpoint:
                yield connect(endpoint)


@contextmanager
def moto() -> Iterator[str]:
    """The endpoint of a server of moto with an empty bucket; written by others, so it knows nothing of this client."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            try:
                make = urllib.request.Request(f"{endpoint}/bucket", method="PUT", headers={"Host": "s3.amazonaws.com"})
                urllib.request.urlopen(make, timeout=60).close()
                break
            except urllib.error.URLError:
                assert server.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
        yield endpoint
    finally:
        server.kill()
        server.wait()

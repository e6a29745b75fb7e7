"""Versions of a model in an object store, and a local folder of downloads.

    current.json            the traffic split, as in a served folder
    versions/000002.json    the files of a version: names, sizes and SHA-256 (`StoredVersion`)
    files/<SHA-256>         content-addressed files, shared by versions

A version is published by its list, which is created last with a conditional write; then `current.json` names it. Files
are content-addressed, so killed or concurrent exports overwrite nothing, and an increment uploads only its new files.
Downloads are verified by checksum, and a version appears in the folder atomically; an interrupted download resumes with
the missing files. Known limits: files of a killed export stay in the store; versions are never removed from it.
"""

import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Self, final

import msgspec
from msgspec import structs

from rowwise.base.errors import CheckpointError, SpecError, StorageError
from rowwise.base.inside import fault_of_name
from rowwise.base.quantity import format_bytes
from rowwise.base.storage.folder import StorageFolder, read_file, read_pieces
from rowwise.base.storage.interface import ObjectExistsError, Piece
from rowwise.base.storage.local import LocalStorage
from rowwise.base.textfile import MAX_BYTES, decode_json, open_regular, read_bytes, write_new
from rowwise.checkpoint.atomic import atomic_output
from rowwise.checkpoint.named import VERSIONS
from rowwise.serve.contents import LIST, StoredFile, digest_of, hash_files, read_files
from rowwise.serve.package import (
    CURRENT,
    VersionFolder,
    decode_traffic,
    list_versions,
    version_folder,
    write_traffic,
)
from rowwise.serve.traffic import Traffic
from rowwise.tables.spec import Value

FILES, OWNER = "files", "store.json"  # in the store; in the folder: the URL of its downloads
LISTS = "lists"  # in the folder: the list of each local version
DOWNLOADS = "arrived"  # in the folder: complete, verified files of a partial download, by SHA-256
LISTED = re.compile(r"([0-9]{6})\.json")
EXPECTED_STORE = "a URL that `rowwise export` wrote to"
REPAIR_HINT = "remove the object, and export the version again with --full"  # existing objects are not uploaded again


class StoredVersion(Value, frozen=True):
    """The list of a version."""

    digest: str  # recomputed by `decode`, as earlier versions of rowwise wrote another one
    files: dict[str, StoredFile]  # by relative path

    def __post_init__(self) -> None:
        for name in self.files:
            fault = next(filter(None, map(fault_of_name, name.split("/"))), None)
            if fault:
                raise SpecError(f"the name {name[:80]!r} is not allowed: {fault}")

    @classmethod
    def decode(cls, content: bytes) -> Self:
        listed = decode_json(content, cls)
        return structs.replace(listed, digest=digest_of(listed.files))


@final
class VersionStore:
    """Versions in a store, and their downloads in a folder.

    Args:
        place: the URL.
        folder: created if missing; empty or with downloads of this URL. Locked for one process.
    """

    def __init__(self, place: StorageFolder, folder: Path) -> None:
        self.place, self.folder = place, folder
        self._stopped = threading.Event()
        self._lock = _claim(folder, str(place))

    def close(self) -> None:
        self._lock.close()

    def stop(self) -> None:
        """Abort a download in another thread, which raises."""
        self._stopped.set()

    def complete(self) -> set[int]:
        """The complete versions in the folder."""
        return {*self._lists()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def numbers(self) -> list[int]:
        """The versions of the store in ascending order; costs one LIST request."""
        names = (self.place / VERSIONS).relative_names()
        return sorted(int(match[1]) for name in names if (match := LISTED.fullmatch(name)))

    def read_traffic(self) -> Traffic:
        """The traffic split; costs one GET of a small object."""
        try:
            return decode_traffic(self.place, read_file(self.place, CURRENT, MAX_BYTES))
        except FileNotFoundError:
            raise CheckpointError(f"{self.place} has no {CURRENT}", EXPECTED_STORE) from None

    def write_traffic(self, traffic: Traffic) -> None:
        """Route requests to these versions, atomically."""
        known = self.numbers()
        for number in traffic.versions:
            if number not in known:
                expected = f"one of {', '.join(map(str, known))}" if known else EXPECTED_STORE
                raise CheckpointError(f"{self.place} has no version {number}", expected)
        content = msgspec.json.encode(traffic)
        self.place.storage.write(self.place.inside(CURRENT), lambda: [content], len(content))

    def read_list(self, number: int) -> StoredVersion:
        folder, name = self.place / VERSIONS, f"{number:06}.json"
        try:
            return StoredVersion.decode(read_file(folder, name, MAX_BYTES))
        except FileNotFoundError:
            raise CheckpointError(f"{self.place} has no version {number}", EXPECTED_STORE) from None
        except (msgspec.MsgspecError, SpecError) as error:
            way = "use another version, or export it again"
            raise CheckpointError(f"{folder / name} is damaged: {error}", hint=way) from None

    def fetch(self, number: int) -> VersionFolder:
        """Download a version; files of other local versions are hard-linked."""
        listed, version = self.read_list(number), version_folder(self.folder, number)
        content = msgspec.json.encode(listed)
        local = self._lists()
        if number in local and local[number] == listed:
            return version
        self._remove(number)
        paths = {
            file.sha256: version_folder(self.folder, other_number).path / name
            for other_number, other_version in local.items()
            if other_number != number
            for name, file in other_version.files.items()
        }
        paths = self._collect_downloads({file.sha256 for file in listed.files.values()}) | paths
        missing = {file.sha256: file for file in listed.files.values() if file.sha256 not in paths}
        self._check_space(number, sum(file.size_bytes for file in missing.values()))
        for name, file in missing.items():
            pieces = partial(self._verified_pieces, file, self.place / FILES, name)
            LocalStorage(self.folder / DOWNLOADS).write(name, pieces, file.size_bytes)
            paths[name] = self.folder / DOWNLOADS / name
        (self.folder / LISTS).mkdir(exist_ok=True)
        write_new(self._list_path(number), content)  # before the version, which is complete with both
        with atomic_output(version.path) as unfinished:
            for name, file in listed.files.items():
                (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(paths[file.sha256], unfinished / name)
        self._collect_downloads(())
        return version

    def send(self, number: int) -> None:
        """Upload a version of the folder, and make it the current one."""
        version = version_folder(self.folder, number)
        files = read_files(version.path) or hash_files(version.path)
        if (version.path / LIST).exists():
            files[LIST] = StoredFile.of(version.path / LIST)
        listed = StoredVersion(digest=digest_of(files), files=files)
        present = {name: stored.size_bytes for name, stored in (self.place / FILES).relative_names().items()}
        for name, file in listed.files.items():
            if present.get(file.sha256) != file.size_bytes:
                path = version.path / name
                pieces = partial(self._verified_pieces, file, path.parent, path.name)
                self.place.storage.write((self.place / FILES).inside(file.sha256), pieces, file.size_bytes)
                present[file.sha256] = file.size_bytes
        content = msgspec.json.encode(listed)
        try:
            self.place.storage.create((self.place / VERSIONS).inside(f"{number:06}.json"), content)
        except ObjectExistsError:
            raise CheckpointError(
                f"{self.place} has version {number} of another export by now",
                hint="run rowwise export again, which writes the next version",
            ) from None
        (self.folder / LISTS).mkdir(exist_ok=True)
        write_new(self._list_path(number), content)
        with suppress(CheckpointError):  # missing, or damaged
            if self.read_traffic().current > number:  # a concurrent export has published a newer version
                return
        self.write_traffic(Traffic(current=number))

    def keep(self, numbers: Collection[int]) -> None:
        """Remove all other versions from the folder."""
        for number in list_versions(self.folder):
            if number not in numbers:
                self._remove(number)

    def begin_export(self, *, full: bool) -> int:
        """Download the newest version as the base of an increment, unless `full`; returns its number, or 0 if none."""
        newest = max(self.numbers(), default=0)
        self.keep({newest})  # removes versions of a killed export that were not uploaded
        if newest and not full:
            self.fetch(newest)
        return newest

    def fetch_current(self) -> Traffic:
        """Download the versions in `current.json`."""
        traffic = self.read_traffic()
        for number in traffic.versions:
            self.fetch(number)
        write_traffic(self.folder, traffic)
        return traffic

    def _verified_pieces(self, expected: StoredFile, folder: StorageFolder | Path, name: str) -> Iterator[Piece]:
        """The pieces of a file; raises at its end unless the checksum matches."""
        total = hashlib.sha256()
        for piece in read_pieces(folder, name, expected.size_bytes):
            if self._stopped.is_set():
                raise StorageError(f"{folder / name} was not copied completely: the copy was stopped")
            total.update(piece)
            yield piece
        if total.hexdigest() != expected.sha256:
            raise StorageError(f"{folder / name} is damaged: its SHA-256 does not match", hint=REPAIR_HINT)

    def _collect_downloads(self, wanted: Collection[str]) -> dict[str, Path]:
        """The wanted files that are downloaded; removes all others, including partial ones."""
        paths = {path.name: path for path in (self.folder / DOWNLOADS).glob("*")}
        for name in paths.keys() - set(wanted):
            paths.pop(name).unlink()
        return paths

    def _check_space(self, number: int, size_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if size_bytes > free:
            raise CheckpointError(
                f"version {number} of {self.place} needs {format_bytes(size_bytes)}, and {self.folder} has "
                f"{format_bytes(free)}",
                "--cache FOLDER on a larger disk",
            )

    def _lists(self) -> dict[int, StoredVersion]:
        """The lists of the local versions."""
        lists: dict[int, StoredVersion] = {}
        for number in list_versions(self.folder):
            with suppress(OSError, msgspec.MsgspecError, SpecError):  # without a valid list it is downloaded again
                lists[number] = StoredVersion.decode(read_bytes(self._list_path(number)))
        return lists

    def _list_path(self, number: int) -> Path:
        return self.folder / LISTS / f"{number:06}.json"

    def _remove(self, number: int) -> None:
        self._list_path(number).unlink(missing_ok=True)  # first, so that a partial version is never complete
        shutil.rmtree(version_folder(self.folder, number).path, ignore_errors=True)


def _claim(folder: Path, url: str) -> BinaryIO:
    """Lock a folder of downloads; returns the locked file."""
    folder.mkdir(parents=True, exist_ok=True)
    owner_file, content = folder / OWNER, msgspec.json.encode({"url": url})
    if not owner_file.exists():
        if any(folder.iterdir()):
            raise SpecError(f"--cache {folder} has other files", "an empty folder, or that of an earlier call")
        write_new(owner_file, content)
    elif read_bytes(owner_file) != content:
        raise SpecError(f"--cache {folder} has versions of another URL than {url}", "another folder")
    file = open_regular(owner_file, "a+b", links=False)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SpecError(f"--cache {folder}: another process uses it", "a folder for each process") from None
    return file

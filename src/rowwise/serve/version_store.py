"""Versions of a model below the URL of an object store, and the folder of this machine that they are copied to.

    current.json            by which versions requests are answered, as in a folder that is served
    versions/000002.json    the files of a version: names, sizes and SHA-256 (`StoredVersion`)
    files/<SHA-256>         their contents; versions share those that are equal

A version appears with its list, which is created last, as one object, and only if there is none; then `current.json`
names it. Objects are named by what they hold, so exports that were killed, or run at once, write over nothing, and an
increment sends its own files alone. What is read is compared with its checksum, and a version appears in the folder in
one step; a copy that ended before goes on with the files that have not arrived. Known limits: files of an export that
was killed stay in the store; versions are not removed from it.
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

FILES, OWNER = "files", "store.json"  # in the store; in the folder: whose copies these are
LISTS = "lists"  # in the folder: the list of each version that is there
ARRIVED = "arrived"  # in the folder: files of a version that is being copied, by their SHA-256; whole and verified
LISTED = re.compile(r"([0-9]{6})\.json")
A_STORE = "a URL that `rowwise export` wrote to"
WAY_OUT = "remove the object, and export the version again with --full"  # objects that are there are not sent


class StoredVersion(Value, frozen=True):
    """The list of a version."""

    digest: str  # by `digest_of` once it is decoded; an earlier rowwise wrote another one
    files: dict[str, StoredFile]  # by their paths

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
    """Versions in a store, and their copies in a folder.

    Args:
        place: the URL.
        folder: is made if it does not exist; has copies of this URL, or nothing. One process has it at a time.
    """

    def __init__(self, place: StorageFolder, folder: Path) -> None:
        self.place, self.folder = place, folder
        self._stopped = threading.Event()
        self._lock = _claim(folder, str(place))

    def close(self) -> None:
        self._lock.close()

    def stop(self) -> None:
        """End a copy of another thread, which raises."""
        self._stopped.set()

    def complete(self) -> set[int]:
        """The versions that are whole in the folder."""
        return {*self._lists()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def numbers(self) -> list[int]:
        """The versions of the store, ascending: one list."""
        names = (self.place / VERSIONS).relative_names()
        return sorted(int(match[1]) for name in names if (match := LISTED.fullmatch(name)))

    def read_traffic(self) -> Traffic:
        """The versions by which requests are to be answered: one small object."""
        try:
            return decode_traffic(self.place, read_file(self.place, CURRENT, MAX_BYTES))
        except FileNotFoundError:
            raise CheckpointError(f"{self.place} has no {CURRENT}", A_STORE) from None

    def write_traffic(self, traffic: Traffic) -> None:
        """Let servers answer by these versions, in one step."""
        known = self.numbers()
        for number in traffic.versions:
            if number not in known:
                expected = f"one of {', '.join(map(str, known))}" if known else A_STORE
                raise CheckpointError(f"{self.place} has no version {number}", expected)
        content = msgspec.json.encode(traffic)
        self.place.storage.write(self.place.inside(CURRENT), lambda: [content], len(content))

    def read_list(self, number: int) -> StoredVersion:
        place, name = self.place / VERSIONS, f"{number:06}.json"
        try:
            return StoredVersion.decode(read_file(place, name, MAX_BYTES))
        except FileNotFoundError:
            raise CheckpointError(f"{self.place} has no version {number}", A_STORE) from None
        except (msgspec.MsgspecError, SpecError) as error:
            way = "use another version, or export it again"
            raise CheckpointError(f"{place / name} is damaged: {error}", hint=way) from None

    def fetch(self, number: int) -> VersionFolder:
        """Copy a version into the folder, but for files that other versions there have, to which it gets links."""
        listed, version = self.read_list(number), version_folder(self.folder, number)
        content = msgspec.json.encode(listed)
        here = self._lists()
        if number in here and here[number] == listed:
            return version
        self._remove(number)
        paths = {
            file.sha256: version_folder(self.folder, other).path / name
            for other, found in here.items()
            if other != number
            for name, file in found.files.items()
        }
        paths = self._arrived({file.sha256 for file in listed.files.values()}) | paths
        missing = {file.sha256: file for file in listed.files.values() if file.sha256 not in paths}
        self._check_room(number, sum(file.size_bytes for file in missing.values()))
        for name, file in missing.items():
            pieces = partial(self._checked, file, self.place / FILES, name)
            LocalStorage(self.folder / ARRIVED).write(name, pieces, file.size_bytes)
            paths[name] = self.folder / ARRIVED / name
        (self.folder / LISTS).mkdir(exist_ok=True)
        write_new(self._list_path(number), content)  # before the version: with both it is whole
        with atomic_output(version.path) as unfinished:
            for name, file in listed.files.items():
                (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(paths[file.sha256], unfinished / name)
        self._arrived(())
        return version

    def send(self, number: int) -> None:
        """Copy a version of the folder into the store, and make it the current one."""
        version = version_folder(self.folder, number)
        files = read_files(version.path) or hash_files(version.path)
        if (version.path / LIST).exists():
            files[LIST] = StoredFile.of(version.path / LIST)
        listed = StoredVersion(digest=digest_of(files), files=files)
        present = {name: one.size_bytes for name, one in (self.place / FILES).relative_names().items()}
        for name, file in listed.files.items():
            if present.get(file.sha256) != file.size_bytes:
                path = version.path / name
                pieces = partial(self._checked, file, path.parent, path.name)
                self.place.storage.write((self.place / FILES).inside(file.sha256), pieces, file.size_bytes)
                present[file.sha256] = file.size_bytes
        content = msgspec.json.encode(listed)
        try:
            self.place.storage.create((self.place / VERSIONS).inside(f"{number:06}.json"), content)
        except ObjectExistsError:
            raise CheckpointError(
                f"{self.place} has a version {number} of another export by now",
                hint="run rowwise export again, which writes the next version",
            ) from None
        (self.folder / LISTS).mkdir(exist_ok=True)
        write_new(self._list_path(number), content)
        with suppress(CheckpointError):  # there is none yet, or a damaged one
            if self.read_traffic().current > number:  # another export was faster, with a newer one
                return
        self.write_traffic(Traffic(current=number))

    def keep(self, numbers: Collection[int]) -> None:
        """Remove the copies of all other versions from the folder."""
        for number in list_versions(self.folder):
            if number not in numbers:
                self._remove(number)

    def begin_export(self, *, full: bool) -> int:
        """Copy the newest version, unless all rows will be written; returns its number, 0: there is none."""
        newest = max(self.numbers(), default=0)
        self.keep({newest})  # of an export that was killed, versions that were not sent
        if newest and not full:
            self.fetch(newest)
        return newest

    def fetch_current(self) -> Traffic:
        """Copy what `current.json` names."""
        traffic = self.read_traffic()
        for number in traffic.versions:
            self.fetch(number)
        write_traffic(self.folder, traffic)
        return traffic

    def _checked(self, wanted: StoredFile, folder: StorageFolder | Path, name: str) -> Iterator[Piece]:
        """The content of a file; raises at its end if it is another."""
        total = hashlib.sha256()
        for piece in read_pieces(folder, name, wanted.size_bytes):
            if self._stopped.is_set():
                raise StorageError(f"{folder / name} was not copied to its end: the copy was stopped")
            total.update(piece)
            yield piece
        if total.hexdigest() != wanted.sha256:
            raise StorageError(f"{folder / name} is damaged: its SHA-256 is another", hint=WAY_OUT)

    def _arrived(self, wanted: Collection[str]) -> dict[str, Path]:
        """The wanted files that have arrived; all others are removed, and what a kill left of them."""
        paths = {path.name: path for path in (self.folder / ARRIVED).glob("*")}
        for name in paths.keys() - set(wanted):
            paths.pop(name).unlink()
        return paths

    def _check_room(self, number: int, size_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if size_bytes > free:
            raise CheckpointError(
                f"version {number} of {self.place} needs {format_bytes(size_bytes)}, and {self.folder} has "
                f"{format_bytes(free)}",
                "--cache FOLDER on a larger disk",
            )

    def _lists(self) -> dict[int, StoredVersion]:
        """The lists of the versions in the folder."""
        found: dict[int, StoredVersion] = {}
        for number in list_versions(self.folder):
            with suppress(OSError, msgspec.MsgspecError, SpecError):  # without its list it is copied again
                found[number] = StoredVersion.decode(read_bytes(self._list_path(number)))
        return found

    def _list_path(self, number: int) -> Path:
        return self.folder / LISTS / f"{number:06}.json"

    def _remove(self, number: int) -> None:
        self._list_path(number).unlink(missing_ok=True)  # first, so that no half is taken for a whole
        shutil.rmtree(version_folder(self.folder, number).path, ignore_errors=True)


def _claim(folder: Path, url: str) -> BinaryIO:
    """Lock a folder of copies; returns the file that has the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    own, mine = folder / OWNER, msgspec.json.encode({"url": url})
    if not own.exists():
        if any(folder.iterdir()):
            raise SpecError(f"--cache {folder} has other files", "an empty folder, or that of an earlier call")
        write_new(own, mine)
    elif read_bytes(own) != mine:
        raise SpecError(f"--cache {folder} has versions of another URL than {url}", "another folder")
    file = open_regular(own, "a+b", links=False)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SpecError(f"--cache {folder}: another process uses it", "a folder for each process") from None
    return file

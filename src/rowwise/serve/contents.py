"""The files of a version by their SHA-256, and the digest of all of them.

`files.json` lists the files of an export. It is not trusted: whoever changes a file can change the list, too.
`open_checked` copies a version to a private folder and hashes the copy, so all later reads see the hashed bytes,
whatever happens to the version meanwhile.
"""

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec
import pyarrow as pa

from rowwise.base.errors import CheckpointError, SpecError
from rowwise.base.inside import has_control
from rowwise.base.quantity import format_bytes
from rowwise.base.scratch import Scratch
from rowwise.base.storage.folder import Folder
from rowwise.base.textfile import decode_json, open_regular, read_bytes, refuse_links, write_new
from rowwise.tables.spec import Value

LIST = "files.json"
PIECE_bytes = 1 << 20  # read size
THREADS = 4  # for hashing, one per file


class StoredFile(Value, frozen=True):
    """Checksum and size of a file of a version."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]

    @classmethod
    def of(cls, path: Path, copy: Path | None = None) -> "StoredFile":
        """Hash a file up to its size at opening; `copy`: a new file for the hashed bytes."""
        total, size = hashlib.sha256(), 0
        with ExitStack() as stack:
            file = stack.enter_context(open_regular(path, links=False))
            out = None if copy is None else stack.enter_context(copy.open("xb"))
            size_limit = os.fstat(file.fileno()).st_size
            while piece := file.read(min(PIECE_bytes, size_limit - size)):
                total.update(piece)
                size += len(piece)
                if out is not None:
                    out.write(piece)
        return cls(sha256=total.hexdigest(), size_bytes=size)


Files = Mapping[str, StoredFile]  # by relative path


def digest_of(files: Files) -> str:
    """The digest of a version: of the names and contents of all its files but `files.json`."""
    total = hashlib.sha256()
    for name in sorted(files.keys() - {LIST}):
        total.update(f"{name} {files[name].sha256}\n".encode())
    return total.hexdigest()


def file_names(version: Path) -> list[str]:
    """Relative paths of the files of a version without `files.json`; raises unless all are regular files."""
    names = [path.relative_to(version).as_posix() for path in refuse_links(version)]
    for name in names:
        if has_control(name):
            raise CheckpointError(
                f"{version} has a file {name[:80]!r}", "a name without control characters", hint="remove the file"
            )
    return [name for name in names if name != LIST]


def hash_files(version: Path, copy: Path | None = None, base: Path | None = None) -> dict[str, StoredFile]:
    """Hash all files of a version.

    Args:
        version: its folder.
        copy: a new folder for the hashed bytes.
        base: a version whose checksums are reused for shared hard links.
    """
    names = file_names(version)
    known: Files = {} if base is None else _same_files(version, base, names)
    copies: dict[str, Path | None] = {name: None if copy is None else copy / name for name in names}
    for path in filter(None, copies.values()):
        path.parent.mkdir(parents=True, exist_ok=True)

    def hash_file(name: str) -> StoredFile:
        return known.get(name) or StoredFile.of(version / name, copies[name])

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(hash_file, names), strict=True))


def _same_files(version: Path, base: Path, names: Collection[str]) -> dict[str, StoredFile]:
    with suppress(CheckpointError, OSError):  # the base is damaged: hash all files
        known = read_files(base) or {}
        return {name: known[name] for name in known.keys() & names if (version / name).samefile(base / name)}
    return {}


def write_files(version: Path, files: Files) -> None:
    write_new(version / LIST, msgspec.json.format(msgspec.json.encode(files)))


def read_files(version: Path) -> dict[str, StoredFile] | None:
    """The content of `files.json`, or None for a version of an earlier rowwise, without it."""
    path = version / LIST
    with suppress(FileNotFoundError), reading_export(path):
        return decode_json(read_bytes(path, links=False), dict[str, StoredFile])
    return None


@contextmanager
def reading_export(path: Folder, *others: type[Exception]) -> Iterator[None]:
    """Convert errors of a damaged file, and `others`, to a CheckpointError with a hint."""
    try:
        yield
    except (pa.ArrowException, msgspec.MsgspecError, SpecError, *others) as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:500]}", hint="export the version again") from None


@contextmanager
def open_checked(version: Path, name: str, expect: str | None) -> Iterator[Path]:
    """A version checked for regular files only; with `expect`, a private copy whose digest is verified.

    Args:
        version: its folder.
        name: folder name of the copy, which is deleted at the end of the block.
        expect: the required digest.
    """
    names = file_names(version)
    if expect is None:
        yield version
        return
    with Scratch() as scratch:
        size, free = sum((version / name).stat().st_size for name in names), shutil.disk_usage(scratch.path).free
        if size > free:
            raise CheckpointError(
                f"{version} has {format_bytes(size)}, which are copied to be checked, and {scratch.path.parent} has "
                f"{format_bytes(free)}",
                hint="set TMPDIR to a folder on a larger disk",
            )
        files = hash_files(version, scratch.path / name)
        digest = digest_of(files)
        if digest != expect:
            raise CheckpointError(f"{version} has digest {digest}", f"digest {expect}")
        write_files(scratch.path / name, files)
        yield scratch.path / name


def find_changes(version: Path, listed: Files) -> Iterator[tuple[str, str]]:
    """Files that differ from the list, with the problem of each."""
    actual = hash_files(version)
    for name in sorted(actual.keys() | listed.keys()):
        if name not in actual:
            yield name, f"{version / name} is missing"
        elif name not in listed:
            yield name, f"{version / name} is not in {LIST}"
        elif actual[name] != listed[name]:
            yield name, f"{version / name} does not match its SHA-256"

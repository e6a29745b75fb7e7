"""A file or folder that appears under its name when it is whole, and else not at all.

A kill leaves at most something whose name ends in `.part`, which nothing reads and the next attempt removes.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rowwise.checkpoint.files import sync
from rowwise.checkpoint.write import PART
from rowwise.errors import CheckpointError


@contextmanager
def atomic_output(out: Path) -> Iterator[Path]:
    """Yield a temporary path to write at, and rename it to `out` at the end."""
    if out.exists():
        raise CheckpointError(f"{out} exists already: want another name")
    part = out.with_name(out.name + PART)
    _remove(part)
    done = False
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        yield part
        for path in (*(part.rglob("*") if part.is_dir() else ()), part):
            sync(path)
        part.rename(out)
        sync(out.parent)
        done = True
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{out} was not written: {error.strerror or error}") from error
    finally:
        if not done:
            _remove(part)


@contextmanager
def scratch_beside(out: Path) -> Iterator[Path]:
    """A folder next to `out` for what is needed only while that is written."""
    place = out.with_name(f".{out.name}.rows{PART}")
    _remove(place)
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        _remove(place)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

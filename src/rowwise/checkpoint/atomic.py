"""Atomic output: a file or folder appears under its name only when it is complete.

A kill leaves at most a file or folder whose name ends in `.part`, which no reader accepts and the next attempt removes.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rowwise.base.errors import CheckpointError, RowwiseError
from rowwise.base.textfile import sync
from rowwise.checkpoint.write import PART


@contextmanager
def atomic_output(out: Path) -> Iterator[Path]:
    """Yield a free path to write to; at the end it is synced to the disk and renamed to `out`."""
    if out.exists():
        raise CheckpointError(f"{out} exists already", hint="choose another name")
    unfinished = out.with_name(out.name + PART)
    _remove(unfinished)
    done = False
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        for path in (*(unfinished.rglob("*") if unfinished.is_dir() else ()), unfinished):
            sync(path)
        unfinished.rename(out)
        sync(out.parent)
        done = True
    except OSError as error:
        if isinstance(error, RowwiseError):
            raise
        raise CheckpointError(
            f"{out} was not written: {error.strerror or error}", hint="choose another place"
        ) from error
    finally:
        if not done:
            _remove(unfinished)


@contextmanager
def scratch_beside(out: Path) -> Iterator[Path]:
    """A temporary folder on the file system of `out`."""
    folder = out.with_name(f".{out.name}.rows{PART}")
    _remove(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

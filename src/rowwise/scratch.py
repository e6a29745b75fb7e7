"""Folders for temporary files, of which the next start removes those that a killed process has left.

A folder holds a lock for as long as its process lives, however that ends; one whose lock is free belongs to nobody.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Self, final

PREFIX = "rowwise-tmp-"
LOCK = ".lock"
NEW_S = 3600.0  # an empty folder without a lock is left alone for so long: its process may be about to take it


@final
class Scratch:
    """A folder of this process; `close` removes it."""

    def __init__(self) -> None:
        """Remove what others have left, then make one."""
        sweep()
        self.path, self._lock = _make()

    def close(self) -> None:
        """Remove it and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def keep(self) -> None:
        (self.path / LOCK).unlink()
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep() -> None:
    """Remove the folders of processes that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
                continue
            if (folder / LOCK).exists():
                if _is_free(folder / LOCK):
                    shutil.rmtree(folder, ignore_errors=True)
            elif time.time() - about.st_mtime > NEW_S:
                folder.rmdir()  # what was kept is not empty
        except OSError:  # another start has just removed it, or it was kept
            continue


def _is_free(path: Path) -> bool:
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _make() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(folder / LOCK).st_ino == os.fstat(lock).st_ino:
                return folder, lock
        except OSError:  # a start saw it before it was locked, and is removing it
            pass
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)

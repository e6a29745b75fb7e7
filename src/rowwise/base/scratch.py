"""Creates temporary folders, and removes those of killed processes.

A process holds a file lock in its folder. The system releases it however the process ends, so a folder whose lock is
free is stale.
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
NEW_S = 3600.0  # age at which an empty folder without a lock is stale; a younger one may be about to be locked


@final
class Scratch:
    """A temporary folder of this process; `close` removes it."""

    def __init__(self) -> None:
        """Remove stale folders, then make one."""
        remove_stale_folders()
        self.path, self._lock = _make_locked_folder()

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def keep(self) -> None:
        """Keep the folder after this process, without a lock."""
        (self.path / LOCK).unlink()
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_stale_folders() -> None:
    """Remove the folders of processes that have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            if (folder / LOCK).exists():
                if _is_free(folder / LOCK):
                    shutil.rmtree(folder, ignore_errors=True)
            elif time.time() - status.st_mtime > NEW_S:
                folder.rmdir()  # fails for a folder after `keep`, which is not empty
        except OSError:  # another process removed it, or it is not empty
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


def _make_locked_folder() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # in a shared folder, a host whose clock is ahead took it for a stale one
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(folder / LOCK).st_ino == os.fstat(lock).st_ino:
                return folder, lock
        except OSError:  # another process found it before it was locked, and is removing it
            pass
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)

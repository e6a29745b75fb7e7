"""A thread that polls a store for the versions to serve, and downloads them.

A poll reads one small object. Servers see a version once its download is complete; if the store fails, they continue
with their local versions.
"""

import threading
from collections.abc import Callable, Collection
from typing import Self, final

from rowwise.base.errors import StorageError, one_line
from rowwise.serve.package import read_traffic
from rowwise.serve.traffic import Traffic
from rowwise.serve.version_store import VersionStore

POLL_s, MAX_BACKOFF_s = 1.0, 60.0  # polling interval, doubled on each failure


@final
class StoreFollower:
    """Follows a store while it is entered.

    Args:
        store: with the folder of downloads.
        log: called with lines for the operator, also from the thread.
    """

    def __init__(self, store: VersionStore, log: Callable[[str], None]) -> None:
        self._store, self._log = store, log
        self._failed = False  # at the last poll
        self._guard = threading.Lock()
        self._traffic = self._begin()
        self._in_use = set(self._traffic.versions)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="versions", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._store.stop()  # aborts a download
        self._thread.join()

    def read_traffic(self, in_use: Collection[int]) -> Traffic:
        """The versions to serve, complete in the folder; the folder also keeps versions `in_use`."""
        with self._guard:
            self._in_use = {*in_use, *self._traffic.versions}
            return self._traffic

    def _begin(self) -> Traffic:
        try:
            return self._store.fetch_current()
        except StorageError as error:
            known = self._store.complete()
            traffic = read_traffic(self._store.folder) if known else None
            if traffic is None or not {*traffic.versions} <= known:
                raise
            self._fail(error, traffic)
            return traffic

    def _follow(self) -> None:
        wait_s = POLL_s
        while not self._ending.wait(wait_s):
            try:
                self._poll()
                if self._failed:
                    self._log(f"{self._store.place}: reached again")
                self._failed, wait_s = False, POLL_s
            except Exception as error:  # the thread must go on polling
                self._fail(error, self._traffic)
                wait_s = min(2 * wait_s, MAX_BACKOFF_s)

    def _poll(self) -> None:
        if self._store.read_traffic() != self._traffic:
            traffic = self._store.fetch_current()
            with self._guard:
                self._traffic = traffic
        with self._guard:
            keep = {*self._in_use, *self._traffic.versions}
        self._store.keep(keep)

    def _fail(self, error: Exception, traffic: Traffic) -> None:
        if not self._failed:  # one line per outage
            self._log(f"{one_line(error) or error}: version {traffic.current} goes on answering")
        self._failed = True

"""A thread that looks at a store for the versions that requests are to be answered by, and copies them.

A look reads one small object. Servers see a version once it is complete on this machine; whatever happens to the
store, they go on with those that they have.
"""

import threading
from collections.abc import Callable, Collection
from typing import Self, final

from rowwise.base.errors import StorageError, one_line
from rowwise.serve.package import read_traffic
from rowwise.serve.traffic import Traffic
from rowwise.serve.version_store import VersionStore

LOOK_s, LONGEST_WAIT_s = 1.0, 60.0  # between two looks; while they fail, waits double


@final
class StoreFollower:
    """Follows a store while it is entered.

    Args:
        store: with the folder that versions are copied to.
        tell: called with lines for the operator, from the thread too.
    """

    def __init__(self, store: VersionStore, tell: Callable[[str], None]) -> None:
        self._store, self._tell = store, tell
        self._failed = False  # at the newest look
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
        self._store.stop()  # a copy that goes on
        self._thread.join()

    def read_traffic(self, in_use: Collection[int]) -> Traffic:
        """The versions to answer by, which are complete in the folder; those `in_use` stay there."""
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
        wait_s = LOOK_s
        while not self._ending.wait(wait_s):
            try:
                self._look()
                if self._failed:
                    self._tell(f"{self._store.place}: reached again")
                self._failed, wait_s = False, LOOK_s
            except Exception as error:  # whatever it is, the thread looks again
                self._fail(error, self._traffic)
                wait_s = min(2 * wait_s, LONGEST_WAIT_s)

    def _look(self) -> None:
        if self._store.read_traffic() != self._traffic:
            traffic = self._store.fetch_current()
            with self._guard:
                self._traffic = traffic
        with self._guard:
            kept = {*self._in_use, *self._traffic.versions}
        self._store.keep(kept)

    def _fail(self, error: Exception, traffic: Traffic) -> None:
        if not self._failed:  # of an outage one line
            self._tell(f"{one_line(error) or error}: version {traffic.current} goes on answering")
        self._failed = True

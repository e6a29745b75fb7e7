"""Keeps a share of the requests with their logits or items as Parquet files, for `rowwise audit`.

A file has requests of one kind. Files are written behind the answers, and appear when they are whole. Where the disk is
too slow, requests are left out and counted, and no answer waits.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import pyarrow as pa
from pyarrow import parquet as pq
from torch import Tensor

from rowwise.base.errors import SpecError
from rowwise.serve.package import LOGIT
from rowwise.serve.request import RequestRows
from rowwise.serve.retrieval import ItemQuery, RetrievedItems
from rowwise.serve.traffic import is_chosen
from rowwise.serve.version import ServedVersion
from rowwise.tables.spec import Value

REQUEST, VERSION = "rowwise:request", "rowwise:version"
K, EXACT, AMONG, WITHOUT, ITEMS, SCORES = (  # of a search
    f"rowwise:{name}" for name in ("k", "exact", "among", "without", "items", "scores")
)
FILE_rows, FILE_s = 1 << 16, 5.0  # of a file, at most
WAITING = 1000  # requests that wait to be written, at most


class Recording(Value, frozen=True):
    """Where requests are kept, and how many of them."""

    folder: str
    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise SpecError(f"--record-share: a share of {self.share}", "more than 0, and at most 1 or 100%")


class _Recorded(NamedTuple):
    """A request that waits to be written."""

    kind: tuple[str, int]  # scores or items, and the version, as versions may differ in columns
    rows: int
    make_table: Callable[[], pa.Table]


def _table_of_scores(version: ServedVersion, rows: RequestRows, predictions_RP: Tensor, number: int) -> pa.Table:
    both = {REQUEST: number, VERSION: version.number}
    numbers = {name: pa.array([number] * rows.rows, pa.int64()) for name, number in both.items()}
    logits = zip(version.tasks, predictions_RP[:, ::2].unbind(1), strict=True)
    return pa.table(numbers | rows.arrays | {LOGIT + task: pa.array(x_R.numpy()) for task, x_R in logits})


def _table_of_search(version: ServedVersion, query: ItemQuery, found: RetrievedItems, number: int) -> pa.Table:
    assert version.retriever is not None
    retriever = version.retriever
    keys = retriever.items.keys

    def lists(values: list[Any] | None) -> pa.Array:
        return pa.array([values], pa.list_(keys.type))

    among, without = (
        lists(None if places is None else keys.take(pa.array(places.numpy())).to_pylist()) for places in query.allowed
    )
    more = {
        REQUEST: pa.array([number], pa.int64()), VERSION: pa.array([version.number], pa.int64()),
        K: pa.array([query.k], pa.int64()), EXACT: pa.array([query.exact]), AMONG: among, WITHOUT: without,
        ITEMS: lists(found.items), SCORES: pa.array([found.scores], pa.list_(pa.float32())),
    }  # fmt: skip
    return pa.table(more | {name: query.rows.arrays[name] for name in retriever.schema.names})


@final
class RequestRecorder:
    """Records requests of one worker.

    Args:
        recording: the folder, and the share of requests.
        worker: the number of the worker.
        leave_out: called with the number of requests that are not kept.
    """

    def __init__(self, recording: Recording, worker: int, leave_out: Callable[[int], None]) -> None:
        self._folder, self._share, self._worker = Path(recording.folder), recording.share, worker
        self._waiting: queue.Queue[_Recorded | None] = queue.Queue(WAITING)
        self._number = self._files = 0
        self._leave_out = leave_out
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()

    def add(self, version: ServedVersion, rows: RequestRows, predictions_RP: Tensor) -> None:
        """Keep a request, if it is one of the share."""
        table_of = partial(_table_of_scores, version, rows, predictions_RP)
        self._keep(("scores", version.number), rows.rows, table_of)

    def add_search(self, version: ServedVersion, query: ItemQuery, found: RetrievedItems) -> None:
        """Keep a request for items, with the items of its answer."""
        self._keep(("items", version.number), 1, partial(_table_of_search, version, query, found))

    def _keep(self, kind: tuple[str, int], rows: int, table_of: Callable[[int], pa.Table]) -> None:
        self._number += 1
        if is_chosen(self._number, self._share):
            try:
                self._waiting.put_nowait(_Recorded(kind, rows, partial(table_of, self._number)))
            except queue.Full:
                self._leave_out(1)

    def close(self) -> None:
        """Write the requests that still wait."""
        self._waiting.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        ended = False
        while not ended:
            kept: dict[tuple[str, int], list[_Recorded]] = {}
            rows, end_s = 0, time.monotonic() + FILE_s
            while rows < FILE_rows and (left_s := end_s - time.monotonic()) > 0:
                try:
                    one = self._waiting.get(timeout=left_s)
                except queue.Empty:
                    break
                if one is None:
                    ended = True
                    break
                kept.setdefault(one.kind, []).append(one)
                rows += one.rows
            for of_kind in kept.values():
                self._write(of_kind)

    def _write(self, kept: Sequence[_Recorded]) -> None:
        """One file of requests to one version; its name says when it was made, by which worker."""
        name = f"{time.time_ns() // 1000}-{self._worker}-{self._files}.parquet"
        self._files += 1
        unfinished = self._folder / f"{name}.part"
        try:
            pq.write_table(pa.concat_tables([one.make_table() for one in kept]), unfinished)
            unfinished.replace(self._folder / name)
        except Exception as error:  # the thread has to go on, as `close` waits for it
            self._leave_out(len(kept))
            print(f"{len(kept)} requests were not recorded: {unfinished}: {error}", file=sys.stderr)
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)

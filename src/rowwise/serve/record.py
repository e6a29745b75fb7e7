"""Records a share of the requests with their logits or items as Parquet files, for `rowwise audit`.

A file has requests of one kind. A background thread writes files, which appear once complete. If the disk is too slow,
requests are dropped and counted, and no response waits.
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
FILE_rows, FILE_s = 1 << 16, 5.0  # maximum rows and duration of a file
MAX_WAITING = 1000  # maximum number of requests to write


class Recording(Value, frozen=True):
    """The folder of records, and the share of requests to record."""

    folder: str
    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise SpecError(f"--record-share: a share of {self.share}", "more than 0, and at most 1 or 100%")


class _Recorded(NamedTuple):
    """A request to write."""

    kind: tuple[str, int]  # scores or items, with the version, as columns may differ between versions
    rows: int
    make_table: Callable[[], pa.Table]


def _table_of_scores(version: ServedVersion, rows: RequestRows, predictions_RP: Tensor, number: int) -> pa.Table:
    ids = {REQUEST: number, VERSION: version.number}
    numbers = {name: pa.array([number] * rows.rows, pa.int64()) for name, number in ids.items()}
    logits = zip(version.tasks, predictions_RP[:, ::2].unbind(1), strict=True)
    return pa.table(numbers | dict(rows.arrays) | {LOGIT + task: pa.array(x_R.numpy()) for task, x_R in logits})


def _table_of_search(version: ServedVersion, query: ItemQuery, retrieved: RetrievedItems, number: int) -> pa.Table:
    assert version.retriever is not None
    retriever = version.retriever
    keys = retriever.items.keys

    def list_column(values: list[Any] | None) -> pa.Array:
        return pa.array([values], pa.list_(keys.type))

    among, without = (
        list_column(None if places is None else keys.take(pa.array(places.numpy())).to_pylist())
        for places in query.allowed
    )
    columns = {
        REQUEST: pa.array([number], pa.int64()), VERSION: pa.array([version.number], pa.int64()),
        K: pa.array([query.k], pa.int64()), EXACT: pa.array([query.exact]), AMONG: among, WITHOUT: without,
        ITEMS: list_column(retrieved.items), SCORES: pa.array([retrieved.scores], pa.list_(pa.float32())),
    }  # fmt: skip
    return pa.table(columns | {name: query.rows.arrays[name] for name in retriever.schema.names})


@final
class RequestRecorder:
    """Recorder of one worker.

    Args:
        recording: the folder, and the share of requests.
        worker: the number of the worker.
        drop: called with the number of dropped requests.
    """

    def __init__(self, recording: Recording, worker: int, drop: Callable[[int], None]) -> None:
        self._folder, self._share, self._worker = Path(recording.folder), recording.share, worker
        self._waiting: queue.Queue[_Recorded | None] = queue.Queue(MAX_WAITING)
        self._number = self._files = 0
        self._drop = drop
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()

    def add(self, version: ServedVersion, rows: RequestRows, predictions_RP: Tensor) -> None:
        """Record a request if it is sampled."""
        table_of = partial(_table_of_scores, version, rows, predictions_RP)
        self._sample(("scores", version.number), rows.rows, table_of)

    def add_search(self, version: ServedVersion, query: ItemQuery, retrieved: RetrievedItems) -> None:
        """Record a request for items, with its answer, if it is sampled."""
        self._sample(("items", version.number), 1, partial(_table_of_search, version, query, retrieved))

    def _sample(self, kind: tuple[str, int], rows: int, table_of: Callable[[int], pa.Table]) -> None:
        self._number += 1
        if is_chosen(self._number, self._share):
            try:
                self._waiting.put_nowait(_Recorded(kind, rows, partial(table_of, self._number)))
            except queue.Full:
                self._drop(1)

    def close(self) -> None:
        """Write the remaining requests."""
        self._waiting.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        ended = False
        while not ended:
            requests_by_kind: dict[tuple[str, int], list[_Recorded]] = {}
            rows, end_s = 0, time.monotonic() + FILE_s
            while rows < FILE_rows and (left_s := end_s - time.monotonic()) > 0:
                try:
                    request = self._waiting.get(timeout=left_s)
                except queue.Empty:
                    break
                if request is None:
                    ended = True
                    break
                requests_by_kind.setdefault(request.kind, []).append(request)
                rows += request.rows
            for requests in requests_by_kind.values():
                self._write(requests)

    def _write(self, requests: Sequence[_Recorded]) -> None:
        """Write one file for one version, named by time and worker."""
        name = f"{time.time_ns() // 1000}-{self._worker}-{self._files}.parquet"
        self._files += 1
        unfinished = self._folder / f"{name}.part"
        try:
            pq.write_table(pa.concat_tables([request.make_table() for request in requests]), unfinished)
            unfinished.replace(self._folder / name)
        except Exception as error:  # the thread must go on, as `close` joins it
            self._drop(len(requests))
            print(f"{len(requests)} requests were not recorded: {unfinished}: {error}", file=sys.stderr)
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)

"""A trainer that needs three times what one worker makes: how many workers a service comes to, and what is waited.

Workers wait instead of working, so that the machine's cores do not matter. Apart from `ingest.py`, as workers import
the reader from here.
"""

import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rowwise.ingest.columns import Columns, Sparse
from rowwise.ingest.prepare import Preparation, PreparationTask
from rowwise.ingest.reader import Split
from rowwise.ingest.service.local import Service, Workers

MAKES_S = 0.3  # a worker, a split
TAKES_S = 0.1  # the trainer
MOST = 8
WARM_S = 4.0  # until the first workers are there


class Slow:
    """A reader that waits."""

    schema = pa.schema({"label": pa.int8(), "c": pa.int64()})

    def __init__(self, count: int) -> None:
        self._count = count

    def splits(self) -> tuple[Split, ...]:
        """A few rows each."""
        return tuple(Split(source="slow", start=i, stop=i + 1, first_row=8 * i, rows=8) for i in range(self._count))

    def read(self, split: Split, columns: Sequence[str]) -> pa.Table:
        """After a while."""
        time.sleep(MAKES_S)
        made = {"label": pa.array(np.zeros(8, np.int8)), "c": pa.array(np.full(8, split.start))}
        return pa.table(made).select(list(columns))


def measure(run_s: float, most: int = MOST) -> dict:
    """Take splits for so long; what happened in each second half."""
    reader = Slow(int(run_s / TAKES_S))
    columns = Columns(labels=("label",), sparse=(Sparse(column="c", ids="direct"),))
    task = PreparationTask(
        reader=reader, splits=reader.splits(), preparation=Preparation(columns=columns, table_rows={}, shuffle=False)
    )
    seen: list[tuple[float, float, int]] = []  # second, waited since the beginning, workers
    with Service(task, Workers(most=most)) as service:
        client, begin_s = service.client(), time.perf_counter()
        for _ in client.splits(0, 0, len(task.splits)):
            time.sleep(TAKES_S)
            health = client.health
            seen.append((time.perf_counter() - begin_s, health.waited_s, health.workers))
    half = [one for one in seen if one[0] >= seen[-1][0] / 2]
    first = [one for one in seen if one[0] <= WARM_S] or seen[:1]
    counts = [workers for *_, workers in half]
    return {
        "splits": len(seen),
        "seconds": seen[-1][0],
        "workers": max(set(counts), key=counts.count),
        "most_workers": max(counts),
        "fewest_workers": min(counts),
        "waits": (half[-1][1] - half[0][1]) / (half[-1][0] - half[0][0]),
        "waits_at_first": first[-1][1] / first[-1][0],
    }

"""Measures the hand-over of a split to a trainer: the message, mapping its memory, and copies into batches.

Both ends are in this process and do what the worker's, the host's and the client's do: a message over a socket, arrays
found in memory that is mapped twice, and `collate`. Known limits: the switch from one process to another, some 20
microseconds a split.
"""

import socket
from time import perf_counter
from typing import final

import numpy as np

from rowwise.ingest.block import EncodedRows
from rowwise.ingest.columns import Columns
from rowwise.ingest.service.coordinator import SplitDelivery, SplitReady
from rowwise.ingest.service.memory import SlotMemory
from rowwise.ingest.service.messages import Connection


@final
class HandOff:
    """The hand-off of a prepared split to a trainer in this process.

    Args:
        file: the memory of a slot, to own.
        columns: what the rows hold.
        batch: rows of a batch.
    """

    def __init__(self, file: int, columns: Columns, batch: int) -> None:
        self._memory, self._columns, self._batch = SlotMemory(file), columns, batch
        ends = socket.socketpair()
        self._ours, self._theirs = Connection(ends[0]), Connection(ends[1])

    def time(self, split: SplitReady) -> float:
        """Seconds from a split that lies ready to its batches."""
        from rowwise.ingest.collate import SplitRows, collate

        begin_s = perf_counter()
        self._ours.send(SplitDelivery(0, split.split_id, 0, split, workers=1, ready=1))
        [(message, _)] = self._receive()
        assert isinstance(message, SplitDelivery)
        assert message.split is not None
        memory = np.frombuffer(self._memory.map(message.split.layout.size), np.uint8)
        encoded = EncodedRows.from_block(memory, message.split.layout)
        for begin in range(0, encoded.rows, self._batch):
            collate([SplitRows(encoded, begin, min(begin + self._batch, encoded.rows))], self._columns)
        return perf_counter() - begin_s

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()
        self._memory.close()

    def _receive(self) -> list[tuple[object, int | None]]:
        while True:
            messages: list[tuple[object, int | None]] = list(self._theirs.receive())
            if messages:
                return messages

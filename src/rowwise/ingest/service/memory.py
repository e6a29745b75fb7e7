"""Anonymous shared memory: the system frees it when the last process that holds it ends, killed or not.

The host makes a slot and sends its file descriptor; a worker grows it to the size of a split, and clients map it. Slots
are reused, so their pages are already mapped in.
"""

import contextlib
import mmap
import os
import tempfile
from typing import final

import numpy as np
from numpy.typing import NDArray

GROW_BYTES = 1 << 20  # sizes are multiples of this, so that a slightly larger split seldom needs a new mapping


def make_memory() -> int:
    """A file descriptor of empty shared memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rowwise-ingest")
    with tempfile.TemporaryFile() as file:  # systems without memfd
        return os.dup(file.fileno())


@final
class SlotMemory:
    """This process's mapping of a slot; it owns the file descriptor."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._map: mmap.mmap | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that are mapped here; another process may have grown the slot since."""
        return 0 if self._map is None else len(self._map)

    def resize(self, size_bytes: int) -> NDArray[np.uint8]:
        """The first `size_bytes` bytes, to write to; grows the slot where it is smaller."""
        if self.size_bytes < size_bytes or self._map is None:
            whole_bytes = max(-(-size_bytes // GROW_BYTES) * GROW_BYTES, GROW_BYTES)
            if os.fstat(self.file).st_size < whole_bytes:
                os.ftruncate(self.file, whole_bytes)
            self._map = mmap.mmap(self.file, 0)
        return np.frombuffer(self._map, np.uint8, size_bytes)

    def map(self, size_bytes: int) -> mmap.mmap:
        """At least `size_bytes` bytes, to read what another process has written."""
        if self.size_bytes < size_bytes or self._map is None:
            self._map = mmap.mmap(self.file, 0)  # as large as the slot is now
        return self._map

    def close(self) -> None:
        """Close the descriptor. Arrays that view the memory stay valid."""
        self._map = None
        with contextlib.suppress(OSError):
            os.close(self.file)

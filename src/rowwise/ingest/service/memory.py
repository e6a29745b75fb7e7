"""Memory that processes share, without a name: it goes with the last process that has it, however that ends.

The host makes a slot and hands it out; a worker makes it as large as a split needs, and clients look into it. Used
again and again, its pages are there already.
"""

import contextlib
import mmap
import os
import tempfile
from typing import final

import numpy as np
from numpy.typing import NDArray

GROW_BYTES = 1 << 20  # sizes are whole megabytes, so that nearly equal splits fit the same memory


def make_memory() -> int:
    """A file descriptor of memory of no size yet."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rowwise-ingest")
    with tempfile.TemporaryFile() as file:  # a file without a name, where the system has no such memory
        return os.dup(file.fileno())


@final
class SlotMemory:
    """A process's own view of a slot."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._map: mmap.mmap | None = None

    @property
    def size_bytes(self) -> int:
        """The size of the mapping in this process."""
        return 0 if self._map is None else len(self._map)

    def take(self, size_bytes: int) -> NDArray[np.uint8]:
        """So many bytes to write to; made larger where it is too small."""
        if self.size_bytes < size_bytes or self._map is None:
            whole_bytes = max(-(-size_bytes // GROW_BYTES) * GROW_BYTES, GROW_BYTES)
            if os.fstat(self.file).st_size < whole_bytes:
                os.ftruncate(self.file, whole_bytes)
            self._map = mmap.mmap(self.file, 0)
        return np.frombuffer(self._map, np.uint8, size_bytes)

    def look(self, size_bytes: int) -> mmap.mmap:
        """At least so many bytes, as another process has written them."""
        if self.size_bytes < size_bytes or self._map is None:
            self._map = mmap.mmap(self.file, 0)  # all there is by now
        return self._map

    def close(self) -> None:
        """Release the mapping; views keep their memory."""
        self._map = None
        with contextlib.suppress(OSError):
            os.close(self.file)

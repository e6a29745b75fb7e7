"""The Storage protocol: named objects that are written atomically.

[Note: Objects]
An object is a name, with slashes, and bytes. It appears when all of its bytes are stored; a reader never sees a part of
it. `write` replaces an object, `create` never does: of several callers that create an object with different bytes, one
succeeds. Objects of several files, such as a checkpoint, are complete when their manifest is, which is therefore
created last. Every method retries transient failures until a deadline; so a request may have taken effect
more than once, which is harmless, as all methods are idempotent.
"""

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from rowwise.base.errors import StorageError

Piece = bytes | bytearray | memoryview
Pieces = Callable[[], Iterable[Piece]]  # the bytes of an object from the beginning, at each call


class MissingObjectError(StorageError):
    """There is no object of this name."""


class ObjectExistsError(StorageError):
    """An object of this name exists, with other bytes."""


class StoredObject(NamedTuple):
    """An object, without its bytes."""

    name: str
    size_bytes: int
    modified_s: float  # seconds since 1970


class SameObject:
    """Raises when several reads of one object get different versions, by the tags of their responses."""

    def __init__(self) -> None:
        self._lock, self._tag = threading.Lock(), ""

    def check(self, place: str, tag: str | None) -> None:
        with self._lock:
            self._tag = self._tag or tag or ""
            if tag and tag != self._tag:
                raise StorageError(f"{place} has changed while it was read", hint="try again")


class Storage(Protocol):
    """The objects below one URL or folder; see [Note: Objects]. Safe to use from several threads."""

    @property
    def url(self) -> str: ...

    def read(self, name: str, begin: int = 0, end: int | None = None, same: SameObject | None = None) -> memoryview:
        """The bytes of an object from `begin` to `end`, or to its last; fewer if the object ends before.

        `same`: shared by reads that have to see one version; they raise if the object is replaced between them.
        """
        ...

    def stat(self, name: str) -> StoredObject:
        """Size and time of an object; raises `MissingObjectError` if there is none."""
        ...

    def write(self, name: str, pieces: Pieces, size_bytes: int) -> None:
        """Store an object of `size_bytes`; replaces one of the same name."""
        ...

    def create(self, name: str, content: bytes) -> None:
        """Store an object only if there is none; raises `ObjectExistsError` unless one has these bytes already."""
        ...

    def list(self, prefix: str) -> list[StoredObject]:
        """The objects whose names begin with a prefix, which is empty or ends with a slash; sorted by name."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object if it exists."""
        ...

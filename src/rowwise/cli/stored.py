"""Opens versions of a model in an object store, with a local folder for downloads."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rowwise.base.errors import SpecError
from rowwise.base.storage.cloud import RetryPolicy
from rowwise.base.storage.folder import parse_folder

if TYPE_CHECKING:
    from rowwise.serve.version_store import VersionStore


@contextmanager
def open_store(path: str, cache: Path | None, patience_s: float | None = None) -> "Iterator[VersionStore | None]":
    """The store at a URL, or None if the path is a local folder.

    Args:
        path: a folder or a URL.
        cache: folder for downloads, or None for a temporary one.
        patience_s: total time to retry a failed request, or None for the default.
    """
    storage = parse_folder(path, None if patience_s is None else RetryPolicy(patience_s))
    if isinstance(storage, Path):
        if cache is not None:
            raise SpecError(f"--cache {cache} with {path}, which is not a URL: versions in a folder are not copied")
        yield None
        return
    from rowwise.base.scratch import Scratch
    from rowwise.serve.version_store import VersionStore

    with Scratch() if cache is None else nullcontext() as scratch:
        folder = scratch.path / "versions" if scratch is not None else cache
        assert folder is not None
        with VersionStore(storage, folder) as store:
            yield store

"""Versions of a model at the URL of an object store, and the folder that a command copies them to."""

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
    """The store at a URL; None: the path is that of a folder.

    Args:
        path: of a folder, or a URL.
        cache: the folder for copies; None: a temporary one.
        patience_s: how long requests that fail are repeated; None: as long as usual.
    """
    place = parse_folder(path, None if patience_s is None else RetryPolicy(patience_s))
    if isinstance(place, Path):
        if cache is not None:
            raise SpecError(f"--cache {cache} with {path}, which is no URL: versions in a folder are not copied")
        yield None
        return
    from rowwise.base.scratch import Scratch
    from rowwise.serve.version_store import VersionStore

    with Scratch() if cache is None else nullcontext() as scratch:
        folder = scratch.path / "versions" if scratch is not None else cache
        assert folder is not None
        with VersionStore(place, folder) as store:
            yield store

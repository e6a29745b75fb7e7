"""A warehouse at the URL of an object store: each file is sent once it is complete, and the manifest last.

The journal is an object beside the files, with which the same command goes on after a kill. While it is there, readers
refuse the URL. Rows that are sorted wait in a temporary folder, which is made again after a kill.
"""

from functools import partial
from pathlib import Path
from typing import final

from rowwise.errors import DataError
from rowwise.storage.folder import StorageFolder, read_file, read_pieces
from rowwise.storage.interface import ObjectExistsError
from rowwise.textfile import MOST_BYTES


@final
class StoredWarehouse:
    """The objects of a warehouse; `place`: its URL."""

    def __init__(self, place: StorageFolder) -> None:
        self.place = place
        self.sizes: dict[str, int] = {}  # of objects, when the conversion began

    def fetch(self, folder: Path) -> None:
        """Copy what an earlier process noted into a folder; raises if the place has anything but a warehouse."""
        self.sizes = {name: one.size_bytes for name, one in self.place.relative_names().items()}
        notes = [name for name in self.sizes if name.startswith(f"{folder.name}/")]
        if self.sizes and not notes:
            raise DataError(f"{self.place}: has objects and is not a warehouse", "a new URL")
        for name in notes:
            short = name.removeprefix(f"{folder.name}/")
            if "/" not in short:
                (folder / short).write_bytes(read_file(self.place / folder.name, short, MOST_BYTES))

    def begin(self, name: str, content: bytes) -> None:
        """Store the first state of the journal, unless another process has."""
        try:
            self.place.storage.create(self.place.inside(name), content)
        except ObjectExistsError:
            raise DataError(f"{self.place}: another process converts into it", hint="wait until it ends") from None

    def send(self, file: Path, name: str) -> None:
        size_bytes = file.stat().st_size
        pieces = partial(read_pieces, file.parent, file.name, size_bytes)
        self.place.storage.write(self.place.inside(name), pieces, size_bytes)

    def delete(self, name: str) -> None:
        self.place.storage.delete(self.place.inside(name))

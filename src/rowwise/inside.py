"""Names that become files: one plain component of a path, and what is opened by one is a regular file of its folder.

Its own file because manifests, journals and runs come from strangers: a name in one must not lead out of its folder,
by `..`, a path or a link.
"""

import errno
import unicodedata
from pathlib import Path
from typing import BinaryIO

from rowwise.textfile import open_regular

MOST_BYTES = 200  # of a name; file systems allow 255, and endings are added
NOT_SHOWN = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of characters, ends of lines


def fault_of_name(name: str, most_bytes: int = MOST_BYTES) -> str | None:
    """Why a name is not one plain component of a path; None: it is."""
    if not name:
        return "it is empty"
    if "/" in name or "\\" in name:
        return "it has a slash"
    if name.startswith("."):
        return "it begins with a dot"
    if has_control(name):
        return "it has a control character"
    if len(name.encode()) > most_bytes:
        return f"it is longer than {most_bytes} bytes"
    return None


def has_control(text: str) -> bool:
    """Whether it has what no line can show."""
    return not text.isprintable() and any(unicodedata.category(character) in NOT_SHOWN for character in text)


def has_no_link(folder: Path, inside: str) -> bool:
    """Whether no folder and no file on the way from a folder to what is inside of it is a link."""
    return (folder / inside).resolve() == folder.resolve() / inside


def open_inside(folder: Path, name: str) -> BinaryIO:
    """A regular file of a folder, to be read; anything else is an OSError that says what it is."""
    fault = fault_of_name(name)
    if fault:
        raise OSError(errno.EINVAL, f"the name {name[:80]!r} is not used: {fault}", str(folder))
    return open_regular(folder / name, links=False)

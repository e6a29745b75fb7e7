"""Checks file names from untrusted manifests, journals and runs: one plain path component, and a regular file.

A name must not lead out of its folder, by `..`, a path or a link.
"""

import errno
import unicodedata
from pathlib import Path
from typing import BinaryIO

from rowwise.base.textfile import open_regular, parse_whole

MAX_BYTES = 200  # of a name; file systems allow 255, and suffixes are added
CONTROL_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")  # control characters, surrogates, line and paragraph separators


def fault_of_name(name: str, max_bytes: int = MAX_BYTES) -> str | None:
    """The reason why a name is not a plain component of a path; None for a valid name."""
    if not name:
        return "it is empty"
    if "/" in name or "\\" in name:
        return "it has a slash"
    if name.startswith("."):
        return "it begins with a dot"
    if has_control(name):
        return "it has a control character"
    if len(name.encode()) > max_bytes:
        return f"it is longer than {max_bytes} bytes"
    return None


def number_in(name: str, digits: int = 1) -> int | None:
    """The number that a name spells with at least `digits` ASCII digits; None for any other spelling.

    Two spellings of one number would be two folders.
    """
    number = parse_whole(name)
    return number if number is not None and f"{number:0{digits}}" == name else None


def has_control(text: str) -> bool:
    """Whether a text has control characters, surrogates or separators of lines."""
    return not text.isprintable() and any(unicodedata.category(character) in CONTROL_CATEGORIES for character in text)


def has_no_link(folder: Path, inside: str) -> bool:
    """Whether no component of a path inside a folder is a symbolic link."""
    return (folder / inside).resolve() == folder.resolve() / inside


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a regular file of a folder for reading; anything else raises an OSError."""
    fault = fault_of_name(name)
    if fault:
        raise OSError(
            errno.EINVAL, f"the name {name[:80]!r} is not allowed: {fault}: expected one plain file name", str(folder)
        )
    return open_regular(folder / name, links=False)

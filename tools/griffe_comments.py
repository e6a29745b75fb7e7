"""An extension of griffe, which reads sources for the reference of the Python API."""

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from field_comments import comments_of


class FieldComments(griffe.Extension):
    """Comments beside fields are their docstrings."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[Any, dict[int, str]] = {}

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        path = attr.filepath
        if path not in self.read:
            self.read[path] = comments_of(path.read_text())
        said = self.read[path].get(attr.lineno or 0)
        if said and attr.docstring is None:
            attr.docstring = griffe.Docstring(f"{said[0].upper()}{said[1:]}.", parent=attr)

"""How a recipe names a class of the user's: path.py:Class. Apart from `own`, which imports it, and torch with it."""

from pathlib import Path

from rowwise.errors import SpecError


def split_name(name: str) -> tuple[Path, str]:
    """The file and the class."""
    path, colon, class_name = name.rpartition(":")
    if not colon or not path.endswith(".py") or not class_name.isidentifier():
        raise SpecError(
            f"model: {name!r}: want path.py:Class, or a mapping with kind: dlrm, deepfm, dcn, wide_deep, ..."
        )
    return Path(path), class_name

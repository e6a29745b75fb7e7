"""Splits path.py:Class, a recipe's name for a user model, without torch, which `user_model` imports."""

from pathlib import Path

from rowwise.errors import SpecError


def split_name(name: str) -> tuple[Path, str]:
    path, colon, class_name = name.rpartition(":")
    if not colon or not path.endswith(".py") or not class_name.isidentifier():
        raise SpecError(
            f"model: {name!r}: want path.py:Class, or a mapping with kind: dlrm, deepfm, dcn, wide_deep, ..."
        )
    return Path(path), class_name

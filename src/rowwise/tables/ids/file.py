"""Id maps as safetensors files: the words are tensors; the header, in JSON, has the shape and the table's name.

A map of another table is refused before any row is trained with it.
"""

import os
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rowwise.base.errors import SpecError
from rowwise.base.textfile import open_regular
from rowwise.base.value import Value
from rowwise.tables.ids.check import find_fault
from rowwise.tables.ids.idmap import FoldAssignment, IdMap, MapShape
from rowwise.tables.spec import Table

FORMAT = 1
HEADER, WORDS = "rowwise_id_map", "words"


class Header(Value, frozen=True):
    """The header of an id map's file, as JSON."""

    format: int
    table: str
    digest: str
    shape: MapShape
    about: dict[str, Any]
    folding: FoldAssignment | None = None


def save(path: Path | str, table_name: str, id_map: IdMap) -> None:
    """Write the map of a table; atomic, so a killed process leaves the old file or the new one."""
    path = Path(path)
    facts = {"format": FORMAT, "table": table_name, "digest": id_map.digest, "about": dict(id_map.about)}
    header = Header(**facts, shape=id_map.shape, folding=id_map.folding)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        named_words = zip(_tensor_names(len(id_map.fold_words)), (id_map.words, *id_map.fold_words), strict=True)
        tensors = {name: np.ascontiguousarray(words, "<i8") for name, words in named_words}
        save_file(tensors, temporary, metadata={HEADER: msgspec.json.encode(header).decode()})
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path | str, table: Table, digest: str = "") -> IdMap:
    """Read the map of a table; raises if the file's table, ids or digest differ; an empty `digest` is not checked."""
    path = Path(path)
    header, id_map = _read(path)
    if header.digest != id_map.digest:
        raise SpecError(f"{path} is damaged: digest {id_map.digest}", header.digest, hint=REMAKE_HINT)
    expected = f"table {table.name!r} of {table.rows} ids" + (f" and digest {digest}" if digest else "")
    in_file = f"table {header.table!r} of {id_map.shape.ids} ids and digest {header.digest}"
    if (header.table, id_map.shape.ids) != (table.name, table.rows) or digest not in ("", header.digest):
        raise SpecError(f"{path} is the id map of {in_file}", f"that of {expected}", hint=REMAKE_HINT)
    fault = find_fault(id_map)
    if fault is not None:
        raise SpecError(f"{path}, the id map of {in_file}, cannot be used: {fault}", hint=REMAKE_HINT)
    return id_map


REMAKE_HINT = "make it anew with `rowwise compress`, or name the map of this table"


def _read(path: Path) -> tuple[Header, IdMap]:
    try:
        open_regular(path).close()  # raises for a FIFO instead of blocking
        with safe_open(path, "numpy") as file:
            text = (file.metadata() or {}).get(HEADER)
            names = sorted(file.keys())
            if text is None or names != sorted(_tensor_names(len(names) - 1)):
                _refuse(path, "its tensors or its header are those of another format")
            words, *fold_words = (file.get_tensor(name) for name in _tensor_names(len(names) - 1))
        version = msgspec.json.decode(text, type=dict[str, Any]).get("format")
        if version != FORMAT:
            _refuse(path, f"its format is {version!r}: expected {FORMAT}")
        header = msgspec.json.decode(text, type=Header)
    except (SafetensorError, msgspec.DecodeError, OSError) as error:
        _refuse(path, (isinstance(error, OSError) and error.strerror) or str(error))
    for tensor in (words, *fold_words):
        if tensor.dtype != np.int64 or tensor.ndim != 1:
            _refuse(path, f"its words are {tensor.dtype} of shape {tensor.shape}: expected int64 [n]")
    folds = 0 if header.folding is None else header.folding.count
    if len(fold_words) != folds:
        _refuse(path, f"it has words of {len(fold_words)} folds: expected {folds}")
    id_map = IdMap(
        shape=header.shape, words=words, about=header.about, folding=header.folding, fold_words=tuple(fold_words)
    )
    return header, id_map


def _tensor_names(folds: int) -> list[str]:
    """Names of the map's words, then of each fold's."""
    return [WORDS, *(f"{WORDS}_{fold}" for fold in range(folds))]


def _refuse(path: Path, reason: str) -> NoReturn:
    raise SpecError(f"{path} cannot be read as an id map: {reason}", hint=REMAKE_HINT)

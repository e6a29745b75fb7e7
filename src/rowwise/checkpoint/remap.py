"""A checkpoint in which a table has another id map, and its rows have moved along, so that training goes on from it.

What a row becomes is said in [Note: Moved rows] in `hashing/refresh.py`. Everything else is copied as it is. Known
limits: memory: one tensor of old rows is held as it is stored, and 4 bytes an id for each part of the map.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import msgspec
import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rowwise.checkpoint.manifest import CheckpointManifest, TensorEntry
from rowwise.checkpoint.named import nearest_name, tables_of
from rowwise.checkpoint.parts import LocalShard
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.stream import shard_outline, write_streamed
from rowwise.checkpoint.windows import Tell
from rowwise.errors import CheckpointError, DataError, SpecError
from rowwise.hashing.file import load
from rowwise.hashing.idmap import IdMap
from rowwise.hashing.mapped import IDENTITY, MapIdentity, identity_of
from rowwise.hashing.refresh import Ids, Move, check_movable, find_moves, moved_rows, same_rows
from rowwise.models.wide import ENDING
from rowwise.ops.idmap import map_ids
from rowwise.ops.rowtype import pack, unpack
from rowwise.spec import Table, Value
from rowwise.textfile import open_regular

COUNTS = "counts/"  # in what `rowwise compress` keeps of its probe
MAPPED = re.compile(rf"model/(?P<path>.+\.)?maps\.(?P<table>[^.]+)\.{IDENTITY}")


class RemappedTable(Value, frozen=True):
    """Counts of rows that were kept, moved and filled for a table, in one of the modules that hold it."""

    table: str
    rows: int
    kept: int  # to the bit
    empty: int  # no id has them
    ids: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _MappedTensors:
    """A table with a map in a module, by the names that the checkpoint has for it."""

    table: str
    path: str  # of the module, with a dot at its end
    known: MapIdentity

    @property
    def maps(self) -> str:
        """The prefix of the tensor names of its id map."""
        return f"model/{self.path}maps.{self.table}."

    def stored(self, index: int) -> str:
        """The stored rows of a part, by the name that `hashing.open.stored_tables` gives, without the prefix."""
        end = f"-{index}" if len(self.known.shape.parts) > 1 else ""
        return f"{self.path}stored.{self.table}{end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemapPlan:
    """Tensors to copy whole, tensors to fill from rows, and tensors to leave out."""

    whole: dict[str, Tensor] = field(default_factory=dict)  # by name, all of it
    from_rows: dict[str, Move] = field(default_factory=dict)  # by name: rows and state that move
    left: set[str] = field(default_factory=set)  # names that stay behind


def remap(
    checkpoint: Checkpoint, folder: Path, table: str, file: Path, counts: Path | None = None, tell: Tell | None = None
) -> list[RemappedTable]:
    """Write a checkpoint in which a table, and the linear part's table of the same ids, has the map of a file.

    Args:
        checkpoint: what is read, and stays as it is.
        folder: what is written; must not exist.
        table: its name, as the model calls it.
        file: the new map, see `hashing.file`.
        counts: how often each id comes, as `rowwise compress` keeps it; None: all weigh the same.
        tell: hears how many bytes of how many are done.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already: want another name")
    homes = _homes(checkpoint, table)
    ids = homes[0].known.shape.ids
    new = load(file, Table(name=table, rows=ids, dim=1))
    weights_N = None if counts is None else _weights(counts, table, ids)
    plan, told = _RemapPlan(), list[RemappedTable]()
    known: dict[str, tuple[Move, ...]] = {}  # by the old map, which modules may have in common
    for home in homes:
        _change_map(checkpoint, home, new, plan)
        old = _old_map(checkpoint, home)
        if same_rows(old, new):
            rows = new.shape.rows
            told.append(RemappedTable(table=home.table, rows=rows, kept=rows, empty=0, ids=ids))
            continue
        try:
            check_movable(old.shape, new.shape, _dim(checkpoint, home))
            found = known.get(old.digest) or find_moves(old, new, _look_up)
        except SpecError as error:
            raise CheckpointError(f"{checkpoint.folder}: table {home.table!r} cannot have {file}: {error}") from None
        known[old.digest] = found
        for index, move in enumerate(found):
            plan.from_rows.update(dict.fromkeys(_tensors(checkpoint, home, index), move))
        told.append(_describe_remap(home, found, ids))
    _write(checkpoint, folder, plan, weights_N, tell)
    return told


def _homes(checkpoint: Checkpoint, table: str) -> list[_MappedTensors]:
    """Tensors of the table and its id map, in each module that has it."""
    found: list[_MappedTensors] = []
    there: list[str] = []
    for name in checkpoint.names():
        match = MAPPED.fullmatch(name)
        if match is None:
            continue
        there.append(match["table"])
        if match["table"] in (table, table + ENDING):
            known = identity_of(checkpoint.load(name))
            found.append(_MappedTensors(table=match["table"], path=match["path"] or "", known=known))
    digests = {home.known.digest for home in found if home.table == table}
    if digests:  # a table that is only called so has a map of its own
        return sorted((home for home in found if home.known.digest in digests), key=lambda home: home.table)
    if table in tables_of(checkpoint.manifest):
        why = "has no id map: each id has a row of its own"
    elif there:
        why = f"is none with an id map; {nearest_name(table, sorted(set(there)))}"
    else:
        why = "is none with an id map; there are none"
    raise CheckpointError(f"{checkpoint.folder}: table {table!r} {why}")


def _old_map(checkpoint: Checkpoint, home: _MappedTensors) -> IdMap:
    known = home.known
    count = 0 if known.folding is None else known.folding.count
    words, *fold_words = (checkpoint.load(home.maps + name).numpy() for name in _words(count))
    made = IdMap(shape=known.shape, words=words, about=known.about, folding=known.folding, fold_words=tuple(fold_words))
    if made.digest != known.digest:
        got = f"digest {made.digest}, want {known.digest}"
        raise CheckpointError(f"{checkpoint.folder}: table {home.table!r}: its id map differs from its header: {got}")
    return made


def _words(folds: int) -> list[str]:
    return ["words", *(f"words_{fold}" for fold in range(folds))]


def _change_map(checkpoint: Checkpoint, home: _MappedTensors, new: IdMap, plan: _RemapPlan) -> None:
    """The tensors of the new map instead of those of the old one."""
    made = MapIdentity(table=home.table, digest=new.digest, about=new.about, shape=new.shape, folding=new.folding)
    text = torch.frombuffer(bytearray(msgspec.json.encode(made)), dtype=torch.uint8)
    all_words = zip(_words(len(new.fold_words)), (new.words, *new.fold_words), strict=True)
    tensors = {name: torch.from_numpy(words) for name, words in all_words} | {IDENTITY: text}
    plan.whole.update({home.maps + name: tensor for name, tensor in tensors.items()})
    words = re.compile(re.escape(home.maps) + r"words(_\d+)?")
    plan.left.update(name for name in checkpoint.names() if words.fullmatch(name) and name not in plan.whole)


def _dim(checkpoint: Checkpoint, home: _MappedTensors) -> int:
    """The table's: what a part is projected to, or has."""
    first = checkpoint.manifest.tensors.get(f"{home.maps}projection_0")
    return checkpoint.entry(f"model/{home.stored(0)}").columns if first is None else first.rows


def _tensors(checkpoint: Checkpoint, home: _MappedTensors, index: int) -> Iterator[str]:
    """The rows of a part and their state, all of a shape that can be moved."""
    name, rows = home.stored(index), home.known.shape.parts[index].rows
    entry = checkpoint.entry(f"model/{name}")
    if entry.row_type is None or entry.rows != rows:
        got = f"{entry.rows} rows of {entry.row_type or entry.dtype}"
        raise CheckpointError(
            f"{checkpoint.folder}: model/{name}: got {got}, want {rows} rows of a table, as of its map"
        )
    yield f"model/{name}"
    for other, state in checkpoint.manifest.tensors.items():
        if not other.startswith(f"rows/{name}/") or not state.shape:
            continue
        fits = state.dtype == "float32" and state.shape[0] == rows and 1 <= state.columns <= entry.columns
        if not fits or len(state.shape) > 2:
            want = f"want float32 of {rows} rows, a number or up to {entry.columns} each"
            raise CheckpointError(f"{checkpoint.folder}: {other}: got {state.shape} of {state.dtype}: {want}")
        yield other


def _weights(path: Path, table: str, ids: int) -> NDArray[np.int64]:
    """Occurrences of each id plus one, so that every id counts."""
    name = COUNTS + table
    try:
        open_regular(path).close()  # a pipe is not waited for
        with safe_open(path, "numpy") as file:
            if name not in file.keys():  # noqa: SIM118 - not a dict
                there = [key.removeprefix(COUNTS) for key in file.keys() if key.startswith(COUNTS)]  # noqa: SIM118
                about = nearest_name(table, sorted(there)) if there else "there are none"
                raise DataError(f"{path} has no counts of table {table!r}; {about}")
            counts_N: NDArray[np.int64] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}; want what `rowwise compress` keeps of its probe") from None
    if counts_N.dtype != np.int64 or counts_N.shape != (ids,) or counts_N.min() < 0:
        got = f"{counts_N.dtype} of shape {counts_N.shape}"
        raise DataError(f"{path}: counts of table {table!r}: got {got}: want a whole number for each of {ids} ids")
    return counts_N + 1


def _look_up(id_map: IdMap, ids_N: Ids) -> NDArray[np.int64]:
    shape = id_map.shape
    sections = torch.tensor([section.numbers for section in shape.sections], dtype=torch.int64)
    words = torch.from_numpy(id_map.words)
    return map_ids(torch.from_numpy(ids_N), sections, words, shape.ids, shape.columns).numpy()


def _describe_remap(home: _MappedTensors, found: tuple[Move, ...], ids: int) -> RemappedTable:
    rows, kept = sum(move.rows for move in found), sum(move.kept for move in found)
    return RemappedTable(table=home.table, rows=rows, kept=kept, empty=sum(move.empty for move in found), ids=ids)


def _write(
    checkpoint: Checkpoint, folder: Path, plan: _RemapPlan, weights_N: NDArray[np.int64] | None, tell: Tell | None
) -> CheckpointManifest:
    whole = {name: LocalShard.whole(name, tensor) for name, tensor in plan.whole.items()}
    rest, parts = dict(whole), list[LocalShard]()
    for name, entry in checkpoint.manifest.tensors.items():
        if name in rest:
            parts.append(shard_outline(name, rest.pop(name).entry))
        elif name in plan.from_rows:
            shape = (plan.from_rows[name].rows, *entry.shape[1:])
            parts.append(shard_outline(name, structs.replace(entry, shape=shape)))
        elif name not in plan.left:
            parts.append(shard_outline(name, entry))
    parts += [shard_outline(name, part.entry) for name, part in rest.items()]
    mover = _Mover(checkpoint, weights_N)

    def fill(part: LocalShard) -> None:
        if part.name in whole:
            part.tensor.copy_(whole[part.name].cut(*part.rows).tensor)
        elif part.name in plan.from_rows:
            mover.fill(part, plan.from_rows[part.name])
        else:
            checkpoint.fill(part)

    return write_streamed(folder, [parts], checkpoint.manifest.data, fill, tell)


@final
class _Mover:
    """Fills rows that move; each source piece is read once, in order."""

    def __init__(self, checkpoint: Checkpoint, weights_N: NDArray[np.int64] | None) -> None:
        self._checkpoint, self._weights_N = checkpoint, weights_N
        self._held: tuple[str, Tensor] | None = None

    def fill(self, part: LocalShard, move: Move) -> None:
        """Rows of a table, or of the state of one."""
        entry, old = self._checkpoint.entry(part.name), self._old(part.name)
        means = torch.from_numpy(
            moved_rows(
                move,
                part.rows,
                lambda rows_K: _floats(old[torch.from_numpy(rows_K)], entry),
                self._weights,
                state=entry.row_type is None,
            )
        )
        made = means if entry.row_type is None else pack(means, entry.row_type, entry.column_group)
        same_R = torch.from_numpy(move.same_R[slice(*part.rows)])
        kept_K = (same_R >= 0).nonzero().flatten()
        made[kept_K] = old[same_R[kept_K]]
        part.tensor.copy_(made.view(part.tensor.shape))

    def _old(self, name: str) -> Tensor:
        if self._held is None or self._held[0] != name:
            self._held = None  # before the next is read
            read = self._checkpoint.load(name)
            self._held = (name, read.view(len(read), -1))
        return self._held[1]

    def _weights(self, ids_N: Ids) -> NDArray[np.floating]:
        return np.ones(len(ids_N)) if self._weights_N is None else self._weights_N[ids_N].astype(np.float64)


def _floats(stored: Tensor, entry: TensorEntry) -> NDArray[np.float32]:
    if entry.row_type is None:
        return stored.numpy()
    return unpack(stored, entry.columns, entry.row_type, entry.column_group).numpy()

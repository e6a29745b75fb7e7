"""Rewrites a checkpoint for another id map of a table: rows are moved to match, so that training can continue.

[Note: Moved rows] in `tables/ids/remap.py` defines the new rows. Other tensors are copied. Known limits: memory for one
tensor of old rows as stored, and 4 bytes per id for each part of the map.
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

from rowwise.base.errors import CheckpointError, DataError, SpecError
from rowwise.base.textfile import open_regular
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import CheckpointManifest, TensorEntry
from rowwise.checkpoint.named import tables_of
from rowwise.checkpoint.read import Checkpoint, nearest_name
from rowwise.checkpoint.stream import shard_outline, write_streamed
from rowwise.checkpoint.windows import Tell
from rowwise.models.wide import ENDING
from rowwise.tables.ids.file import load
from rowwise.tables.ids.idmap import IdMap
from rowwise.tables.ids.mapped import IDENTITY, MapIdentity, decode_identity
from rowwise.tables.ids.remap import Ids, Move, average_rows, check_movable, find_moves, same_rows
from rowwise.tables.ops.idmap import map_ids
from rowwise.tables.ops.rowtype import pack, unpack
from rowwise.tables.spec import Table, Value

COUNTS = "counts/"  # prefix of tensors in the probe file of `rowwise compress`
MAPPED = re.compile(rf"model/(?P<path>.+\.)?maps\.(?P<table>[^.]+)\.{IDENTITY}")


class RemappedTable(Value, frozen=True):
    """Counts of rows that were kept, moved and filled for a table, in one of the modules that hold it."""

    table: str
    rows: int
    kept: int  # rows with the same bits as before
    empty: int  # rows without an id
    ids: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _MappedTensors:
    """A mapped table of a module, and the names of its tensors in the checkpoint."""

    table: str
    path: str  # path of the module, with a trailing dot
    identity: MapIdentity

    @property
    def maps(self) -> str:
        """The prefix of the map's tensors."""
        return f"model/{self.path}maps.{self.table}."

    def stored(self, index: int) -> str:
        """The name of a part's rows, as in `ids.open.stored_tables`, without the prefix model/ or rows/."""
        end = f"-{index}" if len(self.identity.shape.parts) > 1 else ""
        return f"{self.path}stored.{self.table}{end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemapPlan:
    """New tensors, tensors whose rows move, and tensors to omit; all others are copied."""

    contents: dict[str, Tensor] = field(default_factory=dict)  # contents of new tensors, by name
    from_rows: dict[str, Move] = field(default_factory=dict)  # moves of rows and of their state, by name
    omitted: set[str] = field(default_factory=set)


def remap(
    checkpoint: Checkpoint, folder: Path, table: str, file: Path, counts: Path | None = None, tell: Tell | None = None
) -> list[RemappedTable]:
    """Write a checkpoint in which a table, and the linear part's table of the same ids, has the map of a file.

    Args:
        checkpoint: the source; stays unchanged.
        folder: the target; must not exist.
        table: its name in the model.
        file: the new map, see `ids.file`.
        counts: the probe file of `rowwise compress`, with a count for each id; by default all ids weigh the same.
        tell: called with (bytes done, total).
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already", hint="choose another name")
    homes = _find_mapped(checkpoint, table)
    ids = homes[0].identity.shape.ids
    new = load(file, Table(name=table, rows=ids, dim=1))
    weights_N = None if counts is None else _weights(counts, table, ids)
    plan, results = _RemapPlan(), list[RemappedTable]()
    moves_of: dict[str, tuple[Move, ...]] = {}  # by digest of the old map, which modules may share
    for home in homes:
        _change_map(checkpoint, home, new, plan)
        old = _old_map(checkpoint, home)
        if same_rows(old, new):
            rows = new.shape.rows
            results.append(RemappedTable(table=home.table, rows=rows, kept=rows, empty=0, ids=ids))
            continue
        try:
            check_movable(old.shape, new.shape, _dim(checkpoint, home))
            moves = moves_of.get(old.digest) or find_moves(old, new, _look_up)
        except SpecError as error:
            raise CheckpointError(f"{checkpoint.folder}: table {home.table!r} cannot have {file}: {error}") from None
        moves_of[old.digest] = moves
        for index, move in enumerate(moves):
            plan.from_rows.update(dict.fromkeys(_tensors(checkpoint, home, index), move))
        results.append(_result(home, moves, ids))
    _write(checkpoint, folder, plan, weights_N, tell)
    return results


def _find_mapped(checkpoint: Checkpoint, table: str) -> list[_MappedTensors]:
    """The mapped tables of this name in all modules, and the linear part's tables with the same map."""
    homes: list[_MappedTensors] = []
    names: list[str] = []
    for name in checkpoint.names():
        match = MAPPED.fullmatch(name)
        if match is None:
            continue
        names.append(match["table"])
        if match["table"] in (table, table + ENDING):
            identity = decode_identity(checkpoint.load(name))
            homes.append(_MappedTensors(table=match["table"], path=match["path"] or "", identity=identity))
    digests = {home.identity.digest for home in homes if home.table == table}
    if digests:  # excludes tables with another map whose name merely ends like a linear part's
        return sorted((home for home in homes if home.identity.digest in digests), key=lambda home: home.table)
    if table in tables_of(checkpoint.manifest):
        problem = "has no id map: each id has a row of its own"
    else:
        problem = f"is not a table with an id map; {nearest_name(table, sorted(set(names)))}"
    raise CheckpointError(f"{checkpoint.folder}: table {table!r} {problem}")


def _old_map(checkpoint: Checkpoint, home: _MappedTensors) -> IdMap:
    identity = home.identity
    count = 0 if identity.folding is None else identity.folding.count
    words, *fold_words = (checkpoint.load(home.maps + name).numpy() for name in _words(count))
    old = IdMap(
        shape=identity.shape, words=words, about=identity.about, folding=identity.folding, fold_words=tuple(fold_words)
    )
    if old.digest != identity.digest:
        raise CheckpointError(
            f"{checkpoint.folder}: table {home.table!r}: its id map is damaged: digest {old.digest}",
            identity.digest,
            hint="use another checkpoint",
        )
    return old


def _words(folds: int) -> list[str]:
    return ["words", *(f"words_{fold}" for fold in range(folds))]


def _change_map(checkpoint: Checkpoint, home: _MappedTensors, new: IdMap, plan: _RemapPlan) -> None:
    """Replace the tensors of the old map by those of the new one."""
    identity = MapIdentity(table=home.table, digest=new.digest, about=new.about, shape=new.shape, folding=new.folding)
    text = torch.frombuffer(bytearray(msgspec.json.encode(identity)), dtype=torch.uint8)
    all_words = zip(_words(len(new.fold_words)), (new.words, *new.fold_words), strict=True)
    tensors = {name: torch.from_numpy(words) for name, words in all_words} | {IDENTITY: text}
    plan.contents.update({home.maps + name: tensor for name, tensor in tensors.items()})
    words = re.compile(re.escape(home.maps) + r"words(_\d+)?")
    plan.omitted.update(name for name in checkpoint.names() if words.fullmatch(name) and name not in plan.contents)


def _dim(checkpoint: Checkpoint, home: _MappedTensors) -> int:
    """The table's dim: that of a part's projection, or of its rows without one."""
    first = checkpoint.manifest.tensors.get(f"{home.maps}projection_0")
    return checkpoint.entry(f"model/{home.stored(0)}").columns if first is None else first.rows


def _tensors(checkpoint: Checkpoint, home: _MappedTensors, index: int) -> Iterator[str]:
    """The names of a part's rows and their state; raises for shapes that cannot be moved."""
    name, rows = home.stored(index), home.identity.shape.parts[index].rows
    entry = checkpoint.entry(f"model/{name}")
    if entry.row_type is None or entry.rows != rows:
        raise CheckpointError(
            f"{checkpoint.folder}: model/{name}: got {entry.rows} rows of {entry.row_type or entry.dtype}",
            f"{rows} rows of a table, as in its map",
        )
    yield f"model/{name}"
    for other, state in checkpoint.manifest.tensors.items():
        if not other.startswith(f"rows/{name}/") or not state.shape:
            continue
        fits = state.dtype == "float32" and state.shape[0] == rows and 1 <= state.columns <= entry.columns
        if not fits or len(state.shape) > 2:
            raise CheckpointError(
                f"{checkpoint.folder}: {other}: got {state.shape} of {state.dtype}",
                f"float32 of {rows} rows, a number or up to {entry.columns} each",
            )
        yield other


def _weights(path: Path, table: str, ids: int) -> NDArray[np.int64]:
    """The count of each id plus one, so that unseen ids have a weight, too."""
    name = COUNTS + table
    try:
        open_regular(path).close()  # raises for a pipe instead of waiting for it
        with safe_open(path, "numpy") as file:
            if name not in file.keys():  # noqa: SIM118 - not a dict
                tables = [key.removeprefix(COUNTS) for key in file.keys() if key.startswith(COUNTS)]  # noqa: SIM118
                raise DataError(f"{path} has no counts of table {table!r}; {nearest_name(table, sorted(tables))}")
            counts_N: NDArray[np.int64] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} cannot be read: {error}", "a file that `rowwise compress` keeps of its probe"
        ) from None
    if counts_N.dtype != np.int64 or counts_N.shape != (ids,) or counts_N.min() < 0:
        raise DataError(
            f"{path}: counts of table {table!r}: got {counts_N.dtype} of shape {counts_N.shape}",
            f"a whole number for each of {ids} ids",
        )
    return counts_N + 1


def _look_up(id_map: IdMap, ids_N: Ids) -> NDArray[np.int64]:
    shape = id_map.shape
    sections = torch.tensor([section.kernel_args for section in shape.sections], dtype=torch.int64)
    words = torch.from_numpy(id_map.words)
    return map_ids(torch.from_numpy(ids_N), sections, words, shape.ids, shape.columns).numpy()


def _result(home: _MappedTensors, moves: tuple[Move, ...], ids: int) -> RemappedTable:
    rows, kept = sum(move.rows for move in moves), sum(move.kept for move in moves)
    return RemappedTable(table=home.table, rows=rows, kept=kept, empty=sum(move.empty for move in moves), ids=ids)


def _write(
    checkpoint: Checkpoint, folder: Path, plan: _RemapPlan, weights_N: NDArray[np.int64] | None, tell: Tell | None
) -> CheckpointManifest:
    new_shards = {name: LocalShard.whole(name, tensor) for name, tensor in plan.contents.items()}
    remaining, shards = dict(new_shards), list[LocalShard]()
    for name, entry in checkpoint.manifest.tensors.items():
        if name in remaining:
            shards.append(shard_outline(name, remaining.pop(name).entry))
        elif name in plan.from_rows:
            shape = (plan.from_rows[name].rows, *entry.shape[1:])
            shards.append(shard_outline(name, structs.replace(entry, shape=shape)))
        elif name not in plan.omitted:
            shards.append(shard_outline(name, entry))
    shards += [shard_outline(name, shard.entry) for name, shard in remaining.items()]
    mover = _Mover(checkpoint, weights_N)

    def fill(shard: LocalShard) -> None:
        if shard.name in new_shards:
            shard.tensor.copy_(new_shards[shard.name].cut(*shard.rows).tensor)
        elif shard.name in plan.from_rows:
            mover.fill(shard, plan.from_rows[shard.name])
        else:
            checkpoint.fill(shard)

    return write_streamed(folder, [shards], checkpoint.manifest.data, fill, tell)


@final
class _Mover:
    """Fills shards of rows that move; caches the old tensor between shards, so each tensor is read once."""

    def __init__(self, checkpoint: Checkpoint, weights_N: NDArray[np.int64] | None) -> None:
        self._checkpoint, self._weights_N = checkpoint, weights_N
        self._cached: tuple[str, Tensor] | None = None

    def fill(self, shard: LocalShard, move: Move) -> None:
        """Fill rows of a table, or of its state."""
        entry, old = self._checkpoint.entry(shard.name), self._load_old(shard.name)
        means = torch.from_numpy(
            average_rows(
                move,
                shard.rows,
                lambda rows_K: _floats(old[torch.from_numpy(rows_K)], entry),
                self._weights,
                state=entry.row_type is None,
            )
        )
        rows = means if entry.row_type is None else pack(means, entry.row_type, entry.column_group)
        # Rows with the same ids as before are copied bit by bit: `pack` might round them differently.
        same_R = torch.from_numpy(move.same_R[slice(*shard.rows)])
        kept_K = (same_R >= 0).nonzero().flatten()
        rows[kept_K] = old[same_R[kept_K]]
        shard.tensor.copy_(rows.view(shard.tensor.shape))

    def _load_old(self, name: str) -> Tensor:
        if self._cached is None or self._cached[0] != name:
            self._cached = None  # frees its memory before the next tensor is read
            tensor = self._checkpoint.load(name)
            self._cached = (name, tensor.view(len(tensor), -1))
        return self._cached[1]

    def _weights(self, ids_N: Ids) -> NDArray[np.floating]:
        return np.ones(len(ids_N)) if self._weights_N is None else self._weights_N[ids_N].astype(np.float64)


def _floats(stored: Tensor, entry: TensorEntry) -> NDArray[np.float32]:
    if entry.row_type is None:
        return stored.numpy()
    return unpack(stored, entry.columns, entry.row_type, entry.column_group).numpy()

"""Imports weights of other programs as a checkpoint: matches tensors by name, then copies them.

TorchRec's table names are recognised; for nn.EmbeddingBag and others, `--map` gives the names. Not supported: optimizer
state, whose layout every program defines for itself.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from rowwise.base.errors import CheckpointError, SpecError
from rowwise.checkpoint.dcp_source import open_dcp
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.manifest import CheckpointManifest, TensorEntry
from rowwise.checkpoint.read import nearest_name
from rowwise.checkpoint.source import KINDS, TensorOutline, TensorSource, open_safetensors, open_torch
from rowwise.checkpoint.stream import shard_outline, write_streamed
from rowwise.checkpoint.windows import Tell, cut_rows
from rowwise.tables.ops.rowtype import dtype_of
from rowwise.tables.spec import RowType, Table, Value

TORCHREC = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.([^.]+)\.weight")
TABLE = "table:"
TYPES = {dtype_of(kind): kind for kind in RowType if not kind.facts.scaled} | {torch.float64: RowType.FP32}


class MatchedTensor(Value, frozen=True):
    """A tensor to import."""

    source: str
    target: str  # its name in the checkpoint
    shape: tuple[int, ...]
    kind: str  # row type or dtype in the checkpoint
    table: str | None = None


class ImportMatch(Value, frozen=True):
    """The tensors to import, and the names of all others in the source."""

    taken: tuple[MatchedTensor, ...]
    left: tuple[str, ...]


def open_source(path: Path) -> TensorSource:
    """Open a file or folder of another program, by its kind."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such file", KINDS)
    if path.is_dir():
        return open_dcp(path)
    return open_safetensors(path) if path.suffix == ".safetensors" else open_torch(path)


def match(source: TensorSource, maps: Sequence[str] = (), path: str = "embeddings") -> ImportMatch:
    """Match tensors by `maps`, then by TorchRec's table names.

    Args:
        source: the tensors of the other program.
        maps: OLD=NEW; NEW is `table:<name>`, or a name of the model's state dict. A `*` matches any text.
        path: of the module with the tables.
    """
    targets = _match_by_maps(source, maps)
    for name in source.tensors:
        torchrec_name = TORCHREC.fullmatch(name)
        if torchrec_name and name not in targets:
            targets[name] = TABLE + torchrec_name[1]
    taken = [_match_tensor(name, x, targets[name], path) for name, x in source.tensors.items() if name in targets]
    by_target: dict[str, str] = {}
    for tensor in taken:
        earlier = by_target.setdefault(tensor.target, tensor.source)
        if earlier != tensor.source:
            raise CheckpointError(
                f"{source.place}: {earlier!r} and {tensor.source!r} are both {tensor.target!r}",
                hint="map one of them to another name",
            )
    if not taken:
        names = ", ".join(list(source.tensors)[:8])
        how = f"name the tables with --map OLD={TABLE}NAME; there are {names}"
        raise CheckpointError(f"{source.place}: no tensor has a TorchRec table name; {how}")
    return ImportMatch(taken=tuple(taken), left=tuple(name for name in source.tensors if name not in targets))


def import_matched(
    source: TensorSource, matching: ImportMatch, folder: Path, tell: Tell | None = None
) -> CheckpointManifest:
    """Write a checkpoint of the matched tensors, for a warm start; the folder must not exist."""
    names = {tensor.target: tensor.source for tensor in matching.taken}
    shards = [shard_outline(tensor.target, _entry(tensor)) for tensor in matching.taken]

    def fill(shard: LocalShard) -> None:
        name = names[shard.name]
        outline, first = source.tensors[name], shard.rows[0]
        row_bytes = max(1, shard.row_bytes)
        for begin, end in cut_rows(len(shard.tensor), row_bytes, [cut - first for cut in outline.cuts]):
            rows = source.read(name, (first + begin, first + end))
            shard.tensor[begin:end].copy_(rows)

    data = {"imported": {"from": str(source.place), "names": names}}
    return write_streamed(folder, [shards], data, fill, tell)


def _match_by_maps(source: TensorSource, maps: Sequence[str]) -> dict[str, str]:
    targets: dict[str, str] = {}
    for text in maps:
        old, equals, new = text.partition("=")
        if not (old and equals and new.removeprefix(TABLE)) or old.count("*") > 1 or new.count("*") > old.count("*"):
            raise CheckpointError(f"--map {text}", f"OLD={TABLE}NAME or OLD=NEW, with at most one * in each")
        pattern = re.compile(re.escape(old).replace(r"\*", "(.+)"))
        hits = [(name, hit) for name in source.tensors if (hit := pattern.fullmatch(name))]
        if not hits:
            raise CheckpointError(f"{source.place} has no tensor {old!r}; {nearest_name(old, source.tensors)}")
        for name, hit in hits:
            targets[name] = new.replace("*", hit[1]) if "*" in new else new
    return targets


def _match_tensor(name: str, outline: TensorOutline, new_name: str, path: str) -> MatchedTensor:
    if not new_name.startswith(TABLE):
        kind = str(outline.dtype).removeprefix("torch.")
        return MatchedTensor(source=name, target=f"model/{new_name}", shape=outline.shape, kind=kind)
    table = new_name.removeprefix(TABLE)
    if outline.dtype not in TYPES or len(outline.shape) != 2:
        raise CheckpointError(
            f"{name!r} cannot be table {table!r}: got {outline.shape} of {str(outline.dtype).removeprefix('torch.')}",
            "rows x columns of floats",
        )
    try:
        Table(name=table, rows=outline.shape[0], dim=outline.shape[1])
    except SpecError as error:
        raise CheckpointError(f"{name!r}: {error}; give another name: --map {name}={TABLE}NAME") from None
    target = f"model/{path}.{table}" if path else f"model/{table}"
    return MatchedTensor(source=name, target=target, shape=outline.shape, kind=str(TYPES[outline.dtype]), table=table)


def _entry(tensor: MatchedTensor) -> TensorEntry:
    if tensor.table is None:
        return TensorEntry(dtype=tensor.kind, shape=tensor.shape)
    kind = RowType(tensor.kind)
    return TensorEntry(dtype=kind.facts.numbers, shape=tensor.shape, row_type=kind)

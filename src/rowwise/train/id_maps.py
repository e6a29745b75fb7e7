"""Checks that a checkpoint's tables were trained with the id maps and managed tables of the model.

`snapshot` compares names and shapes only: under another id map both may agree, but rows belong to other ids.
"""

from torch import nn

from rowwise.base.errors import CheckpointError, StateError
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.tables import full_name, table_modules
from rowwise.parallel.shard.embeddings import AnyEmbeddings
from rowwise.tables.ids.embeddings import MappedEmbeddings
from rowwise.tables.ids.mapped import IDENTITY, MapIdentity, decode_identity, raise_if_another_map
from rowwise.tables.managed import ID

MODEL = "model/"


def check_maps(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise if a table of the checkpoint was trained with another id map than the model's, or without one."""
    saved = checkpoint.manifest.tensors
    for path, module in table_modules(model):
        _check_managed(checkpoint, path, module)
    for path, module in model.named_modules():
        if not isinstance(module, MappedEmbeddings):
            continue
        prefix = f"{MODEL}{path}." if path else MODEL
        mapped = module.mapped
        for table in module.tables:
            name, id_map = f"{prefix}maps.{table.name}.{IDENTITY}", mapped.get(table.name)
            if name in saved and id_map is not None:
                _compare(checkpoint, name, id_map.map_identity)
            elif name in saved:
                _raise_mismatch(checkpoint, table.name, "was trained with an id map, but has none in this model")
            elif id_map is not None and f"{prefix}stored.{table.name}" in saved:
                _raise_mismatch(checkpoint, table.name, "was trained without an id map, but has one in this model")


def _compare(checkpoint: Checkpoint, name: str, expected: MapIdentity) -> None:
    try:
        raise_if_another_map(decode_identity(checkpoint.load(name)), expected)
    except StateError as error:
        raise CheckpointError(f"{checkpoint.folder}: {error}") from None


def _check_managed(checkpoint: Checkpoint, path: str, module: AnyEmbeddings) -> None:
    """Raise if rows would get other ids: a table managed only on one side, or with another number of buckets."""
    saved = checkpoint.manifest.tensors
    for table in module.tables:
        name = full_name(path, table)
        rows, ids = saved.get(f"{MODEL}{name}"), saved.get(f"rows/{name}/{ID}")
        if rows is None:
            continue
        if table.managed is None and ids is not None:
            _raise_mismatch(checkpoint, table.name, "is managed, but not in this model", "`managed` as in its run")
        elif table.managed is not None and ids is None:
            _raise_mismatch(checkpoint, table.name, "is managed only in this model", "a table without `managed`")
        elif table.managed is not None and rows.rows != table.rows:
            problem = f"is managed and has {rows.rows} rows, but {table.rows} in this model, so its buckets differ"
            _raise_mismatch(checkpoint, table.name, problem, f"rows={rows.rows}")


def _raise_mismatch(
    checkpoint: Checkpoint, table: str, problem: str, expected: str = "the `id_map` that it was trained with"
) -> None:
    raise CheckpointError(f"{checkpoint.folder}: table {table!r} {problem}", expected)

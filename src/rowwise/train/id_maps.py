"""Checks that a checkpoint's tables were trained with the id maps of the model, and are managed as the model's are.

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
            name, here = f"{prefix}maps.{table.name}.{IDENTITY}", mapped.get(table.name)
            if name in saved and here is not None:
                _compare(checkpoint, name, here.map_identity)
            elif name in saved:
                _refuse(checkpoint, table.name, "was trained with an id map, and this model has none for it")
            elif here is not None and f"{prefix}stored.{table.name}" in saved:
                _refuse(checkpoint, table.name, "was trained without an id map, and this model has one for it")


def _compare(checkpoint: Checkpoint, name: str, here: MapIdentity) -> None:
    try:
        raise_if_another_map(decode_identity(checkpoint.load(name)), here)
    except StateError as error:
        raise CheckpointError(f"{checkpoint.folder}: {error}") from None


def _check_managed(checkpoint: Checkpoint, path: str, module: AnyEmbeddings) -> None:
    """Raise if rows would get the ids of other rows: row numbers of another table, or of other buckets."""
    saved = checkpoint.manifest.tensors
    for table in module.tables:
        name = full_name(path, table)
        rows, ids = saved.get(f"{MODEL}{name}"), saved.get(f"rows/{name}/{ID}")
        if rows is None:
            continue
        if table.managed is None and ids is not None:
            _refuse(checkpoint, table.name, "is managed, and in this model it is not", "`managed` as in its run")
        elif table.managed is not None and ids is None:
            _refuse(checkpoint, table.name, "is not managed, and in this model it is", "a table without `managed`")
        elif table.managed is not None and rows.rows != table.rows:
            why = f"is managed and has {rows.rows} rows, and in this model {table.rows}, so its buckets have other rows"
            _refuse(checkpoint, table.name, why, f"rows={rows.rows}")


def _refuse(
    checkpoint: Checkpoint, table: str, why: str, expected: str = "the `id_map` that it was trained with"
) -> None:
    raise CheckpointError(f"{checkpoint.folder}: table {table!r} {why}", expected)

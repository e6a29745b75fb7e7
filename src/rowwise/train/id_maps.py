"""Checks that a checkpoint's tables were trained with the id maps of the model.

`snapshot` compares names and shapes only: under another id map both may agree, but rows belong to other ids.
"""

from torch import nn

from rowwise.checkpoint.read import Checkpoint
from rowwise.errors import CheckpointError, StateError
from rowwise.hashing.embeddings import MappedEmbeddings
from rowwise.hashing.mapped import IDENTITY, MapIdentity, decode_identity, raise_if_another_map

MODEL = "model/"


def check_maps(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise if a table of the checkpoint was trained with another id map than the model's, or without one."""
    saved = checkpoint.manifest.tensors
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


def _refuse(checkpoint: Checkpoint, table: str, why: str) -> None:
    raise CheckpointError(f"{checkpoint.folder}: table {table!r} {why}: want the `id_map` that it was trained with")

"""`make_embeddings`: chooses `Embeddings`, `MappedEmbeddings` or `ManagedEmbeddings` for a model's tables."""

from collections.abc import Sequence

import torch

from rowwise.base.errors import SpecError
from rowwise.tables.embedding import Embeddings
from rowwise.tables.ids.embeddings import MappedEmbeddings
from rowwise.tables.ids.managed.embeddings import ManagedEmbeddings
from rowwise.tables.spec import Table

IdTables = MappedEmbeddings | ManagedEmbeddings  # wrappers of the module with the rows
AnyTables = Embeddings | IdTables


def make_embeddings(
    tables: Sequence[Table],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    merge_shared: bool = False,
    update_in_backward: bool = False,
) -> AnyTables:
    """`Embeddings`; `MappedEmbeddings` if a table has an `id_map`, `ManagedEmbeddings` if one is managed."""
    mapped = [table.name for table in tables if table.id_map is not None]
    managed = [table.name for table in tables if table.managed is not None]
    if mapped and managed:
        raise SpecError(
            f"table {mapped[0]!r} has an id_map, and table {managed[0]!r} of the same module is managed",
            "id_map or managed tables in a model, not both",
        )
    kind = MappedEmbeddings if mapped else ManagedEmbeddings if managed else Embeddings
    return kind(tables, seed=seed, device=device, merge_shared=merge_shared, update_in_backward=update_in_backward)

"""Runs a model whose tables are cut into tiles on several ranks.

One runtime for every layout: a plan is rectangles on ranks, and `routes.py` derives all communication from them. Names
are loaded when first used.

Axes: B samples of this rank, G samples of all ranks, W ranks, H hosts, T tables, F features, N ids, U distinct ids or
samples, R rows, D columns of a table, S pooled columns, C fields of a descriptor, P packed slices; B1 is B + 1.
"""

from typing import TYPE_CHECKING

from rowwise.base.lazy import export_lazily

if TYPE_CHECKING:
    from rowwise.parallel.shard.apply import shard as shard
    from rowwise.parallel.shard.embeddings import LocalTile as LocalTile
    from rowwise.parallel.shard.embeddings import ShardedEmbeddings as ShardedEmbeddings

_HOMES = {"apply": ("shard",), "embeddings": ("LocalTile", "ShardedEmbeddings")}
__all__, __getattr__ = export_lazily(__name__, _HOMES)

"""The served form of a graph model: two towers without layers, whose rows are the convolved vectors of the graph.

Requests need no graph: ids are looked up as in any other tables. A user or item without pairs has the vector that the
run gives it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from rowwise.base.scratch import Scratch
from rowwise.checkpoint.local_shard import LocalShard
from rowwise.checkpoint.read import Checkpoint
from rowwise.checkpoint.tables import full_name, table_modules
from rowwise.checkpoint.write import write
from rowwise.models.graph_tower import GraphTower
from rowwise.models.inference import inference_mode
from rowwise.recipes.compose import build_model
from rowwise.recipes.model_configs import GraphConfig, TwoTowerConfig
from rowwise.recipes.recipe import Tables
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.retrieval import RetrievalModel
from rowwise.recipes.trained import load_trained
from rowwise.tables.spec import Pooling, RowType


@contextmanager
def mixed_towers(
    run: Path, resolved: ResolvedRecipe, checkpoint: Checkpoint
) -> Iterator[tuple[ResolvedRecipe, Checkpoint]]:
    """The recipe and a checkpoint of the towers, in a temporary folder."""
    config = resolved.recipe.model
    assert isinstance(config, GraphConfig)
    _, model = load_trained(run, checkpoint.folder.name)
    assert isinstance(model, RetrievalModel)
    graph = model.towers
    assert isinstance(graph, GraphTower)
    with inference_mode(model, "cpu", resolved.recipe.train.precision):
        vectors = dict(zip((table.name for table in graph.embeddings.tables), graph.node_vectors(), strict=True))
    tables = tuple(
        structs.replace(
            table,
            dim=vectors[table.name].shape[1],
            row_type=RowType.FP32,
            column_group=None,
            id_map=None,  # vectors are by id already
            pooling=Pooling.SUM,
        )
        for table in resolved.tables
        if table.name in vectors
    )
    towers = TwoTowerConfig(
        user_features=(config.user,), item=config.item, sizes=(), temperature=config.temperature, correct=False
    )
    recipe = structs.replace(resolved.recipe, model=towers, tables=Tables(list=tables))
    mixed = replace(resolved, recipe=recipe)
    shards = [
        LocalShard(
            name=f"model/{full_name(path, table)}",
            tensor=vectors[table.name].float().contiguous(),
            shape=(table.rows, table.dim),
            rows=(0, table.rows),
            row_type=table.row_type,
        )
        for path, module in table_modules(build_model(mixed.parts, on_meta=True))
        for table in module.tables
    ]
    with Scratch() as scratch:
        folder = scratch.path / checkpoint.folder.name
        write(folder, shards, {"progress": checkpoint.manifest.data["progress"]})
        yield mixed, Checkpoint.open(folder)

"""Retrieval models of recipes: two towers, with or without pictures of items, or a graph."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, TypeVar, final

import numpy as np
import pyarrow as pa
import torch
from msgspec import structs
from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.ingest.block import Ints
from rowwise.ingest.columns import Columns
from rowwise.ingest.pictures import CHANNELS, PictureFolder
from rowwise.models.frequency import ItemFrequency
from rowwise.models.graph_tower import GraphSage, GraphTower, LightGCN, Pairs, user_item_graph
from rowwise.models.image_tower import DynamicImageTower, ImageTower, PictureTower, size_costs
from rowwise.models.inference import evaluation_mode
from rowwise.models.retrieval import in_batch_bpr, in_batch_softmax
from rowwise.models.two_tower import Tower, TwoTower, VectorModel
from rowwise.parallel.comm.gather import all_gather_rows
from rowwise.parallel.comm.interface import Comm
from rowwise.recipes.families import BuildOptions, EvaluationScope, Family
from rowwise.recipes.model_configs import GraphConfig, PictureConfig, TwoTowerConfig, kind_of
from rowwise.recipes.resolved import ModelParts, ResolvedRecipe, evaluation_batches
from rowwise.tables.batch import Batch
from rowwise.tables.ids.make import AnyTables
from rowwise.tables.ops.graph import Graph
from rowwise.tables.spec import Pooling, Table
from rowwise.train.evaluate import Evaluator
from rowwise.train.loss_settings import AnyLoss
from rowwise.train.objective import InBatch, Objective
from rowwise.train.retrieve import RetrievalEvaluator, ranking_metrics

GREY = 128  # fill value for items without a picture
CHOSEN_AT_ONCE = 1024  # pictures per batch when a report chooses sizes
T = TypeVar("T", TwoTower, GraphTower)


class RetrievalModel(VectorModel, Generic[T]):
    """A retrieval model with its item frequencies, so that a checkpoint holds both."""

    def __init__(self, towers: T, frequency: ItemFrequency | None) -> None:
        super().__init__()
        self.towers, self.frequency = towers, frequency

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, 1] of each sample's user and item."""
        return self.towers(batch)

    def vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.towers.vectors(batch)

    def scores(self, users_UD: Tensor, items_ID: Tensor) -> Tensor:
        return self.towers.scores(users_UD, items_ID)

    def extra_loss(self, batch: Batch) -> Tensor | None:
        return self.towers.extra_loss(batch)


class VectorFamily(Family, ABC):
    """Models with vectors of users and items."""

    def fit(self, columns: Columns, *, named: bool) -> tuple[Columns, tuple[str, ...]]:
        super().fit(columns, named=named)
        users, items, dense = self._sides()
        _check_towers(columns, kind_of(self.config), users, items)
        fitted = _sort_dense(columns, kind_of(self.config), dense)
        return fitted, _unused_columns(columns, (*users, *items, *dense)) if named else ()

    def metrics(self, loss: AnyLoss) -> Sequence[str]:
        return ranking_metrics(self.config.ks)

    def build(self, parts: ModelParts, options: BuildOptions) -> nn.Module:
        frequency = ItemFrequency() if self.config.correct else None
        return options.place(RetrievalModel(self._towers(parts, options), frequency), parts)

    def objective(self, resolved: ResolvedRecipe, model: RetrievalModel[Any], comm: Comm | None) -> Objective:
        loss = in_batch_softmax if self.config.loss == "softmax" else in_batch_bpr
        return InBatch(model, self.config.item, model.frequency, loss, hardest=self.config.hardest, comm=comm)

    def evaluator(self, model: RetrievalModel[Any], scope: EvaluationScope) -> Evaluator:
        train, config = scope.resolved.rows.train, self.config
        return RetrievalEvaluator(
            model,
            config.item,
            train_batches=lambda: scope.batches(train),
            query_batches=scope.batches,
            task=scope.resolved.tasks[0],
            ks=config.ks,
            comm=scope.comm,
        )

    @abstractmethod
    def _sides(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Features of users, features of items, and dense columns in the order of the towers."""

    @abstractmethod
    def _towers(self, parts: ModelParts, options: BuildOptions) -> Any: ...


@final
class TowerFamily(VectorFamily):
    """Two towers, with pictures of items or without."""

    config: TwoTowerConfig

    def check(self, columns: Columns, tables: Sequence[Table]) -> tuple[str, ...]:
        """A note on items without pictures; raises if rows of the table are not the keys of pictures."""
        config, settings = self.config, self.config.item_pictures
        if settings is None:
            return ()
        lead = f"model.item_pictures of {config.item!r}"
        sparse = next(column for column in columns.sparse if column.feature_name == config.item)
        table = next((t for t in tables if config.item in t.feature_names), None)
        if sparse.ids != "direct" or table is None or table.id_map is not None or table.managed is not None:
            raise SpecError(f"{lead}: ids are keys of pictures, but its table has hashed or mapped ids", "ids: direct")
        missing = DecodedPictures(settings, table.rows).missing
        if missing == table.rows:
            raise SpecError(f"{lead}: {settings.folder} has no picture of an item", f"keys from 0 to {table.rows - 1}")
        return (f"{lead}: {missing:,} of {table.rows:,} items have no picture, and get a grey one",) if missing else ()

    def facts(self, model: RetrievalModel[TwoTower], *, chosen: bool) -> dict[str, Any] | None:
        item = model.towers.item
        if not isinstance(item, PictureTower):
            return None
        source = item.copies
        assert isinstance(source, DecodedPictures)
        sizes = [
            {"size": size, "bytes": mean, "share": share, "products": item.backbone.multiplications(size)}
            for size, mean, share in source.folder.costs()
            if size in source.sizes
        ]
        facts: dict[str, Any] = {"folder": str(source.folder.folder), "missing": source.missing, "sizes": sizes}
        if chosen and isinstance(item.pictures, DynamicImageTower):
            facts["chosen"] = _facts_of_choice(item.pictures, source, item.backbone)
        return {"pictures": facts}

    def _sides(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        config = self.config
        return config.user_features, (config.item, *config.item_features), (*config.user_dense, *config.item_dense)

    def _towers(self, parts: ModelParts, options: BuildOptions) -> TwoTower:
        config, (users, items, _) = self.config, self._sides()
        user = Tower(options.embeddings(parts, _tables_of(parts, users)), len(config.user_dense), config.sizes)
        item = _make_item_tower(options.embeddings(parts, _tables_of(parts, items)), config)
        return TwoTower(user, item, config.temperature)


def _tables_of(parts: ModelParts, features: tuple[str, ...]) -> tuple[Table, ...]:
    """The tables with these features; raises if one also has other features."""
    tables = tuple(t for t in parts.tables if set(t.feature_names) & set(features))
    mixed = [t.name for t in tables if not set(t.feature_names) <= set(features)]
    if mixed or not tables:
        problem = f"table {', '.join(mixed)} has features of both" if mixed else "no table"
        raise SpecError(f"two_tower: {problem}", f"tables with features {', '.join(features)} only, for one tower")
    return tables


def _make_item_tower(embeddings: AnyTables, config: TwoTowerConfig) -> Tower:
    settings, dense = config.item_pictures, len(config.item_dense)
    if settings is None:
        return Tower(embeddings, dense, config.sizes)
    table = next(t for t in embeddings.tables if config.item in t.feature_names)
    pictures = DecodedPictures(settings, table.rows)
    tower: ImageTower | DynamicImageTower = ImageTower(settings.dim, settings.widths)
    if (choose := settings.choose) is not None:
        scale = ImageTower(len(pictures.sizes), choose.widths)
        mean_bytes = [cost.mean_bytes for cost in pictures.folder.costs() if cost.size in pictures.sizes]
        costs = size_costs(pictures.sizes, mean_bytes)
        tower = DynamicImageTower(tower, scale, pictures.sizes, choose.price, choose.similar, costs)
    return PictureTower(embeddings, config.item, tower, pictures, dense, config.sizes)


def decoded_bytes(model: object, tables: Sequence[Table]) -> int:
    """Bytes of the decoded pictures of a recipe's items, at all sizes, and of prefixes, on each rank: at most."""
    if not isinstance(model, TwoTowerConfig) or model.item_pictures is None:
        return 0
    rows = next((table.rows for table in tables if model.item in table.feature_names), 0)
    pictures = DecodedPictures(model.item_pictures, rows)
    held = pictures.bytes_of(np.flatnonzero(pictures.numbers_I >= 0), pictures.sizes[-1]).sum()
    decoded = rows * CHANNELS * sum(size**2 for size in pictures.sizes)
    return decoded + (int(held) if len(pictures.sizes) > 1 else 0)


@final
class DecodedPictures:
    """The decoded pictures of items in memory; each is decoded at a size on first use.

    Args:
        settings: folder and sizes.
        items: number of items; the keys of pictures are ids from 0.
    """

    def __init__(self, settings: PictureConfig, items: int) -> None:
        """Open the folder; nothing is decoded yet."""
        self.folder = PictureFolder.open(settings.folder)
        self.numbers_I = self.folder.find(pa.array(np.arange(items)))
        self.missing, self.sizes = int((self.numbers_I < 0).sum()), settings.sizes or self.folder.sizes
        unknown = sorted(set(self.sizes) - set(self.folder.sizes))
        if unknown or (settings.choose is not None and len(self.sizes) < 2):
            problem = f"model.item_pictures: {settings.folder} has no copies of size {unknown[0]}" if unknown else ""
            problem = problem or f"model.item_pictures.choose: {settings.folder} with one size, {self.sizes[0]}"
            sizes = ", ".join(map(str, self.folder.sizes))
            raise SpecError(problem, f"{'some' if unknown else 'several'} of {sizes}")
        self._decoded: dict[int, Tensor] = {}
        self._prefixes: dict[int, bytes] = {}  # of pictures that are not decoded at each size
        self._is_decoded = {size: self.numbers_I < 0 for size in self.sizes}

    def read(self, items_N: Tensor, size: int) -> Tensor:
        """Bytes [N, C, S, S] of the pictures of items; grey for those without."""
        if size not in self._decoded:
            self._decoded[size] = torch.empty((len(self.numbers_I), CHANNELS, size, size), dtype=torch.uint8)
            self._decoded[size][self.numbers_I < 0] = GREY
        indices_N = items_N.cpu()
        fresh_M = np.unique(indices_N.numpy()[~self._is_decoded[size][indices_N.numpy()]])
        if len(fresh_M):
            rows_M = self.numbers_I[fresh_M]
            self._decoded[size][fresh_M] = torch.from_numpy(self.folder.read(rows_M, size, self._prefixes))
            self._is_decoded[size][fresh_M] = True
            done_M = np.logical_and.reduce([done_I[fresh_M] for done_I in self._is_decoded.values()])
            for row in rows_M[done_M].tolist():
                self._prefixes.pop(row, None)
        return self._decoded[size][indices_N].to(items_N.device)

    def bytes_of(self, items_N: Ints, size: int) -> Ints:
        """Bytes [N] read for each item with a picture: a prefix of its file, at least that of the smallest size."""
        rows_N = self.numbers_I[items_N]
        return np.maximum(self.folder.bytes_of(rows_N, size), self.folder.bytes_of(rows_N, self.sizes[0]))


def _facts_of_choice(tower: DynamicImageTower, source: DecodedPictures, backbone: ImageTower) -> dict[str, Any]:
    """Shares of the sizes that a scale model chooses for items with a picture, and the mean cost of a picture."""
    assert isinstance(tower.scale, ImageTower)
    items_N, device = torch.from_numpy((source.numbers_I >= 0).nonzero()[0]), next(tower.parameters()).device
    with evaluation_mode(tower):
        small = (source.read(part, tower.sizes[0]).to(device) for part in items_N.split(CHOSEN_AT_ONCE))
        chosen_N = torch.cat([tower.choose(copies).cpu() for copies in small])
    shares_K: list[float] = []
    total_bytes = 0
    for index, size in enumerate(tower.sizes):
        items_M = items_N[chosen_N == index].numpy()
        shares_K.append(len(items_M) / len(items_N))
        total_bytes += int(source.bytes_of(items_M, size).sum())
    products = sum(share * backbone.multiplications(size) for share, size in zip(shares_K, tower.sizes, strict=True))
    products += tower.scale.multiplications(tower.sizes[0])
    return {"shares": shares_K, "bytes": total_bytes / len(items_N), "products": round(products)}


@final
class GraphFamily(VectorFamily):
    """Graph convolutions over the training rows."""

    config: GraphConfig

    def pairs(self, resolved: ResolvedRecipe) -> Pairs | None:
        batches = evaluation_batches(resolved, resolved.rows.train)
        return Pairs.of_batches(batches, self.config.user, self.config.item)

    def share(self, model: RetrievalModel[GraphTower], comm: Comm) -> None:
        if len(comm.ranks) > 1:
            model.towers.share(comm.rank, len(comm.ranks), partial(all_gather_rows, comm, purpose="graph"))

    def facts(self, model: RetrievalModel[GraphTower], *, chosen: bool) -> dict[str, Any] | None:
        tower = model.towers
        users = tower.embeddings.tables[0].rows
        sides = (("users", slice(0, users)), ("items", slice(users, None)))
        nodes = [_facts_of_nodes(name, tower.graph, where) for name, where in sides]
        sampled = None if tower.sampled is tower.graph else tower.sampled.edges_read
        return {"graph": {"edges": len(tower.graph.sources_E) // 2, "sampled": sampled, "nodes": nodes}}

    def _sides(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        return (self.config.user,), (self.config.item,), ()

    def _towers(self, parts: ModelParts, options: BuildOptions) -> GraphTower:
        """The graph has pairs as edges, and the rows of both tables as nodes."""
        config, tables = self.config, list[Table]()
        for feature in (config.user, config.item):
            table = next((t for t in parts.tables if feature in t.feature_names), None)
            if table is None or table.managed is not None or table.pooling is Pooling.SEQUENCE:
                raise SpecError(f"graph: feature {feature!r}", "a table of its own that pools, with ids as row numbers")
            tables.append(table)
        user, item = tables
        embeddings, is_light = options.embeddings(parts, tables), config.encoder == "lightgcn"
        pairs, weights = options.pairs or Pairs.none(), "symmetric" if is_light else "mean"
        graph = user_item_graph(*pairs, user.rows, item.rows, weights)
        encoder: nn.Module = LightGCN(config.layers) if is_light else GraphSage(user.dim, config.sizes)
        sampled = None if config.sampled is None else graph.sampled(config.sampled, config.sampled_by)
        return GraphTower(embeddings, graph, encoder, sampled=sampled, temperature=config.temperature)


def _facts_of_nodes(name: str, graph: Graph, where: slice) -> dict[str, Any]:
    """Degrees of the users or of the items; `counts`: nodes of degree 0, of 1 and 2, of 3 to 6, and so on."""
    degrees_T = graph.degrees_T[where]
    counts = torch.bincount((degrees_T + 1).double().log2().floor().long()).tolist()
    return {"name": name, "count": len(degrees_T), "mean": float(degrees_T.double().mean()), "counts": counts}


def _check_towers(columns: Columns, kind: str, users: Sequence[str], items: Sequence[str]) -> None:
    """Raise unless each named feature exists and is in one tower, and there is one label."""
    if len(columns.labels) != 1:
        raise SpecError(f"{kind}: labels {', '.join(columns.labels)}", "one label: whether user and item match")
    features = [sparse.feature_name for sparse in columns.sparse]
    missing = [name for name in (*users, *items) if name not in features]
    if missing:
        raise SpecError(f"{kind}: no feature {', '.join(missing)}; there are {', '.join(features)}")
    both = [name for name in users if name in items]
    if both:
        raise SpecError(f"{kind}: feature {', '.join(both)} is in both towers", "each feature in one tower")


def _sort_dense(columns: Columns, kind: str, wanted: Sequence[str]) -> Columns:
    """Reorder dense columns: those of the user first, then those of the item."""
    by_name = {dense.column: dense for dense in columns.dense}
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise SpecError(f"{kind}: no dense column {', '.join(missing)}; there are {', '.join(by_name) or 'none'}")
    return structs.replace(columns, dense=tuple(by_name[name] for name in wanted))


def _unused_columns(columns: Columns, used: Sequence[str]) -> tuple[str, ...]:
    names = (*(s.feature_name for s in columns.sparse), *(d.column for d in columns.dense))
    unused = [name for name in names if name not in used]
    return (f"columns {', '.join(unused)}: not used, because neither tower names them",) if unused else ()

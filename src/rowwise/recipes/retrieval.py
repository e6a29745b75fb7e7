"""Models of recipes that make vectors of users and items: two towers, with pictures of items or without, or a graph."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from rowwise.batch import Batch, Jagged
from rowwise.comm.gather import all_gather_rows
from rowwise.comm.interface import Comm
from rowwise.errors import SpecError
from rowwise.hashing.make import AnyTables, make_embeddings
from rowwise.ingest.block import Ints
from rowwise.ingest.columns import Columns
from rowwise.ingest.pictures import CHANNELS, PictureFolder
from rowwise.models.frequency import ItemFrequency
from rowwise.models.graph_tower import GraphSage, GraphTower, LightGCN, user_item_graph
from rowwise.models.histories import single_ids
from rowwise.models.image_tower import DynamicImageTower, ImageTower, PictureTower, size_costs
from rowwise.models.inference import evaluation_mode
from rowwise.models.two_tower import Tower, TwoTower, VectorModel
from rowwise.ops.graph import Graph
from rowwise.recipes.model_configs import GraphConfig, PictureConfig, TwoTowerConfig
from rowwise.spec import Pooling, Table

GREY = 128  # of the pictures of items that have none
CHOSEN_AT_ONCE = 1024  # pictures whose sizes a report asks for


class RetrievalModel(VectorModel):
    """A model of vectors and the item frequencies, so that a checkpoint holds both."""

    def __init__(self, towers: TwoTower | GraphTower, frequency: ItemFrequency | None) -> None:
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


class Pairs(NamedTuple):
    """Users and items that met; repeated pairs count once."""

    users_E: Tensor
    items_E: Tensor

    @classmethod
    def none(cls) -> "Pairs":
        return cls(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))

    @classmethod
    def of_batches(cls, batches: Iterable[Batch], user: str, item: str) -> "Pairs":
        """Those of the samples whose label is 1."""
        parts = [cls.none()]
        for batch in batches:
            met_B = batch.labels_BK[:, 0] == 1
            ids = (single_ids(Jagged.from_keyed(batch.sparse), feature)[met_B].long() for feature in (user, item))
            parts.append(cls(*ids))
        return cls(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


class TowerParts(NamedTuple):
    """What towers are made from."""

    tables: tuple[Table, ...]
    seed: int
    device: str
    merge_shared: bool

    def of(self, features: tuple[str, ...], what: str) -> AnyTables:
        """The tables with some of these features, and with no others."""
        tables = tuple(t for t in self.tables if set(t.feature_names) & set(features))
        mixed = [t.name for t in tables if not set(t.feature_names) <= set(features)]
        if mixed or not tables:
            got = f"table {', '.join(mixed)} has features of both" if mixed else "no table"
            raise SpecError(f"{what}: {got}", f"tables with features {', '.join(features)} only, for one tower")
        return self.make(tables)

    def make(self, tables: tuple[Table, ...]) -> AnyTables:
        return make_embeddings(tables, seed=self.seed, device=self.device, merge_shared=self.merge_shared)


def make_two_tower(parts: TowerParts, config: TwoTowerConfig) -> RetrievalModel:
    user = Tower(parts.of(config.user_features, "two_tower"), len(config.user_dense), config.sizes)
    embeddings = parts.of((config.item, *config.item_features), "two_tower")
    item = _make_item_tower(embeddings, config)
    return RetrievalModel(TwoTower(user, item, config.temperature), ItemFrequency() if config.correct else None)


def _make_item_tower(embeddings: AnyTables, config: TwoTowerConfig) -> Tower:
    settings, dense = config.item_pictures, len(config.item_dense)
    if settings is None:
        return Tower(embeddings, dense, config.sizes)
    table = next(t for t in embeddings.tables if config.item in t.feature_names)
    pictures = DecodedPictures(settings, table.rows)
    tower: ImageTower | DynamicImageTower = ImageTower(settings.dim, settings.widths)
    if (choose := settings.choose) is not None:
        scale = ImageTower(len(pictures.sizes), choose.widths)
        read = [cost.mean_bytes for cost in pictures.folder.costs() if cost.size in pictures.sizes]
        costs = size_costs(pictures.sizes, read)
        tower = DynamicImageTower(tower, scale, pictures.sizes, choose.price, choose.similar, costs)
    return PictureTower(embeddings, config.item, tower, pictures, dense, config.sizes)


def check_pictures(config: TwoTowerConfig, columns: Columns, tables: Sequence[Table]) -> tuple[str, ...]:
    """A note on items without pictures; raises where rows of the table are not the ids that pictures have as keys."""
    if config.item_pictures is None:
        return ()
    lead = f"model.item_pictures of {config.item!r}"
    sparse = next(one for one in columns.sparse if one.feature_name == config.item)
    table = next((one for one in tables if config.item in one.feature_names), None)
    if sparse.ids != "direct" or table is None or table.id_map is not None or table.managed is not None:
        raise SpecError(f"{lead}: pictures are found by ids, but its table has hashed or mapped ids", "ids: direct")
    missing = DecodedPictures(config.item_pictures, table.rows).missing
    if missing == table.rows:
        raise SpecError(
            f"{lead}: {config.item_pictures.folder} has no picture of an item", f"keys from 0 to {table.rows - 1}"
        )
    return (f"{lead}: {missing:,} of {table.rows:,} items have no picture, and get a grey one",) if missing else ()


def decoded_bytes(model: object, tables: Sequence[Table]) -> int:
    """The memory of a rank for the pictures of a recipe's items, decoded at all sizes."""
    if not isinstance(model, TwoTowerConfig) or model.item_pictures is None:
        return 0
    rows = next((table.rows for table in tables if model.item in table.feature_names), 0)
    return rows * CHANNELS * sum(size**2 for size in DecodedPictures(model.item_pictures, rows).sizes)


@final
class DecodedPictures:
    """The pictures of items in memory, each at a size from its first use on.

    Args:
        settings: name the folder.
        items: whose ids are the keys of pictures, from 0.
    """

    def __init__(self, settings: PictureConfig, items: int) -> None:
        """Open the folder; nothing is decoded yet."""
        self.folder = PictureFolder.open(settings.folder)
        self.numbers_I = self.folder.find(pa.array(np.arange(items)))
        self.missing, self.sizes = int((self.numbers_I < 0).sum()), settings.sizes or self.folder.sizes
        unknown = sorted(set(self.sizes) - set(self.folder.sizes))
        if unknown or (settings.choose is not None and len(self.sizes) < 2):
            got = f"model.item_pictures: {settings.folder} has no copies of size {unknown[0]}" if unknown else ""
            got = got or f"model.item_pictures.choose: {settings.folder} with one size, {self.sizes[0]}"
            raise SpecError(got, f"{('some' if unknown else 'several')} of {', '.join(map(str, self.folder.sizes))}")
        self._decoded: dict[int, Tensor] = {}
        self._is_there = {size: self.numbers_I < 0 for size in self.sizes}

    def read(self, items_N: Tensor, size: int) -> Tensor:
        """Bytes [N, C, S, S] of the pictures of items; grey for those without."""
        if size not in self._decoded:
            self._decoded[size] = torch.empty((len(self.numbers_I), CHANNELS, size, size), dtype=torch.uint8)
            self._decoded[size][self.numbers_I < 0] = GREY
        asked_N = items_N.cpu()
        fresh_M = np.unique(asked_N.numpy()[~self._is_there[size][asked_N.numpy()]])
        if len(fresh_M):
            self._decoded[size][fresh_M] = torch.from_numpy(self.folder.read(self.numbers_I[fresh_M], size))
            self._is_there[size][fresh_M] = True
        return self._decoded[size][asked_N].to(items_N.device)

    def bytes_of(self, items_N: Ints, size: int) -> Ints:
        """The bytes [N] of the prefixes that items with a picture need; they contain those of the smallest size."""
        rows_N = self.numbers_I[items_N]
        return np.maximum(self.folder.bytes_of(rows_N, size), self.folder.bytes_of(rows_N, self.sizes[0]))


def make_graph_tower(parts: TowerParts, config: GraphConfig, pairs: Pairs) -> RetrievalModel:
    """The graph is that of the pairs; nodes are the rows of both tables."""
    tables = [next((t for t in parts.tables if f in t.feature_names), None) for f in (config.user, config.item)]
    for table, feature in zip(tables, (config.user, config.item), strict=True):
        if table is None or table.managed is not None or table.pooling is Pooling.SEQUENCE:
            raise SpecError(f"graph: feature {feature!r}", "a table of its own that pools, with ids as row numbers")
    user, item = (table for table in tables if table is not None)
    embeddings = parts.make((user, item))
    is_light = config.encoder == "lightgcn"
    graph = user_item_graph(*pairs, user.rows, item.rows, "symmetric" if is_light else "mean")
    encoder: nn.Module = LightGCN(config.layers) if is_light else GraphSage(user.dim, config.sizes)
    sampled = None if config.sampled is None else graph.sampled(config.sampled)
    tower = GraphTower(embeddings, graph, encoder, sampled=sampled, temperature=config.temperature)
    return RetrievalModel(tower, ItemFrequency() if config.correct else None)


def share_graph(model: nn.Module, comm: Comm) -> None:
    """Let each of several ranks read and sum for a part of the nodes of the model's graph, if it has one."""
    if isinstance(model, RetrievalModel) and isinstance(model.towers, GraphTower) and len(comm.ranks) > 1:
        model.towers.share(comm.rank, len(comm.ranks), partial(all_gather_rows, comm, purpose="graph"))


def tower_facts(model: nn.Module, *, chosen: bool = False) -> dict[str, Any] | None:
    """What a report says of a graph or of pictures, with the sizes that are `chosen`; None for other models."""
    towers = model.towers if isinstance(model, RetrievalModel) else None
    if isinstance(towers, GraphTower):
        users = towers.embeddings.tables[0].rows
        sides = (("users", slice(0, users)), ("items", slice(users, None)))
        nodes = [_facts_of_nodes(name, towers.graph, where) for name, where in sides]
        sampled = None if towers.sampled is towers.graph else len(towers.sampled.sources_E)
        return {"graph": {"edges": len(towers.graph.sources_E) // 2, "sampled": sampled, "nodes": nodes}}
    item = towers.item if isinstance(towers, TwoTower) else None
    if isinstance(item, PictureTower):
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
    return None


def _facts_of_choice(tower: DynamicImageTower, source: DecodedPictures, backbone: ImageTower) -> dict[str, Any]:
    """The sizes that a scale model chooses for the items with a picture, and what a picture costs on average."""
    assert isinstance(tower.scale, ImageTower)
    items_N, device = torch.from_numpy((source.numbers_I >= 0).nonzero()[0]), next(tower.parameters()).device
    with evaluation_mode(tower):
        small = (source.read(part, tower.sizes[0]).to(device) for part in items_N.split(CHOSEN_AT_ONCE))
        chosen_N = torch.cat([tower.choose(copies).cpu() for copies in small])
    shares_K: list[float] = []
    read = 0
    for place, size in enumerate(tower.sizes):
        mine_M = items_N[chosen_N == place].numpy()
        shares_K.append(len(mine_M) / len(items_N))
        read += int(source.bytes_of(mine_M, size).sum())
    products = sum(share * backbone.multiplications(size) for share, size in zip(shares_K, tower.sizes, strict=True))
    products += tower.scale.multiplications(tower.sizes[0])
    return {"shares": shares_K, "bytes": read / len(items_N), "products": round(products)}


def _facts_of_nodes(name: str, graph: Graph, where: slice) -> dict[str, Any]:
    """Degrees of the users or of the items; `counts`: nodes of degree 0, of 1 and 2, of 3 to 6, and so on."""
    degrees_T = graph.degrees_T[where]
    counts = torch.bincount((degrees_T + 1).double().log2().floor().long()).tolist()
    return {"name": name, "count": len(degrees_T), "mean": float(degrees_T.double().mean()), "counts": counts}

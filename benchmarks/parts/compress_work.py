"""The rows that `compress` trains on, and one training of them with some tables compressed.

Sales in stores, with the ids of each table numbered from 0 in a random order: as many rows as there are ids, so that
full tables have no collisions and no spare rows, and no order of the ids helps any method.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
from msgspec import structs
from pyarrow import compute as pc
from pyarrow import parquet as pq

from rowwise import Constant
from rowwise.ingest.columns import Columns, Sparse
from rowwise.ingest.datasets.catalog import get
from rowwise.recipes.compose import resolve
from rowwise.recipes.compress.probe import learn
from rowwise.recipes.find import load
from rowwise.recipes.recipe import Data, Recipe, Tables
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.runs import TrainingRun
from rowwise.tables.idmaps import StoredIds
from rowwise.tables.ids.file import save
from rowwise.tables.ids.idmap import IdMap
from rowwise.tables.ids.methods import IdHistory, make_map, table_bytes
from rowwise.tables.spec import Table

FIRST, LAST = 2, 47  # weeks to train on
GROUP_ROWS = 1 << 16
LARGE = 1000  # ids of a table that is compressed
HUGE = 10_000  # of one whose rows begin at 0


@dataclass(frozen=True)
class Sales:
    """The recipe over rows with permuted ids."""

    resolved: ResolvedRecipe

    @property
    def large(self) -> tuple[Table, ...]:
        return tuple(table for table in self.resolved.tables if table.rows >= LARGE)

    @property
    def full_bytes(self) -> int:
        return sum(table_bytes(table, None) for table in self.resolved.tables)

    def weeks(self, first: int, last: int) -> "Sales":
        """Trained on some of the weeks only."""
        data = structs.replace(self.resolved.recipe.data, where=(f"week >= {first}", f"week <= {last}"))
        return replace(self, resolved=resolve(structs.replace(self.resolved.recipe, data=data)))

    def histories(self) -> tuple[dict[str, IdHistory], float]:
        """What a probe learns of the training rows, and how long it takes."""
        begin_s = time.perf_counter()
        found = learn(self.resolved, [table.name for table in self.large], lambda _: None)
        return found, time.perf_counter() - begin_s

    def maps(self, method: str, ratio: float, histories: Mapping[str, IdHistory]) -> dict[str, IdMap | None]:
        """Of each large table, in its bytes over the ratio; None: the method cannot be that small."""
        return {
            table.name: make_map(method, table, int(table_bytes(table, None) / ratio), histories[table.name])
            for table in self.large
        }

    def size(self, maps: Mapping[str, IdMap | None]) -> dict[str, int]:
        """Bytes of all tables, and of maps among them."""
        tables = self.resolved.tables
        found = {table.name: table_bytes(table, maps.get(table.name)) for table in tables}
        return {"bytes": sum(found.values()), "map_bytes": sum(m.map_bytes for m in maps.values() if m is not None)}


def fetch(name: str, data: Path) -> Path:
    """The folder of a dataset, which is got if it is not there."""
    if not (data / name / "train.parquet").exists():
        get(name, data)
    return data / name


def permuted(data: Path, to: Path, seed: int = 7) -> Sales:
    """Write the rows with new ids, and the recipe over them."""
    columns = [s.column for s in resolve(load("complete-journey-dlrm", [f"data.folder={data}"])).columns.sparse]
    source = fetch("complete-journey", data)
    wanted = [*columns, "label", "week"]
    parts = {name: pq.read_table(source / f"{name}.parquet", columns=wanted) for name in ("train", "test")}
    generator = np.random.default_rng(seed)
    rows: dict[str, int] = {}
    for column in columns:
        both = pa.chunked_array([chunk for part in parts.values() for chunk in part[column].chunks])
        known = pc.unique(both).drop_null()
        rows[column] = len(known)
        order = pa.array(generator.permutation(len(known)))
        for name, part in parts.items():
            ids = order.take(pc.index_in(part[column], value_set=known).cast(pa.int64()))
            parts[name] = part.set_column(part.schema.get_field_index(column), column, ids)
    # In a random order too: of weeks in their order, the last that are trained on count most.
    parts["train"] = parts["train"].take(generator.permutation(parts["train"].num_rows))
    for name, part in parts.items():
        pq.write_table(part, to / f"{name}.parquet", row_group_size=GROUP_ROWS)
    recipe = load("complete-journey-dlrm")
    sparse = tuple(Sparse(column=name, ids="direct") for name in columns)
    preset = recipe.tables
    tables = tuple(preset.all.apply(Table(name=name, rows=count, dim=16)) for name, count in rows.items())
    # Rows of large tables begin at 0, for every method: what few samples tell is not lost in noise.
    tables = tuple(structs.replace(t, init=Constant(0.0)) if t.rows >= HUGE else t for t in tables)
    changed = structs.replace(
        recipe,
        data=Data(dataset=f"parquet:{to}/train.parquet", test=f"parquet:{to}/test.parquet"),
        columns=Columns(labels=("label",), sparse=sparse),
        tables=Tables(list=tables),
    )
    return Sales(resolve(changed))


def trained(resolved: ResolvedRecipe, maps: Mapping[str, IdMap | None], seed: int) -> dict[str, float]:
    """A whole run of the recipe with these maps, as `rowwise train` makes it: NE and AUC on the test rows."""
    with TemporaryDirectory() as folder:
        stored: dict[str, StoredIds] = {}
        for name, one in maps.items():
            if one is not None:
                file = Path(folder) / f"{name}.idmap"
                save(file, name, one)
                stored[name] = StoredIds(file=str(file), digest=one.digest)
        tables = tuple(structs.replace(table, id_map=stored.get(table.name)) for table in resolved.tables)
        return as_it_is(structs.replace(resolved.recipe, tables=Tables(list=tables)), seed)


def as_it_is(recipe: Recipe, seed: int) -> dict[str, float]:
    """The same of a recipe that names its maps."""
    with TemporaryDirectory() as folder:
        result = TrainingRun.start(structs.replace(recipe, seed=seed), Path(folder)).go()
    scores = result.test["label"]
    return {"auc": scores["auc"], "ne": scores["ne"], "wall_s": result.wall_s}

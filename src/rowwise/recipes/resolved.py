"""A recipe with every default filled in and its data opened, the parts of its model, and its batches."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from rowwise.ingest.batch_shard import BatchShard
from rowwise.ingest.batcher import Batcher, Batching, Position, table_rows_for_ids
from rowwise.ingest.bound import REQUEST, BoundPreparation
from rowwise.ingest.columns import Columns
from rowwise.ingest.reader import Split
from rowwise.ingest.transform import LoadedTransforms, serving
from rowwise.models.link import AmountLink
from rowwise.models.second_copy import second_tables
from rowwise.parallel.comm.interface import Comm
from rowwise.planning.perf.wire_choice import WireChoice
from rowwise.recipes.id_maps import stored_tables_of
from rowwise.recipes.model_configs import Model
from rowwise.recipes.model_kinds import family_of
from rowwise.recipes.recipe import Recipe
from rowwise.recipes.rows import RecipeRows, RowSelection
from rowwise.tables.batch import Batch
from rowwise.tables.spec import Table, Value
from rowwise.train.loss_settings import AmountLoss, CoTeaching

OpenBatches = Callable[[Position | None], Batcher]
QuarantineFolder = Callable[[], Path | None]  # None until the run has a folder


def no_quarantine() -> None:
    """The quarantine folder of code without one, where bad rows are dropped."""


class ModelParts(Value, frozen=True, kw_only=True):
    """Everything that a model is built from but data: settings, columns and tables."""

    model: Model
    columns: Columns
    tables: tuple[Table, ...]
    tasks: tuple[str, ...]
    seed: int = 0
    merge_shared: bool = False
    device: str = "cpu"
    link: AmountLink | None = None  # maps outputs to amounts; None: outputs are logits

    def bind(
        self, schema: pa.Schema, transforms: LoadedTransforms, columns: Columns | None = None, split: Split = REQUEST
    ) -> BoundPreparation:
        """The preparation of raw rows; `columns`: a subset, for one tower; `split`: its name is in errors."""
        columns = columns or self.columns
        return BoundPreparation(schema, transforms, columns, table_rows_for_ids(columns, self.tables), split)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRecipe:
    """A recipe with every default filled in, and its opened data."""

    recipe: Recipe
    rows: RecipeRows
    transforms: LoadedTransforms
    notes: tuple[str, ...] = ()  # settings that were replaced or have no effect, and why
    wire_choice: WireChoice | None = None  # of wire: auto

    @property
    def columns(self) -> Columns:
        assert self.recipe.columns is not None
        return self.recipe.columns

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.recipe.tables.list

    @property
    def stored_tables(self) -> tuple[Table, ...]:
        """The tables in memory, after id maps have split tables into their parts."""
        return tuple(stored for table in self.trained_tables for stored in stored_tables_of(table))

    @property
    def trained_tables(self) -> tuple[Table, ...]:
        """The tables of the model, and those of its second copy."""
        return (*self.tables, *second_tables(self.tables)) if self.has_second_copy else self.tables

    @property
    def has_second_copy(self) -> bool:
        """Whether two copies of the model train each other."""
        train, model = self.recipe.train, self.recipe.model
        return isinstance(train.objective, CoTeaching) and not family_of(model).ranks_items

    @property
    def parts(self) -> ModelParts:
        recipe, model = self.recipe, self.recipe.model
        assert not isinstance(model, str)  # `resolve` replaces the name of a class
        return ModelParts(
            model=model,
            columns=self.columns,
            tables=self.tables,
            tasks=self.tasks,
            seed=recipe.seed,
            merge_shared=recipe.train.merge_shared,
            device=recipe.train.device,
            link=self.link,
        )

    @property
    def link(self) -> AmountLink | None:
        """The link from outputs to amounts; None: outputs are logits."""
        loss = self.recipe.train.objective
        return loss.link if isinstance(loss, AmountLoss) else None

    @property
    def tasks(self) -> tuple[str, ...]:
        return tasks_of(self.recipe.model, self.columns)


def tasks_of(model: Model | str, columns: Columns) -> tuple[str, ...]:
    task = family_of(model).task
    return columns.tasks if task is None else (task,)


def batch_shard_of(comm: Comm | None) -> BatchShard:
    return BatchShard() if comm is None else BatchShard(rank=comm.rank, world=len(comm.ranks))


def make_batcher(
    resolved: ResolvedRecipe,
    rows: RowSelection,
    position: Position | None = None,
    shard: BatchShard | None = None,
    quarantine: Path | Literal[""] | None = None,
) -> Batcher:
    """The training batches, or a rank's shard of each.

    The recipe says whether bad rows go to the folder `quarantine`; "" leaves them out and writes nothing.
    """
    data, train, seed = resolved.recipe.data, resolved.recipe.train, resolved.recipe.seed
    batching = Batching(
        size=train.batch,
        seed=seed,
        shuffle=train.shuffle,
        ahead=train.ahead,
        share=rows.share,
        where=rows.where,
        together=data.together,
        shard=shard or BatchShard(),
        quarantine=str(quarantine) if quarantine is not None and data.on_bad_rows == "quarantine" else None,
    )
    return Batcher(rows.reader, resolved.columns, resolved.tables, batching, position, resolved.transforms)


def evaluation_batches(
    resolved: ResolvedRecipe, rows: RowSelection, shard: BatchShard | None = None, quarantine: Path | None = None
) -> Iterable[Batch]:
    """All rows once, in their order, in batches for evaluation, or a rank's shard of each.

    If the recipe quarantines bad rows, they go to the folder; without a folder they are dropped.
    """
    recipe = resolved.recipe
    batching = Batching(
        size=recipe.evaluate.batch,
        shuffle=False,
        ahead=recipe.train.ahead,
        share=rows.share,
        where=rows.where,
        shard=shard or BatchShard(),
        quarantine=str(quarantine or "") if recipe.data.on_bad_rows == "quarantine" else None,
    )
    # `serving` drops transforms that sample rows: evaluation measures all of them.
    return Batcher(rows.reader, resolved.columns, resolved.tables, batching, None, serving(resolved.transforms))

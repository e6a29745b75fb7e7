"""Divides rows into a history, from which maps are learned, and later rows to measure on.

Ids of the rows to measure on are not counted, and no model is trained on them. Test rows are never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from rowwise.base.errors import DataError
from rowwise.ingest.datasets.dataset import PartReader
from rowwise.ingest.reader import Split
from rowwise.ingest.where import RowFilter, parse
from rowwise.recipes.recipe import TimeShare
from rowwise.recipes.resolved import ResolvedRecipe
from rowwise.recipes.rows import RowSelection

LATER = 0.1  # share of the history to measure on, without validation rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWindow:
    """The history, and the later rows to measure on."""

    earlier: ResolvedRecipe  # trains on the history without `later`
    later: RowSelection
    whole: ResolvedRecipe | None  # trains on the whole history; None: same as `earlier`
    description: str  # description of `later`
    is_later: bool  # `later` is later in time, if splits are in time order

    @property
    def validates(self) -> bool:
        """Whether the rows to measure on also choose the best step."""
        return self.earlier.rows.valid is not None


def open_window(resolved: ResolvedRecipe, history: Sequence[str]) -> DataWindow:
    """The window of a recipe, whose history is the training rows that pass all conditions in `history`."""
    train = resolved.rows.train
    conditions = parse(history)
    rows = replace(train, where=RowFilter(all_of=train.where.all_of + conditions.all_of))
    splits = _splits_with_rows(rows) if conditions.all_of else rows.reader.splits()
    if not splits:
        raise DataError(f"--history {' and '.join(history)}: no training row passes", "other conditions")
    valid = resolved.rows.valid
    if valid is not None:
        description, is_later = _describe_validation(resolved)
        return DataWindow(
            earlier=_replace_rows(resolved, rows, valid),
            later=valid,
            whole=None,
            description=description,
            is_later=is_later,
        )
    earlier, later, description = _hold_out(rows, splits)
    return DataWindow(
        earlier=_replace_rows(resolved, earlier, None),
        later=later,
        whole=_replace_rows(resolved, rows, None),
        description=description,
        is_later=later.share == rows.share,
    )


def _replace_rows(resolved: ResolvedRecipe, rows: RowSelection, valid: RowSelection | None) -> ResolvedRecipe:
    return replace(resolved, rows=replace(resolved.rows, train=rows, valid=valid))


def _splits_with_rows(rows: RowSelection) -> tuple[Split, ...]:
    """Splits with at least one row of the history; reads the columns that the conditions name."""
    reader, where = rows.reader, rows.where
    splits = reader.splits()
    where.check(reader.schema, splits[0].source)
    return tuple(split for split in splits if where.mask(reader.read(split, where.columns)).any())


def _describe_validation(resolved: ResolvedRecipe) -> tuple[str, bool]:
    """A description of the recipe's validation rows, and whether they may be later than its training rows."""
    data, dataset = resolved.recipe.data, resolved.rows.dataset
    description = "the validation rows of the recipe"
    if data.valid is not None or dataset.valid is not None:
        return description, True
    if data.share == "last":
        return f"{description}, the last splits before the test splits", True
    if isinstance(data.share, TimeShare):
        return f"{description}, the last ones by {data.share.column!r} before the test rows", True
    return f"{description}, a random share of its rows", False


def _hold_out(rows: RowSelection, splits: Sequence[Split]) -> tuple[RowSelection, RowSelection, str]:
    """Earlier and later rows of the history, and a description; a random split if there are too few splits."""
    count = round(LATER * len(splits))
    if count:
        earlier, later = (
            replace(rows, reader=PartReader(rows.reader, chosen)) for chosen in (splits[:-count], splits[-count:])
        )
        last = f"last {count} of {len(splits)} splits" if count > 1 else f"last of {len(splits)} splits"
        return earlier, later, f"the {last} of the history"
    border = rows.share.begin + LATER * (rows.share.end - rows.share.begin)
    description = f"a random {LATER:.0%} of the history, as it has too few splits ({len(splits)}) to take the last"
    earlier, later = structs.replace(rows.share, begin=border), structs.replace(rows.share, end=border)
    return replace(rows, share=earlier), replace(rows, share=later), description

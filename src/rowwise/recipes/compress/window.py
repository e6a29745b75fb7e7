"""Which rows are the history that maps are learned from, and which later rows tell how good they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rowwise.errors import DataError
from rowwise.ingest.datasets.dataset import PartReader
from rowwise.ingest.reader import Split
from rowwise.ingest.share import Share
from rowwise.ingest.where import RowFilter, parse
from rowwise.recipes.compose import ResolvedRecipe
from rowwise.recipes.rows import RowSelection

LATER = 0.1  # of the splits of the history, where the recipe has no validation rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWindow:
    """The history, and what is measured on."""

    earlier: ResolvedRecipe  # trains on the history without the rows that are measured on
    later: RowSelection
    whole: ResolvedRecipe | None  # trains on all of the history; None: nothing was taken from it
    said: str  # which rows `later` are
    is_later: bool  # as far as the order of splits is that of time, or the recipe says so

    @property
    def validates(self) -> bool:
        """Whether the recipe chooses its best step by the rows that are measured on."""
        return self.earlier.parts.valid is not None


def open_window(resolved: ResolvedRecipe, history: Sequence[str]) -> DataWindow:
    """The rows of a recipe that are history, all of these conditions being met, and those to measure on."""
    train = resolved.parts.train
    more = parse(history)
    rows = replace(train, where=RowFilter(all_of=train.where.all_of + more.all_of))
    splits = _used(rows) if more.all_of else rows.reader.splits()
    if not splits:
        raise DataError(f"--history {' and '.join(history)}: no training row is like that: want other conditions")
    valid = resolved.parts.valid
    if valid is not None:
        said, later = _own(resolved)
        return DataWindow(
            earlier=_training_on(resolved, rows, valid), later=valid, whole=None, said=said, is_later=later
        )
    earlier, rest, said = _cut(rows, splits)
    return DataWindow(
        earlier=_training_on(resolved, earlier, None),
        later=rest,
        whole=_training_on(resolved, rows, None),
        said=said,
        is_later=rest.share == rows.share,
    )


def _training_on(resolved: ResolvedRecipe, rows: RowSelection, valid: RowSelection | None) -> ResolvedRecipe:
    return replace(resolved, parts=replace(resolved.parts, train=rows, valid=valid))


def _used(rows: RowSelection) -> tuple[Split, ...]:
    """The splits that have rows of the history; reads the columns that are compared."""
    reader, where = rows.reader, rows.where
    splits = reader.splits()
    where.check(reader.schema, splits[0].source)
    return tuple(split for split in splits if where.mask(reader.read(split, where.columns)).any())


def _own(resolved: ResolvedRecipe) -> tuple[str, bool]:
    """What the recipe's validation rows are, and whether they may be later ones."""
    data, dataset = resolved.recipe.data, resolved.parts.dataset
    said = "the validation rows of the recipe"
    if data.valid is not None or dataset.valid is not None:
        return said, True
    if data.share == "last":
        return f"{said}, the last splits before those to test on", True
    return f"{said}, a random share of its rows", False


def _cut(rows: RowSelection, splits: Sequence[Split]) -> tuple[RowSelection, RowSelection, str]:
    """The earlier and the later rows of a history; a random share, where it has too few splits."""
    count = round(LATER * len(splits))
    if count:
        earlier, later = (
            replace(rows, reader=PartReader(rows.reader, part)) for part in (splits[:-count], splits[-count:])
        )
        many = f"last {count} of {len(splits)} splits" if count > 1 else f"last of {len(splits)} splits"
        return earlier, later, f"the {many} of the history"
    begin, end = rows.share.begin, rows.share.end
    at = begin + LATER * (end - begin)
    said = f"a random {LATER:.0%} of the history, as its splits are too few ({len(splits)}) to take the last"
    return replace(rows, share=Share(begin=at, end=end)), replace(rows, share=Share(begin=begin, end=at)), said

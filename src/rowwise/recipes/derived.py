"""Transforms of columns in a first recipe: values in text, parts of times, buckets of numbers."""

from collections.abc import Sequence
from typing import NamedTuple

from rowwise.ingest.columns import Sparse
from rowwise.ingest.inspect import ColumnCard, DatasetCard
from rowwise.ingest.transform import AnyKind, Bucketize, GetLocalHour, GetLocalWeekday, SplitText

LARGE_ROWS = 5_000_000
PARTS = {"hour": (GetLocalHour, 24), "weekday": (GetLocalWeekday, 7)}


class Derived(NamedTuple):
    """Transforms, and their sparse columns, each with the rows of its table."""

    transforms: tuple[AnyKind, ...]
    sparse: tuple[tuple[Sparse, int], ...]


def derive(card: DatasetCard) -> Derived:
    """Derive columns from the used ones. Numbers also become ids of buckets, unless the data is large."""
    used = [c for c in card.columns if c.is_ids or c.role == "dense" or c.parts]
    transforms: list[AnyKind] = [SplitText(column=c.name, separator=c.separator) for c in used if c.separator]
    transforms += [c.reading.transform(c.name) for c in used if c.reading is not None]
    taken = {c.name for c in card.columns}
    sparse: list[tuple[Sparse, int]] = []
    for column in used:
        for part in column.parts:
            kind, rows = PARTS[part]
            name = _new_name(f"{column.name}_{part}", taken)
            transforms.append(kind(column=column.name, to=name, unit=column.unit))
            sparse.append((Sparse(column=name, ids="direct"), rows))
    if card.rows <= LARGE_ROWS or not any(c.is_ids for c in used):
        for column in (c for c in used if c.role == "dense" and not c.both and c.borders):
            name = _new_name(f"{column.name}_bucket", taken)
            transforms.append(Bucketize(column=column.name, to=name, borders=column.borders))
            sparse.append((Sparse(column=name, ids="direct"), len(column.borders) + 1))
    return Derived(tuple(transforms), tuple(sparse))


def _new_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def left_out(card: DatasetCard, used: Sequence[str | None]) -> list[ColumnCard]:
    """Columns that the model does not use."""
    rest = [c for c in card.columns if c.role in ("unused", "group")]
    return rest + [c for c in card.columns if c.role in ("key", "time") and c.name not in used]

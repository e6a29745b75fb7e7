"""What the first rows say of labels: how many rows have none, and the facts that losses of amounts need."""

from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from rowwise.base.errors import DataError
from rowwise.ingest.bags import combine_chunks
from rowwise.ingest.columns import Columns
from rowwise.ingest.labels import bad_values, describe_unlabelled
from rowwise.ingest.transform import LoadedTransforms
from rowwise.recipes.rows import RowSelection, make_task
from rowwise.tables.spec import Table
from rowwise.train.loss_settings import AmountLoss, Poisson

LOOK_ROWS, LOOK_SPLITS = 1 << 20, 8  # of which the facts are, at most


class LabelFacts(NamedTuple):
    """Counts and labels of the first rows."""

    rows: int
    unlabelled: int  # of these
    all_rows: bool
    labels_RK: NDArray[np.float64]  # of the rows in the share

    @property
    def note(self) -> str | None:
        """That rows without a label are left out."""
        return describe_unlabelled(self.unlabelled, self.rows, all_rows=self.all_rows) if self.unlabelled else None


def look_at_labels(
    rows: RowSelection, columns: Columns, tables: tuple[Table, ...], transforms: LoadedTransforms
) -> LabelFacts:
    """Read the labels of the first splits of a selection."""
    only = structs.replace(columns, dense=(), sparse=columns.sparse[:1], weight=None, key=None, time=None, shared=())
    task = make_task(rows, only, tables, transforms, quarantine="")  # training says what is wrong with a row
    seen = unlabelled = 0
    read = 0
    parts: list[NDArray[np.float64]] = []
    for index in range(min(len(task.splits), LOOK_SPLITS)):
        loaded = task.load(index)
        seen, unlabelled, read = seen + loaded.rows, unlabelled + loaded.unlabelled, index + 1
        order_R = task.order_rows(loaded, index, 0).order_R
        arrays = {name: combine_chunks(loaded.table[name]) for label in columns.parsed_labels for name in label.columns}
        labels_RK = np.stack([label.values(arrays) for label in columns.parsed_labels], 1).astype(np.float64)
        parts.append(labels_RK if order_R is None else labels_RK[order_R])
        if seen >= LOOK_ROWS:
            break
    empty = np.empty((0, len(columns.labels)))
    return LabelFacts(seen, unlabelled, read == len(task.splits), np.concatenate([empty, *parts]))


def with_facts(loss: AmountLoss, facts: LabelFacts, columns: Columns) -> AmountLoss:
    """The loss with a mean, and a scale, of each label."""
    good_R = ~np.logical_or.reduce([bad_values(label_R, columns.label_values) for label_R in facts.labels_RK.T])
    labels_RK = facts.labels_RK[good_R]
    if not len(labels_RK):
        raise DataError(f"labels {', '.join(columns.labels)}: no row has one", "rows with labels to train on")
    mean = tuple(map(float, labels_RK.mean(0)))
    scale = tuple(float(one) or 1.0 for one in labels_RK.std(0))
    if not isinstance(loss, Poisson):
        return structs.replace(loss, mean=loss.mean or mean, scale=loss.scale or scale)
    if not loss.mean and min(mean) <= 0:
        raise DataError(f"label {columns.labels[int(np.argmin(mean))]!r}: all are 0", "rows with other labels, too")
    return structs.replace(loss, mean=loss.mean or mean)


def is_complete(loss: AmountLoss) -> bool:
    """Whether a loss has its facts."""
    return bool(loss.mean) and (isinstance(loss, Poisson) or bool(loss.scale))

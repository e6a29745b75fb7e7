"""Statistics of labels in the first rows: rows without a label, and the mean and scale that losses of amounts need."""

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

LOOK_ROWS, LOOK_SPLITS = 1 << 20, 8  # maximum rows and splits to read


class LabelFacts(NamedTuple):
    """Counts and labels of the first rows."""

    rows: int
    unlabelled: int  # among `rows`
    all_rows: bool
    labels_RK: NDArray[np.float64]  # rows of the share only

    @property
    def note(self) -> str | None:
        """A warning that rows without a label are left out."""
        return describe_unlabelled(self.unlabelled, self.rows, all_rows=self.all_rows) if self.unlabelled else None


def inspect_labels(
    rows: RowSelection, columns: Columns, tables: tuple[Table, ...], transforms: LoadedTransforms
) -> LabelFacts:
    """Read the labels of the first splits of a selection."""
    label_columns = structs.replace(
        columns, dense=(), sparse=columns.sparse[:1], weight=None, key=None, time=None, shared=()
    )
    task = make_task(rows, label_columns, tables, transforms, quarantine="")  # training reports bad rows
    rows_read = unlabelled = 0
    splits_read = 0
    parts: list[NDArray[np.float64]] = []
    for index in range(min(len(task.splits), LOOK_SPLITS)):
        loaded = task.load(index)
        rows_read, unlabelled, splits_read = rows_read + loaded.rows, unlabelled + loaded.unlabelled, index + 1
        order_R = task.order_rows(loaded, index, 0).order_R
        arrays = {name: combine_chunks(loaded.table[name]) for label in columns.parsed_labels for name in label.columns}
        labels_RK = np.stack([label.values(arrays) for label in columns.parsed_labels], 1).astype(np.float64)
        parts.append(labels_RK if order_R is None else labels_RK[order_R])
        if rows_read >= LOOK_ROWS:
            break
    empty = np.empty((0, len(columns.labels)))
    return LabelFacts(rows_read, unlabelled, splits_read == len(task.splits), np.concatenate([empty, *parts]))


def with_facts(loss: AmountLoss, facts: LabelFacts, columns: Columns) -> AmountLoss:
    """The loss completed by the mean and scale of each label."""
    good_R = ~np.logical_or.reduce([bad_values(label_R, columns.label_values) for label_R in facts.labels_RK.T])
    labels_RK = facts.labels_RK[good_R]
    if not len(labels_RK):
        raise DataError(f"labels {', '.join(columns.labels)}: no row has one", "rows with labels to train on")
    mean = tuple(map(float, labels_RK.mean(0)))
    scale = tuple(float(std) or 1.0 for std in labels_RK.std(0))
    if not isinstance(loss, Poisson):
        return structs.replace(loss, mean=loss.mean or mean, scale=loss.scale or scale)
    if not loss.mean and min(mean) <= 0:
        raise DataError(f"label {columns.labels[int(np.argmin(mean))]!r}: all are 0", "rows with other labels, too")
    return structs.replace(loss, mean=loss.mean or mean)


def is_complete(loss: AmountLoss) -> bool:
    """Whether a loss has its mean and scale."""
    return bool(loss.mean) and (isinstance(loss, Poisson) or bool(loss.scale))

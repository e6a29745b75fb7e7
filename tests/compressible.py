"""Small made-up clicks in which one table has ids worth compressing, and a recipe that learns from them in a second."""

import pyarrow as pa
import small
import yaml
from pyarrow import parquet as pq
from small import RECIPE

from rowwise.ingest.datasets.synthetic import SyntheticColumns
from rowwise.recipes.text import decode

WORLD = SyntheticColumns(dense=2, ids=(("user", 1200), ("item", 30)), bags=(("seen", 1100),))
TABLE = {"dim": 8, "pooling": "mean", "optimizer": {"kind": "rowwise_adagrad", "lr": 0.1}}
SECTIONS = {
    "name": "clicks",
    "data": {"dataset": "parquet:rows.parquet", "test_share": 0.1},
    "columns": RECIPE["columns"],
    "tables": {"list": [{"name": name, "rows": rows, **TABLE} for name, rows in WORLD.ids + WORLD.bags]},
    "model": RECIPE["model"],
    "train": {"batch": 256, "threads": 1, "ahead": 0, "optimizer": {"kind": "adam", "lr": 0.01}},
}


def sections(folder, **changes):
    """The recipe, with other or more keys in its sections; the rows are written if they are not there."""
    if not (folder / "rows.parquet").exists():
        write_clicks(folder / "rows.parquet")
    return small.sections(folder, SECTIONS, **changes)


def recipe(folder, **changes):
    """The recipe as a value."""
    return decode(sections(folder, **changes), "clicks.yaml")


def write_recipe(folder, **changes):
    """The recipe as a file."""
    path = folder / "clicks.yaml"
    path.write_text(yaml.safe_dump(sections(folder, **changes)))
    return path


def write_clicks(path, rows=4000, group=200, seen=None):
    """Rows, of which column `row` counts on as time does; `seen`: the same list in each."""
    table = WORLD.rows(0, rows).drop_columns(["logit"])
    if seen is not None:
        column = pa.array([seen] * rows, table["seen"].type)
        table = table.drop_columns(["seen"]).append_column("seen", column)
    pq.write_table(table, path, row_group_size=group)

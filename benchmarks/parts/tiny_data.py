"""Made-up rows in the form of the public datasets, which take long to get: what smoke runs train on."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from rowwise.ingest.datasets import complete_journey, movielens

IDS = 40  # of a column
LARGE = {"product_id": 1_200, "product_store": 1_500}  # tables that are large enough to be compressed
GENRES = 20
GROUP_ROWS = 500


def make_tiny(folder: Path) -> Path:
    """A folder of datasets."""
    draw = np.random.default_rng(0)
    films = folder / "movielens-100k"
    for part, rows in (("train", 1_000), ("valid", 200), ("test", 200)):
        _write(films / f"{part}.parquet", _films(draw, rows))
    sales = folder / "complete-journey"
    _write(sales / "train.parquet", _sales(draw, 4_000, complete_journey.FIRST_WEEK, complete_journey.TEST_WEEK))
    _write(sales / "test.parquet", _sales(draw, 400, complete_journey.TEST_WEEK, 54))
    return folder


def _films(draw: np.random.Generator, rows: int) -> pa.Table:
    lists = [draw.choice(GENRES, draw.integers(1, 4), replace=False).tolist() for _ in range(rows)]
    columns = {name: draw.integers(0, IDS, rows) for name in ("user_id", "movie_id")}
    words = {name: draw.choice(["a", "b", "c"], rows) for name in ("occupation", "gender")}
    about = {"age": draw.integers(18, 80, rows), "timestamp": np.arange(rows), "genres": pa.array(lists)}
    return _labelled(draw, columns | words | about, movielens.ROWS)


def _sales(draw: np.random.Generator, rows: int, first: int, last: int) -> pa.Table:
    columns = {name: draw.integers(0, LARGE.get(name, IDS), rows) for name in complete_journey.ROWS}
    weeks = np.sort(draw.integers(first, last, rows))
    sold = {
        f"{what}_{weeks}": draw.poisson(1.0, rows).astype(np.float32)
        for what in ("sold_here", "sold")
        for weeks in complete_journey.HISTORY_WEEKS
    }
    return _labelled(draw, columns | {"week": weeks} | sold, complete_journey.ROWS)


def _labelled(draw: np.random.Generator, columns: dict, wanted: dict[str, int]) -> pa.Table:
    if missing := wanted.keys() - columns.keys():
        raise AssertionError(f"made-up rows lack {sorted(missing)}")
    rows = len(next(iter(columns.values())))
    return pa.table(columns | {"label": draw.random(rows) < 0.4, "row": np.arange(rows)})


def _write(path: Path, rows: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, row_group_size=GROUP_ROWS)

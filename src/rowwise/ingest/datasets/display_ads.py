"""Display advertising logs of Criteo and Avazu, with the splits and preprocessing of the BARS benchmark.

BARS names a split x1 or x4. It publishes the files of x1, and draws x4 from the Kaggle logs by ten folds, seed 2018.
In x4 Criteo's numbers are ids: a number above 2 becomes floor(log(x)^2).
"""

from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from rowwise.ingest.columns import Columns, Dense
from rowwise.ingest.datasets.criteo import CATEGORIES, NUMBERS
from rowwise.ingest.datasets.dataset import PARTS
from rowwise.ingest.datasets.source import Download, SourceFolder
from rowwise.ingest.datasets.stored import PartedRows, StoredDataset, in_ten_folds, sparse_columns, with_parts

SEED = 2018  # of the folds
KAGGLE_TERMS = "the rules of the Kaggle competition"
MISSING = "missing"  # id of an empty category, which is a category in BARS
AVAZU_IDS = (
    *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
    *("C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21"),
)
AVAZU_TYPES = {"click": pa.int8(), "hour": pa.string(), **dict.fromkeys(AVAZU_IDS, pa.string())}
AVAZU_BORDERS = ("141029", "141030")  # validation and test day, as yymmdd
FRAPPE = ("user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city")


def _criteo_x4(source: SourceFolder) -> PartedRows:
    types = {"label": pa.int8(), **dict.fromkeys(NUMBERS, pa.float64()), **dict.fromkeys(CATEGORIES, pa.string())}
    labels = source.csv("train.txt", types, header=False, delimiter="\t", only=("label",))
    rows = map(_criteo_ids, source.csv("train.txt", types, header=False, delimiter="\t"))
    yield from with_parts(rows, in_ten_folds(labels, SEED))


def _criteo_ids(table: pa.Table) -> pa.Table:
    columns = {"label": table["label"]}
    columns |= {name: _bucket(table[name]) for name in NUMBERS}
    columns |= {name: pc.call_function("coalesce", [table[name], pa.scalar(MISSING)]) for name in CATEGORIES}
    return pa.table(columns)


def _bucket(numbers: pa.ChunkedArray) -> pa.Array:
    x_R = np.nan_to_num(numbers.to_numpy())
    above_R = np.floor(np.log(np.maximum(x_R, 1)) ** 2)
    return pa.array(np.where(x_R > 2, above_R, np.trunc(x_R)).astype(np.int64))


def _avazu(source: SourceFolder) -> PartedRows:
    for table in source.csv("train*", AVAZU_TYPES):
        day_R = np.array([hour[:6] for hour in table["hour"].to_pylist()])
        yield _with_times(table), np.searchsorted(AVAZU_BORDERS, day_R, side="right").astype(np.int8)


def _avazu_x4(source: SourceFolder) -> PartedRows:
    part_R = in_ten_folds(source.csv("train*", {"click": pa.int8()}), SEED)
    yield from with_parts(map(_with_times, source.csv("train*", AVAZU_TYPES)), part_R)


def _with_times(table: pa.Table) -> pa.Table:
    """Replace a text such as 14102105 by hour, weekday and a weekend flag."""
    distinct = table["hour"].combine_chunks().dictionary_encode()
    times = [datetime.strptime(hour, "%y%m%d%H").replace(tzinfo=UTC) for hour in distinct.dictionary.to_pylist()]
    parts = {
        "time": [int(time.timestamp()) for time in times],
        "hour": [time.hour for time in times],
        "weekday": [time.weekday() for time in times],
        "is_weekend": [int(time.weekday() >= 5) for time in times],
    }
    columns = {name: pa.array(values, pa.int64()).take(distinct.indices) for name, values in parts.items()}
    return pa.table({name: table[name] for name in table.schema.names if name != "hour"} | columns)


def _files_of_parts(types: dict[str, pa.DataType]) -> Callable[[SourceFolder], PartedRows]:
    """A function that reads train.csv, valid.csv and test.csv."""

    def read(source: SourceFolder) -> PartedRows:
        for part, name in enumerate(PARTS):
            yield from ((table, part) for table in source.csv(f"{name}.csv", types))

    return read


def _bars_x1(what: str, name: str, size: str, ids: tuple[str, ...], numbers: tuple[str, ...] = ()) -> StoredDataset:
    types = {"label": pa.int8(), **dict.fromkeys(numbers, pa.float64()), **dict.fromkeys(ids, pa.string())}
    page = f"https://huggingface.co/datasets/reczoo/{name}"
    files = tuple(f"{part}.csv" for part in PARTS)
    return StoredDataset(
        what=what,
        split=f"the files of {name} in BARS",
        download=Download(files=files, size=size, terms="those of the publisher of the log", page=page),
        read=_files_of_parts(types),
        columns=Columns(labels=("label",), dense=tuple(Dense(column=n) for n in numbers), sparse=sparse_columns(*ids)),
        min_rows=1,
    )


_CRITEO_LOG = Download(
    files=("train.txt",),
    size="11 GB unpacked",
    terms=KAGGLE_TERMS,
    page="https://www.kaggle.com/c/criteo-display-ad-challenge/data",
)
_AVAZU_LOG = Download(
    files=("train.gz",),
    size="about 1 GB",
    terms=KAGGLE_TERMS,
    page="https://www.kaggle.com/c/avazu-ctr-prediction/data",
)
_AVAZU_SPARSE = sparse_columns(*AVAZU_IDS, "hour", "weekday", "is_weekend")

DATASETS = {
    "criteo-x1": _bars_x1(
        "Criteo's clicks of a week, 45.8 million rows", "Criteo_x1", "several GB", CATEGORIES, NUMBERS
    ),
    "criteo-x4": StoredDataset(
        what="Criteo's clicks of a week, 45.8 million rows, with numbers as ids",
        split="Criteo_x4 of BARS: ten folds at random, 8 train, 1 validates, 1 tests",
        download=_CRITEO_LOG,
        read=_criteo_x4,
        columns=Columns(labels=("label",), sparse=sparse_columns(*NUMBERS, *CATEGORIES)),
        min_rows=10,
    ),
    "avazu": StoredDataset(
        what="clicks on mobile advertisements of ten days, 40.4 million rows",
        split="by day: the last tests, the one before validates",
        download=_AVAZU_LOG,
        read=_avazu,
        columns=Columns(labels=("click",), sparse=_AVAZU_SPARSE, time="time"),
    ),
    "avazu-x1": _bars_x1(
        "Avazu's clicks, 40.4 million rows of 22 ids",
        "Avazu_x1",
        "several GB",
        tuple(f"feat_{i + 1}" for i in range(22)),
    ),
    "avazu-x4": StoredDataset(
        what="Avazu's clicks, 40.4 million rows",
        split="Avazu_x4 of BARS: ten folds at random, 8 train, 1 validates, 1 tests",
        download=_AVAZU_LOG,
        read=_avazu_x4,
        columns=Columns(labels=("click",), sparse=_AVAZU_SPARSE, time="time"),
    ),
    "frappe-x1": _bars_x1("uses of mobile apps in context, 288,609 rows", "Frappe_x1", "some MB", FRAPPE),
    "movielens-tags-x1": _bars_x1(
        "tags that users gave to films, 2.0 million rows",
        "MovielensLatest_x1",
        "tens of MB",
        ("user_id", "item_id", "tag_id"),
    ),
}

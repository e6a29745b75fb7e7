"""Criteo's click logs (Kaggle and Terabyte): lines of a label, 13 integers and 26 hexadecimal categories.

Criteo requires its terms to be accepted, so the user downloads the files; they are read without conversion.
"""

from collections.abc import Sequence
from pathlib import Path

from rowwise.base.errors import DataError
from rowwise.ingest.columns import Columns, Dense, Sparse
from rowwise.ingest.datasets.dataset import Dataset, PartReader, hold_out
from rowwise.ingest.datasets.source import Download
from rowwise.ingest.delimited import CsvReader, Dialect
from rowwise.ingest.reader import Reader
from rowwise.tables.spec import Table

NUMBERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
# Distinct values of each category in the Kaggle set.
DISTINCT = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
MAX_ROWS = 1_000_000
# Table rows of MLPerf's DLRM on the Terabyte set.
TERABYTE_DISTINCT = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
MAX_TERABYTE_ROWS = 10_000_000
DAYS = 24
TEST_PART = 7  # the Kaggle set is seven days
WHERE = "https://ailab.criteo.com/ressources/"
CRITEO_DOWNLOADS = {
    "criteo": Download(files=("train.txt",), size="11 GB unpacked", terms="Criteo's terms", page=WHERE),
    "criteo-terabyte": Download(
        files=("day_0 to day_23",), size="about 1 TB unpacked", terms="Criteo's terms", page=WHERE
    ),
}


def criteo(folder: Path, dim: int = 16) -> Dataset:
    """The files in a folder; the last seventh of the splits is the test set, if there are at least seven."""
    if not folder.is_dir() or not any(folder.iterdir()):
        raise DataError(f"{folder}: no Criteo data here", hint="rowwise data get criteo says where it comes from")
    train, test = hold_out(_read(folder), TEST_PART)
    # Values are hashed: four times as many rows avoid most collisions of small categories.
    return _dataset(train, None, test, [min(4 * count, MAX_ROWS) for count in DISTINCT], dim)


def criteo_terabyte(folder: Path, dim: int = 16) -> Dataset:
    """The unpacked files day_0 to day_23: the halves of the last day are the validation and test sets."""
    days = {path.name for path in folder.glob("day_*")}
    missing = [name for name in (f"day_{n}" for n in range(DAYS)) if name not in days]
    if missing:
        expected = f"day_0 to day_{DAYS - 1}, unpacked"
        raise DataError(f"{folder}: no {missing[0]}", expected, hint=explain_download(folder))
    reader = _read(folder / "day_[0-9]*")
    last = f"day_{DAYS - 1}"
    train = [split for split in reader.splits() if Path(split.source).name != last]
    last_day = [split for split in reader.splits() if Path(split.source).name == last]
    half = len(last_day) // 2
    if not half:
        raise DataError(f"{folder}/{last}: {len(last_day)} split", "at least two, to validate and to test")
    parts = [PartReader(reader, splits) for splits in (train, last_day[:half], last_day[half:])]
    rows = [min(count, MAX_TERABYTE_ROWS) for count in TERABYTE_DISTINCT]
    return _dataset(parts[0], parts[1], parts[2], rows, dim)


def _read(path: Path) -> CsvReader:
    names = ("label", *NUMBERS, *CATEGORIES)
    types = {"label": "int8"} | dict.fromkeys(NUMBERS, "int64") | dict.fromkeys(CATEGORIES, "string")
    return CsvReader(path, Dialect(delimiter="\t", names=names, quotes=False, types=types))


def _dataset(train: Reader, valid: Reader | None, test: Reader | None, rows: Sequence[int], dim: int) -> Dataset:
    columns = Columns(
        labels=("label",),
        dense=tuple(Dense(column=name, log1p=True) for name in NUMBERS),
        sparse=tuple(Sparse(column=name) for name in CATEGORIES),
    )
    tables = tuple(Table(name=n, rows=r, dim=dim) for n, r in zip(CATEGORIES, rows, strict=True))
    return Dataset(train=train, valid=valid, test=test, columns=columns, tables=tables)


def explain_download(folder: Path) -> str:
    """Why this dataset is not fetched, and how to get it."""
    return f"Criteo's terms have to be accepted: get the files from {WHERE}, unpack them and put them into {folder}"

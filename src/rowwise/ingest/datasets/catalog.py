"""Datasets by name: those that are known, and `parquet:PATH` and `csv:PATH` for any other."""

import difflib
from collections.abc import Callable
from pathlib import Path

from rowwise.errors import DataError
from rowwise.ingest.datasets.complete_journey import complete_journey, complete_journey_tuning, get_complete_journey
from rowwise.ingest.datasets.criteo import criteo, explain_download
from rowwise.ingest.datasets.dataset import Dataset
from rowwise.ingest.datasets.files import from_files
from rowwise.ingest.datasets.movielens import get_movielens, movielens
from rowwise.ingest.datasets.synthetic import synthetic
from rowwise.ingest.delimited import CsvReader
from rowwise.ingest.parquet import ParquetReader

FOLDER = Path("data")
STORED: dict[str, Callable[[Path], Dataset]] = {
    "complete-journey": complete_journey,
    "complete-journey-tuning": complete_journey_tuning,
    "criteo": criteo,
    "movielens-100k": movielens,
}
FOLDERS = {"complete-journey-tuning": "complete-journey"}  # of those that read the files of another
GETTERS: dict[str, Callable[[Path], None]] = {
    "complete-journey": get_complete_journey,
    "movielens-100k": get_movielens,
}


def load(name: str, folder: Path = FOLDER) -> Dataset:
    """A dataset by name; what `rowwise data get` fetches is read from the folder of that name in `folder`."""
    kind, colon, path = name.partition(":")
    if colon and kind == "parquet":
        return from_files(ParquetReader(path))
    if colon and kind == "csv":
        return from_files(CsvReader(path))
    if name == "synthetic":
        return synthetic()
    return STORED[_known(name)](_place(name, folder))


def get(name: str, folder: Path = FOLDER) -> Path:
    """Fetch a dataset into `folder`, and say where it is."""
    if name == "synthetic":
        raise DataError("synthetic is made as it is read: there is nothing to get")
    place = _place(_known(name), folder)
    if place.name not in GETTERS:
        raise DataError(explain_download(place))
    GETTERS[place.name](place)
    return place


def _place(name: str, folder: Path) -> Path:
    return folder / FOLDERS.get(name, name)


def _known(name: str) -> str:
    if name in STORED:
        return name
    near = difflib.get_close_matches(name, STORED, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else "."
    there = ", ".join(["synthetic", *STORED, "parquet:PATH", "csv:PATH"])
    raise DataError(f"no dataset {name!r}{guess} There are {there}")

"""Datasets by name: known ones, and `parquet:PATH` and the like for any files and tables."""

import functools
from collections.abc import Callable
from pathlib import Path

from rowwise.base.errors import DataError, did_you_mean
from rowwise.ingest.datasets import display_ads, platforms, ratings
from rowwise.ingest.datasets.complete_journey import complete_journey, complete_journey_tuning, get_complete_journey
from rowwise.ingest.datasets.criteo import CRITEO_DOWNLOADS, criteo, criteo_terabyte, explain_download
from rowwise.ingest.datasets.dataset import PARTS, Dataset
from rowwise.ingest.datasets.discs import discs, get_discs
from rowwise.ingest.datasets.files import NAMES, from_files, open_named
from rowwise.ingest.datasets.movielens import (
    get_movielens,
    get_movielens_histories,
    get_movielens_sequences,
    movielens,
    movielens_histories,
    movielens_sequences,
)
from rowwise.ingest.datasets.source import Download
from rowwise.ingest.datasets.stored import StoredDataset
from rowwise.ingest.datasets.synthetic import synthetic
from rowwise.tables.spec import Value

FOLDER = Path("data")
FROM_FILES: dict[str, StoredDataset] = display_ads.DATASETS | ratings.DATASETS | platforms.DATASETS
STORED: dict[str, Callable[[Path], Dataset]] = {
    "complete-journey": complete_journey,
    "complete-journey-tuning": complete_journey_tuning,
    "criteo": criteo,
    "criteo-terabyte": criteo_terabyte,
    "discs": discs,
    "movielens-100k": movielens,
    "movielens-100k-histories": movielens_histories,
    "movielens-100k-sequences": movielens_sequences,
    **{name: functools.partial(dataset.open, name) for name, dataset in FROM_FILES.items()},
}
FOLDERS = {"complete-journey-tuning": "complete-journey"}  # datasets that share the files of another
GETTERS: dict[str, Callable[[Path], None]] = {
    "complete-journey": get_complete_journey,
    "discs": get_discs,
    "movielens-100k": get_movielens,
    "movielens-100k-histories": get_movielens_histories,
    "movielens-100k-sequences": get_movielens_sequences,
}


FETCHED = Download(files=(), size="fetched by rowwise data get", terms="see the docs", page="")
OWN = {  # description, split and download of the datasets outside of FROM_FILES
    "complete-journey": ("promotions in stores; the label is a sale", "by week: 2 to 47 train, 48 to 53 test", FETCHED),
    "complete-journey-tuning": ("the same, to choose settings", "by week: 2 to 43 train, 44 to 47 validate", FETCHED),
    "criteo": (
        "Criteo's clicks of a week, 45.8 million rows",
        "the last seventh of the lines tests",
        CRITEO_DOWNLOADS["criteo"],
    ),
    "criteo-terabyte": (
        "Criteo's clicks of 24 days, 4.4 billion rows",
        "day_0 to day_22 train; the halves of day_23 validate and test",
        CRITEO_DOWNLOADS["criteo-terabyte"],
    ),
    "discs": (
        "made-up people who like the items of one colour, and a picture of each item",
        "new items test; of all other rows a tenth, at random, validates",
        Download(files=(), size="made up by rowwise data get", terms="", page=""),
    ),
    "movielens-100k": (
        "100,000 ratings of films; the label is 4 stars or more",
        "at random: 80,000 rows train, 10,000 validate, 10,000 test",
        FETCHED,
    ),
    "movielens-100k-histories": (
        "the later half of each person's ratings, after the films that they liked in the earlier half",
        "by time: the last fifth of a person's rows tests, the fifth before it validates, all others train",
        FETCHED,
    ),
    "movielens-100k-sequences": (
        "the films that each of 943 people rated, oldest first",
        "a person's last film tests, the one before it validates, all others train",
        FETCHED,
    ),
    "synthetic": (
        "made up as it is read",
        "the rows after those that train test",
        Download(files=(), size="", terms="", page=""),
    ),
}


class CatalogEntry(Value, frozen=True):
    """An entry of `rowwise data ls`."""

    name: str
    what: str
    split: str
    files: tuple[str, ...]  # to download
    size: str
    terms: str
    page: str
    is_here: bool


def catalog(folder: Path = FOLDER) -> tuple[CatalogEntry, ...]:
    """All datasets by name."""
    about = OWN | {name: (dataset.what, dataset.split, dataset.download) for name, dataset in FROM_FILES.items()}
    return tuple(
        CatalogEntry(name, what, split, file.files, file.size, file.terms, file.page, _is_here(name, folder))
        for name, (what, split, file) in sorted(about.items())
    )


def _is_here(name: str, folder: Path) -> bool:
    place = _place(name, folder)
    if name in CRITEO_DOWNLOADS:
        return place.is_dir() and any(place.iterdir())
    return name == "synthetic" or (place / f"{PARTS[0]}.parquet").exists()


def load(name: str, folder: Path = FOLDER) -> Dataset:
    """Load a dataset by name; one of `rowwise data get` from its subfolder of `folder`."""
    if (reader := open_named(name)) is not None:
        return from_files(reader)
    if name == "synthetic":
        return synthetic()
    return STORED[_known(name)](_place(name, folder))


def get(name: str, folder: Path = FOLDER, source: Path | None = None) -> Path:
    """Get a dataset into `folder`, and return its path.

    Args:
        name: name of the dataset.
        folder: parent folder of all datasets.
        source: folder of the downloaded files, if rowwise cannot fetch them; by default the dataset's own folder.
    """
    if name == "synthetic":
        raise DataError("synthetic is made as it is read: there is nothing to get")
    place = _place(_known(name), folder)
    if place.name in FROM_FILES:
        FROM_FILES[place.name].make(name, source or place, place)
    elif source is not None:
        raise DataError(
            f"--source {source}: {name} is not made of other files",
            hint=f"put its own files into {place}, or leave out --source",
        )
    elif place.name in GETTERS:
        GETTERS[place.name](place)
    else:
        raise DataError(explain_download(place))
    return place


def _place(name: str, folder: Path) -> Path:
    return folder / FOLDERS.get(name, name)


def _known(name: str) -> str:
    if name in STORED:
        return name
    guess = did_you_mean(name, STORED)
    ending = f"; {guess}" if guess else "."
    names = ", ".join(["synthetic", *STORED, *NAMES])
    raise DataError(f"no dataset {name!r}{ending} There are {names}")

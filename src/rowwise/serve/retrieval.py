"""Retrieval by a version: from the columns of a user, or a list, to the items with the largest dot products."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import msgspec
import pyarrow as pa
import torch
from pyarrow import types
from torch import Tensor

from rowwise.base.errors import DataError
from rowwise.ingest.raw_columns import RawColumns
from rowwise.serve.cached_rows import CachedBatches, CachedRows, RowCounts
from rowwise.serve.forward import Forward
from rowwise.serve.item_scan import ItemFilter, ItemScan, NearItems
from rowwise.serve.items import ServedItems
from rowwise.serve.json_body import WHERE, BodyLimits, ColumnName, decode_body
from rowwise.serve.request import RequestReader, RequestRows, to_array
from rowwise.serve.sides import SideTable

MAX_ITEMS = 16_384  # per answer
QUERIES_AT_ONCE = 16  # size of the smallest block, so fewer cost the same


class RetrieveBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request in JSON."""

    context: dict[ColumnName, Any]
    k: int = 100
    among: list[Any] | None = None  # keys of allowed items; None for all
    without: list[Any] = []  # keys of excluded items
    exact: bool = False


class ItemQuery(NamedTuple):
    """A request for items, validated for a version."""

    rows: RequestRows  # a single row
    k: int
    allowed: ItemFilter
    exact: bool
    unknown: int  # number of unknown keys


class RetrievedItems(NamedTuple):
    """The answer to a query, best items first."""

    items: list[Any]  # keys
    scores: list[float]  # dot products, in float32
    unknown: int  # number of unknown keys in `among` and `without`
    exact: bool  # whether all allowed items were searched


@final
class Retriever:
    """The user (or sequence) tower and the items of a version. Not thread-safe, except `retrieve`.

    Args:
        users: the tower, from raw columns to vectors.
        schema: the columns that `users` reads.
        items: of the same version, as vectors of two versions are not comparable.
        sides: of the version; tables without columns of users are ignored.
        cached: tables larger than memory.
    """

    def __init__(
        self,
        users: Forward,
        schema: pa.Schema,
        items: ServedItems,
        sides: Sequence[SideTable] = (),
        cached: Sequence[CachedRows] = (),
    ) -> None:
        self.schema = pa.schema([schema.field(name) for name in users.preparation.names])
        user_sides = [side for side in sides if set(side.columns) & set(self.schema.names)]
        self._users, self.items, self._cached = users, items, cached
        self._lock = threading.Lock()  # a preparation is stateful during a call
        self._reader = RequestReader(self.schema, 1, user_sides)
        self._key = pa.field(items.facts.key, items.keys.type)

    def read_json(self, body: bytes | bytearray, limits: BodyLimits | None = None) -> ItemQuery:
        """Decode and validate a JSON request."""
        expected = 'JSON such as {"context": {...}, "k": 100}'
        return self.read(decode_body(body, RetrieveBody, limits or self._reader.limits, expected))

    def read(self, body: RetrieveBody, columns: Mapping[str, pa.Array] | None = None) -> ItemQuery:
        """Validate a request; `columns`: complete columns of the user, instead of its context."""
        if not 1 <= body.k <= MAX_ITEMS:
            raise DataError(f"{WHERE}: k={body.k}", f"1 to {MAX_ITEMS} items")
        if columns is None:
            rows = self._reader.read_lists({name: [value] for name, value in body.context.items()})
        else:
            rows = RequestRows(RawColumns.of({name: columns[name] for name in self.schema.names}), 1, 0)
        among_A, unknown = (None, 0) if body.among is None else self._places_of("among", body.among)
        without_W, more_unknown = (None, 0) if not body.without else self._places_of("without", body.without)
        return ItemQuery(rows, body.k, ItemFilter(among_A, without_W), body.exact, unknown + more_unknown)

    def _places_of(self, name: str, keys: list[Any]) -> tuple[Tensor, int]:
        try:
            return self.items.places_of(to_array(keys, self._key, is_whole=types.is_integer(self._key.type)))
        except DataError as error:
            raise DataError(f"{error} in {name!r}") from None

    def vectors(self, queries: Sequence[RequestRows]) -> tuple[Tensor, RowCounts]:
        """Vectors [Q, D] of the users of requests, and the origins of cached rows."""
        arrays = RawColumns.join([rows.arrays for rows in queries])
        batches = CachedBatches(self._cached, exact=True)  # vectors never use default rows
        users_QD = self._users(arrays, len(queries), QUERIES_AT_ONCE, batches.collect)
        if not bool(torch.isfinite(users_QD).all()):
            raise DataError(f"{WHERE}: the vector of a user is not finite", "columns as in training")
        return users_QD, batches.counts

    def begin(self, query_D: Tensor, query: ItemQuery) -> NearItems | ItemScan:
        """The items of a query, or an exhaustive search to be stepped."""
        return self.items.begin(query_D, query.k, query.allowed, exact=query.exact)

    def name(self, near: NearItems, unknown: int) -> RetrievedItems:
        """Resolve items to their keys."""
        keys = self.items.keys.take(pa.array(near.places_K.numpy())).to_pylist()
        return RetrievedItems(keys, near.dots_K.tolist(), unknown, near.exact)

    def retrieve(
        self,
        context: Mapping[str, Any],
        k: int = 100,
        *,
        among: Sequence[Any] | None = None,
        without: Sequence[Any] = (),
        exact: bool = False,
    ) -> RetrievedItems:
        """Retrieve in this process, as a server does. Thread-safe, one call at a time.

        Args:
            context: the columns of a user.
            k: maximum number of items.
            among: keys of the items to choose from (default: all).
            without: keys of items to exclude.
            exact: search all items.
        """
        allowed = None if among is None else list(among)
        return self.answer(self.read(RetrieveBody(dict(context), k, allowed, list(without), exact)))

    def answer(self, query: ItemQuery) -> RetrievedItems:
        """The items of a validated request. Thread-safe, one call at a time."""
        with self._lock:
            user_D = self.vectors([query.rows])[0][0]
            near = self.items.find(user_D, query.k, query.allowed, exact=query.exact)
            return self.name(near, query.unknown)

"""Retrieval by a version: a user's columns or a list in, the items of largest dot with its vector out."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import msgspec
import pyarrow as pa
import torch
from pyarrow import types
from torch import Tensor

from rowwise.base.errors import DataError
from rowwise.serve.cached_rows import CachedBatches, CachedRows, RowCounts
from rowwise.serve.forward import Forward
from rowwise.serve.item_scan import ItemFilter, ItemScan, NearItems
from rowwise.serve.items import ServedItems
from rowwise.serve.json_body import WHERE, BodyLimits, ColumnName, decode_body
from rowwise.serve.request import RequestReader, RequestRows, to_array
from rowwise.serve.sides import SideTable

MAX_ITEMS = 16_384  # of an answer
QUERIES_AT_ONCE = 16  # the rows of the smallest block: fewer cost the same


class RetrieveBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request in JSON."""

    context: dict[ColumnName, Any]
    k: int = 100
    among: list[Any] | None = None  # keys of the items that may be in the answer; None: all
    without: list[Any] = []  # keys of items that may not
    exact: bool = False


class ItemQuery(NamedTuple):
    """A request for items, checked for a version."""

    rows: RequestRows  # one
    k: int
    allowed: ItemFilter
    exact: bool
    unknown: int  # keys of no item


class RetrievedItems(NamedTuple):
    """Items, the best first."""

    items: list[Any]  # keys, of their own type
    scores: list[float]  # dots of the vectors, in 32 bits
    unknown: int  # keys in `among` and `without` that are of no item
    exact: bool  # whether all items that the request allows were looked at


@final
class Retriever:
    """What makes vectors of users, or of lists, by a version, and its items. For one thread, but for `retrieve`.

    Args:
        users: makes vectors of raw columns.
        schema: of the columns that `users` reads.
        items: of the same version: vectors of two versions are never compared.
        sides: of the version; those with columns of users are used.
        cached: of tables that are larger than memory.
    """

    def __init__(
        self,
        users: Forward,
        schema: pa.Schema,
        items: ServedItems,
        sides: Sequence[SideTable] = (),
        cached: Sequence[CachedRows] = (),
    ) -> None:
        """Vectors of users have the dim of the items' vectors."""
        self.schema = pa.schema([schema.field(name) for name in users.preparation.names])
        used = [side for side in sides if set(side.columns) & set(self.schema.names)]
        self._users, self.items, self._cached = users, items, cached
        self._one_at_a_time = threading.Lock()  # a preparation keeps the addresses of a call
        self._reader = RequestReader(self.schema, 1, used)
        self._key = pa.field(items.facts.key, items.keys.type)

    def read_json(self, body: bytes | bytearray, limits: BodyLimits | None = None) -> ItemQuery:
        """Check a request of JSON, which names columns and keys."""
        expected = 'JSON such as {"context": {...}, "k": 100}'
        return self.read(decode_body(body, RetrieveBody, limits or self._reader.limits, expected))

    def read(self, body: RetrieveBody, columns: Mapping[str, pa.Array] | None = None) -> ItemQuery:
        """Check a request; `columns`: of its user, with those of side tables, instead of its context."""
        if not 1 <= body.k <= MAX_ITEMS:
            raise DataError(f"{WHERE}: k={body.k}", f"1 to {MAX_ITEMS} items")
        if columns is None:
            rows = self._reader.read_lists({name: [value] for name, value in body.context.items()})
        else:
            rows = RequestRows({name: columns[name] for name in self.schema.names}, 1, 0)
        among_A, unknown = (None, 0) if body.among is None else self._places_of("among", body.among)
        without_W, more = (None, 0) if not body.without else self._places_of("without", body.without)
        return ItemQuery(rows, body.k, ItemFilter(among_A, without_W), body.exact, unknown + more)

    def _places_of(self, name: str, keys: list[Any]) -> tuple[Tensor, int]:
        try:
            return self.items.places_of(to_array(keys, self._key, whole=types.is_integer(self._key.type)))
        except DataError as error:
            raise DataError(f"{error} in {name!r}") from None

    def vectors(self, queries: Sequence[RequestRows]) -> tuple[Tensor, RowCounts]:
        """The vectors [Q, D] of the users of requests, and where rows of large tables came from."""
        arrays = {name: pa.concat_arrays([rows.arrays[name] for rows in queries]) for name in self.schema.names}
        batches = CachedBatches(self._cached, exact=True)  # no vector is made of rows that are missing
        users_QD = self._users(arrays, len(queries), QUERIES_AT_ONCE, batches.collect)
        if not bool(torch.isfinite(users_QD).all()):
            raise DataError(f"{WHERE}: the vector of a user is not finite", "columns as in training")
        return users_QD, batches.counts

    def begin(self, query_D: Tensor, query: ItemQuery) -> NearItems | ItemScan:
        """The items of a query, or a search among all of them, which has not begun."""
        return self.items.begin(query_D, query.k, query.allowed, exact=query.exact)

    def name(self, near: NearItems, unknown: int) -> RetrievedItems:
        """Items by their keys."""
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
        """What a server answers, in this process. Threads that call it take turns.

        Args:
            context: the columns of a user.
            k: items in the answer, if there are as many.
            among: keys of items; no others are in the answer.
            without: keys of items that are not in the answer.
            exact: look at all items.
        """
        allowed = None if among is None else list(among)
        return self.answer(self.read(RetrieveBody(dict(context), k, allowed, list(without), exact)))

    def answer(self, query: ItemQuery) -> RetrievedItems:
        """The items of a checked request. Threads that call it take turns."""
        with self._one_at_a_time:
            user_D = self.vectors([query.rows])[0][0]
            near = self.items.find(user_D, query.k, query.allowed, exact=query.exact)
            return self.name(near, query.unknown)

"""One table whose ids share rows, inside a module: its map as buffers, so that checkpoints hold it and say whose it is.

Apart from `embeddings`, which knows of batches: here an id becomes rows, and the rows of its parts one vector.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import msgspec
import torch
from torch import Tensor, nn

from rowwise.errors import StateError
from rowwise.hashing.idmap import FoldAssignment, IdMap, MapShape
from rowwise.hashing.open import stored_tables
from rowwise.ops.idmap import map_ids
from rowwise.spec import Pooling, Table
from rowwise.value import Value

EVERY_ID = ("hash", "quotient", "remainder", "every", "rest")  # kinds of sections that leave no id without a row
IDENTITY = "identity"


class MapIdentity(Value, frozen=True, forbid_unknown_fields=False):
    """Identifies a map in checkpoints."""

    table: str
    digest: str
    about: dict[str, Any]
    shape: MapShape
    folding: FoldAssignment | None = None

    def differs(self, other: "MapIdentity") -> str | None:
        """The difference to another map in words, names first; empty if they are equal."""
        if self.digest == other.digest:
            return None
        named = [("table", self.table, other.table), ("ids", self.shape.ids, other.shape.ids)]
        named.append(("rows", self.shape.rows, other.shape.rows))
        keys = dict.fromkeys([*self.about, *other.about])
        named += [(key, self.about.get(key), other.about.get(key)) for key in keys]
        found = [f"{name} {there!r} there and {here!r} here" for name, there, here in named if there != here]
        return ", ".join(found) or f"digest {self.digest} there and {other.digest} here"


@final
class MappedTable(nn.Module):
    """The map of one table, and what projects its narrower parts."""

    words: Tensor
    identity: Tensor  # JSON, as bytes

    def __init__(self, table: Table, id_map: IdMap) -> None:
        super().__init__()
        self.table, self.map = table, id_map
        self.stored, self.parts = stored_tables(table, id_map), places_of(id_map.shape)
        self._sections = [_sections(id_map.shape)]
        self.register_buffer("words", torch.from_numpy(id_map.words))
        self.folding = id_map.folding
        if id_map.folding is not None:
            for index, (shape, words) in enumerate(zip(id_map.folding.shapes, id_map.fold_words, strict=True)):
                self._sections.append(_sections(shape))
                self.register_buffer(f"words_{index}", torch.from_numpy(words))
        identity = msgspec.json.encode(self.known)
        self.register_buffer(IDENTITY, torch.frombuffer(bytearray(identity), dtype=torch.uint8))
        for index, stored in enumerate(self.stored):
            if stored.dim != table.dim:
                weight = nn.Parameter(torch.empty(table.dim, stored.dim))
                nn.init.orthogonal_(weight)
                self.register_parameter(f"projection_{index}", weight)
        self.register_load_state_dict_pre_hook(_before_load)

    @property
    def known(self) -> MapIdentity:
        made = self.map
        return MapIdentity(
            table=self.table.name, digest=made.digest, about=made.about, shape=made.shape, folding=made.folding
        )

    @property
    def one_sum(self) -> bool:
        """Whether the vector of a bag is what the stored table's lookup gives."""
        plain = self.table.pooling in (Pooling.SUM, Pooling.WEIGHTED)
        return plain and len(self.stored) == 1 and self.stored[0].dim == self.table.dim

    @property
    def per_id(self) -> bool:
        """Whether rows have to be put together id by id, before any pooling."""
        return self.table.pooling is Pooling.SEQUENCE or self.map.shape.combine == "product"

    def rows_of(self, ids_N: Tensor, folds_N: Tensor | None = None) -> Tensor:
        """The rows [N, columns] of ids, numbered through all parts; -1 where there is none.

        `folds_N`: of the sample that each id is of, while the rows are trained. See [Note: Folds].
        """
        shape = self.map.shape
        if folds_N is None or self.folding is None:
            return map_ids(ids_N, self._sections[0], self.words, shape.ids, shape.columns)
        rows_NC = ids_N.new_empty((len(ids_N), shape.columns), dtype=torch.int64)
        for index in range(self.folding.count):
            at_M = (folds_N == index).nonzero().flatten()
            words = self.get_buffer(f"words_{index}")
            rows_NC[at_M] = map_ids(ids_N[at_M], self._sections[1 + index], words, shape.ids, shape.columns)
        return rows_NC

    def project(self, index: int, vectors: Tensor) -> Tensor:
        """Vectors of a part as wide as the table."""
        weight = self._parameters.get(f"projection_{index}")
        return vectors if weight is None else vectors @ weight.to(vectors.dtype).T

    def project_all(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of all parts, as wide as the table: one product instead of one for each."""
        if len(parts) == 1:
            return self.project(0, parts[0])
        dim = self.table.dim
        found = (self._parameters.get(f"projection_{index}") for index in range(len(parts)))
        weights_SD = torch.cat([torch.eye(dim, device=parts[0].device) if w is None else w.T for w in found])
        side_by_side = torch.cat(list(parts), 1)
        return side_by_side @ weights_SD.to(side_by_side.dtype)


def _sections(shape: MapShape) -> Tensor:
    return torch.tensor([section.numbers for section in shape.sections], dtype=torch.int64)


class PartPlace(NamedTuple):
    """The rows of one part of a map in the stored table."""

    columns: tuple[int, ...]  # of the map, those that may name some of its rows
    begin: int  # among the rows of all parts
    end: int
    always: bool  # each id has a row of it in each of these columns

    def pick(self, rows_NC: Tensor) -> Tensor:
        """Its rows [N, columns] from 0 on, as they are numbered in its own table; negative where there is none."""
        whole = len(self.columns) == rows_NC.shape[1]
        rows_NK = rows_NC if whole else rows_NC[:, list(self.columns)]
        if self.begin:
            rows_NK = rows_NK - self.begin
        return rows_NK if self.always else rows_NK.masked_fill(rows_NK >= self.end - self.begin, -1)


def places_of(shape: MapShape) -> tuple[PartPlace, ...]:
    """The places of all parts, concatenated: rows of a column may be in several parts."""
    found: list[PartPlace] = []
    end = 0
    for part in shape.parts:
        begin, end = end, end + part.rows
        inside = [s for s in shape.sections if begin <= s.base < end]
        columns = tuple(dict.fromkeys(s.column for s in inside))
        elsewhere = {s.column for s in shape.sections if not begin <= s.base < end}
        full = {s.column for s in inside if s.kind in EVERY_ID} - elsewhere
        found.append(PartPlace(columns, begin, end, always=full == set(columns)))
    return tuple(found)


def identity_of(bytes_N: Tensor) -> MapIdentity:
    try:
        return msgspec.json.decode(bytes(bytes_N.to(torch.uint8).tolist()), type=MapIdentity)
    except msgspec.DecodeError as error:
        raise StateError(f"the identity of the id map cannot be decoded: {error}") from None


def _before_load(
    module: nn.Module, state: Mapping[str, Any], prefix: str, _metadata: dict[str, Any], *_: Sequence[Any]
) -> None:
    """Refuse rows that were trained by another map, before any is copied."""
    assert isinstance(module, MappedTable)
    there = state.get(prefix + IDENTITY)
    if there is not None:
        raise_if_another_map(identity_of(there), module.known)


def raise_if_another_map(there: MapIdentity, here: MapIdentity) -> None:
    """Raise unless both are the same map."""
    differs = there.differs(here)
    if differs:
        want = "want the map that its rows were trained by; `rowwise ckpt remap` moves rows to another"
        raise StateError(f"table {here.table!r}: another id map: {differs}: {want}")

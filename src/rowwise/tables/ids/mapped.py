"""The module of one table with an id map: maps ids to rows, and projects narrow parts to the table's dim.

The map is in buffers, so that checkpoints hold it and identify it. `embeddings` handles batches.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, final

import msgspec
import torch
from torch import Tensor, nn

from rowwise.base.errors import StateError
from rowwise.base.value import Value
from rowwise.tables.ids.idmap import FoldAssignment, IdMap, MapShape
from rowwise.tables.ids.open import stored_tables
from rowwise.tables.ops.idmap import map_ids
from rowwise.tables.spec import Pooling, Table

EVERY_ID = ("hash", "quotient", "remainder", "every", "rest")  # kinds of sections that give every id a row
IDENTITY = "identity"


class MapIdentity(Value, frozen=True, forbid_unknown_fields=False):
    """Identifies a map in checkpoints: its table, digest and shape."""

    table: str
    digest: str
    about: dict[str, Any]
    shape: MapShape
    folding: FoldAssignment | None = None

    def differences(self, other: "MapIdentity") -> str | None:
        """The differences of a saved map (`self`) to the model's in words; None if they are equal."""
        if self.digest == other.digest:
            return None
        facts = [("table", self.table, other.table), ("ids", self.shape.ids, other.shape.ids)]
        facts.append(("rows", self.shape.rows, other.shape.rows))
        keys = dict.fromkeys([*self.about, *other.about])
        facts += [(key, self.about.get(key), other.about.get(key)) for key in keys]
        words = [f"{name} {saved!r} saved and {model!r} in the model" for name, saved, model in facts if saved != model]
        return ", ".join(words) or f"digest {self.digest} saved and {other.digest} in the model"


@final
class MappedTable(nn.Module):
    """The id map of one table, and the projections of its narrow parts."""

    words: Tensor
    identity: Tensor  # JSON, as bytes

    def __init__(self, table: Table, id_map: IdMap) -> None:
        super().__init__()
        self.table, self.map = table, id_map
        self.stored, self.parts = stored_tables(table, id_map), locate_parts(id_map.shape)
        self._sections = [_sections(id_map.shape)]
        self.register_buffer("words", torch.from_numpy(id_map.words))
        self.folding = id_map.folding
        if id_map.folding is not None:
            for index, (shape, words) in enumerate(zip(id_map.folding.shapes, id_map.fold_words, strict=True)):
                self._sections.append(_sections(shape))
                self.register_buffer(f"words_{index}", torch.from_numpy(words))
        identity = msgspec.json.encode(self.map_identity)
        self.register_buffer(IDENTITY, torch.frombuffer(bytearray(identity), dtype=torch.uint8))
        for index, stored in enumerate(self.stored):
            if stored.dim != table.dim:
                weight = nn.Parameter(torch.empty(table.dim, stored.dim))
                nn.init.orthogonal_(weight)
                self.register_parameter(f"projection_{index}", weight)
        self.register_load_state_dict_pre_hook(_check_state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the projections; the map stays on the host, where batches are mapped before they are copied."""
        buffers, self._buffers = self._buffers, dict[str, Tensor | None]()
        try:
            return super()._apply(fn, recurse)
        finally:
            self._buffers = buffers

    @property
    def map_identity(self) -> MapIdentity:
        id_map = self.map
        return MapIdentity(
            table=self.table.name, digest=id_map.digest, about=id_map.about, shape=id_map.shape, folding=id_map.folding
        )

    @property
    def needs_no_combining(self) -> bool:
        """Whether the lookup of the stored table gives the pooled vectors as they are."""
        sums = self.table.pooling in (Pooling.SUM, Pooling.WEIGHTED)
        return sums and len(self.stored) == 1 and self.stored[0].dim == self.table.dim

    @property
    def per_id(self) -> bool:
        """Whether rows have to be combined id by id, before any pooling."""
        return self.table.pooling is Pooling.SEQUENCE or self.map.shape.combine == "product"

    def look_up_rows(self, ids_N: Tensor, folds_N: Tensor | None = None) -> Tensor:
        """The rows [N, columns] of ids, numbered through all parts; -1 for none.

        `folds_N` is the fold of the sample of each id, in training mode. See [Note: Folds].
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
        """The vectors of a part, projected to the table's dim."""
        weight = self._parameters.get(f"projection_{index}")
        return vectors if weight is None else vectors @ weight.to(vectors.dtype).T

    def project_all(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of the projected vectors of all parts, in one matrix product."""
        if len(parts) == 1:
            return self.project(0, parts[0])
        dim = self.table.dim
        projections = (self._parameters.get(f"projection_{index}") for index in range(len(parts)))
        weights_SD = torch.cat([torch.eye(dim, device=parts[0].device) if w is None else w.T for w in projections])
        vectors_BS = torch.cat(list(parts), 1)
        return vectors_BS @ weights_SD.to(vectors_BS.dtype)


def _sections(shape: MapShape) -> Tensor:
    return torch.tensor([section.kernel_args for section in shape.sections], dtype=torch.int64)


class PartRange(NamedTuple):
    """The rows of one part of a map, and the columns of the map that refer to them."""

    columns: tuple[int, ...]
    begin: int  # among the rows of all parts
    end: int
    complete: bool  # each id has a row of the part in each of these columns

    def local_rows(self, rows_NC: Tensor) -> Tensor:
        """The part's rows [N, its columns] as numbered in its own table, from 0 on; negative for none."""
        has_all_columns = len(self.columns) == rows_NC.shape[1]
        rows_NK = rows_NC if has_all_columns else rows_NC[:, list(self.columns)]
        if self.begin:
            rows_NK = rows_NK - self.begin
        return rows_NK if self.complete else rows_NK.masked_fill(rows_NK >= self.end - self.begin, -1)


def locate_parts(shape: MapShape) -> tuple[PartRange, ...]:
    """The ranges of all parts; the rows of a column may be in several parts."""
    parts: list[PartRange] = []
    end = 0
    for part in shape.parts:
        begin, end = end, end + part.rows
        sections = [s for s in shape.sections if begin <= s.base < end]
        columns = tuple(dict.fromkeys(s.column for s in sections))
        other_columns = {s.column for s in shape.sections if not begin <= s.base < end}
        complete_columns = {s.column for s in sections if s.kind in EVERY_ID} - other_columns
        parts.append(PartRange(columns, begin, end, complete=complete_columns == set(columns)))
    return tuple(parts)


def decode_identity(bytes_N: Tensor) -> MapIdentity:
    try:
        return msgspec.json.decode(bytes(bytes_N.to(torch.uint8).tolist()), type=MapIdentity)
    except msgspec.DecodeError as error:
        raise StateError(f"the identity of the id map cannot be decoded: {error}") from None


def _check_state(
    module: nn.Module, state: Mapping[str, Any], prefix: str, _metadata: dict[str, Any], *_: Sequence[Any]
) -> None:
    """Raise for rows that were trained with another map, before any is copied."""
    assert isinstance(module, MappedTable)
    saved = state.get(prefix + IDENTITY)
    if saved is not None:
        raise_if_another_map(decode_identity(saved), module.map_identity)


def raise_if_another_map(saved: MapIdentity, model: MapIdentity) -> None:
    differences = saved.differences(model)
    if differences:
        raise StateError(
            f"table {model.table!r}: another id map: {differences}",
            "the map that its rows were trained with",
            hint="`rowwise ckpt remap` moves rows to another",
        )

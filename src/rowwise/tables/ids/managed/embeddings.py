"""`ManagedEmbeddings`: embedding tables of any 64-bit ids, in place of `Embeddings` in a model.

It wraps `Embeddings`, which `shard` replaces. A batch of ids becomes a batch of rows, which the module inside looks up.
In training mode with gradients enabled the ids of a batch change the map; else ids without a row read row 0 of their
bucket. A trainer that splits its batch calls `begin_step` with all of it first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from rowwise.base.errors import RowwiseError, StateError
from rowwise.tables.batch import Jagged, KeyedJagged
from rowwise.tables.embedding import Embeddings, Vectors, break_graph
from rowwise.tables.ids.managed.lookup import Evicted, IdCounts, LocalBuckets, LocalIds
from rowwise.tables.ids.managed.piece import ManagedCounters, ManagedPiece
from rowwise.tables.managed import ID
from rowwise.tables.ops import check
from rowwise.tables.ops.arena import Arena
from rowwise.tables.spec import Table, check_tables

PREFIX = "ids."  # of a table's ids in a state dict


class IdLookup(Protocol):
    """Finds the rows of ids, on one rank or several."""

    def find(
        self, ids_T: Sequence[IdCounts] | None, error: RowwiseError | None = None, *, observe: bool
    ) -> list[Tensor]:
        """The rows of the ids of each table. `observe`: the ids change the map. None: there is an error."""
        ...


@runtime_checkable
class ShardedRows(Protocol):
    """The module that replaces `Embeddings` on several ranks."""

    @property
    def arenas(self) -> tuple[Arena, ...]: ...

    def make_id_lookup(self, tables: Sequence[LocalBuckets], evicted: Evicted) -> IdLookup:
        """The lookup of ids on all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class _Binding:
    """The lookup of ids for the module inside, which `shard` replaces."""

    stored: nn.Module
    ids: IdLookup
    pieces: Mapping[str, Sequence[ManagedPiece]]


@final
class ManagedEmbeddings(nn.Module):
    """`Embeddings` some of whose tables are managed.

    Args:
        tables: as for `Embeddings`; a managed table has `rows` rows for any number of ids.
        seed: of the initial rows.
        device: the device of the rows; "meta" until they are sharded.
        merge_shared, update_in_backward: see `Embeddings`.
    """

    stored: Embeddings

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        merge_shared: bool = False,
        update_in_backward: bool = False,
    ) -> None:
        super().__init__()
        check_tables(tables)
        self.tables = tuple(tables)
        self.managed = tuple(table for table in tables if table.managed is not None)
        settings = {"merge_shared": merge_shared, "update_in_backward": update_in_backward}
        self.stored = Embeddings(tables, seed=seed, device=device, rows_of_ids=True, **settings)
        self._features = tuple(feature for table in self.managed for feature in table.feature_names)
        self._binding: _Binding | None = None
        self._step: list[tuple[Tensor, Tensor]] | None = None  # distinct ids of a step and their rows, by table
        self.keeps_evicted = False  # whether `take_evicted` will be called
        self._evicted: dict[str, list[Tensor]] = {}
        self.register_state_dict_post_hook(_add_ids)
        self.register_load_state_dict_pre_hook(_take_ids)

    @property
    def device(self) -> torch.device:
        """The device of the rows before they are sharded."""
        return self.stored.device

    @property
    def unknown_ids(self) -> dict[str, int]:
        return self.stored.unknown_ids

    @property
    def counters(self) -> dict[str, ManagedCounters]:
        """Counts by managed table, of this rank's buckets."""
        pieces = self._bind().pieces
        return {name: sum((piece.counters for piece in table), ManagedCounters()) for name, table in pieces.items()}

    def take_evicted(self) -> dict[str, Tensor]:
        """The ids that lost their rows on this rank since the last call, by table; empty without `keeps_evicted`."""
        evicted = {name: torch.cat(ids) for name, ids in self._evicted.items()}
        self._evicted.clear()
        return evicted

    @break_graph
    def forward(self, sparse: Jagged | KeyedJagged) -> Vectors:
        """Look a batch up, as `Embeddings` does."""
        learns = self.training and torch.is_grad_enabled()
        if learns and self._step is not None:
            return self.stored(self._replace_ids(self._check_batch(sparse), self._step))
        jagged, ids_T, error = self._collect([sparse])
        rows_T = self._bind().ids.find(ids_T, error, observe=learns)
        assert ids_T is not None
        known = [(ids.ids_U, rows_U) for ids, rows_U in zip(ids_T, rows_T, strict=True)]
        return self.stored(self._replace_ids(jagged[0], known))

    @torch.no_grad()
    def begin_step(self, batches: Sequence[Jagged | KeyedJagged]) -> None:
        """Change the map by the ids of all batches of a step; collective. Forwards until `end_step` only look up."""
        _, ids_T, error = self._collect(batches)
        rows_T = self._bind().ids.find(ids_T, error, observe=True)
        self._step = [(ids.ids_U, rows_U) for ids, rows_U in zip(ids_T or (), rows_T, strict=True)]

    def end_step(self) -> None:
        """Let the next forward in training mode change the map again."""
        self._step = None

    def map_batch(self, sparse: Jagged | KeyedJagged) -> Jagged:
        """The batch with a row number for each managed id, for statistics; not the row that the id has."""
        jagged = self._check_batch(sparse)
        values_N = jagged.values_N.long().clone()
        for table, begin, end in self._ranges(jagged):
            values_N[begin:end].remainder_(table.rows)
        return replace(jagged, values_N=values_N)

    def _check_batch(self, sparse: Jagged | KeyedJagged) -> Jagged:
        """The batch after checks; managed features share no bags in it, so that each occurrence of an id counts."""
        jagged = Jagged.from_keyed(sparse)
        check.check_features(jagged.all_features, self._features)
        jagged = jagged.expand_features(self._features).contiguous()
        check.check_lengths(jagged)
        return jagged

    def _collect(
        self, batches: Sequence[Jagged | KeyedJagged]
    ) -> tuple[list[Jagged], list[IdCounts] | None, RowwiseError | None]:
        """The checked batches, and the distinct ids of each managed table in all of them; or the error."""
        try:
            jaggeds = [self._check_batch(sparse) for sparse in batches]
        except RowwiseError as error:
            return [], None, error
        ids: dict[str, list[Tensor]] = {table.name: [] for table in self.managed}
        for jagged in jaggeds:
            for table, begin, end in self._ranges(jagged):
                ids[table.name].append(jagged.values_N[begin:end].long().cpu())
        distinct = (torch.cat(ids[table.name]).unique(return_counts=True) for table in self.managed)
        return jaggeds, [IdCounts(ids_U=ids_U, counts_U=counts_U) for ids_U, counts_U in distinct], None

    def _replace_ids(self, jagged: Jagged, known_T: Sequence[tuple[Tensor, Tensor]]) -> Jagged:
        """The batch with each managed id replaced by its row."""
        number = {table.name: index for index, table in enumerate(self.managed)}
        narrow = jagged.values_N.dtype == torch.int32 and all(table.rows <= 1 << 31 for table in self.managed)
        values_N = jagged.values_N.clone() if narrow else jagged.values_N.to(torch.int64, copy=True)
        for table, begin, end in self._ranges(jagged):
            ids_U, rows_U = known_T[number[table.name]]
            ids_N = jagged.values_N[begin:end].long().cpu()
            if not len(ids_N):
                continue
            at_N = torch.searchsorted(ids_U, ids_N).clamp_(max=len(ids_U) - 1)
            if not len(ids_U) or not torch.equal(ids_U[at_N], ids_N):
                raise StateError(
                    f"table {table.name!r}: a batch has ids that begin_step did not get",
                    hint="pass all batches of the step to it",
                )
            values_N[begin:end] = rows_U[at_N].to(values_N)
        return replace(jagged, values_N=values_N)

    def _ranges(self, jagged: Jagged) -> Iterator[tuple[Table, int, int]]:
        """(table, begin, end) of the ids of each managed feature."""
        ranges = jagged.id_ranges()
        for table in self.managed:
            for feature in table.feature_names:
                yield table, *ranges[feature]

    def _bind(self) -> _Binding:
        if self._binding is None or self._binding.stored is not self.stored:
            self._binding = self._make_binding()
        return self._binding

    def _make_binding(self) -> _Binding:
        stored: nn.Module = self.stored
        assert isinstance(stored, Embeddings | ShardedRows)
        pieces: dict[str, list[ManagedPiece]] = {table.name: [] for table in self.managed}
        for arena in stored.arenas:
            for index in arena.row_ids:
                pieces[arena.pieces[index].full_table.name].append(ManagedPiece(arena, index))
        tables = [LocalBuckets(table=table, pieces=pieces[table.name]) for table in self.managed]
        make = LocalIds if isinstance(stored, Embeddings) else stored.make_id_lookup
        return _Binding(stored, make(tables, self._keep_evicted), pieces)

    def _keep_evicted(self, table: str, ids_N: Tensor) -> None:
        if self.keeps_evicted and len(ids_N):
            self._evicted.setdefault(table, []).append(ids_N)

    def __getstate__(self) -> dict[str, Any]:
        """All but the native maps, which are rebuilt from the ids of rows."""
        return {**self.__dict__, "_binding": None, "_step": None}

    def extra_repr(self) -> str:
        return "\n".join(
            f"{t.name}: any ids in {t.rows} rows of {t.buckets} buckets, {t.managed}" for t in self.managed
        )


def _add_ids(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Add the ids of rows, without which rows mean nothing. Training needs `optimizer_state`, too."""
    assert isinstance(module, ManagedEmbeddings)
    for name, id_R in _ids_by_table(module).items():
        state_dict[f"{prefix}{PREFIX}{name}"] = id_R


def _take_ids(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, ManagedEmbeddings)
    for name, id_R in _ids_by_table(module).items():
        saved = state_dict.pop(f"{prefix}{PREFIX}{name}", None)
        if not isinstance(saved, Tensor) or saved.shape != id_R.shape or saved.dtype != torch.int64:
            got = f"{tuple(saved.shape)} of {saved.dtype}" if isinstance(saved, Tensor) else "nothing"
            raise StateError(
                f"table {name!r} is managed: {PREFIX}{name}: got {got}",
                f"{tuple(id_R.shape)} of torch.int64, the ids of its rows",
            )
        module.stored.arena.fill_ids(name, saved)


def _ids_by_table(module: ManagedEmbeddings) -> dict[str, Tensor]:
    stored: nn.Module = module.stored
    if not isinstance(stored, Embeddings):
        names = ", ".join(table.name for table in module.managed)
        raise StateError(f"managed tables on several ranks have no state dict ({names})", "a checkpoint")
    return {stored.tables[index].name: state[ID] for index, state in stored.arena.row_ids.items()}

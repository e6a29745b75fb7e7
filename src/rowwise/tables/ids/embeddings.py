"""`MappedEmbeddings`: embedding tables whose ids share rows, in place of `Embeddings` in a model.

It wraps `Embeddings`, which hold fewer rows than there are ids. It maps a batch of ids to a batch of rows, looks the
rows up, and combines the vectors of ids with several rows. Sharding, checkpoints and updates need no code for maps:
`shard` replaces the `Embeddings` inside.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from rowwise.base.errors import RowwiseError, SpecError
from rowwise.tables.batch import Jagged, KeyedJagged, SharedBags
from rowwise.tables.embedding import Embeddings, Vectors, break_graph
from rowwise.tables.ids.combine import PartBags, combine_parts, complete_bags, partial_bags
from rowwise.tables.ids.folds import assign_folds
from rowwise.tables.ids.idmap import IdMap
from rowwise.tables.ids.mapped import MappedTable
from rowwise.tables.ids.open import open_map
from rowwise.tables.ops import check
from rowwise.tables.ops.pinned import copy_to
from rowwise.tables.ops.unknown import UnknownIds, count_unknown, map_unknown
from rowwise.tables.spec import Pooling, Table, check_tables

MAX_INT32_ROWS = 1 << 31


class _MappedBatch(NamedTuple):
    jagged: Jagged  # the batch of ids, checked
    batch: Jagged  # the batch of rows
    bags: dict[str, PartBags]
    unknown: Sequence[UnknownIds]

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "_MappedBatch":
        """A copy with `change` applied to each tensor."""
        jagged, batch = self.jagged.map_tensors(change), self.batch.map_tensors(change)
        bags = {name: bags.map_tensors(change) for name, bags in self.bags.items()}
        return self._replace(jagged=jagged, batch=batch, bags=bags)


@final
class MappedEmbeddings(nn.Module):
    """`Embeddings` some of whose tables have an `id_map`.

    Args:
        tables: as for `Embeddings`; `rows` of a table with a map is its number of ids.
        maps: by table, maps that replace those of the tables' `id_map`.
        seed: of the initial rows.
        device: the device of the rows; "meta" until they are sharded.
        merge_shared, update_in_backward: see `Embeddings`.
    """

    stored: Embeddings

    def __init__(
        self,
        tables: Sequence[Table],
        maps: Mapping[str, IdMap] | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        merge_shared: bool = False,
        update_in_backward: bool = False,
    ) -> None:
        super().__init__()
        check_tables(tables)
        self.tables = tuple(tables)
        opened = {t.name: maps[t.name] if maps and t.name in maps else open_map(t) for t in tables}
        self.maps = nn.Module()
        for table in tables:
            if (id_map := opened[table.name]) is not None:
                # Not add_module, which refuses names of attributes, as tables may have.
                self.maps._modules[table.name] = MappedTable(table, id_map)
        mapped = self.mapped
        stored = [s for t in tables for s in (mapped[t.name].stored if t.name in mapped else (t,))]
        settings = {"merge_shared": merge_shared, "update_in_backward": update_in_backward}
        self.stored = Embeddings(stored, seed=seed, device=device, **settings)
        self._table_of = {feature: table for table in tables for feature in table.feature_names}
        self._mapped_features = {feature for table in mapped.values() for feature in table.table.feature_names}
        self._needs_no_combining = all(table.needs_no_combining for table in mapped.values())
        self.unknown_ids: dict[str, int] = {}  # of mapped tables, see `Embeddings`
        self._ahead: list[
            tuple[Jagged | KeyedJagged, _MappedBatch | RowwiseError]
        ] = []  # batches mapped before their `forward`

    @property
    def mapped(self) -> dict[str, MappedTable]:
        return {name: module for name, module in self.maps._modules.items() if isinstance(module, MappedTable)}

    @property
    def device(self) -> torch.device:
        """The device of the rows before they are sharded."""
        return self.stored.device

    @break_graph
    def forward(self, sparse: Jagged | KeyedJagged) -> Vectors:
        """Look a batch up, as `Embeddings` does."""
        mapped = self._take_ahead(sparse) or self._map_or_error(sparse)
        if isinstance(mapped, RowwiseError):
            self.stored.abort_forward(mapped)
        jagged, bags = mapped.jagged, mapped.bags
        count_unknown(self.unknown_ids, mapped.unknown)
        vectors = self.stored(mapped.batch)
        if self._needs_no_combining:
            return vectors
        device = vectors.matrix_BS.device
        if jagged.values_N.device.type != device.type:  # sharded tables on a GPU take ids of the host
            jagged = jagged.map_tensors(lambda x: copy_to(x, device))
            bags = {name: part.map_tensors(lambda x: copy_to(x, device)) for name, part in bags.items()}
        # One split, not a slice for each feature: the backward of a slice allocates zeros of the whole matrix.
        widths = [columns.stop - columns.start for columns in vectors.columns.values()]
        by_part = dict(zip(vectors.columns, vectors.matrix_BS.split(widths, 1), strict=True)) | dict(vectors.sequences)
        by_feature = {f: self._combine(jagged, f, by_part, bags) for f in self._table_of}
        sequences = {f: x for f, x in by_feature.items() if self._table_of[f].pooling is Pooling.SEQUENCE}
        pooled = {f: x for f, x in by_feature.items() if f not in sequences}
        columns: dict[str, slice] = {}
        at = 0
        for feature, x in pooled.items():
            columns[feature] = slice(at, at := at + x.shape[1])
        matrix_BS = torch.cat(list(pooled.values()), 1) if pooled else vectors.matrix_BS[:, :0]
        return Vectors.of(matrix_BS, columns, sequences)

    def map_batch(self, sparse: Jagged | KeyedJagged) -> Jagged:
        """The batch of rows that `Embeddings` looks up for a batch of ids."""
        return self._map(sparse).batch

    def map_ahead(self, sparse: Jagged | KeyedJagged) -> Jagged | RowwiseError:
        """Map a batch before its `forward`, which has to get the same object; returns the batch that `stored` looks up.

        An error is returned here, and raised by that `forward`.
        """
        mapped = self._map_or_error(sparse)
        self._ahead.append((sparse, mapped))
        return mapped if isinstance(mapped, RowwiseError) else mapped.batch

    def map_on_host(self, host: Jagged, copied: Jagged, move: Callable[[Tensor], Tensor]) -> None:
        """Map a batch on the host and `move` the result, for the `forward` of `copied`, the same batch on a GPU."""
        self._ahead.append((copied, self._map(host).map_tensors(move)))

    def batch_ahead(self, sparse: Jagged | KeyedJagged) -> Jagged | RowwiseError | None:
        """The result of `map_ahead` for this batch; None once `forward` has consumed it."""
        mapped = next((mapped for batch, mapped in self._ahead if batch is sparse), None)
        return mapped.batch if isinstance(mapped, _MappedBatch) else mapped

    def drop_ahead(self) -> None:
        """Discard the batches that were mapped ahead."""
        self._ahead.clear()

    def _take_ahead(self, sparse: Jagged | KeyedJagged) -> "_MappedBatch | RowwiseError | None":
        for index, (batch, mapped) in enumerate(self._ahead):
            if batch is sparse:
                del self._ahead[index]
                return mapped
        return None

    def _map_or_error(self, sparse: Jagged | KeyedJagged) -> "_MappedBatch | RowwiseError":
        try:
            return self._map(sparse)
        except RowwiseError as error:
            return error

    def _map(self, sparse: Jagged | KeyedJagged) -> "_MappedBatch":
        ids = Jagged.from_keyed(sparse)
        device = ids.values_N.device
        jagged, unknown = self._check_batch(ids if device.type == "cpu" else ids.to("cpu")), list[UnknownIds]()
        batch, bags = self._map_features(jagged, unknown)
        mapped = _MappedBatch(jagged, batch, bags, unknown)
        return mapped if device.type == "cpu" else mapped.map_tensors(lambda x: x.to(device))

    @torch.no_grad()
    def weights(self, name: str) -> Tensor:
        """The vector of each id of a table as float32 [ids, dim]; raises if the tables are sharded."""
        if not isinstance(self.stored, Embeddings):
            raise SpecError(f"table {name!r} is sharded", "weights() of a model that is not sharded")
        mapped = self.mapped.get(name)
        if mapped is None:
            return self.stored.weights(name)
        rows_NC = mapped.look_up_rows(torch.arange(mapped.table.rows))
        vectors: list[Tensor] = []  # for each column, part by part
        for index, table in enumerate(mapped.stored):
            weights_RD = mapped.project(index, self.stored.weights(table.name))
            for rows_N in mapped.parts[index].local_rows(rows_NC).unbind(1):
                vectors.append(weights_RD[rows_N.clamp(min=0)] * (rows_N >= 0).unsqueeze(1))
        vectors_CND = torch.stack(vectors)
        return vectors_CND.prod(0) if mapped.map.shape.combine == "product" else vectors_CND.sum(0)

    def _check_batch(self, jagged: Jagged) -> Jagged:
        """The batch after checks; features that are combined id by id or looked up by fold share no bags in it.

        Lengths are checked before ids are mapped, because the batch of rows may be valid where they are wrong.
        """
        check.check_lengths(jagged)
        if jagged.shared is not None:
            check.check_lengths(jagged.shared.jagged)
            jagged.shared.check()
        check.check_features(jagged.all_features, self._table_of)
        unshared = [t for t in self.mapped.values() if t.per_id or (self.training and t.folding)]
        return jagged.expand_features([f for t in unshared for f in t.table.feature_names])

    def _map_features(self, jagged: Jagged, unknown: list[UnknownIds]) -> tuple[Jagged, dict[str, PartBags]]:
        """The batch of rows, and the bags of each part, without those of shared features; appends to `unknown`."""
        folds, shared = self._assign_folds(jagged), jagged.shared
        if jagged.features:
            mapped = {f: self._table_of[f] for f in jagged.features if f in self._mapped_features}
            jagged, unknown_ids = map_unknown(replace(jagged, shared=None), mapped)
            unknown += unknown_ids
        bags = [
            part_bags
            for feature, ids in jagged.id_ranges().items()
            if feature in self._table_of
            for part_bags in self._map_feature(jagged, feature, ids, folds)
        ]
        if shared is not None and not self._table_of.keys() & set(shared.jagged.features):
            shared = None  # no table looks it up
        if shared is not None:
            shared = SharedBags(jagged=self._map_features(shared.jagged, unknown)[0], inverse_B=shared.inverse_B)
        weights_N = None
        if jagged.weights_N is not None:
            weights_N = _concatenate([w for b in bags if (w := b.weights_M) is not None], jagged.weights_N[:0])
        wide = any(b.rows_M.dtype == torch.int64 for b in bags)
        batch = Jagged(
            features=tuple(b.name for b in bags),
            values_N=_concatenate([b.rows_M.long() if wide else b.rows_M for b in bags], jagged.values_N[:0]),
            lengths_FB=_concatenate([b.lengths_B for b in bags], jagged.lengths_FB[:0]),
            weights_N=weights_N,
            shared=shared,
        )
        return batch, {b.name: b for b in bags}

    def _map_feature(
        self,
        jagged: Jagged,
        feature: str,
        ids: tuple[int, int],
        folds: Mapping[str, Tensor],
    ) -> Iterator[PartBags]:
        """The bags of one feature in each part; `folds` are the folds of the samples [B], by table."""
        table, lengths_B, (begin, end) = self._table_of[feature], jagged.lengths_of(feature), ids
        weights = None if jagged.weights_N is None else jagged.weights_N[begin:end]
        ids_N = jagged.values_N[begin:end]
        if table.name not in self.mapped:
            yield PartBags(name=feature, rows_M=ids_N, lengths_B=lengths_B, weights_M=weights, ids_M=None)
            return
        mapped = self.mapped[table.name]
        folds_B = folds.get(table.name)
        rows_NC = mapped.look_up_rows(ids_N, None if folds_B is None else folds_B.repeat_interleave(lengths_B))
        number = table.feature_names.index(feature)
        for stored, part in zip(mapped.stored, mapped.parts, strict=True):
            make_bags = complete_bags if part.complete else partial_bags
            bags = make_bags(stored.feature_names[number], part.local_rows(rows_NC), lengths_B, weights)
            int32 = ids_N.dtype == torch.int32 and stored.rows < MAX_INT32_ROWS
            yield replace(bags, rows_M=bags.rows_M.int()) if int32 else bags

    def _assign_folds(self, jagged: Jagged) -> dict[str, Tensor]:
        """In training mode, the fold of each sample for each table whose map has folds."""
        by_folding: dict[tuple[tuple[str, ...], int, int], Tensor] = {}  # most maps have equal fold assignments
        folds: dict[str, Tensor] = {}
        for name, mapped in self.mapped.items():
            folding = mapped.folding
            if folding is None or not self.training or not set(mapped.table.feature_names) & set(jagged.features):
                continue
            key = (folding.features, folding.count, folding.seed)
            if key not in by_folding:
                by_folding[key] = assign_folds(jagged, *key)
            folds[name] = by_folding[key]
        return folds

    def _combine(
        self, jagged: Jagged, feature: str, vectors: Mapping[str, Tensor], bags: Mapping[str, PartBags]
    ) -> Tensor:
        mapped = self.mapped.get(self._table_of[feature].name)
        return vectors[feature] if mapped is None else combine_parts(mapped, jagged, feature, vectors, bags)

    def extra_repr(self) -> str:
        lines = []
        for name, mapped in self.mapped.items():
            rows = " + ".join(f"{t.rows} x {t.dim}" for t in mapped.stored)
            lines.append(f"{name}: {mapped.table.rows} ids in {rows}, a map of {mapped.map.map_bytes} bytes")
        return "\n".join(lines)


def _concatenate(tensors: Sequence[Tensor], empty: Tensor) -> Tensor:
    return torch.cat(list(tensors)) if tensors else empty

"""`MappedEmbeddings`: tables whose ids share rows, as models use them.

Around `Embeddings`, which holds fewer rows than there are ids: a batch of ids becomes a batch of rows, and what comes
back is put together where an id has several. So sharding, checkpoints and updates know nothing of maps: `shard`
replaces what is inside. Known limits: ids that have no row of their own cannot be told apart afterwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from rowwise.batch import Jagged, KeyedJagged, SharedBags
from rowwise.embedding import Embeddings, Vectors
from rowwise.errors import BatchError, RowwiseError, SpecError
from rowwise.hashing.combine import PartBags, all_rows, combine_parts, some_rows
from rowwise.hashing.folds import begins_of, folds_of
from rowwise.hashing.idmap import IdMap
from rowwise.hashing.mapped import MappedTable
from rowwise.hashing.open import open_map
from rowwise.ops import check
from rowwise.ops.unknown import count_unknown
from rowwise.spec import Pooling, Table, check_tables

NARROW = 1 << 31


@final
class MappedEmbeddings(nn.Module):
    """`Embeddings` some of whose tables have an `id_map`.

    Args:
        tables: as for `Embeddings`; `rows` of a table is how many ids it knows.
        maps: instead of what the tables' `id_map` say, by name.
        seed: of the initial rows.
        device: where rows live; "meta": nowhere, until they are sharded.
        merge_shared: see `Embeddings`.
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
    ) -> None:
        super().__init__()
        check_tables(tables)
        self.tables = tuple(tables)
        opened = {t.name: maps[t.name] if maps and t.name in maps else open_map(t) for t in tables}
        self.maps = nn.Module()
        for table in tables:
            if (id_map := opened[table.name]) is not None:
                # Not setattr: it refuses the names of methods, which tables may have.
                self.maps._modules[table.name] = MappedTable(table, id_map)
        stored = [one for table in tables for one in self._stored_of(table)]
        self.stored = Embeddings(stored, seed=seed, device=device, merge_shared=merge_shared)
        self._homes = {feature: table for table in tables for feature in table.feature_names}
        # Where nothing has to be put together, what the lookup gives is the answer.
        self._plain = all(one.one_sum for one in self.mapped.values())
        self.unknown_ids: dict[str, int] = {}  # of mapped tables, see `Embeddings`

    @property
    def mapped(self) -> dict[str, MappedTable]:
        return {name: module for name, module in self.maps._modules.items() if isinstance(module, MappedTable)}

    @property
    def device(self) -> torch.device:
        """The device of the rows; a model asks while it is made, before rows are sharded."""
        return self.stored.device

    def forward(self, sparse: Jagged | KeyedJagged) -> Vectors:
        """Look a batch up, as `Embeddings` does."""
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._forward)(sparse)  # see Embeddings.forward
        return self._forward(sparse)

    def _forward(self, sparse: Jagged | KeyedJagged) -> Vectors:
        try:
            jagged = self._owning(Jagged.from_keyed(sparse))
            batch, places = self._map_features(jagged)
        except RowwiseError as error:
            self.stored.abort_forward(error)
        vectors = self.stored(batch)
        if self._plain:
            return vectors
        # Cut once: a backward of many slices would make as many matrices of zeros.
        widths = [columns.stop - columns.start for columns in vectors.columns.values()]
        cut = dict(zip(vectors.columns, vectors.matrix_BS.split(widths, 1), strict=True)) | dict(vectors.sequences)
        found = {f: self._vector(jagged, f, cut, places) for f in self._homes}
        sequences = {f: x for f, x in found.items() if self._homes[f].pooling is Pooling.SEQUENCE}
        pooled = {f: x for f, x in found.items() if f not in sequences}
        columns: dict[str, slice] = {}
        at = 0
        for feature, x in pooled.items():
            columns[feature] = slice(at, at := at + x.shape[1])
        matrix_BS = torch.cat(list(pooled.values()), 1) if pooled else vectors.matrix_BS[:, :0]
        return Vectors(matrix_BS=matrix_BS, columns=columns, sequences=sequences)

    def map_batch(self, sparse: Jagged | KeyedJagged) -> Jagged:
        """The batch of rows that a batch of ids becomes: what is looked up, and travels."""
        return self._map_features(self._owning(Jagged.from_keyed(sparse)))[0]

    @torch.no_grad()
    def weights(self, name: str) -> Tensor:
        """A vector for each id of a table [ids, dim], as float32, where all rows are on this device."""
        if not isinstance(self.stored, Embeddings):
            raise SpecError(f"table {name!r} is spread over ranks: want weights() of a model that is not sharded")
        mapped = self.mapped.get(name)
        if mapped is None:
            return self.stored.weights(name)
        rows_NC = mapped.rows_of(torch.arange(mapped.table.rows))
        found: list[Tensor] = []
        for index, table in enumerate(mapped.stored):
            weights_RD = mapped.project(index, self.stored.weights(table.name))
            for rows_N in mapped.parts[index].pick(rows_NC).unbind(1):
                found.append(weights_RD[rows_N.clamp(min=0)] * (rows_N >= 0).unsqueeze(1))
        stacked = torch.stack(found)
        return stacked.prod(0) if mapped.map.shape.combine == "product" else stacked.sum(0)

    def _stored_of(self, table: Table) -> Sequence[Table]:
        mapped = self.mapped.get(table.name)
        return (table,) if mapped is None else mapped.stored

    def _owning(self, jagged: Jagged) -> Jagged:
        """The batch with features unshared that are combined id by id or looked up fold by fold.

        Checked here, as what is made of wrong lengths may look right.
        """
        check.check_lengths(jagged)
        if jagged.shared is not None:
            check.check_lengths(jagged.shared.jagged)
            jagged.shared.check()
        missing = [f for f in self._homes if f not in jagged.all_features]
        if missing:
            there = ", ".join(jagged.all_features)
            raise BatchError(f"the batch has no feature {', '.join(missing)}; it has {there}")
        apart = [one for one in self.mapped.values() if one.per_id or (self.training and one.folding)]
        return jagged.expand_features([f for one in apart for f in one.table.feature_names])

    def _map_features(self, jagged: Jagged) -> tuple[Jagged, dict[str, PartBags]]:
        """The batch of rows, and the parts that its own features became."""
        folds, begins_F1 = self._folds(jagged), begins_of(jagged)
        parts = [
            part
            for at, feature in enumerate(jagged.features)
            if feature in self._homes
            for part in self._parts(jagged, at, begins_F1, folds)
        ]
        shared = jagged.shared
        if shared is not None and not self._homes.keys() & set(shared.jagged.features):
            shared = None  # nothing of it is looked up
        if shared is not None:
            shared = SharedBags(jagged=self._map_features(shared.jagged)[0], inverse_B=shared.inverse_B)
        weights_N = None
        if jagged.weights_N is not None:
            weights_N = _concatenate_parts([w for p in parts if (w := p.weights_M) is not None], jagged.weights_N[:0])
        wide = any(part.rows_M.dtype == torch.int64 for part in parts)
        batch = Jagged(
            features=tuple(part.name for part in parts),
            values_N=_concatenate_parts([p.rows_M.long() if wide else p.rows_M for p in parts], jagged.values_N[:0]),
            lengths_FB=_concatenate_parts([part.lengths_B for part in parts], jagged.lengths_FB[:0]),
            weights_N=weights_N,
            shared=shared,
        )
        return batch, {part.name: part for part in parts}

    def _parts(
        self, jagged: Jagged, at: int, begins_F1: Sequence[int], folds: Mapping[str, Tensor]
    ) -> Iterator[PartBags]:
        """The rows of one feature's ids in each part; `folds`: of the samples [B], by table."""
        feature, begin, end = jagged.features[at], begins_F1[at], begins_F1[at + 1]
        table, size = self._homes[feature], jagged.lengths_FB.numel() // len(jagged.features)
        lengths_B = jagged.lengths_FB[at * size : (at + 1) * size]
        weights = None if jagged.weights_N is None else jagged.weights_N[begin:end]
        ids_N = jagged.values_N[begin:end]
        if table.name not in self.mapped:
            yield PartBags(name=feature, rows_M=ids_N, lengths_B=lengths_B, weights_M=weights, ids_M=None)
            return
        mapped = self.mapped[table.name]
        ids_N = self._check_ids(jagged, table, feature, begin, ids_N)
        folds_B = folds.get(table.name)
        rows_NC = mapped.rows_of(ids_N, None if folds_B is None else folds_B.repeat_interleave(lengths_B))
        place = table.feature_names.index(feature)
        for index, stored in enumerate(mapped.stored):
            name, part = stored.feature_names[place], mapped.parts[index]
            fits = ids_N.dtype == torch.int32 and stored.rows < NARROW
            bags = (all_rows if part.always else some_rows)(name, part.pick(rows_NC), lengths_B, weights)
            yield replace(bags, rows_M=bags.rows_M.int()) if fits else bags

    def _folds(self, jagged: Jagged) -> dict[str, Tensor]:
        """While rows are trained, the fold of each sample for each table whose map has folds."""
        made: dict[tuple[tuple[str, ...], int, int], Tensor] = {}  # mostly one for all tables
        found: dict[str, Tensor] = {}
        for name, one in self.mapped.items():
            how = one.folding
            if how is None or not self.training or not set(one.table.feature_names) & set(jagged.features):
                continue
            key = (how.features, how.count, how.seed)
            if key not in made:
                made[key] = folds_of(jagged, *key)
            found[name] = made[key]
        return found

    def _check_ids(self, jagged: Jagged, table: Table, feature: str, begin: int, ids_N: Tensor) -> Tensor:
        """The ids, all known to the map; ids outside the table become its last id if it takes unknown ids."""
        if not len(ids_N):
            return ids_N
        low, high = map(int, ids_N.aminmax())
        if low >= 0 and high < table.rows:
            return ids_N
        outside_N = (ids_N < 0) | (ids_N >= table.rows)
        if table.unknown != "last_row":
            raise check.unknown_id_error(table, feature, jagged, outside_N.nonzero().flatten() + begin)
        count_unknown(self.unknown_ids, table, feature, int(outside_N.sum()))
        return ids_N.masked_fill(outside_N, table.rows - 1)

    def _vector(
        self, jagged: Jagged, feature: str, vectors: Mapping[str, Tensor], places: Mapping[str, PartBags]
    ) -> Tensor:
        mapped = self.mapped.get(self._homes[feature].name)
        return vectors[feature] if mapped is None else combine_parts(mapped, jagged, feature, vectors, places)

    def extra_repr(self) -> str:
        """One line a mapped table."""
        lines = []
        for name, one in self.mapped.items():
            rows = " + ".join(f"{t.rows} x {t.dim}" for t in one.stored)
            lines.append(f"{name}: {one.table.rows} ids in {rows}, a map of {one.map.map_bytes} bytes")
        return "\n".join(lines)


AnyTables = Embeddings | MappedEmbeddings


def make_embeddings(
    tables: Sequence[Table], *, seed: int = 0, device: torch.device | str = "cpu", merge_shared: bool = False
) -> AnyTables:
    """Tables for a model: `Embeddings`, or what is around them where a table has an `id_map`."""
    kind = Embeddings if all(table.id_map is None for table in tables) else MappedEmbeddings
    return kind(tables, seed=seed, device=device, merge_shared=merge_shared)


def _concatenate_parts(tensors: Sequence[Tensor], none: Tensor) -> Tensor:
    return torch.cat(list(tensors)) if tensors else none

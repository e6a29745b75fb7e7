"""Batches whose samples share bags: routes, messages and received ids of their two bag sets.

[Note: Bag sets] A batch is one bag set, or two where samples share bags: own features with a bag for each of B samples,
and shared features with a bag for each of U distinct samples. One message per rank holds the ids of both, and ends with
the number of samples of each distinct sample. Vectors travel bag set by bag set, and the rank of the samples expands
them. Gradients travel for all samples, as those of the expanded batch; the owners of the rows expand the ids to match.
All ranks must share the same features; if they do not, all expand their batches and route again.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from msgspec import structs
from torch import Tensor

from rowwise.base.errors import IdError
from rowwise.parallel.shard.pack import BagSet, PackedBatch, Packer, RoutedBatch
from rowwise.parallel.shard.routes import PieceGroup, Routes, pooled_columns
from rowwise.tables.batch import Jagged, SharedBags
from rowwise.tables.ops.unknown import UnknownIds


@final
class SharedBatchPacker:
    """Packs and unpacks the messages of batches with two bag sets."""

    def __init__(self, routes: Routes, rank: int, unknown: list[UnknownIds]) -> None:
        self._routes, self._me, self._unknown = routes, rank, unknown
        self._packers: dict[tuple[str, ...], tuple[Packer, ...]] = {}  # one per bag set, by the shared features

    def pack(self, batch: Jagged, jagged: Jagged, shared: SharedBags, features: tuple[str, ...]) -> PackedBatch:
        """The messages of both bag sets; `jagged`: `batch` with sequences expanded, `features`: those of tables."""
        shared.check()
        packers, inverse_B = self._packers_for(features), shared.inverse_B
        parts = replace(jagged, shared=None) if jagged.features else jagged, shared.jagged
        try:
            own, distinct = (packer.pack_valid(part) for packer, part in zip(packers, parts, strict=True))
        except (RuntimeError, IdError):
            # An error names a sample of this batch, and unknown ids are counted per sample: make each sample distinct.
            parts, inverse_B = (parts[0], shared.expanded()), torch.arange(len(inverse_B), device=inverse_B.device)
            own, distinct = (packer.pack(part) for packer, part in zip(packers, parts, strict=True))
        samples_U = inverse_B.bincount(minlength=distinct.jagged.batch_size).to(torch.int32)
        # A rank without a piece of the shared tables gets no counts either: its message has no bag set to expand.
        messages_W = [
            [own_words, shared_words, samples_U if len(shared_words) else samples_U[:0]]
            for own_words, shared_words in zip(
                *(sent.words.split(sent.sizes_W) for sent in (own, distinct)), strict=True
            )
        ]
        words, sizes_W = torch.cat([x for parts in messages_W for x in parts]), [sum(map(len, x)) for x in messages_W]
        joined = _join_bag_sets(own.jagged, distinct.jagged, inverse_B)
        return PackedBatch(batch, joined, (own, distinct), words, sizes_W, shared_features=features)

    def unpack(
        self, packed: PackedBatch, messages_W: Sequence[Tensor], samples_W: Sequence[int], distinct_W: Sequence[int]
    ) -> RoutedBatch:
        """The messages of all ranks as a batch of all their samples; `distinct_W`: distinct samples of each rank."""
        rest_W, bag_sets, names = list(messages_W), list[BagSet](), packed.shared_features
        sides = zip(self._packers_for(names), packed.sent, (samples_W, distinct_W), strict=True)
        for packer, sent, sizes_W in sides:
            # The second bag set and the counts follow: the lengths of a bag set give its end.
            ends_W = [_message_words(packer, rest, n) for rest, n in zip(rest_W, sizes_W, strict=True)]
            messages_W = [rest[:end] for rest, end in zip(rest_W, ends_W, strict=True)]
            rest_W = [rest[end:] for rest, end in zip(rest_W, ends_W, strict=True)]
            bag_sets.append(packer.unpack(sent, messages_W, sizes_W))
        received, distinct = bag_sets[0].received, bag_sets[1].received
        if distinct is not None:
            # The remainder of each message: samples per distinct sample. Distinct samples of all ranks follow each
            # other in rank order, as samples do, so one repeat_interleave maps every sample to its distinct one.
            samples_U = torch.cat(rest_W)
            numbers_U = torch.arange(len(samples_U), device=samples_U.device)
            inverse_G = numbers_U.repeat_interleave(samples_U, output_size=sum(samples_W))
            received = _join_bag_sets(received, distinct, inverse_G)
        return RoutedBatch(jagged=packed.jagged, received=received, bag_sets=tuple(bag_sets), shared_features=names)

    def _packers_for(self, features: tuple[str, ...]) -> tuple[Packer, ...]:
        if features not in self._packers:
            routes = split_bag_sets(self._routes, features)
            self._packers[features] = tuple(Packer(split, self._me, self._unknown) for split in routes)
        return self._packers[features]


def split_bag_sets(routes: Routes, shared_features: Collection[str]) -> tuple[Routes, ...]:
    """Routes of own features, then of shared features."""
    own = [f for table in routes.tables for f in table.feature_names if f not in shared_features]
    return _restrict_to(routes, own), _restrict_to(routes, shared_features)


def _restrict_to(routes: Routes, features: Collection[str]) -> Routes:
    """The routes of a batch that has only these features; tables without any of them are dropped."""
    names_T = [tuple(f for f in table.feature_names if f in features) for table in routes.tables]
    numbers = {k: number for number, k in enumerate(k for k, names in enumerate(names_T) if names)}
    tables = tuple(structs.replace(routes.tables[k], features=names_T[k]) for k in numbers)
    replicated = {table.name for table in routes.replicated}
    return replace(
        routes,
        tables=tables,
        cuts={feature: cuts for feature, cuts in routes.cuts.items() if feature in features},
        replicated=tuple(table for table in tables if table.name in replicated),
        slices_W=tuple(
            tuple(s._replace(table=numbers[s.table]) for s in slices if s.feature in features)
            for slices in routes.slices_W
        ),
        groups_W=tuple(tuple(_only_tables(groups, numbers)) for groups in routes.groups_W),
        columns=pooled_columns(tables),
    )


def _only_tables(groups: Sequence[PieceGroup], numbers: Mapping[int, int]) -> Iterator[PieceGroup]:
    """The groups less pieces of other tables; `numbers`: the new index of each table that stays."""
    for group in groups:
        pieces = tuple(p._replace(table=numbers[p.table]) for p in group.pieces if p.table in numbers)
        if pieces:
            yield group._replace(pieces=pieces)


def _message_words(packer: Packer, message: Tensor, samples: int) -> int:
    """Words of one bag set at the start of a message, which holds the bags of `samples` samples."""
    bags = packer.num_slices * samples
    return bags + int(message[:bags].sum()) * packer.words_per_id


def _join_bag_sets(own: Jagged | None, distinct: Jagged, inverse_B: Tensor) -> Jagged:
    """One batch of own and shared features; if only one of the two has weights, the other gets ones."""
    values_N, lengths_FB, weights_N = distinct.values_N[:0], distinct.lengths_FB[:0], None
    if own is not None and own.features:
        values_N, lengths_FB, weights_N = own.values_N, own.lengths_FB, own.weights_N
    if weights_N is None and distinct.weights_N is not None:
        weights_N = torch.ones(len(values_N), device=values_N.device)
    elif weights_N is not None and distinct.weights_N is None:
        distinct = replace(distinct, weights_N=torch.ones(len(distinct.values_N), device=values_N.device))
    return Jagged(
        features=own.features if own is not None else (),
        values_N=values_N,
        lengths_FB=lengths_FB,
        weights_N=weights_N,
        shared=SharedBags(jagged=distinct, inverse_B=inverse_B),
    )

"""Launches of the operators on jagged batches and ids: `reference/jagged.py`, `exchange.py` and `idmap.py` on a GPU.

Operators with a size, an answer or an error for the host wait for the device once, in `to_host`. `bucketize` and
`find_newer` do not wait: ids outside their table become -1, which later operators refuse.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rowwise.base.errors import IdError
from rowwise.tables.ops import reference
from rowwise.tables.ops._triton import idmap as idmap_kernel
from rowwise.tables.ops._triton import rearrange as kernels
from rowwise.tables.ops._triton import specialise
from rowwise.tables.ops._triton.launch import TILED, begin, empty_numbers, end, on_device, over, shared_programs
from rowwise.tables.ops.pinned import copy_to
from rowwise.tables.ops.reference.idmap import SectionKind, SectionRow, SetPlaces, half_bits
from rowwise.tables.ops.reference.jagged import Distinct, Expanded, Routed, Taken
from rowwise.tables.ops.shapes import widest

IDS = 256  # ids that a program handles at a time
MAX_INDEX = 2**31 - 1  # most ids or bags of a batch
WARPS = {"num_warps": specialise.TILE_WARPS}


class Bags(NamedTuple):
    """A batch on the device; its lengths, and so its offsets, may be wrong until `check`."""

    values: Tensor
    lengths: Tensor
    weights: Tensor | None
    offsets: Tensor

    @classmethod
    def of(cls, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> "Bags":
        if weights is not None and len(weights) != len(values):
            raise RuntimeError(f"rowwise: {len(weights)} weights for {len(values)} values")
        return cls(values, lengths, weights, reference.offsets(lengths))

    def facts(self) -> Tensor:
        """The sum of all lengths, and the number of lengths that are negative or above the number of ids."""
        counts = self.lengths.long()
        return torch.stack([self.offsets[-1], ((counts < 0) | (counts > len(self.values))).sum()])

    def check(self, facts: list[int]) -> None:
        if facts != [len(self.values), 0]:
            raise RuntimeError(f"rowwise: lengths do not add up to {len(self.values)} values")

    def has_bags(self, first: int, count: int) -> bool:
        return first >= 0 and count >= 0 and first + count <= len(self.lengths)


def to_host(parts: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of tensors, in the only call that waits for the device."""
    numbers = iter(torch.cat([part.long() for part in parts]).tolist())
    return [[next(numbers) for _ in range(len(part))] for part in parts]


def take(values: Sequence[Tensor], lengths: Sequence[Tensor], weights: Sequence[Tensor], segments: Tensor) -> Taken:
    batches, device = _batches(values, lengths, weights), values[0].device
    rows = segments.tolist()
    for number, (source, first, count) in enumerate(rows):
        if not 0 <= source < len(batches):
            raise RuntimeError(f"rowwise: no batch {source}")
        if not batches[source].has_bags(first, count):
            bags = len(batches[source].lengths)
            raise RuntimeError(f"rowwise: segment {number} reaches past the {bags} bags of its batch")
    own = [[(at, *row[1:]) for at, row in enumerate(rows) if row[0] == source] for source in range(len(batches))]
    firsts = [_table([x for _, first, count in chosen for x in (first, first + count)], device) for chosen in own]
    bounds = [batch.offsets[at] for batch, at in zip(batches, firsts, strict=True)]
    numbers = to_host([*bounds, *(batch.facts() for batch in batches)])
    begins, sizes = [0] * len(rows), [0] * len(rows)
    for batch, chosen, ids, facts in zip(batches, own, numbers, numbers[len(batches) :], strict=False):
        batch.check(facts)
        for (at, *_), first, last in zip(chosen, ids[::2], ids[1::2], strict=True):
            begins[at], sizes[at] = first, last - first
    starts, bag_starts = list(accumulate(sizes, initial=0)), list(accumulate((row[2] for row in rows), initial=0))
    taken = torch.empty(starts[-1], dtype=widest(values), device=device)
    bags = torch.empty(bag_starts[-1], dtype=widest(lengths), device=device)
    moved = torch.empty(starts[-1] if weights else 0, device=device)
    for batch, chosen in zip(batches, own, strict=True):
        both = None if batch.weights is None else (batch.weights, moved)
        _copy([(begins[at], starts[at], sizes[at]) for at, *_ in chosen], batch.values, taken, both)
        _copy([(first, bag_starts[at], count) for at, first, count in chosen], batch.lengths, bags)
    return taken, bags, moved, torch.tensor(starts)


def expand(values: Sequence[Tensor], lengths: Sequence[Tensor], weights: Sequence[Tensor], *args: Any) -> Expanded:
    samples, places, narrow = args
    batches, device, samples_B = _batches(values, lengths, weights), values[0].device, len(samples[0])
    for batch_samples in samples:
        if len(batch_samples) != samples_B:
            raise RuntimeError(f"rowwise: {len(batch_samples)} samples; want {samples_B}")
    rows = places.tolist()
    for source, first in rows:
        if not (0 <= source < len(batches) and batches[source].has_bags(first, 0)):
            raise RuntimeError(f"rowwise: no bags from {first} on in batch {source}")
    bags = len(rows) * samples_B
    lengths_out = torch.empty(bags, dtype=widest(lengths), device=device)
    begins, outside = torch.empty(bags, dtype=torch.int64, device=device), _zeros(1, device)
    own = [
        _table([x for k, (at, first) in enumerate(rows) if at == source for x in (first, k * samples_B)], device)
        for source in range(len(batches))
    ]
    launched = [(batch, at, len(table) // 2, table) for batch, at, table in zip(batches, samples, own, strict=True)]
    launched = [launch for launch in launched if launch[2] and samples_B]
    for batch, at, features, table in launched:
        kernels.find_bags[*over(samples_B), features](
            at,
            table,
            batch.lengths,
            batch.offsets,
            lengths_out,
            begins,
            outside,
            samples_B,
            len(batch.lengths),
            **TILED,
        )
    ends = lengths_out.cumsum(0, dtype=torch.int64)
    (is_outside,), size, *facts = to_host([outside, ends[-1:], *(batch.facts() for batch in batches)])
    for batch, fact in zip(batches, facts, strict=True):
        batch.check(fact)
    if is_outside:
        raise RuntimeError("rowwise: a sample is outside the distinct ones")
    count = sum(size)
    taken = torch.empty(count, dtype=torch.int32 if narrow else widest(values), device=device)
    moved = torch.empty(count if weights else 0, device=device)
    bags_of_program, ids = specialise.expand_shape(count / max(1, bags))
    for batch, _, features, table in launched:
        kernels.copy_bags[*over(samples_B, bags_of_program), features](
            table, begins, ends, batch.values, moved if batch.weights is None else batch.weights, taken, moved,
            samples_B, HAS_WEIGHTS=bool(weights), BAGS=bags_of_program, IDS=ids, **WARPS,
        )  # fmt: skip
    return taken, lengths_out, moved


def bucketize(values: Tensor, lengths: Tensor, weights: Tensor | None, bounds: Tensor) -> Routed:
    (features, columns), bags, n = bounds.shape, Bags.of(values, lengths, weights), len(values)
    num_bags, device, buckets = len(lengths), values.device, columns - 1
    if not features or buckets < 1 or bool((bounds[:, 0] != 0).any() | (bounds.diff() < 0).any()):
        raise RuntimeError("rowwise: bounds must be [features, buckets + 1] and ascend from 0")
    if num_bags % features or (n and not num_bags):
        raise RuntimeError(f"rowwise: {num_bags} bags do not divide among {features} features")
    if max(n, num_bags * buckets) > MAX_INDEX:
        raise RuntimeError("rowwise: too many ids or bags for one batch; make it smaller")
    bucket_N = torch.empty(n, dtype=torch.uint8 if buckets <= 256 else torch.int32, device=device)  # passes of a sort
    bag_N, local_N, out = empty_numbers(device, n), torch.empty_like(values), torch.empty_like(values)
    if n:
        kernels.find_buckets[over(n)](
            values, bags.offsets, on_device(bounds, device), bucket_N, bag_N, local_N, num_bags, num_bags // features,
            columns, n, **TILED,
        )  # fmt: skip
    bucket_N, order_N = torch.sort(bucket_N, stable=True)
    moved = torch.empty(0 if weights is None else n, device=device)
    first_K, last_K = (torch.zeros(buckets * num_bags, dtype=torch.int32, device=device) for _ in range(2))
    if n:
        kernels.place_ids[over(n)](
            order_N, bucket_N, bag_N, local_N, moved if weights is None else weights, out, moved, first_K, last_K,
            num_bags, n, HAS_WEIGHTS=weights is not None, **TILED,
        )  # fmt: skip
    counts_K = (last_K - first_K).to(lengths.dtype)
    return out, counts_K, moved, order_N, reference.offsets(counts_K.view(buckets, num_bags).sum(1))


def deduplicate(values: Tensor, bounds: Tensor) -> Distinct:
    device, n, at = values.device, len(values), bounds.tolist()
    if not at or at[0] or at[-1] != n or at != sorted(at):
        raise RuntimeError(f"rowwise: bounds of segments do not ascend from 0 to {n}")
    ids_N, order_N = torch.sort(values, stable=True)
    segment_N = torch.zeros(n, dtype=torch.uint8 if len(at) <= 257 else torch.int32, device=device)
    if len(at) > 2:
        sizes = copy_to(bounds.diff(), device)
        segment_N = torch.arange(len(at) - 1, device=device).repeat_interleave(sizes, output_size=n).to(segment_N.dtype)
        # The ids of a segment stay in their order.
        segment_N, by_segment_N = torch.sort(segment_N[order_N], stable=True)
        ids_N, order_N = ids_N[by_segment_N], order_N[by_segment_N]
    is_first_N = empty_numbers(device, n)
    if n:
        kernels.find_distinct[over(n)](ids_N, segment_N, is_first_N, n, **TILED)
    numbers_N1 = reference.offsets(is_first_N)
    (starts,) = to_host([numbers_N1[copy_to(bounds, device)]])
    distinct = torch.empty(starts[-1], dtype=values.dtype, device=device)
    first_U1, inverse = _zeros(starts[-1] + 1, device), torch.empty(n, dtype=torch.int64, device=device)
    if n:
        kernels.write_distinct[over(n)](ids_N, order_N, numbers_N1[1:], distinct, first_U1, inverse, n, **TILED)
    return distinct, torch.tensor(starts), inverse, first_U1.diff()


def in_range(values: Tensor, lengths: Tensor, limits: Tensor, batch: int) -> bool:
    bags = Bags.of(values, lengths)
    for source, _ in limits.tolist():
        if batch < 0 or not bags.has_bags(source * batch, batch):
            raise RuntimeError(f"rowwise: no feature {source}")
    (is_outside,), facts = to_host([_find_outside(bags, limits * torch.tensor([batch, 1]), batch), bags.facts()])
    bags.check(facts)
    return not is_outside


def pack_ids(
    values: Tensor, lengths: Tensor, weights: Tensor | None, slices: Tensor, messages: Tensor, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    bags, device = Bags.of(values, lengths, weights), values.device
    _check_messages(bags, slices, messages, batch)
    firsts = slices[:, 0]
    ends = _table([*firsts.tolist(), *(firsts + batch).tolist()], device)
    (is_outside,), bounds, facts = to_host([_find_outside(bags, slices, batch), bags.offsets[ends], bags.facts()])
    bags.check(facts)
    if is_outside:
        raise IdError("rowwise: an id is outside its table")
    begins, counts = bounds[: len(firsts)], [b - a for a, b in zip(bounds, bounds[len(firsts) :], strict=False)]
    bag_segments: list[tuple[int, int, int]] = []
    id_segments: list[tuple[int, int, int, int, int]] = []
    starts, before, k = [0], 0, 0
    for number, wide, weighted in messages.tolist():
        words = 2 if wide else 1
        ids_at = starts[-1] + number * batch
        weights_at = ids_at + words * sum(counts[k : k + number])
        for slice_ in range(k, k + number):
            bag_segments.append((int(firsts[slice_]), starts[-1] + (slice_ - k) * batch, batch))
            if counts[slice_]:
                id_segments.append((before, begins[slice_], ids_at, weights_at if weighted else -1, words - 1))
            before, ids_at = before + counts[slice_], ids_at + words * counts[slice_]
            weights_at += counts[slice_] if weighted else 0
        starts.append(weights_at)
        k += number
    out = torch.empty(starts[-1], dtype=torch.int32, device=device)
    _copy(bag_segments, lengths, out)
    if before:
        table = copy_to(torch.tensor(id_segments), device)
        kernels.write_ids[over(before)](
            table, values, out if weights is None else weights, out, len(table), before,
            HAS_WEIGHTS=weights is not None, **TILED,
        )  # fmt: skip
    return out, torch.tensor(starts), torch.tensor(counts, dtype=torch.int64)


def find_newer(values: Tensor, offsets: Tensor, features: Tensor, ids: Tensor, places: Tensor, batch: int) -> Tensor:
    device, n, count = values.device, len(values), len(ids)
    for source, _, first, last in features.tolist():
        if source < 0 or (source + 1) * batch >= len(offsets):
            raise RuntimeError(f"rowwise: no feature {source}")
        if not 0 <= first <= last <= count or len(places) != count:
            raise RuntimeError(f"rowwise: no ids of feature {source}")
    fault, out = begin(device), values.to(torch.int64, copy=True)
    if n and len(features):
        kernels.find_newer[shared_programs(n, IDS, device, len(features)), len(features)](
            values, offsets, on_device(features, device), ids, places, out, fault, batch, n, IDS=IDS, **WARPS
        )
    end(device)
    return out


def map_ids(ids: Tensor, sections: Tensor, words: Tensor, known: int, columns: int) -> Tensor:
    if ids.is_floating_point() or words.dtype != torch.int64 or sections.dim() != 2 or sections.shape[1] != 10:
        raise RuntimeError("rowwise: map_ids wants ids [N], sections [S, 10], words [W]")
    if not (1 <= known <= 1 << 40 and 1 <= columns <= 256):
        raise RuntimeError(f"rowwise: an id map of {known} ids in {columns} columns")
    device, n = ids.device, len(ids)
    rows = torch.full((n, columns), -1, dtype=torch.int64, device=device)
    before = torch.zeros_like(rows)
    for number, section in enumerate(SectionRow(*row) for row in sections.tolist()):
        layout = _checked_layout(number, section, known, columns, len(words))
        is_set = section.kind in (SectionKind.RANKED, SectionKind.LISTED)
        if n and (section.count or not is_set):
            row = torch.tensor([*section, *layout, known, half_bits(known)])
            idmap_kernel.map_section[over(n, IDS)](
                ids, on_device(row, device), words, rows, before, columns, n, KIND=section.kind, IDS=IDS, **WARPS
            )
    return rows


def _checked_layout(number: int, section: SectionRow, known: int, columns: int, words: int) -> SetPlaces:
    """The places of a section's set; raises for a section that reaches past the words or the columns."""
    lead = f"rowwise: section {number} of an id map"
    if not (0 <= section.kind < len(SectionKind) and 0 <= section.column < columns):
        raise RuntimeError(f"{lead} is of kind {section.kind} in column {section.column} of {columns}")
    min_rows, max_rows = int(section.kind == SectionKind.HASH), 1 << 48
    if not (min_rows <= section.rows <= max_rows and 0 <= section.base <= max_rows and section.divisor > 0):
        raise RuntimeError(f"{lead} has {section.rows} rows from {section.base} on, divisor {section.divisor}")
    bits = section.low_bits, section.entry_bits
    if not (0 <= section.count <= known and all(0 <= x <= 48 for x in bits)):
        raise RuntimeError(f"{lead} has {section.count} of {known} ids, with {bits[0]} and {bits[1]} bits each")
    layout, end = SetPlaces.of(section, known), section.at
    if section.kind == SectionKind.EVERY:
        end -= -known * section.entry_bits // 64
    elif section.kind in (SectionKind.RANKED, SectionKind.LISTED) and section.count:
        end = layout.end
    if not 0 <= section.at <= end <= words:
        raise RuntimeError(f"{lead} reaches past its {words} words")
    return layout


def _batches(values: Sequence[Tensor], lengths: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Bags]:
    if not values or len(lengths) != len(values) or (weights and len(weights) != len(values)):
        raise RuntimeError(f"rowwise: {len(values)} batches of ids, {len(lengths)} of bags, {len(weights)} of weights")
    return [Bags.of(*tensors) for tensors in zip(values, lengths, weights or [None] * len(values), strict=True)]


def _check_messages(bags: Bags, slices: Tensor, messages: Tensor, batch: int) -> None:
    if batch < 0 or slices.shape[1:] != (2,) or messages.shape[1:] != (3,):
        raise RuntimeError("rowwise: slices must be [n, 2] and messages [n, 3]")
    for number, (first, _) in enumerate(slices.tolist()):
        if not bags.has_bags(first, batch):
            raise RuntimeError(f"rowwise: slice {number} reaches past the {len(bags.lengths)} bags of its batch")
    if int(messages[:, 0].sum()) != len(slices) or bool((messages[:, 0] < 0).any()):
        raise RuntimeError(f"rowwise: messages want other than {len(slices)} slices")
    if bags.weights is None and bool(messages[:, 2].any()):
        raise RuntimeError("rowwise: a rank wants weights, and there are none")


def _find_outside(bags: Bags, slices: Tensor, batch: int) -> Tensor:
    """1 if an id of a slice (first bag, rows) is outside its rows."""
    device, n, outside = bags.values.device, len(bags.values), _zeros(1, bags.values.device)
    if n and len(slices):
        kernels.find_outside[shared_programs(n, IDS, device, len(slices)), len(slices)](
            bags.values, bags.offsets, on_device(slices, device), outside, batch, n, IDS=IDS, **WARPS
        )
    return outside


def _copy(
    segments: Sequence[tuple[int, int, int]], source: Tensor, out: Tensor, weights: tuple[Tensor, Tensor] | None = None
) -> None:
    """Copy segments (first in the source, first in `out`, count), and the same of weights (source, target)."""
    nonempty = [segment for segment in segments if segment[2]]
    before = list(accumulate((count for *_, count in nonempty), initial=0))
    if not nonempty:
        return
    rows = [(at, *segment[:2]) for at, segment in zip(before, nonempty, strict=False)]
    kernels.copy_segments[over(before[-1])](
        copy_to(torch.tensor(rows), out.device), source, out, *(weights or (out, out)), len(rows), before[-1],
        HAS_WEIGHTS=weights is not None, **TILED,
    )  # fmt: skip


def _table(numbers: list[int], device: torch.device) -> Tensor:
    return copy_to(torch.tensor(numbers, dtype=torch.int64), device)


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device=device)


LAUNCHES: dict[str, Callable[..., Any]] = {
    "in_range": in_range,
    "find_newer": find_newer,
    "take": take,
    "bucketize": bucketize,
    "expand": expand,
    "deduplicate": deduplicate,
    "pack_ids": pack_ids,
    "map_ids": map_ids,
}

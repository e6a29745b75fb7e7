"""Calls of the operators on batches, of any size, for tests that compare two implementations of them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from rowwise.tables.ops import reference

INT32, INT64 = torch.int32, torch.int64
ROWS = (17, 300, 5)
# Arguments that stay on the CPU, by position.
ON_HOST = {
    "take": {3}, "expand": {4}, "bucketize": {3}, "deduplicate": {1}, "pack_ids": {3, 4}, "in_range": {2},
    "find_newer": {2}, "map_ids": {1},
}  # fmt: skip


def on_device_of(name: str, args: Sequence[Any], device: str) -> list[Any]:
    """The arguments of an operator on a device, as far as they are not on the host."""

    def moved(x: Any) -> Any:
        if isinstance(x, list):
            return [moved(one) for one in x]
        return x.to(device) if isinstance(x, torch.Tensor) else x

    return [x if at in ON_HOST.get(name, ()) else moved(x) for at, x in enumerate(args)]


class Ids(NamedTuple):
    """A batch of features whose ids are below ROWS."""

    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor

    @property
    def batch(self) -> int:
        return len(self.lengths) // len(ROWS)


def ids_of(batch: int, most: int, seed: int, types: tuple[torch.dtype, torch.dtype] = (INT64, INT64)) -> Ids:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(ROWS), batch), generator=g)
    parts = [torch.randint(0, rows, (n,), generator=g) for rows, n in zip(ROWS, lengths.sum(1).tolist(), strict=True)]
    values = torch.cat(parts).to(types[0])
    return Ids(values, lengths.flatten().to(types[1]), torch.rand(len(values), generator=g))


Call = tuple[str, tuple[Any, ...]]


def calls_on(batches: Sequence[Ids]) -> Iterator[Call]:
    """Of all operators but `deduplicate`, whose ids have no bags."""
    yield from _takes(batches)
    yield from _expansions(batches)
    for one in batches:
        yield from _bucketized(one)
        yield from _packed(one)
        for change in (None, (0, 250), (2, 0), (1, -1)):
            limits = [[f, ROWS[f]] for f in (1, 0, 2, 1)]
            if change is not None:
                limits[change[0]][1] = change[1]
            yield "in_range", (one.values, one.lengths, torch.tensor(limits), one.batch)
        yield "in_range", (one.values, one.lengths, torch.empty(0, 2, dtype=INT64), one.batch)
        yield "find_newer", newer(one)


def deduplications(scale: int = 1) -> Iterator[Call]:
    for sizes in ([], [0], [700], [5, 0, 300, 1]):
        values = torch.randint(
            -20 * scale, 60 * scale, (scale * sum(sizes),), generator=torch.Generator().manual_seed(0)
        )
        bounds = torch.tensor([0, *(scale * size for size in sizes)]).cumsum(0)
        yield "deduplicate", (values.int(), bounds)
        yield "deduplicate", (values << 40, bounds)
    yield "deduplicate", (torch.tensor([-1, (1 << 63) - 1, -(1 << 63), -1]), torch.tensor([0, 4]))


def newer(one: Ids, rows: Sequence[int] = ROWS) -> tuple[Any, ...]:
    """Two features have newer rows, of which the table of the second has none."""
    ids = torch.arange(0, 300, 3)
    features = torch.tensor([[1, rows[1], 0, 100], [0, rows[0], 100, 100]])
    return one.values, reference.offsets(one.lengths), features, ids, ids + 300, one.batch


def _takes(batches: Sequence[Ids]) -> Iterator[Call]:
    segments = []
    for source, one in enumerate(batches):
        bags = len(one.lengths)
        segments += [(source, 0, bags // 2), (source, bags, 0), (source, bags // 3, bags - bags // 3)]
    columns = [one.values for one in batches], [one.lengths for one in batches]
    for weights in ([], [one.weights for one in batches]):
        yield "take", (*columns, weights, torch.tensor(segments[::-1]))
        yield "take", (*columns, weights, torch.empty(0, 3, dtype=INT64))


def _expansions(batches: Sequence[Ids]) -> Iterator[Call]:
    columns = [one.values for one in batches], [one.lengths for one in batches]
    for count in (0, 1, 150) if min(one.batch for one in batches) else (0,):
        samples = [(torch.arange(count) * 7 % max(1, one.batch)).to((INT32, INT64)[k]) for k, one in enumerate(batches)]
        places = torch.tensor([(k, f * one.batch) for k, one in enumerate(batches) for f in (2, 0)])
        for weights in ([], [one.weights for one in batches]):
            yield "expand", (*columns, weights, samples, places, not weights)
            yield "expand", (*columns, weights, samples, places[:0], False)


def _bucketized(one: Ids) -> Iterator[Call]:
    for buckets in (1, 3, 300):
        even = [[min(w * -(-rows // buckets), rows) for w in range(buckets + 1)] for rows in ROWS]
        yield "bucketize", (one.values, one.lengths, None, torch.tensor(even))
    empty = torch.tensor([[0, *[rows // 2] * 2, rows] for rows in ROWS])
    yield "bucketize", (one.values, one.lengths, one.weights, empty)


def _packed(one: Ids) -> Iterator[Call]:
    slices = torch.tensor([(f * one.batch, ROWS[f]) for f in (2, 0, 1, 1, 0)])
    messages = torch.tensor([(2, 0, 1), (0, 1, 0), (1, 1, 1), (2, 1, 0)])
    yield "pack_ids", (one.values, one.lengths, one.weights, slices, messages, one.batch)
    yield "pack_ids", (one.values, one.lengths, None, slices, torch.tensor([(5, 0, 0)]), one.batch)

"""How fast are lookups of 8-bit and 4-bit rows beside TorchRec's quantised tables, in one thread as a worker has it?

    python benchmarks/serve_lookups.py [--quick | --smoke] [--save]

26 tables of 100,000 rows of dim 64, the same weights on both sides, rounded by each. A lookup is a call of the module
with a batch that is there: `Embeddings` and `Jagged`, or a quantised `EmbeddingBagCollection` and `KeyedJaggedTensor`.
Pooled vectors of both are compared with those of the floats; then the two run interleaved (A B A B). A time is the 20 %
quantile of the repeats.

Takes: 1 minute
Needs: the extra `peers`
"""

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from parts.batches import names_of, tables_of
from parts.report import at_least, at_most, finish, geomean, has_peer, options, parsed, show
from parts.timer import in_turns
from torch import Tensor, nn

from rowwise import Embeddings, Jagged, RowType
from rowwise.tables.ops import rowtype

TABLES, DIM = 26, 64
NAMES = names_of(TABLES)
BATCHES, POOLINGS, TYPES = (1, 4, 16, 64, 128, 512, 2048), (1, 20), (RowType.INT8, RowType.INT4)
SMALL = 128  # batches up to this have a floor of their own
LEVELS = {RowType.INT8: 255, RowType.INT4: 15}


class Cell(NamedTuple):
    row_type: RowType
    batch: int
    pooling: int


def make_ours(weights: list[Tensor], row_type: RowType) -> Embeddings:
    embeddings = Embeddings(tables_of([len(weights[0])] * TABLES, DIM, row_type=row_type))
    for name, w_RD in zip(NAMES, weights, strict=True):
        embeddings.table(name).copy_(rowtype.pack(w_RD, row_type))
    return embeddings


def make_theirs(weights: list[Tensor], row_type: RowType) -> nn.Module:
    from torchrec.inference.modules import quantize_embeddings
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=len(weights[0]), feature_names=[name])
        for name in NAMES
    ]
    plain = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    for name, w_RD in zip(NAMES, weights, strict=True):
        plain.embedding_bags[name].weight.data.copy_(w_RD)
    kind = torch.qint8 if row_type is RowType.INT8 else torch.quint4x2
    return quantize_embeddings(nn.Sequential(plain), kind, inplace=True)[0]


def make_batch(cell: Cell, rows: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(cell.batch * 100 + cell.pooling)
    values_N = torch.randint(0, rows, (TABLES * cell.batch * cell.pooling,), generator=g)
    return values_N, torch.full((TABLES * cell.batch,), cell.pooling)


def sides(cell: Cell, ours: Embeddings, theirs: nn.Module | None, rows: int) -> Iterator[Callable[[], Tensor]]:
    """What each side does with one batch."""
    values_N, lengths_FB = make_batch(cell, rows)
    yield lambda: ours(Jagged(features=NAMES, values_N=values_N, lengths_FB=lengths_FB)).matrix_BS
    if theirs is not None:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        keys = list(NAMES)
        yield lambda: theirs(KeyedJaggedTensor(keys=keys, values=values_N, lengths=lengths_FB)).values()


def relative_error(found_BS: Tensor, cell: Cell, weights: list[Tensor]) -> float:
    """The mean squared distance from the floats' vectors, over that of rounding each weight to the nearest step."""
    values_N, _ = make_batch(cell, len(weights[0]))
    ids_TBL = values_N.view(TABLES, cell.batch, cell.pooling)
    wanted_BS = torch.cat([w_RD[ids_BL].sum(1) for w_RD, ids_BL in zip(weights, ids_TBL, strict=True)], 1)
    step = 2 / LEVELS[cell.row_type]  # weights are in [-1, 1)
    return float((found_BS - wanted_BS).square().mean()) / (cell.pooling * step**2 / 12)


def main() -> None:
    args = parsed(options("serve_lookups", __doc__))
    torch.set_num_threads(1)
    there = has_peer("torchrec", args)
    rows, batches = (500, (1, 64)) if args.smoke else (100_000, (1, 16, 128, 2048) if args.quick else BATCHES)
    repeats = 3 if args.smoke else 20 if args.quick else 60
    weights = [torch.rand(rows, DIM, generator=torch.Generator().manual_seed(k)) * 2 - 1 for k in range(TABLES)]
    found, errors = [], []
    for row_type in TYPES:
        ours, theirs = make_ours(weights, row_type), make_theirs(weights, row_type) if there else None
        for cell in (Cell(row_type, batch, pooling) for batch in batches for pooling in POOLINGS):
            with torch.inference_mode():
                works = list(sides(cell, ours, theirs, rows))
                errors += [relative_error(work(), cell, weights) for work in works]
                taken = in_turns(dict(enumerate(works)), repeats)
                times = [sorted(seconds)[repeats // 5] for seconds in taken.values()]
            row = cell._asdict() | {"row_type": str(row_type), "rowwise_us": 1e6 * times[0]}
            if there:
                row |= {"torchrec_us": 1e6 * times[1], "ratio": times[1] / times[0]}
            show(row)
            found.append(row)
    floors = [at_most("squared error of pooled vectors, over that of rounding", max(errors), 1.2)]
    if not args.smoke:
        for row_type in TYPES:
            mine = [row for row in found if row["row_type"] == row_type]
            small = [row["ratio"] for row in mine if row["batch"] <= SMALL]
            floors += [
                at_least(f"{row_type}: torchrec's time over ours, worst cell", min(row["ratio"] for row in mine), 1.0),
                at_least(f"{row_type}: the same up to batch {SMALL}, geometric mean", geomean(small), 1.5),
            ]
    finish("serve_lookups", found, floors, args)


if __name__ == "__main__":
    main()

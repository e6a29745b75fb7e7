"""Elastic training whose every bit is the same on all processors, as three hashes.

Ids, per-id weights and gradients are integers divided by powers of two, and gradients are made one number at a time:
no product of matrices, whose last bits differ between processors, has a part in it. Momentum decays by powers of
1/2 and 3/4, which floats hold exactly.
"""

import hashlib
from collections.abc import Callable

import torch
from parallel.shard.layout_cases import CASES

from rowwise import Adagrad, Adam, Embeddings, Ftrl, Jagged, Lamb, Plan, RowWiseAdagrad, Sgd, Table, Topology
from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard.apply import copy_tables
from rowwise.parallel.shard.embeddings import LocalTile, ShardedEmbeddings
from rowwise.tables.ops import rowtype
from rowwise.tables.ops.jagged import split

SEED, SAMPLES, STEPS, LONGEST = 11, 1024, 3, 3
EXACT = {"beta1": 0.5, "beta2": 0.75}
Tables = tuple[Table, ...]

OPTIMIZERS: Tables = (
    Table(name="sgd", rows=40, dim=8, optimizer=Sgd(lr=0.125, weight_decay=0.01)),
    Table(name="rowwise", rows=60, dim=16, features=("said", "read"), optimizer=RowWiseAdagrad(lr=0.1, clip=4.0)),
    Table(name="adagrad", rows=30, dim=20, pooling="mean", optimizer=Adagrad(lr=0.1)),
    Table(name="adam", rows=50, dim=24, optimizer=Adam(lr=0.01, **EXACT)),
    Table(name="lamb", rows=35, dim=12, optimizer=Lamb(lr=0.01, **EXACT)),
    Table(name="ftrl", rows=45, dim=4, optimizer=Ftrl(lr=0.1, l1=0.01)),
)
ROW_TYPES: Tables = (
    Table(name="halves", rows=40, dim=32, row_type="fp16", optimizer=RowWiseAdagrad(lr=0.1)),
    Table(name="brains", rows=60, dim=16, row_type="bf16", pooling="mean", optimizer=Adam(lr=0.05, **EXACT)),
    Table(name="bytes", rows=50, dim=32, row_type="int8", column_group=16, optimizer=Adagrad(lr=0.1)),
)
POOLINGS: Tables = (
    Table(name="weighted", rows=40, dim=16, pooling="weighted", optimizer=RowWiseAdagrad(lr=0.1)),
    Table(name="sequence", rows=30, dim=8, pooling="sequence", optimizer=Adagrad(lr=0.1)),
    Table(name="halves", rows=25, dim=20, pooling="sequence", row_type="fp16", optimizer=Sgd(lr=0.125)),
    Table(name="mean", rows=45, dim=12, pooling="mean", optimizer=RowWiseAdagrad(lr=0.1)),
)
JOBS = {"optimizers": OPTIMIZERS, "row types": ROW_TYPES, "poolings": POOLINGS}
WORLDS = {
    "one rank": (Topology(), ["table-wise"]),
    "2 ranks": (Topology(devices=2), ["column-wise", "row-wise"]),
    "4 ranks of 2 hosts": (Topology(hosts=2, devices=2), ["row-wise", "grid", "table-wise", "column-wise"]),
}


def eighths(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Numbers in -4 ... 4 that every float type holds exactly."""
    return torch.randint(-32, 33, shape, generator=generator) / 8


def batch_of(tables: Tables, generator: torch.Generator) -> Jagged:
    """Bags of 0 to 3 ids, some ids far more often than others."""
    rows = {feature: table.rows for table in tables for feature in table.feature_names}
    lengths = [torch.randint(LONGEST + 1, (SAMPLES,), generator=generator) for _ in rows]
    counts = [int(one.sum()) for one in lengths]
    draws = zip(rows.values(), counts, strict=True)
    values = [torch.randint(n, (count,), generator=generator) // torch.randint(1, 5, (count,), generator=generator)
              for n, count in draws]  # fmt: skip
    weights_N = eighths(generator, sum(counts))
    return Jagged(features=tuple(rows), values_N=torch.cat(values), lengths_FB=torch.cat(lengths), weights_N=weights_N)


def parts_of(whole: torch.Tensor, batch: Jagged, feature: str, sizes: list[int], rank: int) -> torch.Tensor:
    """Of numbers for each id of a feature, those of a rank's samples."""
    lengths_B = batch.lengths_FB.view(len(batch.features), -1)[batch.features.index(feature)]
    ids_W = [int(part.sum()) for part in lengths_B.split(sizes)]
    return whole.split(ids_W)[rank]


def train(module: ShardedEmbeddings, tables: Tables, comm: Comm) -> list[dict[str, torch.Tensor]]:
    """What a rank looked up in each step."""
    generator, world = torch.Generator().manual_seed(SEED), len(comm.ranks)
    sizes, found = [SAMPLES // world] * world, []
    for _ in range(STEPS):
        batch = batch_of(tables, generator)
        vectors = module(split(batch, sizes)[comm.rank])
        pooled, sequences = vectors.matrix_BS, dict(vectors.sequences)
        loss = (pooled * eighths(generator, SAMPLES, pooled.shape[1]).split(sizes)[comm.rank]).sum()
        for feature, vectors_ND in sequences.items():
            count = int(batch.lengths_FB.view(len(batch.features), -1)[batch.features.index(feature)].sum())
            ups = eighths(generator, count, vectors_ND.shape[1])
            loss = loss + (vectors_ND * parts_of(ups, batch, feature, sizes, comm.rank)).sum()
        loss.backward()
        module.update()
        found.append({"": pooled.detach()} | {name: x.detach() for name, x in sequences.items()})
    return found


def digest(tables: Tables, topology: Topology, layouts: list[str]) -> str:
    """The hash of all vectors looked up, all rows and all optimizer state, whole."""
    tiles = [t for k, table in enumerate(tables) for t in CASES[layouts[k % len(layouts)]](table, topology)]
    plan = Plan(world=topology.world, tiles=tuple(tiles))

    def rank(comm: Comm):
        module = ShardedEmbeddings(tables, plan, comm, elastic=True)
        copy_tables(Embeddings(tables, seed=SEED), module)
        return train(module, tables, comm), module.local_tiles()

    ranks = run_threads(topology, rank, timeout_s=60)
    hashed = hashlib.sha256()
    for number in range(STEPS):
        for name in sorted(ranks[0][0][number]):
            add(hashed, torch.cat([steps[number][name] for steps, _ in ranks]))
    for table in tables:
        pieces = [piece for _, held in ranks for piece in held if piece.tile.table == table.name]
        add(hashed, whole_of(table, pieces, lambda piece, table=table: floats_of(table, piece)))
        for name in sorted(pieces[0].state):
            add(hashed, whole_of(table, pieces, lambda piece, name=name: piece.state[name]))
    return hashed.hexdigest()


def floats_of(table: Table, piece: LocalTile) -> torch.Tensor:
    """The weights of a piece as floats, which hold those of every row type exactly."""
    first, last = piece.tile.cols
    return rowtype.unpack(piece.rows, last - first, table.row_type, table.column_group)


def whole_of(table: Table, pieces: list, part: Callable) -> torch.Tensor:
    """Pieces put where they are of a table: whole, of each row one number, or one for all."""
    first = part(pieces[0])
    if first.dim() < 2:
        rows = [slice(*piece.tile.rows) if first.dim() else ... for piece in pieces]
        whole = torch.zeros(table.rows if first.dim() else (), dtype=first.dtype)
        for piece, at in zip(pieces, rows, strict=True):
            whole[at] = part(piece)
        return whole
    starts = sorted({piece.tile.rows[0] for piece in pieces})
    by_rows = [[p for p in pieces if p.tile.rows[0] == start] for start in starts]
    return torch.cat([torch.cat([part(p) for p in sorted(ps, key=lambda p: p.tile.cols)], 1) for ps in by_rows])


def add(hashed, tensor: torch.Tensor) -> None:
    """Type, shape and bits."""
    hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    hashed.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

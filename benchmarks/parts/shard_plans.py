"""Does the result depend on the plan? The part of `shard_step.py` that trains and compares weights, and no times.

Each system is held against itself: the same model whole, in one process, on the same samples.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from parts.dlrm import linears
from parts.report import show
from parts.shard_torchrec import LAYOUTS, TorchRec, join
from parts.shard_work import NAMES, Load, Shape, Side, parts_of, whole_model
from rowwise.tables.spec import Topology

SHAPE = Shape.of(1_000, 20_000, small=True)._replace(lr=0.1, dense_lr=1e-3)
LOAD = Load(batch=2048, pooling=3)
STEPS, FEW = 20, 5
WIRES = ("fp16", "bf16", "int8")
Cut = tuple[int | None, int | None]


class Case(NamedTuple):
    """How a system runs."""

    layout: str
    wire: str = "fp32"
    determinism: str = "run"
    steps: int = STEPS


class Weights(NamedTuple):
    """What one rank ends with: pieces of tables (rows, columns), and the dense parameters, which all ranks have."""

    tables: dict[str, list[tuple[Cut, Cut, np.ndarray]]]
    dense: list[np.ndarray]


def train(side: Side, rank: int, world: int, steps: int) -> Weights:
    for seed in range(steps):
        side.step(parts_of(SHAPE, LOAD, seed, rank, world))
    tables = {name: [_plain(*piece) for piece in pieces] for name, pieces in side.tables().items()}
    dense = [_copy(p) for layer in linears(side.model) for p in (layer.weight, layer.bias)]
    return Weights(tables, dense)


def _plain(rows: slice, columns: slice, piece: Tensor) -> tuple[Cut, Cut, np.ndarray]:
    """As it travels between processes."""
    return (rows.start, rows.stop), (columns.start, columns.stop), _copy(piece)


def _copy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy().copy()


def theirs(comm: Any, cases: Sequence[Case]) -> list[Weights]:
    join(comm)
    wires = [None if case.wire == "fp32" else case.wire for case in cases]
    sides = (TorchRec(whole_model(SHAPE), SHAPE, c.layout, w) for c, w in zip(cases, wires, strict=True))
    return [train(side, comm.rank, len(comm.ranks), c.steps) for side, c in zip(sides, cases, strict=True)]


def ours(comm: Any, cases: Sequence[Case]) -> list[Weights]:
    from parts.shard_rowwise import Rowwise

    sides = (Rowwise(whole_model(SHAPE), c.layout, comm, c.wire, c.determinism, SHAPE.dense_lr) for c in cases)
    return [train(side, comm.rank, len(comm.ranks), c.steps) for side, c in zip(sides, cases, strict=True)]


def difference(ranks: Sequence[Weights], whole: Weights) -> float:
    """The largest, over everything that any rank holds."""
    found: list[float] = []
    for weights in ranks:
        found += [float(np.abs(a - b).max()) for a, b in zip(weights.dense, whole.dense, strict=True)]
        for name, pieces in weights.tables.items():
            exact = whole.tables[name][0][2]
            found += [
                float(np.abs(piece - exact[slice(*rows), slice(*columns)]).max()) for rows, columns, piece in pieces
            ]
    return float(np.max(found))  # a NaN stays one


def moved(whole: Weights) -> float:
    """The furthest that a row has come since the first step."""
    tables = whole_model(SHAPE).embeddings
    return max(float(np.abs(whole.tables[name][0][2] - tables.table(name).numpy()).max()) for name in NAMES)


def rows_of(system: str, how: str, cases: Sequence[Case], ranks: Sequence[list[Weights]], whole: Weights) -> list[dict]:
    """A row a case; `ranks`: what each rank gave for all of them."""
    rows, yardstick = [], moved(whole)
    for case, found in zip(cases, zip(*ranks, strict=True), strict=True):
        away = {"difference": difference(found, whole), "moved": yardstick}
        row = {"kind": "plans", "side": system, "how": how, **case._asdict(), **away}
        show(row)
        rows.append(row)
    return rows


def measure_theirs(launch: Any, quick: bool) -> list[dict]:
    """The layouts in which it agrees with itself, those in which it does not, and its wires; `quick`: one of each."""
    cases = [Case(layout) for layout in LAYOUTS] + [Case("table-wise", wire) for wire in WIRES]
    cases = [case._replace(steps=FEW) for case in cases[1:3]] if quick else cases
    whole = train(TorchRec(whole_model(SHAPE), SHAPE, None), 0, 1, cases[0].steps)
    return rows_of("TorchRec", "2 processes", cases, launch(2, theirs, cases), whole)


def measure_ours(launch: Any, quick: bool) -> list[dict]:
    """On two processes, and on threads that play two hosts of two; `quick`: some layouts, on threads."""
    from parts.shard_rowwise import HOST_LAYOUTS, Rowwise, on_threads
    from parts.shard_rowwise import LAYOUTS as ALL

    rows: list[dict] = []
    for determinism in ("run", "elastic"):
        cases = [Case(layout, "fp32", determinism) for layout in (*ALL, *HOST_LAYOUTS)]
        cases += [Case("table-wise", wire) for wire in WIRES if determinism == "run"]
        cases = [case._replace(steps=FEW) for case in cases[1:3]] if quick else cases
        whole = train(
            Rowwise(whole_model(SHAPE), None, None, determinism=determinism, dense_lr=SHAPE.dense_lr),
            0,
            1,
            cases[0].steps,
        )
        found = on_threads(Topology(hosts=2, devices=2), ours, cases)
        rows += rows_of("rowwise", "4 threads", cases, found, whole)
        if not quick:
            cases = [case for case in cases if case.layout in ALL]
            rows += rows_of("rowwise", "2 processes", cases, launch(2, ours, cases), whole)
    return rows

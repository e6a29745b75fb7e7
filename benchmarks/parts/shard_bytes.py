"""How many bytes travel in a step: the part of `shard_step.py` that counts, beside Neo's formulas (arXiv 2104.05158).

Of all ranks together. A formula knows ids of 64 bits, lengths of 32, vectors of the wire's type, and dense gradients
that go around a ring.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from parts.dlrm import DIM, FEATURES, linears
from parts.report import at_most, show
from parts.shard_plans import Case
from parts.shard_work import Load, Shape, parts_of, whole_model
from rowwise.tables.spec import RowType, row_bytes

SHAPE = Shape.of(1_000, 20_000)
LOAD = Load(batch=4096, pooling=20)
STEPS = 2
WIRES = ("fp32", "fp16", "bf16", "int8")
ID_bytes, LENGTH_bytes, FLOAT_bytes = 8, 4, 4


def expected(case: Case, world: int) -> dict[str, int]:
    """Bytes a step that the layout cannot do without, by what they are."""
    others, bags, ids = world - 1, LOAD.batch * FEATURES, LOAD.batch * FEATURES * LOAD.pooling
    vector_bytes = row_bytes(RowType(case.wire), DIM)
    match case.layout:
        case "table-wise":  # a share of 1 / W stays at home
            sent = {"ids": ids * ID_bytes * others // world, "lengths": bags * LENGTH_bytes * others // world}
            sent["pooled"] = bags * vector_bytes * others // world
        case "row-wise":  # each id goes to one rank, each bag to all
            sent = {"ids": ids * ID_bytes * others // world, "lengths": bags * LENGTH_bytes * others}
            sent["pooled"] = bags * vector_bytes * others
        case "column-wise":  # each id goes to all ranks
            sent = {"ids": ids * ID_bytes * others, "lengths": bags * LENGTH_bytes * others}
            sent["pooled"] = bags * row_bytes(RowType(case.wire), DIM // world) * others
        case _:  # replicated: the gradient of every table goes around a ring
            sent = {"tables": 2 * others * sum(SHAPE.rows) * DIM * FLOAT_bytes}
    if "pooled" in sent:
        sent["gradients"] = sent["pooled"]
    weights = sum(p.numel() for layer in linears(whole_model(SHAPE)) for p in (layer.weight, layer.bias))
    return sent | {"dense": 2 * others * weights * FLOAT_bytes}


def count(comm: Any, cases: Sequence[Case]) -> list[dict[tuple[str, str, str], int]]:
    """What this rank sends in a step, by purpose, collective and link."""
    from parts.shard_rowwise import Rowwise

    found = []
    for case in cases:
        side = Rowwise(whole_model(SHAPE), case.layout, comm, case.wire)
        before = Counter(comm.sent.counts)
        for seed in range(STEPS):
            side.step(parts_of(SHAPE, LOAD, seed, comm.rank, len(comm.ranks)))
        found.append({key: n // STEPS for key, n in (Counter(comm.sent.counts) - before).items()})
    return found


def measure(launch: Any, world: int, quick: bool, wires: Sequence[str] = WIRES) -> list[dict]:
    """`quick`: whole tables alone."""
    from parts.shard_rowwise import LAYOUTS

    cases = [Case(layout, wire) for layout in LAYOUTS for wire in (wires if layout != "replicated" else wires[:1])]
    cases = cases[: len(wires)] if quick else cases
    rows = []
    for case, found in zip(cases, zip(*launch(world, count, cases), strict=True), strict=True):
        sent = sum((Counter(rank) for rank in found), Counter())
        wanted = expected(case, world)
        by = {" ".join(key): n for key, n in sent.items()}
        over = sent.total() / sum(wanted.values())
        rows.append({"kind": "bytes", "side": "rowwise", **case._asdict(), "sent": by, "formula": wanted, "over": over})
        show(rows[-1])
    return rows


def floors_of(rows: Sequence[dict]) -> list[dict]:
    """At most what the formulas say; a little more is ids that are not split evenly."""
    floors = []
    for row in rows:
        floors.append(at_most(f"bytes sent over the formula's, {row['layout']}, {row['wire']} wire", row["over"], 1.02))
    return floors

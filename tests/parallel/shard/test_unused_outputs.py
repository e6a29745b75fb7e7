"""A loss that uses only pooled features, or only sequences, steps no table of the other kind: as on one device."""

from dataclasses import replace
from itertools import accumulate, pairwise, product

import pytest
import torch
from parallel.shard.equal import SEED, assert_alike, look_up, make_sharded, make_steps, outputs, place
from shared_batches import make_shared

from rowwise import Adam, Embeddings, Pooling, RowWiseAdam, Table, Topology
from rowwise.parallel.comm.thread import run_threads

WORLD = Topology(hosts=2, devices=2)
ADAM, SMALL = Adam(lr=0.1), RowWiseAdam(lr=0.1)  # both move rows by what they remember, at a gradient of 0 too
TABLES = (
    Table(name="a", rows=40, dim=8, features=("a.0", "a.1"), pooling=Pooling.MEAN, optimizer=SMALL),
    Table(name="b", rows=30, dim=16, optimizer=ADAM),
    Table(name="s", rows=30, dim=8, pooling=Pooling.SEQUENCE, optimizer=SMALL),
    Table(name="t", rows=20, dim=8, pooling=Pooling.SEQUENCE, optimizer=ADAM),
)
LAYOUTS = {
    "whole": ("table-wise", "all on the last rank", "all on the last rank", "table-wise"),
    "rows": ("row-wise", "table-row-wise", "row-wise", "row-wise"),
    "columns": "column-wise",
    "copies": "replicated",
    "some copies": ("replicated", "grid", "table-wise", "replicated"),
    "pinwheel": "pinwheel",
}
# What the loss of each rank uses, batch by batch; an update follows each line.
POOLED, SEQUENCES, BOTH = {""}, {"s", "t"}, {"", "s", "t"}
SCRIPT = (
    ((BOTH, BOTH, BOTH, BOTH),),
    ((SEQUENCES, SEQUENCES, SEQUENCES, SEQUENCES),),
    ((POOLED, POOLED, POOLED, POOLED),),
    ((SEQUENCES, POOLED, SEQUENCES, SEQUENCES),),
    (({"s"}, {"s"}, {"s"}, {"s"}),),
    (({"t"}, {"s"}, {"t"}, {"t"}),),
    ((POOLED, POOLED, POOLED, POOLED), (BOTH, SEQUENCES, BOTH, POOLED)),
    ((SEQUENCES,) * 4, (SEQUENCES, SEQUENCES, POOLED, SEQUENCES)),
    ((POOLED,) * 4, (POOLED,) * 4),
)
SIZES_W = (256, 0, 512, 256)  # whole blocks: sums in one order


def loss_of(outs, step, used):
    return sum((outs[name] * step.ups[name]).sum() for name in used)


def as_used(step, used_W):
    """One device's step: what a rank's loss does not use has no weight in the sum."""
    ups = {name: x.clone() for name, x in step.ups.items()}
    spans = pairwise(accumulate(step.sizes_W, initial=0))
    for used, (first, last) in zip(used_W, spans, strict=True):
        for name in ups.keys() - used:
            lengths_B = step.batch.lengths_of(name) if name else torch.ones(sum(step.sizes_W), dtype=torch.int64)
            ups[name][int(lengths_B[:first].sum()) : int(lengths_B[:last].sum())] = 0
    return replace(step, ups=ups), set.union(*used_W)


def script_steps():
    steps = make_steps(TABLES, [SIZES_W] * sum(map(len, SCRIPT)), seed=1)
    return [[steps.pop(0) for _ in line] for line in SCRIPT]


CASES = [
    pytest.param(layout, elastic, marks=() if (layout, elastic) == ("some copies", False) else pytest.mark.slow)
    for layout, elastic in product(LAYOUTS, (False, True))
]


@pytest.mark.parametrize(("layout", "elastic"), CASES)
def test_only_groups_that_some_rank_uses_are_stepped(layout, elastic):
    lines = script_steps()
    whole = Embeddings(TABLES, seed=SEED)
    for line, used in zip(lines, SCRIPT, strict=True):
        for step, used_W in zip(line, used, strict=True):
            mine, names = as_used(step, used_W)
            loss_of(look_up(whole, mine), mine, names).backward()
        whole.update()
    assert len({int(state["step"]) for state in whole.optimizer_state().values()}) > 1

    def use(sharded, rank):
        for line, used in zip(lines, SCRIPT, strict=True):
            for step, used_W in zip(line, used, strict=True):
                mine = step.of(rank)
                loss_of(look_up(sharded, mine), mine, used_W[rank]).backward()
            sharded.update()

    limit = 0.0 if elastic or "copies" not in layout else 1e-6
    assert_alike(whole, LAYOUTS[layout], WORLD, use, limit, elastic=elastic)


@pytest.mark.parametrize(("layout", "merges"), [("pinwheel", False), ("pinwheel", True), ("some copies", False)])
def test_the_same_where_samples_share_bags(layout, merges):
    """What is not used stays as it is, on ranks whose loss uses it not and on all others."""

    def rank(comm):
        sharded = make_sharded(TABLES, place(TABLES, LAYOUTS[layout], WORLD), comm)
        sharded.merge_shared = merges
        for number, used in enumerate((SEQUENCES, POOLED, BOTH)):
            before = {str(held.tile): (held.rows.clone(), int(held.state["step"])) for held in sharded.local_tiles()}
            batch = make_shared(TABLES, ("a.0", "b"), [2] * 128, seed=10 * number + comm.rank)
            outs = outputs(sharded, batch)
            sum((outs[name] ** 2).sum() for name in used).backward()
            sharded.update()
            for held in sharded.local_tiles():
                rows, steps = before[str(held.tile)]
                uses = (held.tile.table if held.tile.table in SEQUENCES else "") in used
                assert int(held.state["step"]) == steps + uses
                assert torch.equal(held.rows, rows) != uses

    run_threads(WORLD, rank, timeout_s=60)

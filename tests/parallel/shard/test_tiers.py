"""Rows live where a plan says, or the plan is refused: never quietly elsewhere."""

import pytest
import torch
from msgspec import structs
from parallel.shard.equal import SEED, make_sharded, make_steps, rows_apart, train
from torch import nn

from rowwise import Embeddings, Plan, SpecError, Table, Topology
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.plan import TIERS
from rowwise.parallel.shard import shard
from rowwise.parallel.shard.embeddings import check_tiers
from rowwise.parallel.shard.rehearse import RehearsedRank, rehearse
from rowwise.parallel.shard.tiers import DEVICE_TIERS, runnable_tiers
from rowwise.planning.planner.layouts import replicated, row_wise

TABLES = (Table(name="a", rows=40, dim=8), Table(name="b", rows=9, dim=4, features=("x", "y")))


def lowered(tier, cache_rows=0, *, table="a", world=2):
    """A table of two in another tier."""
    tiles = [*row_wise(TABLES[0], range(world)), *replicated(TABLES[1], range(world))]
    moved = {"tier": tier, "cache_rows": cache_rows}
    return Plan(world=world, tiles=tuple(structs.replace(t, **moved) if t.table == table else t for t in tiles))


@pytest.mark.parametrize("table", ["a", "b"])
def test_the_memory_of_a_cpu_is_that_of_its_host(table):
    steps = make_steps(TABLES, [(5, 3)] * 2)

    def rank(comm, plan):
        sharded = make_sharded(TABLES, plan, comm)
        outs = [outs[""].detach() for _, outs in train(sharded, [step.of(comm.rank) for step in steps])]
        return sharded, outs

    found = [
        run_threads(2, lambda comm, p=p: rank(comm, p), 30)
        for p in (lowered("device"), lowered("host", 3, table=table))
    ]
    for (_, wanted), (_, outs) in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, outs, strict=True))
    for (wanted, _), (sharded, _) in zip(*found, strict=True):
        for a, b in zip(wanted.local_tiles(), sharded.local_tiles(), strict=True):
            assert torch.equal(a.rows, b.rows)


@pytest.mark.parametrize(("tier", "device"), [("disk", "cuda"), ("host", "cuda")])
def test_rows_that_would_live_elsewhere_are_refused(tmp_path, tier, device):
    check_tiers(lowered("device"), torch.device(device), tmp_path)
    want = (
        rf"table 'b': tile b\[0:9, 0:4\] on rank 0 \({tier}, 2 rows cached\): rows on the {tier}; on '{device}' .* only"
    )
    with pytest.raises(SpecError, match=f"{want}: expected tier 'device'"):
        check_tiers(lowered(tier, 2, table="b"), torch.device(device), tmp_path)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tier", TIERS)
def test_what_is_refused_is_what_planning_is_not_given(tmp_path, tier, device):
    if tier in runnable_tiers(device):
        check_tiers(lowered(tier), torch.device(device), tmp_path)
    else:
        with pytest.raises(SpecError, match=f"rows on the {tier}"):
            check_tiers(lowered(tier), torch.device(device), tmp_path)
    assert runnable_tiers(device) >= DEVICE_TIERS >= {"device"}


def test_a_model_that_was_only_described_lives_in_the_memory_of_the_host():
    whole = Embeddings(TABLES, seed=SEED)
    model = nn.ModuleDict({"tables": Embeddings(TABLES, seed=SEED, device="meta")})
    shard(model, lowered("host", world=1), solo())
    assert not list(rows_apart(model["tables"], whole))


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_rehearsal_takes_all_tiers(tier):
    (step,) = make_steps(TABLES, [(4,)])
    found, plain = (
        rehearse(TABLES, p, RehearsedRank(Topology(devices=2), 1), step.batch)
        for p in (lowered(tier), lowered("device"))
    )
    assert found.calls == plain.calls
    assert found.held_bytes[tier] >= 20 * (8 * 4 + 4)
    assert found.held_bytes.total() == plain.held_bytes.total()

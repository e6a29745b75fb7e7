"""With `elastic`, fifty steps of a whole model end with the same bits for any number of ranks and any plan."""

import copy

import pytest
import torch
from clicks import DENSE, make_clicks, make_tables
from parallel.shard.layout_cases import CASES

from rowwise import DLRM, Embeddings, Plan, Topology
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.shard import shard
from rowwise.train.breakdown import Breakdown
from rowwise.train.objective import Clicks
from rowwise.train.settings import DenseAdam, Training
from rowwise.train.step import StepContext, step
from rowwise.train.virtual import split

SHARDS, STEPS, SAMPLES = 8, 50, 8 * 256
PLANS = {
    "one rank": (Topology(), ["table-wise"]),
    "by column, 2 ranks": (Topology(devices=2), ["column-wise"]),
    "by row, 4 ranks of 2 hosts": (Topology(hosts=2, devices=2), ["row-wise"]),
    "copies, 8 ranks": (Topology(devices=8), ["replicated"]),
    "a grid, 4 ranks of 2 hosts": (Topology(hosts=2, devices=2), ["grid"]),
    "mixed, 8 ranks of 2 hosts": (
        Topology(hosts=2, devices=4),
        ["row-wise", "replicated", "column-wise", "table-wise"],
    ),
}


def trained(start, topology, layouts):
    """Losses, dense parameters and whole tables after all steps."""
    tables = start.embeddings.tables
    tiles = tuple(t for k, table in enumerate(tables) for t in CASES[layouts[k % len(layouts)]](table, topology))
    plan, how = (
        Plan(world=topology.world, tiles=tiles),
        Training(optimizer=DenseAdam(lr=0.01), determinism="elastic", virtual_shards=SHARDS),
    )

    def rank(comm):
        model = shard(copy.deepcopy(start), plan, comm, elastic=True)
        work, losses = StepContext.create(model, Clicks(model), how, Breakdown(), comm), []
        for number in range(1, STEPS + 1):
            mine = split(make_clicks(SAMPLES, seed=number), [SAMPLES // topology.world] * topology.world)[comm.rank]
            losses.append(step(work, [mine], number).loss)
        dense = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        return losses, dense, model.embeddings.local_tiles()

    ranks = run_threads(topology, rank, timeout_s=200)
    whole = {table.name: torch.full((table.rows, table.dim), torch.nan) for table in tables}
    for losses, dense, held in ranks:
        assert losses == ranks[0][0]
        assert all(torch.equal(x, ranks[0][1][name]) for name, x in dense.items())
        for piece in held:
            whole[piece.tile.table][slice(*piece.tile.rows), slice(*piece.tile.cols)] = piece.rows
    return ranks[0][0], ranks[0][1] | whole


@pytest.mark.slow
def test_fifty_steps_end_with_the_same_bits_on_any_ranks_and_by_any_plan():
    torch.manual_seed(0)
    start = DLRM(Embeddings(make_tables(), seed=1), DENSE, (16, 8), (16, 1))
    found = {name: trained(start, *how) for name, how in PLANS.items()}
    losses, wanted = found["one rank"]
    assert losses[-1] < losses[0]
    for name, (others, weights) in found.items():
        assert others == losses, name
        assert all(torch.equal(x, wanted[which]) for which, x in weights.items()), name

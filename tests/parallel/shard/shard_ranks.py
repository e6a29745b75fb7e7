"""What the processes of `test_processes` run; light to import, as each of them does it anew."""

import dataclasses
import warnings

import pytest
import torch
from parallel.shard.equal import SEED, look_up, make_sharded, make_steps, place, rows_apart
from parallel.shard.jobs import draw_job, make_job
from parallel.shard.test_learned_weights import learned, of_rank, train

from rowwise import Embeddings, IdError, Jagged, Pooling, RowType, RowWiseAdagrad, Table, Topology, Uniform
from rowwise.base.errors import PeerError
from rowwise.tables.spec import Codecs, Wire

TABLES = (
    Table(name="a", rows=400, dim=16, pooling=Pooling.WEIGHTED, init=Uniform(1.0)),
    Table(name="b", rows=30, dim=8, features=("b.0", "b.1"), optimizer=RowWiseAdagrad(lr=0.1)),
)


def differences(comm, world, seeds):
    """Of jobs drawn from all of them for this world."""
    warnings.simplefilter("error")
    found = []
    for seed in seeds:
        choices = draw_job(seed, tables=4, world=world)
        differing = make_job(*choices, seed).whole().differences(comm)
        found += [f"seed {seed}: {text}" for text in differing]
    return found


def learn_weights(comm):
    """The gradients of per-id weights: how far from those of one device."""
    steps = make_steps(TABLES, [tuple(range(3, 3 + len(comm.ranks)))] * 2)
    whole = Embeddings(TABLES, seed=SEED)
    sharded = make_sharded(TABLES, place(TABLES, "row-wise", comm.topology), comm)
    wanted = train(whole, [learned(step) for step in steps])
    found = train(sharded, [learned(step.of(comm.rank)) for step in steps])
    apart = [
        float((of_rank(step, want, comm.rank) - mine).abs().max())
        for step, want, mine in zip(steps, wanted, found, strict=True)
    ]
    return max(apart), list(rows_apart(sharded, whole))


def round_on_the_way(comm):
    """How far a lossy wire is from an exact one, in the largest number; and the bytes of vectors."""
    steps = make_steps(TABLES, [(9,) * len(comm.ranks)])
    plan = place(TABLES, "row-wise", comm.topology)
    outs, sent = [], []
    for kind in (RowType.FP32, RowType.FP16):
        before = comm.sent.total("pooled")
        codecs = Codecs(forward=kind, backward=kind)
        with torch.no_grad():
            sharded = make_sharded(TABLES, plan, comm, wire=Wire(host=codecs, network=codecs))
            outs.append(look_up(sharded, steps[0].of(comm.rank))[""])
        sent.append(comm.sent.total("pooled") - before)
    return float(((outs[0] - outs[1]).abs() / outs[0].abs().max()).max()), sent


def meet_a_bad_id(comm):
    """The error that each rank met, and whether the next batch works."""
    sharded = make_sharded(TABLES, place(TABLES, ["row-wise", "replicated"], comm.topology), comm)
    (step,) = make_steps(TABLES, [(4,) * len(comm.ranks)])
    good = step.of(comm.rank).batch
    bad = Jagged.from_lists({"a": [[400]], "b.0": [[1]], "b.1": [[2]]})
    bad = dataclasses.replace(bad, weights_N=torch.ones(3))
    with pytest.raises(IdError if comm.rank == 1 else PeerError) as raised:
        sharded(bad if comm.rank == 1 else good)
    sharded(good).matrix_BS.sum().backward()
    sharded.update()
    return str(raised.value)


def everything(comm, world, seeds):
    """All of it in one world, as one takes long to start."""
    assert comm.topology == {"2": Topology(devices=2), "3": Topology(devices=3)}.get(world, comm.topology)
    return differences(comm, world, seeds), learn_weights(comm), round_on_the_way(comm), meet_a_bad_id(comm)

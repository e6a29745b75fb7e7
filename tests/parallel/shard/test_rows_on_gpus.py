"""Rows on GPUs and ids on their hosts, without a GPU: the bits of the CPU, and what is on which side.

Tables are moved to a pretended device (`pretend_gpu.py`), where an operation that mixes host and device raises. What
collectives send from the host and what they send between GPUs is noted.
"""

import random
from dataclasses import replace

import pytest
import torch
from parallel.shard.equal import make_sharded, outputs, place, rows_apart
from parallel.shard.jobs import WORLDS, draw_job, draw_tables, draw_wire, make_job
from parallel.shard.layout_cases import CASES
from parallel.shard.test_rehearse import Noting
from pretend_gpu import DEVICE, PretendGpu, on_host
from shared_batches import draw_copies, make_shared

from rowwise.parallel.comm.thread import run_threads


def to_device(module):
    """The module's rows on the pretended device."""
    module._parameters.clear()  # of another class than those that they are pointed to
    return module.to(DEVICE)


def to_host(module):
    for arena in module.arenas:
        arena.rows, arena.state = on_host(arena.rows), on_host(arena.state)
    return module


def train_on_devices(job, whole, seen_W):
    def rank(comm):
        seen = seen_W[comm.rank]
        sharded = make_sharded(job.tables, job.plan, comm, elastic=job.elastic)
        comm.transport = Noting(comm.transport, lambda call, x: seen.append((call.purpose, x.device.type)))
        steps = [step.of(comm.rank) for step in job.steps]
        with PretendGpu():
            to_device(sharded)
            for step in steps:
                ups = {name: x.to(DEVICE) for name, x in step.ups.items()}
                outs = outputs(sharded, step.batch)
                assert all(out.device == DEVICE for out in outs.values())
                sum((outs[name] * ups[name]).sum() for name in outs).backward()
                sharded.update()
        return [f"rank {comm.rank}, {text}" for text in rows_apart(to_host(sharded), whole.module)]

    return rank


@pytest.mark.few(4)
@pytest.mark.parametrize("world", ["1", "2", "3", "2x2"])
@pytest.mark.parametrize("seed", range(8))
def test_rows_on_devices_get_the_bits_of_the_cpu(world, seed):
    job = make_job(*draw_job(seed, tables=6, world=world, determinism="run"), seed, steps=2)
    seen_W = [[] for _ in range(WORLDS[world].world)]
    apart_W = run_threads(WORLDS[world], train_on_devices(job, job.whole(), seen_W), timeout_s=60)
    assert apart_W == [[]] * len(seen_W)
    for seen in seen_W:
        assert seen == seen_W[0]  # a rank that sends nothing still joins the collective of the same device


def one_step(module, batch, device):
    """What is looked up, and what the weights of ids got."""
    weights_N = batch.weights_N.clone().requires_grad_()
    outs = outputs(module, replace(batch, weights_N=weights_N) if batch.shared is None else batch)
    wanted = {name: torch.linspace(-1, 1, out.numel()).view(out.shape).to(device) for name, out in outs.items()}
    sum(((outs[name] - wanted[name]) ** 2).sum() for name in sorted(outs)).backward()
    module.update()
    found = {name: on_host(out.detach()).clone() for name, out in outs.items()}
    return found if weights_N.grad is None else found | {"weights": weights_N.grad}


@pytest.mark.few(2)
@pytest.mark.parametrize("world", ["2", "2x2"])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_wires_shared_bags_and_weights_are_those_of_the_cpu(world, shares, seed):
    """Against the same ranks on CPUs, which have the same wire."""
    draws, topology = random.Random(f"{world} {seed}"), WORLDS[world]
    layouts = draws.choices(list(CASES), k=4)
    tables = draw_tables(draws, layouts)
    plan, wire = place(tables, layouts, topology), draw_wire(draws, elastic=False)
    common = [f for table in tables for f in table.feature_names if draws.random() < 0.5] or list(
        tables[0].feature_names
    )
    batches_W = [
        make_shared(tables, tuple(common), draw_copies(draws, draws.randint(0, 40)), seed + k)
        for k in range(topology.world)
    ]

    def rank(comm):
        batch = batches_W[comm.rank] if shares else batches_W[comm.rank].expanded()
        on_cpu, on_gpu = (make_sharded(tables, plan, comm, wire=wire) for _ in range(2))
        wanted = one_step(on_cpu, batch, torch.device("cpu"))
        with PretendGpu():
            found = one_step(to_device(on_gpu), batch, DEVICE)
        assert found.keys() == wanted.keys()
        names = [name for name in found if not torch.equal(found[name], wanted[name])]
        tiles = zip(to_host(on_gpu).local_tiles(), on_cpu.local_tiles(), strict=True)
        return names + [str(one.tile) for one, other in tiles if not torch.equal(one.rows, other.rows)]

    assert run_threads(topology, rank, timeout_s=60) == [[]] * topology.world

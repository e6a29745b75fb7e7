"""A rehearsal of a rank is what that rank does where all ranks are there and have the same batch: to the byte.

So it is in small worlds, where both can be done. In those of 128 ranks that no machine here could hold, bytes are held
against sums over the plan, and what ranks send against what others expect.
"""

import random
import resource
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from from_benchmarks import planner_tasks
from msgspec import structs
from parallel.shard.equal import make_sharded, make_steps
from parallel.shard.jobs import TABLE, WORLDS, draw, draw_job, draw_wire, make_job
from parallel.shard.layout_cases import CASES
from torch.testing._internal.distributed.fake_pg import FakeStore

from rowwise import IdError, Jagged, Plan, Pooling, Table, Topology
from rowwise.base.errors import PeerError
from rowwise.parallel.comm.call import describe_mismatch
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.comm.torch import Rendezvous, TorchTransport
from rowwise.parallel.shard.rehearse import RehearsedRank, rehearse, zero_pages
from rowwise.planning.perf.hardware import Machine, hardware_named
from rowwise.planning.perf.roofline import Roofline
from rowwise.planning.planner.heuristic import simple_plan
from rowwise.planning.planner.pipeline import make_plan
from rowwise.planning.planner.problem import PlanRequest
from rowwise.tables.spec import row_bytes, state_slots

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
CLUSTER = Topology(hosts=16, devices=8)
DEVICE_bytes = 36 << 30


class Noting:
    """A transport that tells a function what it is asked."""

    def __init__(self, inner, note):
        self.inner, self.note = inner, note
        self.waited = inner.waited

    def start(self, call, send_N):
        self.note(call, send_N)
        return self.inner.start(call, send_N)

    def split(self, groups, group):
        return Noting(self.inner.split(groups, group), self.note)

    def close(self):
        self.inner.close()


def one_step(tables, plan, make, settings):
    """What really happens on each rank: calls, bytes, rows that changed, and shapes."""

    def rank(comm):
        calls = []
        comm.transport = Noting(comm.transport, lambda call, _: calls.append(call))
        sharded = make_sharded(tables, plan, comm, **settings)
        for arena in sharded.arenas:
            arena.track().clear()
        vectors = sharded(make())
        shapes = tuple(vectors.matrix_BS.shape), {name: tuple(x.shape) for name, x in vectors.sequences.items()}
        torch.stack([x.sum() for x in (vectors.matrix_BS, *vectors.sequences.values())]).sum().backward()
        sharded.update()
        rows = {}
        for held in sharded.local_tiles():
            rows[held.tile.table] = rows.get(held.tile.table, 0) + int((held.touched > 0).sum())
        return calls, comm.sent.counts, rows, shapes

    return rank


def check_world(tables, plan, topology, make, **settings):
    """`make` gives the batch that all ranks have."""
    real_W = run_threads(topology, one_step(tables, plan, make, settings), timeout_s=60)
    for number, (calls, sent, rows, shapes) in enumerate(real_W):
        found = rehearse(tables, plan, RehearsedRank(topology, number), make(), **settings)
        assert list(found.calls) == calls
        assert found.sent_bytes == sent
        assert (found.pooled_shape, found.sequence_shapes) == shapes
        assert {name: visited.rows for name, visited in found.visited.items()} == rows


@pytest.mark.few(2)
@pytest.mark.parametrize("world", ["4", "2x2", "2x4"])
@pytest.mark.parametrize("seed", range(6))
def test_a_rehearsal_counts_what_ranks_do(world, seed):
    draws = random.Random(f"{world} {seed}")
    job = make_job(*draw_job(seed, tables=6, world=world), seed, steps=0)
    samples = draws.choice((0, 1, 24, 256))
    (step,) = make_steps(job.tables, [(samples,)], seed)
    wire = draw_wire(draws, elastic=job.elastic)
    check_world(job.tables, job.plan, WORLDS[world], lambda: step.batch, elastic=job.elastic, wire=wire)


def test_a_rehearsal_counts_what_ranks_do_for_weights_that_learn():
    draws = random.Random(1)
    tables = [draw(draws, TABLE) | {"pooling": Pooling.WEIGHTED, "layout": layout} for layout in CASES]
    world = {"world": "2x2", "determinism": "run", "ids": torch.int64, "sizes": "even"}
    job = make_job(world, tables, 1, steps=0)
    (step,) = make_steps(job.tables, [(12,)])

    def learning():
        return replace(step.batch, weights_N=step.batch.weights_N.clone().requires_grad_())

    check_world(job.tables, job.plan, WORLDS["2x2"], learning)


def test_a_rehearsal_of_one_rank_is_a_step():
    job = make_job(*draw_job(3, tables=3, world="1"), 3, steps=0)
    (step,) = make_steps(job.tables, [(8,)])
    check_world(job.tables, job.plan, Topology(), lambda: step.batch)


def make_batch(workloads, samples, seed=0):
    """Ids as tables are asked for them: so many on average, small ones more often."""
    rng = np.random.default_rng(seed)
    lengths = [rng.poisson(work.access.pooling, samples) for work in workloads]
    values = [
        (work.table.rows * rng.random(count.sum()) ** 6).astype(np.int64)
        for work, count in zip(workloads, lengths, strict=True)
    ]
    return Jagged(
        features=tuple(work.table.name for work in workloads),
        values_N=torch.from_numpy(np.concatenate(values)),
        lengths_FB=torch.from_numpy(np.concatenate(lengths)),
    )


def in_tiers(plan, tables):
    """The same, with the largest tiles of each rank on its host, as many as its device has no room for."""
    known, tiles = {table.name: table for table in tables}, []
    for rank in range(plan.world):
        left = DEVICE_bytes
        for tile in sorted(plan.tiles_on(rank), key=lambda tile: stored_bytes(known[tile.table], tile)):
            left -= stored_bytes(known[tile.table], tile)
            tiles.append(tile if left >= 0 else structs.replace(tile, tier="host", cache_rows=1))
    return Plan(world=plan.world, tiles=tuple(tiles))


def stored_bytes(table, tile):
    """Rows of a tile and their optimizer state."""
    cols = tile.cols[1] - tile.cols[0]
    state = sum(cols if slot.width == table.dim else slot.width for slot in state_slots(table).values())
    return (tile.rows[1] - tile.rows[0]) * (row_bytes(table.row_type, cols) + 4 * state)


def id_bytes(tables, plan, rank, batch):
    """What a rank sends to others: the size of each bag, and ids, which have 64 bits for ranks with a large table."""
    size = batch.batch_size
    copied = {name for name, count in Counter(tile.table for tile in plan.tiles).items() if count == plan.world}
    large = {table.name for table in tables if table.rows >= 1 << 31}
    wide = {tile.rank for tile in plan.tiles if tile.table in large - copied}
    sent = Counter()
    for tile in plan.tiles:
        if tile.rank != rank and tile.table not in copied:
            ids = batch.ids_of(tile.table)
            count = int(((ids >= tile.rows[0]) & (ids < tile.rows[1])).sum())
            sent["ids", "all_to_all", CLUSTER.link(rank, tile.rank)] += 4 * (size + count * (1 + (tile.rank in wide)))
    return sent


@dataclass(frozen=True)
class Large:
    """A model that no machine here holds, its plan, and a batch."""

    tables: list[Table]
    plan: Plan
    batch: Jagged

    @classmethod
    def of(cls, workloads, samples):
        tables, ids = [w.table for w in workloads], {w.table.name: w.access.pooling for w in workloads}
        plan = simple_plan(tables, CLUSTER, batch=512, ids=ids)
        return cls(tables, in_tiers(plan, tables), make_batch(workloads, samples))


LARGE = {
    "12 T parameters": (lambda tasks: tasks.model_f(), 64),
    "2002 tables": (lambda tasks: tasks.listed_tables("nv_colossal"), 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_plan_for_128_ranks_is_carried_out(name):
    """For the first, the last and one between; what they send each other is what they expect of each other."""
    make, samples = LARGE[name]
    large = Large.of(make(planner_tasks()), samples)
    before, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, time.monotonic()
    ranks = (0, 63, 127)
    found = [rehearse(large.tables, large.plan, RehearsedRank(CLUSTER, rank), large.batch) for rank in ranks]
    assert time.monotonic() - start_s < 60  # a few seconds, on a machine that does nothing else
    assert found[-1].peak_bytes - before < 2 << 30
    width = sum(table.dim for table in large.tables)
    for rank, one in zip(ranks, found, strict=True):
        assert one.pooled_shape == (large.batch.batch_size, width)
        sent = {key: n for key, n in one.sent_bytes.items() if key[:2] == ("ids", "all_to_all")}
        assert sent == id_bytes(large.tables, large.plan, rank, large.batch)
        assert one.held_bytes == held(large, rank)
        assert set(one.held_bytes) == {"device", "host"}
        assert one.visited.keys() == {tile.table for tile in large.plan.tiles_on(rank)}
        assert one.total_bytes() == one.total_bytes("host") + one.total_bytes("network")
    for (a, first), (b, second) in combinations(zip(ranks, found, strict=True), 2):
        for mine, theirs in zip(of_all(first), of_all(second), strict=True):
            assert describe_mismatch(mine, theirs, a, b, range(CLUSTER.world)) is None


def asked_12t(tasks):
    where = Machine(topology=CLUSTER, hardware=hardware_named("zionex"))
    model = Roofline(where.hardware, CLUSTER)
    tiers = frozenset({"device", "host"})  # a rehearsal takes tiers that no runtime has
    return PlanRequest(workloads=tuple(tasks.model_f()), machine=where, model=model, batch=65536, tiers=tiers)


ASKED = {"12 T parameters": asked_12t, "2002 tables": lambda tasks: tasks.listed(tasks.LISTS[-1])}


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_a_searched_plan_for_128_ranks_fits_and_is_carried_out(name):
    question = ASKED[name](planner_tasks())
    plan = make_plan(question, seconds=3.0).plan
    forecast = plan.forecast
    assert 0 < forecast.bound_s <= forecast.step_s * (1 + 1e-9)
    for used in forecast.memory_bytes:
        assert all(size <= limit for size, limit in zip(used, forecast.limits_bytes, strict=True))
    tables = [w.table for w in question.workloads]
    large = Large(tables, plan, make_batch(question.workloads, 4))
    for rank in (0, 127):
        one = rehearse(tables, plan, RehearsedRank(question.machine.topology, rank), large.batch)
        assert one.held_bytes == held(large, rank)
        assert one.visited.keys() == {tile.table for tile in plan.tiles_on(rank)}
        # Operators' own buffers apart, what is held is what was forecast, tier by tier.
        rows = [one.held_bytes.get(tier, 0) for tier in ("device", "host")]
        cached = sum(held_rows(tables, tile) for tile in plan.tiles_on(rank))
        assert rows[0] + cached <= forecast.memory_bytes[rank][0] * (1 + 1e-6)
        assert rows[1] <= forecast.memory_bytes[rank][1] * (1 + 1e-6)


def held_rows(tables, tile):
    """Bytes of the copies that a tile has in the tier above."""
    table = next(table for table in tables if table.name == tile.table)
    return stored_bytes(table, tile) * tile.cache_rows // (tile.rows[1] - tile.rows[0])


def held(large, rank):
    known, found = {table.name: table for table in large.tables}, Counter()
    for tile in large.plan.tiles_on(rank):
        found[tile.tier] += stored_bytes(known[tile.table], tile)
    return found


def of_all(rehearsal):
    """The collectives of all ranks, not those of a host or of a device number."""
    return [call for call in rehearsal.calls if len(call.input_splits) == CLUSTER.world]


@pytest.fixture
def fake():
    """The backend of torch's fake process group of 128 ranks, as rank 63."""
    dist.init_process_group("fake", store=FakeStore(), rank=63, world_size=CLUSTER.world)
    yield dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.destroy_process_group()


def test_torch_takes_the_collectives_of_128_ranks(fake):
    """By way of the communicator for torch.distributed: sizes that do not fit, it refuses."""
    large = Large.of(planner_tasks().model_f(), 8)
    found = rehearse(large.tables, large.plan, RehearsedRank(CLUSTER, 63), large.batch)
    everyone = Rendezvous(store=FakeStore(), name="", ranks=tuple(range(128)), rank=63, pids={}, timeout_s=1)
    transport = TorchTransport(everyone)
    transport._backends["cpu"] = fake
    assert {call.purpose for call in of_all(found)} == {"counts", "ids", "pooled", "gradients"}
    for call in of_all(found):
        send_N = torch.zeros(sum(call.input_splits), dtype=call.dtype)
        assert len(transport.start(call, send_N).wait()) == sum(call.output_splits)
    call = of_all(found)[-1]
    with pytest.raises(PeerError, match="Split sizes"):
        transport.start(call, torch.zeros(sum(call.input_splits) + 1, dtype=call.dtype))


def test_pages_that_nobody_writes_take_no_memory():
    before = resident_bytes()
    pages = zero_pages(1 << 40)
    assert not pages[:: 1 << 32].any()
    assert not pages[-1 << 24 :].any()
    assert resident_bytes() - before < 8 << 20
    pages[:: 1 << 34] = 7
    assert resident_bytes() - before < 8 << 20
    assert pages[(1 << 34) - 1 : (1 << 34) + 2].tolist() == [0, 7, 0]
    assert zero_pages(0).shape == (0,)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_wrong_input_is_refused_as_by_any_rank():
    table = Table(name="t", rows=10, dim=4)
    plan = simple_plan([table], Topology(devices=4))
    with pytest.raises(IdError, match="10"):
        rehearse([table], plan, RehearsedRank(Topology(devices=4), 2), Jagged.from_lists({"t": [[10]]}))
    with pytest.raises(PeerError, match="rank 4 of 4"):
        rehearse([table], plan, RehearsedRank(Topology(devices=4), 4), Jagged.from_lists({"t": [[1]]}))

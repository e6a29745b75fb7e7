"""Rows in host memory behind the GPUs of several ranks: the bits of one device, whatever fits into the caches.

The reference of the cache runs on the CPU, in place of a GPU's kernels.
"""

import random
from collections import Counter
from itertools import pairwise

import pytest
from msgspec import structs
from parallel.shard.equal import make_sharded, rows_apart
from parallel.shard.jobs import WORLDS, draw_job, make_job

from rowwise import Embeddings, Managed, Plan, SpecError, StateError, Table
from rowwise.parallel.comm.solo import solo
from rowwise.parallel.comm.thread import run_threads
from rowwise.parallel.plan import Tile
from rowwise.parallel.shard.embeddings import ShardedEmbeddings, check_cached


def with_caches(draws, tables, plan):
    """The plan with some of its tiles in host memory: neither copies nor parts of rows."""

    whole = {table.name: (0, table.dim) for table in tables}
    copies = Counter((tile.table, tile.rows, tile.cols) for tile in plan.tiles)

    def choose(tile):
        if tile.cols != whole[tile.table] or copies[tile.table, tile.rows, tile.cols] > 1 or draws.random() < 0.3:
            return tile
        return structs.replace(tile, tier="host", cache_rows=draws.randint(0, tile.rows[1] - tile.rows[0]))

    return structs.replace(plan, tiles=tuple(map(choose, plan.tiles)))


@pytest.mark.few(6)
@pytest.mark.parametrize("world", list(WORLDS))
@pytest.mark.parametrize("seed", range(8))
def test_rows_behind_caches_get_the_bits_of_one_device(world, seed):
    job = make_job(*draw_job(seed, tables=6, world=world), seed, steps=3)
    plan, whole = with_caches(random.Random(seed), job.tables, job.plan), job.whole()
    samples = max(sum(step.sizes_W) for step in job.steps) * 4  # up to four ids of a feature in a sample

    def rank(comm):
        sharded = make_sharded(job.tables, plan, comm, elastic=job.elastic).cache_on("cpu", samples)
        for arena in sharded.arenas:
            arena.track()
        for _ in job.script(sharded, [step.of(comm.rank) for step in job.steps]):
            pass
        lower = [tile for tile in plan.tiles_on(comm.rank) if tile.tier == "host"]
        assert sum(len(arena.cached) for arena in sharded.arenas) == len(lower)
        assert any(arena.store is not None for arena in sharded.arenas) == bool(lower)
        return [f"rank {comm.rank}, {text}" for text in rows_apart(sharded, whole.module)]

    assert run_threads(WORLDS[world], rank, timeout_s=60) == [[]] * WORLDS[world].world


def test_what_cannot_be_cached_is_refused():
    table = Table(name="t", rows=200, dim=8)
    halves = zip((0, 1), pairwise((0, 4, 8)), strict=True)
    tiles = tuple(Tile(table="t", rank=rank, rows=(0, 200), cols=cols, tier="host") for rank, cols in halves)

    def rank(comm):
        sharded = make_sharded([table], Plan(world=2, tiles=tiles), comm)
        with pytest.raises(SpecError, match="4 of 8 columns"):
            sharded.cache_on("cpu", 10)

    run_threads(2, rank, timeout_s=60)
    managed = Table(name="m", rows=256, dim=8, managed=Managed())
    plan = Plan(world=1, tiles=(Tile(table="m", rank=0, rows=(0, 256), cols=(0, 8), tier="host"),))
    with pytest.raises(SpecError, match="managed, so a GPU"):
        ShardedEmbeddings([managed], plan, solo()).cache_on("cpu", 10)
    copies = tuple(Tile(table="t", rank=rank, rows=(0, 200), cols=(0, 8), tier="host") for rank in range(2))
    with pytest.raises(SpecError, match="replicated, so a GPU"):
        check_cached(Plan(world=2, tiles=copies), [table])
    with pytest.raises(SpecError, match="disk, so a GPU"):
        check_cached(Plan(world=1, tiles=(structs.replace(copies[0], tier="disk"),)), [table])


def test_tables_of_a_rank_are_as_they_were_before():
    """Parameters, and what is read of them, are views of host memory; a second device takes the rest."""
    tables = [Table(name="a", rows=500, dim=8), Table(name="b", rows=90, dim=8)]
    tiles = [Tile(table=t.name, rank=0, rows=(0, t.rows), cols=(0, 8), tier=tier, cache_rows=64 * (tier == "host"))
             for t, tier in zip(tables, ("host", "device"), strict=True)]  # fmt: skip
    sharded = make_sharded(tables, Plan(world=1, tiles=tuple(tiles)), solo()).cache_on("cpu", 10)
    assert not list(rows_apart(sharded, Embeddings(tables, seed=3)))
    assert {name: value.shape for name, value in sharded.state_dict().items()} == {"a": (500, 8), "b": (90, 8)}
    assert sharded.to("cpu") is sharded
    with pytest.raises(StateError, match="tables in host memory"):
        sharded.cache_on("cpu", 10)

"""Collectives of tables, as the simulation has them, carry the bytes that a rehearsed rank sends."""

import random
from collections import Counter

import pytest
import torch
from parallel.shard.equal import make_steps
from parallel.shard.jobs import WORLDS, draw_job, draw_wire, make_job
from parallel.shard.layout_cases import CASES

from rowwise import Pooling
from rowwise.parallel.shard.distinct import deduplicate_sequences, repeatable_features
from rowwise.parallel.shard.rehearse import RehearsedRank, rehearse
from rowwise.parallel.shard.routes import make_routes
from rowwise.planning.simulate.traffic import LINKS, BatchCounts, PlanTraffic


def counts_of(batch, routes):
    """Those of a batch that all ranks have."""
    weighted = any(table.pooling is Pooling.WEIGHTED for table in routes.tables)
    repeats = [] if weighted or routes.world == 1 else repeatable_features(routes.exchanged_tables)
    shorter = deduplicate_sequences(batch, repeats)[0]

    def inside(ids, rows):
        return ids[(ids >= rows[0]) & (ids < rows[1])]

    def distinct(table, rows):
        return len(inside(torch.cat([batch.ids_of(feature) for feature in table.feature_names]), rows).unique())

    return BatchCounts(
        samples=batch.batch_size,
        sent_ids=lambda feature, rows: len(inside(shorter.ids_of(feature), rows)),
        own_ids=lambda feature: len(batch.ids_of(feature)),
        distinct=distinct,
    )


def sent_bytes(flows, rank):
    total = Counter()
    for flow in flows:
        for link in LINKS:
            total[flow.purpose, flow.collective, link] += flow.sent[link][rank]
    return {key: n for key, n in total.items() if n}


def check(job, topology, samples, wire):
    (step,) = make_steps(job.tables, [(samples,)])
    routes = make_routes(job.tables, job.plan, topology, elastic=job.elastic)
    flows = PlanTraffic(routes=routes, counts=counts_of(step.batch, routes), wire=wire).flows()
    for flow in flows:
        assert sum(x.sum() for x in flow.sent.values()) == pytest.approx(sum(x.sum() for x in flow.received.values()))
    for rank in range(topology.world):
        found = rehearse(
            job.tables, job.plan, RehearsedRank(topology, rank), step.batch, wire=wire, elastic=job.elastic
        )
        wanted = {key: n for key, n in found.sent_bytes.items() if n}
        assert {key: int(n + 1e-6) for key, n in sent_bytes(flows, rank).items()} == wanted


@pytest.mark.few(2)
@pytest.mark.parametrize("world", ["4", "2x2", "2x4"])
@pytest.mark.parametrize("seed", range(6))
def test_bytes_are_those_of_a_rehearsal(world, seed):
    draws = random.Random(f"{world} {seed}")
    job = make_job(*draw_job(seed, tables=6, world=world), seed, steps=0)
    check(job, WORLDS[world], draws.choice((1, 24, 256)), draw_wire(draws, elastic=job.elastic))


@pytest.mark.few(8)
@pytest.mark.parametrize("layout", CASES)
def test_bytes_of_each_layout_are_those_of_a_rehearsal(layout):
    draws = random.Random(layout)
    world, tables = draw_job(7, tables=3, world="2x4")
    job = make_job(world, [table | {"layout": layout} for table in tables], 7, steps=0)
    check(job, WORLDS["2x4"], 24, draw_wire(draws, elastic=job.elastic))

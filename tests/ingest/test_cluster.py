"""A service on a Ray cluster of several nodes, here on one machine: the batches are those that are made here."""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from ingest.test_batcher import same
from test_service import batches, files_in, served

from rowwise.ingest.service.cluster import ServiceCluster
from rowwise.ingest.service.local import Workers

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def nodes():
    """A cluster of three nodes; the first has room for no worker."""
    import ray
    from ray.cluster_utils import Cluster as Nodes

    found = Nodes(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        found.add_node(num_cpus=2)
    ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def reader(tmp_path):
    return files_in(tmp_path)


WORKERS = Workers(count=2, on="ray")


def test_the_batches_are_those_made_here(nodes, reader):
    here = batches(reader)
    expected = [*here, *here]
    there = batches(reader)
    with ServiceCluster(there.task, WORKERS) as cluster:
        client = cluster.client()
        served(there, client)
        assert same([*there, *there], expected)
        assert client.health.workers == 2
        assert client.health.times.busy_s > 0


def test_workers_and_the_coordinator_are_killed(nodes, reader):
    import ray

    expected = list(batches(reader, size=64))
    there, got, draw, kills = batches(reader, size=64), [], random.Random(1), 0
    with ServiceCluster(there.task, WORKERS) as cluster:
        client = cluster.client()
        for number, batch in enumerate(served(there, client)):
            got.append(batch)
            if number % 9 == 4:
                coordinator = cluster.coordinator
                pids = [ray.get(coordinator.pid.remote())] if number % 2 else ray.get(coordinator.workers.remote())
                if pids:
                    os.kill(draw.choice(pids), signal.SIGKILL)
                    kills += 1
    assert kills > 3
    assert client.health.restarts > 0
    assert same(got, expected)


def test_a_node_is_lost(nodes, reader):
    expected = list(batches(reader, size=64))
    there, got = batches(reader, size=64), []
    extra = nodes.add_node(num_cpus=2)
    with ServiceCluster(there.task, Workers(count=6, on="ray")) as cluster:
        for number, batch in enumerate(served(there, cluster.client())):
            got.append(batch)
            if number == 10:
                nodes.remove_node(extra, allow_graceful=False)
    assert same(got, expected)


def test_trainers_share_what_workers_prepare(nodes, reader):
    there = batches(reader)
    with ServiceCluster(there.task, WORKERS, clients=2) as cluster:
        second = ServiceCluster(there.task, WORKERS, clients=2, name=cluster.name)
        clients = [cluster.client(0), second.client(1)]
        with ThreadPoolExecutor(2) as threads:
            taken = threads.map(lambda c: [bytes(s.block) for s in c.splits(0, 0, there.splits)], clients, timeout=60)
            mine, others = taken
    assert len(mine) == there.splits
    assert mine == others


def test_there_is_no_such_cluster(reader):
    import ray

    from rowwise import SpecError

    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(SpecError, match="Ray cluster answers"):
        ServiceCluster(batches(reader).task, Workers(on="ray", address="127.0.0.1:1"))

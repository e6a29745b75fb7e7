"""A server of real processes that strangers talk to: others have their answers, and its memory stays what it was."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from http.client import HTTPConnection

import numpy as np
import pyarrow as pa
import pytest
from launching import wait_for
from serving import Clients, ask, score, server, tensors_of, workers_of

from rowwise.serve.client import ARROW
from rowwise.serve.oip import BINARY, HEADER
from rowwise.serve.start import memory_of

pytestmark = [pytest.mark.slow, pytest.mark.dist]
SCORE = b"POST /v1/models/small/score HTTP/1.1\r\nhost: x\r\n"
LIMITS = ("head_s=1", "body_s=1", "idle_s=2", "connections=100")
BEGUN = {  # what is sent, what goes on being sent, and the status
    "silence": (b"", b"", b""),
    "slow head": (b"GET / HTTP/1.1\r\n", b"", b"408"),
    "slow body": (SCORE + b"content-length: 9\r\n\r\n{", b"", b"408"),
    "endless head": (b"GET / HTTP/1.1\r\nx: ", b"a" * 1000, b"431"),
    "endless body": (SCORE + b"transfer-encoding: chunked\r\n\r\n", b"3e8\r\n" + b" " * 1000 + b"\r\n", b"4"),
    "no language": (b"\x16\x03\x01\r\n\r\n", b"", b"400"),
}


def told(netloc, begin, more):
    """What a connection is told before it is closed."""
    host, _, port = netloc.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(begin)
        stopped = threading.Event()

        def send():
            try:
                while more and not stopped.is_set():
                    connection.sendall(more)
            except OSError:
                pass  # it was closed

        sender = threading.Thread(target=send)
        sender.start()
        found = b""
        try:
            while part := connection.recv(4096):
                found += part
        except ConnectionResetError:
            pass
        stopped.set()
        sender.join()
        return found


def test_strangers_leave_neighbours_alone(increments):
    rows = increments.table.slice(0, 3).select(["user", "item", "seen", "d0", "d1"]).to_pydict()
    body, ending, codes = json.dumps({"rows": rows}), threading.Event(), []
    limits = [word for limit in LIMITS for word in ("--limit", limit)]
    with server(increments.models, "--timeout", "60000", *limits) as (netloc, process):

        def neighbour():
            with closing(HTTPConnection(netloc, timeout=60)) as connection:
                while not ending.is_set():
                    codes.append(score(connection, body)[0])

        thread = threading.Thread(target=neighbour)
        thread.start()
        wait_for(lambda: codes)
        before = memory_of(process)
        strangers = [
            threading.Thread(target=lambda k=k, n=n: found.__setitem__((k, n), told(netloc, *BEGUN[k][:2])))
            for k in BEGUN
            for n in range(5)
        ]
        found = {}
        for stranger in strangers:
            stranger.start()
        for stranger in strangers:
            stranger.join(60)
        ending.set()
        thread.join()
        assert set(codes) == {200}
        assert len(workers_of(process.pid)) == 2
        for (kind, _), answer in found.items():
            assert answer[9:].startswith(BEGUN[kind][2]), (kind, answer)
            assert bool(answer) == bool(BEGUN[kind][2])
        assert sum(memory_of(process)) - sum(before) < 100 << 20
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


WORDS = np.array([0, 1, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1], np.uint32)  # of lengths, places and counts


def damaged(body, draw):
    """A body with a few words of others, or without its end."""
    words = bytearray(body)
    for _ in range(draw.integers(0, 4)):
        place = 4 * int(draw.integers(len(words) // 4))
        words[place : place + 4] = draw.choice(WORDS).tobytes()
    return bytes(words[: draw.integers(len(words))] if draw.random() < 0.2 else words)


@pytest.mark.parametrize("kind", ["arrow", "views", "zstd", "tensors"])
def test_damaged_bodies_leave_neighbours_alone(kind, increments):
    draw, table, codes = np.random.default_rng(0), pa.table(increments.rows), set()
    path, headers = "/v1/models/small/score", {"content-type": ARROW}
    if kind == "tensors":
        tensors = tensors_of(increments.rows)
        inputs = [
            {"name": name, "shape": [len(array)], "datatype": of, "parameters": {"binary_data_size": array.nbytes}}
            for name, (of, array) in tensors.items()
        ]
        head = json.dumps({"inputs": inputs}).encode()
        path, headers = "/v2/models/small/infer", {HEADER: str(len(head)), "content-type": BINARY}
        body = head + b"".join(array.tobytes() for _, array in tensors.values())
    else:
        texts = pa.array(["a" * 30, None] * (table.num_rows // 2), pa.string_view() if kind == "views" else pa.string())
        sink, options = pa.BufferOutputStream(), pa.ipc.IpcWriteOptions(compression="zstd" if kind == "zstd" else None)
        table = table.append_column("more", texts.dictionary_encode() if kind == "arrow" else texts)
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        body = sink.getvalue().to_pybytes()
    with (
        server(increments.models, "--timeout", "60000") as (netloc, process),
        Clients(netloc, increments, 1) as clients,
    ):
        clients.wait_for(4)
        workers, before = workers_of(process.pid), memory_of(process)
        for _ in range(150):
            code, _, answer = ask(netloc, path, damaged(body, draw), **headers)
            codes.add(code)
            assert code == 200 or json.loads(answer)["error"].isprintable(), answer
        assert codes == {200, 400}
        assert workers_of(process.pid) == workers
        assert sum(memory_of(process)) - sum(before) < 50 << 20
    assert (clients.wrong, clients.failed) == (0, [])


@pytest.mark.slow
def test_a_worker_that_is_killed_as_it_begins_its_numbers_hides_no_others(tmp_path):
    (tmp_path / "counter_99.db").touch()
    code = "from rowwise.serve.metrics import ServerMetrics as M; m = M(); m.rows.inc(7); print(m.text().decode())"
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "rowwise_rows_total 7.0" in done.stdout, done.stderr

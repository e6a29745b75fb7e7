"""Real servers, and clients that compare each answer with the logits of the version that it names."""

import json
import os
import signal
import threading
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from launching import started, wait_for

from rowwise.serve.start import is_loader


@contextmanager
def server(models, *options, folder=None, environment=None):
    args = ("serve", str(models), "--port", "0", "--workers", "2", *options)
    with started(folder or models.parent, *args, environment=environment) as process:
        line = process.stdout.readline()
        assert " at http://" in line, process.stderr.read()
        yield urlsplit(line.split(" at ")[1]).netloc, process


@contextmanager
def quiet_server(models, *options):
    """The address of a server that ends when it is told to, without an error."""
    with server(models, "--timeout", "60000", *options) as (netloc, process):
        yield netloc
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


class Clients:
    """Clients that ask until the `with` ends, and check each answer."""

    def __init__(self, netloc, exported, count=3):
        self.netloc, self.rows, self.logits = netloc, exported.rows, exported.logits
        self.count = len(next(iter(self.rows.values())))
        self.seen, self.wrong, self.failed, self.lock = {}, 0, [], threading.Lock()
        self.ending = threading.Event()
        self.threads = [threading.Thread(target=self.go, args=(k,)) for k in range(count)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ending.set()
        for thread in self.threads:
            thread.join()

    def go(self, seed):
        g = np.random.default_rng(seed)
        with closing(HTTPConnection(self.netloc, timeout=60)) as connection:
            while not self.ending.is_set():
                try:
                    self.ask(connection, g.choice(self.count, int(g.integers(1, self.count))))
                except Exception as error:
                    connection.close()  # the next request connects again
                    with self.lock:
                        self.failed.append(repr(error))

    def ask(self, connection, chosen):
        body = json.dumps({"rows": {name: [values[k] for k in chosen] for name, values in self.rows.items()}})
        code, version, logits = score(connection, body)
        assert code == 200, logits
        with self.lock:
            self.seen[version] = self.seen.get(version, 0) + 1
            self.wrong += np.array(logits, np.float32).tobytes() != self.logits[version][chosen].tobytes()

    def wait_for(self, version):
        wait_for(lambda: self.seen.get(version))


def score(connection, body, path="/v1/models/small/score"):
    connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    return response.status, answer.get("version"), answer["outputs"]["label_logit"] if "outputs" in answer else answer


def ask(netloc, path, body=None, **headers):
    """The status, the headers and the body of an answer."""
    headers = {"content-type": "application/json"} | headers
    with closing(HTTPConnection(netloc, timeout=60)) as connection:
        connection.request("GET" if body is None else "POST", path, body, headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()


def tensors_of(rows):
    """Rows of the small world, as the tensors of the Open Inference Protocol: their types and values by name."""
    arrays = {name: np.array(rows[name], np.int64) for name in ("user", "item")}
    arrays |= {name: np.array(rows[name], np.float32) for name in ("d0", "d1")}
    arrays["seen__values"] = np.concatenate(rows["seen"]).astype(np.int64)
    arrays["seen__offsets"] = np.cumsum([0, *map(len, rows["seen"])])
    return {name: ("FP32" if array.dtype == np.float32 else "INT64", array) for name, array in arrays.items()}


def get(netloc, path):
    return ask(netloc, path)[2]


def about(netloc):
    return json.loads(get(netloc, "/v1/versions"))


def files_of(version):
    """The content of each file of a folder."""
    return {str(file.relative_to(version)): file.read_bytes() for file in version.rglob("*") if file.is_file()}


def children_of(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def forks_of(pid):
    """Forks of the fork server, whose parent is the host."""
    return sorted(fork for server in children_of(pid) for fork in children_of(server))


def workers_of(pid):
    """The processes that accept connections."""
    return [fork for fork in forks_of(pid) if not is_loader(fork)]


def loader_of(pid):
    """The process that loads versions, once it waits for one."""
    wait_for(lambda: any(map(is_loader, forks_of(pid))))
    return next(filter(is_loader, forks_of(pid)))

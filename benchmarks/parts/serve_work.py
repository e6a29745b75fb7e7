"""A DLRM behind `rowwise serve`: its versions, requests with their right answers, and what a server takes for them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from parts.process_tree import processor_s
from rowwise.checkpoint.read import Checkpoint
from rowwise.ingest.datasets.synthetic import SyntheticColumns
from rowwise.recipes.ensemble import predict_ensemble
from rowwise.recipes.export import export
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode
from rowwise.serve.load import Answer, Load, open_sender, quantiles_ms, seconds_of, send
from rowwise.serve.package import list_versions, version_folder, write_traffic
from rowwise.serve.start import end_server, start_server
from rowwise.serve.traffic import Traffic

DENSE, TABLES, CANDIDATES = 13, 26, 100
END_s = 60.0  # that a server has to answer what it has
OK, PATH = 200, "/v1/models/dlrm/score"
CONTEXT = tuple(f"c{k}" for k in range(16))  # the columns of the user; the others are the item's


Wanted = Callable[[int, list[int]], np.ndarray]  # logits by a version of rows


class Change(NamedTuple):
    """A version that became current."""

    version: int
    at_s: float


class Served(NamedTuple):
    """A server that runs, and what is sent to it."""

    url: str
    pid: int
    requests: dict[str, tuple[list, Wanted]]
    path: str = PATH
    close: float | None = None  # how far logits of a peer may be from ours; None: they have the same bits
    send: Callable[[Load], list[Answer]] = send  # from a process that starts once for all loads

    def load(self, bodies: Sequence[bytes], requests: int, clients: int, **more: Any) -> Load:
        place = urlsplit(self.url)
        return Load(str(place.hostname), place.port or 80, self.path, tuple(bodies), requests, clients, **more)


def write_versions(folder: Path, size: tuple) -> tuple[Path, Path]:
    """Versions of a model that has hardly been trained, each an increment of the one before; and rows to score."""
    rows, dim, widths, _, versions = size
    world, batch = SyntheticColumns(dense=DENSE, ids=tuple((f"c{k}", rows) for k in range(TABLES))), rows // 100
    pq.write_table(world.rows(0, max(1000, 15 * batch)).drop_columns(["logit"]), folder / "rows.parquet")
    pq.write_table(world.rows(10_000, 1000).drop_columns(["logit", "label"]), folder / "new.parquet")
    recipe = {
        "name": "dlrm",
        "data": {"dataset": f"parquet:{folder / 'rows.parquet'}", "test_share": 0.1},
        "columns": {
            "labels": ["label"],
            "sparse": [{"column": f"c{k}", "ids": "direct"} for k in range(TABLES)],
            "dense": [{"column": f"d{k}"} for k in range(DENSE)],
        },
        "tables": {"list": [{"name": f"c{k}", "rows": rows, "dim": dim} for k in range(TABLES)]},
        "model": {"kind": "dlrm", "bottom": list(widths), "top": [*widths]},
        "train": {"batch": batch, "steps": versions, "ahead": 0},
        "save": {"every": 1, "keep": versions},
    }
    run = TrainingRun.start(decode(recipe, "dlrm.yaml"), folder / "runs")
    run.go(test=False)
    made = [export(run.folder.path, folder / "models", which=f"step-{step + 1}") for step in range(versions)]
    assert [one.base for one in made] == [None, *range(1, versions)]
    write_traffic(folder / "models", Traffic(1))
    sizes = [one.size_bytes / 1e6 for one in made]
    print(f"a version of {sizes[0]:.1f} MB, and changes of {min(sizes[1:]):.1f} to {max(sizes[1:]):.1f} MB", flush=True)
    return folder / "models", folder / "new.parquet"


def write_weights(models: Path, path: Path) -> None:
    """What a peer needs of the first version."""
    version = Checkpoint.open(version_folder(models, 1).path)
    layers = {
        part: [
            tuple(version.load(f"model/{part}.layers.{k}.{kind}") for kind in ("weight", "bias"))
            for k in range(sum(name.startswith(f"model/{part}.") for name in version.names()) // 2)
        ]
        for part in ("bottom", "top")
    }
    tables = [version.load(f"model/embeddings.c{k}") for k in range(TABLES)]
    columns = [f"d{k}" for k in range(DENSE)] + [f"c{k}" for k in range(TABLES)]
    torch.save({"tables": tables, "columns": columns, "dense": DENSE, **layers}, path)


def bodies_of(rows: dict, kind: str) -> list[tuple[bytes, list[int]]]:
    """Requests, each with the rows of the file whose logits it asks for; of candidates none is in the file."""
    names, count = list(rows), len(rows["c0"])
    if kind == "one row":
        return [
            (json.dumps({"rows": {name: [rows[name][row]] for name in names}}).encode(), [row]) for row in range(count)
        ]
    context = [name for name in names if name in CONTEXT or name.startswith("d")]
    found = []
    for row in range(0, count - CANDIDATES, 10):
        span = range(row, row + CANDIDATES)
        candidates = {name: [rows[name][k] for k in span] for name in names if name not in context}
        body = {"context": {name: rows[name][row] for name in context}, "candidates": candidates}
        found.append((json.dumps(body).encode(), list(span)))
    return found


def count_wrong(answers: Sequence[Answer], bodies: list, wanted: Wanted, close: float | None = None) -> int:
    """Logits with other bits than `predict` gives by the version that an answer names, and requests without logits."""
    wrong = 0
    for one in answers:
        if one.code != OK:
            wrong += 1
            continue
        answer = json.loads(one.answer)
        logits = np.array(answer["outputs"]["label_logit"], np.float32)
        right = wanted(answer.get("version", 1), bodies[one.body][1])
        if close is None:
            wrong += int((logits.view(np.int32) != right.view(np.int32)).sum())
        else:
            wrong += int((np.abs(logits - right) > close).sum())
    return wrong


def measure(
    server: Served,
    kind: str,
    requests: int,
    clients: int,
    rate: float | None = None,
    seen: list[tuple[float, int]] | None = None,
) -> dict:
    """Latencies of requests and their processor time.

    Args:
        server: with one version, or several in turn.
        kind: of the requests.
        requests: how many.
        clients: connections.
        rate: of an open loop; None: of a closed one.
        seen: gets the arrival and the version of each answer.
    """
    bodies, wanted = server.requests[kind]
    load = server.load([body for body, _ in bodies], requests, clients, rate=rate)
    server.send(load._replace(requests=max(2 * clients, requests // 10), rate=None))
    begin_s = processor_s(server.pid)
    answers = server.send(load)
    cpu_s = processor_s(server.pid) - begin_s
    took_s = seconds_of(answers)
    if seen is not None:
        seen += [(a.arrived_s, json.loads(a.answer).get("version", 1)) for a in answers if a.code == OK]
    return {
        "request": kind,
        "clients": clients,
        "rate": rate,
        "requests": len(answers),
        "requests_s": len(answers) / took_s,
        **quantiles_ms(answers),
        "server_cpu_ms": 1e3 * cpu_s / len(answers),
        "wrong_logits": count_wrong(answers, bodies, wanted, server.close),
    }


def expand(rows: dict, spans: list[list[int]]) -> dict:
    """The rows that candidates stand for, with the context of each request."""
    made: dict[str, list] = {name: [] for name in rows}
    for span in spans:
        for name, values in rows.items():
            of_context = name in CONTEXT or name.startswith("d")
            made[name] += [values[span[0]]] * len(span) if of_context else [values[k] for k in span]
    return made


def logits_of(models: Path, version: int, rows: dict, folder: Path) -> np.ndarray:
    schema = pq.read_schema(folder / "new.parquet")
    pq.write_table(
        pa.table({f.name: pa.array(rows[f.name], f.type) for f in schema if f.name in rows}), folder / "x.parquet"
    )
    path = version_folder(models, version).path
    predict_ensemble([path], folder / "p.parquet", data=f"parquet:{folder / 'x.parquet'}")
    return pq.read_table(folder / "p.parquet")["label_logit"].to_numpy()


def make_requests(models: Path, data: Path, folder: Path) -> dict[str, tuple[list, Wanted]]:
    """Bodies of each kind, and the logits of their rows by each version."""
    table = pq.read_table(data)
    rows = table.select([name for name in table.column_names if name[0] in "cd"]).to_pydict()
    alone, together = bodies_of(rows, "one row"), bodies_of(rows, "candidates")
    expanded = expand(rows, [span for _, span in together])
    versions = list_versions(models)
    of_rows = {version: logits_of(models, version, rows, folder) for version in versions}
    of_candidates = {v: logits_of(models, v, expanded, folder).reshape(-1, CANDIDATES) for v in versions}
    places = {span[0]: k for k, (_, span) in enumerate(together)}
    return {
        "one row": (alone, lambda version, numbers: of_rows[version][numbers]),
        "1 x 100": (together, lambda version, numbers: of_candidates[version][places[numbers[0]]]),
    }


class Answered(NamedTuple):
    """Changes that were current for long enough to be loaded, and those of them whose version answered meanwhile."""

    due: int
    answered: int

    @classmethod
    def of(cls, made: Sequence[Change], end_s: float, seen: Sequence[tuple[float, int]], load_s: float) -> "Answered":
        """Of changes until `end_s`, each current for two loads, and what was seen of versions at times."""
        ends_s = [*(change.at_s for change in made[1:]), end_s][: len(made)]
        due = [(change, end_s) for change, end_s in zip(made, ends_s, strict=True) if end_s - change.at_s >= 2 * load_s]
        answered = [
            any(version == change.version and change.at_s <= at_s <= end_s for at_s, version in seen)
            for change, end_s in due
        ]
        return cls(len(due), sum(answered))


def first_answers_s(made: Sequence[Change], seen: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds from each change to the first answer by its version; those without one are left out."""
    firsts_s: list[float] = []
    for version, begin_s in made:
        answers_s = [at_s for at_s, number in seen if number == version and at_s >= begin_s]
        if answers_s:
            firsts_s.append(min(answers_s) - begin_s)
    return firsts_s


@contextmanager
def serving(models: Path, requests: dict, *options: str) -> Iterator[Served]:
    server = start_server([str(models), *options])
    if server is None:
        sys.exit(f"no server of {models}")
    try:
        with open_sender() as send_load:
            yield Served("http://" + urlsplit(server.url).netloc, server.process.pid, requests, send=send_load)
    finally:
        end_server(server.process, END_s)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def answering(command: Sequence[str], port: int, body: bytes) -> Iterator[int]:
    """The process of another server, from its first answer to this request at /score on."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            end_s = time.monotonic() + 120
            while True:
                with suppress(OSError), closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
                    connection.request("POST", "/score", body, {"content-type": "application/json"})
                    if connection.getresponse().status == OK:
                        break
                if time.monotonic() > end_s or process.poll() is not None:
                    raise RuntimeError(f"{' '.join(command)} does not answer")
                time.sleep(0.2)
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def beside(go: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run a function in a thread; the event tells it to end, and is set when the block does."""
    ending = threading.Event()
    thread = threading.Thread(target=go, args=(ending,))
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


@contextmanager
def changing(models: Path, every_s: float = 1.0, versions: Sequence[int] = ()) -> Iterator[list[Change]]:
    """Another version becomes current now and then, all in turn or these; yields those that did."""
    made: list[Change] = []

    def change(ending: threading.Event) -> None:
        for number in cycle(versions or [*list_versions(models)[1:], 1]):
            write_traffic(models, Traffic(number))
            made.append(Change(number, time.perf_counter()))
            if ending.wait(every_s):
                return

    try:
        with beside(change):
            yield made
    finally:
        write_traffic(models, Traffic(1))

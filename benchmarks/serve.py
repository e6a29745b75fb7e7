"""What does a score over HTTP cost, is it the bits of `rowwise predict`, and do new versions delay it?

    python benchmarks/serve.py [--quick | --smoke] [--save]

A DLRM of 13 numbers and 26 tables of dim 64 behind `rowwise serve`. A request has one row, or a context and 100
candidates, in JSON; all answers are compared with the file of `rowwise predict` for the version that they name. With
one worker: a client that sends the next request when it has an answer, and 16 of them. With a worker for each core:
requests that arrive at random times, at 25, 50 and 75 % of the rate that 16 clients reach, and at 50 % while each
second the next version, an increment, becomes current. Clients are a process that shares the machine's cores; processor
seconds are those of the server's processes.

Beside it, if `make .venv/.serve_peers` has installed them: LitServe and BentoML with plain torch and the same weights,
16 clients, logits within 1e-4.

Takes: 6 minutes; --quick 3 minutes
Needs: the extra `serve`
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from itertools import cycle
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from parts import BENCHMARKS
from parts.report import at_least, at_most, environment, exactly, finish, options, parsed
from parts.serve_load import Answer, Load, quantiles_ms, send

from rowwise.checkpoint.read import Checkpoint
from rowwise.ingest.datasets.synthetic import SyntheticColumns
from rowwise.recipes.ensemble import predict_ensemble
from rowwise.recipes.export import export
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode
from rowwise.serve.package import list_versions, version_folder, write_traffic
from rowwise.serve.traffic import Traffic

DENSE, TABLES, CANDIDATES, CLIENTS = 13, 26, 100, 16
OPEN = 64  # connections of an open loop
SHARES, CHANGED = (0.25, 0.5, 0.75), 0.5  # of the rate that clients reach
PEERS, PEER_NAMES = Path(sys.executable).parents[1] / "serve_peers/bin/python", ("litserve", "bentoml")
OK, PATH = 200, "/v1/models/dlrm/score"
SIZES = {  # rows of a table, dim, MLP, requests of a client, versions
    "smoke": (1000, 8, (16,), 20, 3),
    "quick": (20_000, 64, (512, 256), 300, 6),
    "full": (100_000, 64, (512, 256), 2000, 12),
}
SECONDS = {"smoke": 0.2, "quick": 4.0, "full": 15.0}  # of an open loop
CONTEXT = tuple(f"c{k}" for k in range(16))  # the columns of the user; the others are the item's


Wanted = Callable[[int, list[int]], np.ndarray]  # logits by a version of rows


class Served(NamedTuple):
    """A server that runs, and what is sent to it."""

    url: str
    pid: int
    requests: dict[str, tuple[list, Wanted]]
    path: str = PATH
    close: float | None = None  # how far logits of a peer may be from ours; None: they have the same bits


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


def processor_s(pid: int) -> float:
    """Processor seconds of a process and its descendants."""
    parents, times = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            times[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(times.get(one, 0.0) for one in family)


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


def measure(server: Served, kind: str, requests: int, clients: int, rate: float | None = None) -> dict:
    """Latencies of requests and their processor time; `rate`: of an open loop."""
    bodies, wanted = server.requests[kind]
    place = urlsplit(server.url)
    load = Load(
        str(place.hostname), place.port or 80, server.path, tuple(body for body, _ in bodies), requests, clients, rate
    )
    send(load._replace(requests=max(2 * clients, requests // 10), rate=None))
    cpu_s = processor_s(server.pid)
    answers = send(load)
    cpu_s = processor_s(server.pid) - cpu_s
    took_s = max(a.arrived_s + a.seconds for a in answers) - min(a.arrived_s for a in answers)
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


@contextmanager
def serving(models: Path, requests: dict, *options: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "rowwise", "serve", str(models), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield Served("http://" + urlsplit(line.split(" at ")[1]).netloc, process.pid, requests)
        finally:
            process.terminate()


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


@contextmanager
def peer_serving(name: str, weights: Path, requests: dict, workers: int) -> Iterator[Served]:
    """The same model behind another server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(PEERS), str(BENCHMARKS / "parts/serve_peers.py"), name, str(weights), str(port), str(workers)]
    if name == "bentoml":  # its bodies name the argument
        requests = {
            kind: ([(b'{"request": ' + body + b"}", rows) for body, rows in bodies], wanted)
            for kind, (bodies, wanted) in requests.items()
        }
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        server = Served(f"http://127.0.0.1:{port}", process.pid, requests, "/score", 1e-4)
        try:
            end_s = time.monotonic() + 120
            while True:
                with suppress(OSError), closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
                    connection.request(
                        "POST", "/score", server.requests["one row"][0][0][0], {"content-type": "application/json"}
                    )
                    if connection.getresponse().status == OK:
                        break
                if time.monotonic() > end_s or process.poll() is not None:
                    raise RuntimeError(f"{name} does not answer on port {port}")
                time.sleep(0.2)
            yield server
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def changing(models: Path) -> Iterator[list[int]]:
    """Another version becomes current each second; yields those that did."""
    ending, made = threading.Event(), []

    def change() -> None:
        for number in cycle([*list_versions(models)[1:], 1]):
            write_traffic(models, Traffic(number))
            made.append(number)
            if ending.wait(1.0):
                return

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield made
    finally:
        ending.set()
        thread.join()
        write_traffic(models, Traffic(1))


def measure_all(folder: Path, size: tuple, seconds: float) -> list[dict]:
    """A row for each measurement, one after the other."""
    models, data = write_versions(folder, size)
    requests, count = make_requests(models, data, folder), size[3]
    rows = []
    with serving(models, requests, "--workers", "1") as server:
        for kind in requests:
            rows += [measure(server, kind, count, clients) | {"workers": 1} for clients in (1, CLIENTS)]
    with serving(models, requests) as server:
        for kind in requests:
            rows.append(full := measure(server, kind, count, CLIENTS))
            for share in SHARES:
                rate = share * full["requests_s"]
                rows.append(measure(server, kind, int(seconds * rate), OPEN, rate) | {"share": share})
            with changing(models) as made:
                row = measure(server, kind, int(seconds * rate), OPEN, CHANGED * full["requests_s"])
            rows.append(row | {"share": CHANGED, "versions": len(made)})
    for name in PEER_NAMES if PEERS.exists() else ():
        write_weights(models, folder / "weights.pt")
        with peer_serving(name, folder / "weights.pt", requests, os.cpu_count() or 1) as server:
            for kind in requests:
                rows.append(measure(server, kind, max(20, count // 4), CLIENTS) | {"peer": name})
    return rows


def rows_of(rows: list[dict], kind: str, clients: int) -> dict:
    """The row of a closed loop with a worker for each core."""
    return next(r for r in rows if r["request"] == kind and r["clients"] == clients and "workers" not in r)


def main() -> None:
    args = parsed(options("serve", __doc__))
    with tempfile.TemporaryDirectory() as folder:
        size = "smoke" if args.smoke else "quick" if args.quick else "full"
        rows = measure_all(Path(folder), SIZES[size], SECONDS[size])
    print("request  workers  clients  arriving/s  requests/s      p50      p99    p99.9   server's processor")
    for row in rows:
        times = "".join(f"{row[name]:9.2f}" for name in ("p50_ms", "p99_ms", "p99.9_ms"))
        rate = f"{row['rate']:10.0f}" if row["rate"] else " " * 10
        who = (
            f"{row['request']:8} {row.get('workers', 'all'):>7}  {row['clients']:7}  {rate}  {row['requests_s']:10.0f}"
        )
        more = f", {row['versions']} versions" if "versions" in row else f", {row['peer']}" if "peer" in row else ""
        print(f"{who}{times} ms {row['server_cpu_ms']:9.3f} ms a request{more}")
    finish({"benchmark": "serve", "environment": environment(), "rows": rows, "floors": floors_of(rows, args)}, args)


def floors_of(rows: list[dict], args: argparse.Namespace) -> list[dict]:
    ours = [row for row in rows if "peer" not in row]
    floors = [
        exactly("logits with other bits than predict's", sum(row["wrong_logits"] for row in ours), 0),
        exactly("logits of peers that are others", sum(row["wrong_logits"] for row in rows if "peer" in row), 0),
    ]
    if args.smoke:
        return floors
    alone, many = rows[:2]
    floors += [
        at_most("ms of processor for a one-row request, one client", alone["server_cpu_ms"], 0.8),
        at_most(f"ms of processor for a one-row request, {CLIENTS} clients", many["server_cpu_ms"], 0.35),
        at_most(f"ms of a one-row request at p99, {CLIENTS} clients", many["p99_ms"], 25.0),
    ]
    for row in (row for row in rows if "peer" in row):
        ratio = rows_of(ours, row["request"], CLIENTS)["requests_s"] / row["requests_s"]
        floors.append(at_least(f"{row['request']}: requests/s of {CLIENTS} clients, over {row['peer']}'s", ratio, 3.0))
    for kind in dict.fromkeys(row["request"] for row in ours):
        half = [row for row in ours if row["request"] == kind and row.get("share") == CHANGED]
        still, changed = half  # measured in this order
        ratio = changed["p99_ms"] / still["p99_ms"]
        floors.append(at_most(f"{kind}: p99 while a version changes each second, over p99 without", ratio, 1.2))
    return floors


if __name__ == "__main__":
    main()

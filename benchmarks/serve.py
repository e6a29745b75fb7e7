"""What does a score over HTTP cost, and is it the bits of `rowwise predict`?

    python benchmarks/serve.py [--quick | --smoke] [--save]

A DLRM of 13 numbers and 26 tables of dim 64 behind `rowwise serve`, one worker. A request has one row, or a context and
100 candidates, in JSON; all answers are compared with the file of `rowwise predict`. One client sends the next request
when it has an answer; then 16 do. Latencies are a client's, which shares the machine's cores; processor seconds are
those of the server's process alone.

Takes: 2 minutes; --quick 1 minute
Needs: the extra `serve`
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow.parquet as pq
from parts.report import at_most, environment, exactly, finish, options, parsed

from rowwise.ingest.datasets.synthetic import SyntheticColumns
from rowwise.recipes.ensemble import predict_ensemble
from rowwise.recipes.export import export
from rowwise.recipes.runs import TrainingRun
from rowwise.recipes.text import decode

DENSE, TABLES, CANDIDATES, CLIENTS = 13, 26, 100, 16
SIZES = {  # rows of a table, dim, MLP, requests of a client
    "smoke": (1000, 8, (16,), 20),
    "quick": (20_000, 64, (512, 256), 300),
    "full": (100_000, 64, (512, 256), 2000),
}
CONTEXT = tuple(f"c{k}" for k in range(16))  # the columns of the user; the others are the item's


def write_version(folder: Path, size: tuple) -> tuple[Path, Path]:
    """A version of a model that has hardly been trained, and rows to score."""
    rows, dim, widths, _ = size
    world = SyntheticColumns(dense=DENSE, ids=tuple((f"c{k}", rows) for k in range(TABLES)))
    pq.write_table(world.rows(0, 2000).drop_columns(["logit"]), folder / "rows.parquet")
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
        "train": {"batch": 256, "steps": 4, "ahead": 0},
    }
    run = TrainingRun.start(decode(recipe, "dlrm.yaml"), folder / "runs")
    run.go(test=False)
    export(run.folder.path, folder / "models")
    return folder / "models", folder / "new.parquet"


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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


def send(url: str, bodies: list, wanted, count: int, first: int) -> tuple[list[float], int]:
    """Seconds of each request, and the number of logits with other bits than wanted."""
    connection, seconds, wrong = HTTPConnection(urlsplit(url).netloc), [], 0
    for number in range(count):
        body, rows = bodies[(first + number) % len(bodies)]
        begin_s = time.perf_counter()
        connection.request("POST", "/v1/models/dlrm/score", body, {"content-type": "application/json"})
        answer = connection.getresponse().read()
        seconds.append(time.perf_counter() - begin_s)
        found = np.array(json.loads(answer)["outputs"]["label_logit"], np.float32)
        wrong += int((found.view(np.int32) != wanted(rows).view(np.int32)).sum())
    connection.close()
    return seconds, wrong


def measure(url: str, pid: int, kind: str, bodies: list, wanted, requests: int, clients: int) -> dict:
    send(url, bodies, wanted, max(2, requests // 10), 0)
    begin_s, cpu_s = time.perf_counter(), processor_s(pid)
    with ThreadPoolExecutor(clients) as pool:
        each = requests // clients + 1
        found = list(pool.map(lambda k: send(url, bodies, wanted, each, 37 * k), range(clients)))
    took_s, cpu_s = time.perf_counter() - begin_s, processor_s(pid) - cpu_s
    seconds = np.array([s for one, _ in found for s in one])
    return {
        "request": kind,
        "clients": clients,
        "requests": len(seconds),
        "requests_s": len(seconds) / took_s,
        "p50_ms": 1e3 * float(np.quantile(seconds, 0.5)),
        "p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
        "server_cpu_ms": 1e3 * cpu_s / len(seconds),
        "wrong_logits": sum(wrong for _, wrong in found),
    }


def expand(rows: dict, spans: list[list[int]]) -> dict:
    """The rows that candidates stand for, with the context of each request."""
    made: dict[str, list] = {name: [] for name in rows}
    for span in spans:
        for name, values in rows.items():
            of_context = name in CONTEXT or name.startswith("d")
            made[name] += [values[span[0]]] * len(span) if of_context else [values[k] for k in span]
    return made


def logits_of(models: Path, rows: dict, folder: Path) -> np.ndarray:
    import pyarrow as pa

    schema = pq.read_schema(folder / "new.parquet")
    pq.write_table(
        pa.table({f.name: pa.array(rows[f.name], f.type) for f in schema if f.name in rows}), folder / "x.parquet"
    )
    predict_ensemble([models], folder / "p.parquet", data=f"parquet:{folder / 'x.parquet'}")
    return pq.read_table(folder / "p.parquet")["label_logit"].to_numpy()


def measure_all(folder: Path, size: tuple) -> list[dict]:
    models, data = write_version(folder, size)
    table = pq.read_table(data)
    rows = table.select([name for name in table.column_names if name[0] in "cd"]).to_pydict()
    alone, together = bodies_of(rows, "one row"), bodies_of(rows, "candidates")
    of_rows = logits_of(models, rows, folder)
    of_candidates = logits_of(models, expand(rows, [span for _, span in together]), folder).reshape(-1, CANDIDATES)
    places = {span[0]: k for k, (_, span) in enumerate(together)}
    command = [sys.executable, "-m", "rowwise", "serve", str(models), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            url = "http://" + urlsplit(line.split(" at ")[1]).netloc
            return [
                measure(url, server.pid, kind, bodies, wanted, size[3], clients)
                for kind, bodies, wanted in (
                    ("one row", alone, lambda numbers: of_rows[numbers]),
                    ("1 x 100", together, lambda numbers: of_candidates[places[numbers[0]]]),
                )
                for clients in (1, CLIENTS)
            ]
        finally:
            server.terminate()


def main() -> None:
    args = parsed(options("serve", __doc__))
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_all(Path(folder), SIZES["smoke" if args.smoke else "quick" if args.quick else "full"])
    print("request  clients  requests/s    p50       p99     server's processor")
    for row in rows:
        times = f"{row['p50_ms']:7.2f} ms {row['p99_ms']:7.2f} ms {row['server_cpu_ms']:9.3f} ms a request"
        print(f"{row['request']:8} {row['clients']:7} {row['requests_s']:11.0f} {times}")
    floors = [exactly("logits with other bits than predict's", sum(row["wrong_logits"] for row in rows), 0)]
    if not args.smoke:
        floors += [
            at_most("ms of processor for a one-row request, one client", rows[0]["server_cpu_ms"], 0.8),
            at_most(f"ms of processor for a one-row request, {CLIENTS} clients", rows[1]["server_cpu_ms"], 0.35),
            at_most(f"ms of a one-row request at p99, {CLIENTS} clients", rows[1]["p99_ms"], 25.0),
        ]
    finish({"benchmark": "serve", "environment": environment(), "rows": rows, "floors": floors}, args)


if __name__ == "__main__":
    main()

"""Does MLPerf LoadGen find `rowwise serve` VALID at a p99 of 60 ms, at which rate, and beside plain torch?

    python benchmarks/loadgen.py [--quick | --smoke] [--save]

A query is a context and 100 to 700 candidates, sizes from a seed, in the JSON of `rowwise serve`; the model is the DLRM
of `serve.py`. LoadGen decides when queries arrive, and gives the verdict (`examples/loadgen.py`). Under this harness:
`rowwise serve`, plain torch with the same weights behind the same uvicorn and Starlette, each with a worker for each
core, and the library in process, on one thread. In turn, each is searched for its largest rate that is VALID in the
scenario `server` (Poisson arrivals, p99 60 ms), then measured in `offline` (all queries at once) and `single-stream`
(one after the other). The client shares the cores.

Beside the verdict: what `rowwise fleet` forecasts for requests of 400 rows, the mean number of candidates. Its
requests have all columns in each row.

Takes: 25 minutes; --quick 6 minutes
Needs: the extras `serve` and `judges`
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from parts import BENCHMARKS
from parts.command import rowwise
from parts.report import at_least, at_most, exactly, finish, has_peer, options, parsed, show
from parts.serve_work import (
    CONTEXT,
    TABLES,
    answering,
    free_port,
    make_requests,
    serving,
    write_versions,
    write_weights,
)

P99_ms, MEAN_CANDIDATES = 60, 400
CANDIDATES = ",".join(f"c{k}" for k in range(TABLES) if f"c{k}" not in CONTEXT)
OURS, PEER, INSIDE = "rowwise serve", "plain torch", "in process"
CORES = os.cpu_count() or 1


class Effort(NamedTuple):
    """The model, as in `serve.py`, and how long it is measured."""

    model: tuple
    rounds: int
    queries: int
    seconds: float  # of a scenario, at least
    budget_s: float  # of a search
    p99_ms: float = P99_ms


EFFORTS = {
    "smoke": Effort((1000, 8, (16,), 20, 2), 1, 30, 0.1, 1.0, 10_000),
    "quick": Effort((20_000, 64, (512, 256), 300, 2), 1, 1000, 4.0, 45.0),
    "full": Effort((100_000, 64, (512, 256), 2000, 2), 2, 2000, 10.0, 150.0),
}


@contextmanager
def system(name: str, models: Path, requests: dict) -> Iterator[list[str]]:
    """The options of the example for a system that runs."""
    if name == OURS:
        with serving(models, requests) as server:
            yield ["--url", f"{server.url}{server.path}"]
    elif name == PEER:
        weights, port = models.parent / "weights.pt", free_port()
        write_weights(models, weights)
        command = [sys.executable, str(BENCHMARKS / "parts/loadgen_peer.py"), str(weights), str(port), str(CORES)]
        with answering(command, port, requests["one row"][0][0][0]):
            yield ["--url", f"http://127.0.0.1:{port}/score"]
    else:
        yield []


def judged(name: str, models: Path, words: list[str], effort: Effort) -> list[dict]:
    """Rows of LoadGen's verdicts: at the largest rate that is VALID, and in the other scenarios."""
    saved = models.parent / "loadgen.json"
    rows_of_queries = ["--rows", str(models.parent / "new.parquet"), "--candidates", CANDIDATES]
    limits = ["--p99", str(effort.p99_ms), "--queries", str(effort.queries), "--seconds", str(effort.seconds)]
    search = ["--scenario", "server", "offline", "single-stream", "--find-rate", "--budget", str(effort.budget_s)]
    command = [sys.executable, str(BENCHMARKS.parent / "examples/loadgen.py"), str(models), *rows_of_queries, *limits]
    command += [*search, *words, "--json", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not saved.exists():  # a verdict that is not VALID is an answer, too
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
    result = json.loads(saved.read_text())
    saved.unlink()
    return [{"system": name, **row, "tried": len(result["tried"])} for row in result["rows"]]


def forecast(models: Path, row: dict) -> dict:
    """What `rowwise fleet` forecasts for the rate of a row, on this machine; or why it does not."""
    words = ["--qps", str(row["target_rate"]), "--p99", str(P99_ms), "--rows", str(MEAN_CANDIDATES), "--no-check"]
    try:
        report = json.loads(rowwise("fleet", str(models), *words, "--workers", str(CORES), "--json"))
    except RuntimeError as error:  # such as a request that a busy machine does not answer in time
        return {"fleet_rate": None, "fleet_p99_ms": None, "fleet_error": str(error).rpartition("rowwise: ")[2]}
    p99_ms = report["p99_ms"] if report["replicas"] == 1 else None  # of more than this machine
    return {"fleet_rate": CORES * report["rate_of_a_worker"], "fleet_p99_ms": p99_ms}


def measure_all(folder: Path, effort: Effort, with_fleet: bool) -> list[dict]:
    models, data = write_versions(folder, effort.model)
    requests, rows = make_requests(models, data, folder), []
    for round_ in range(effort.rounds):
        for name in (OURS, PEER, INSIDE):
            with system(name, models, requests) as words:
                load = os.getloadavg()[0]
                judgements = [{"round": round_, "load": load, **row} for row in judged(name, models, words, effort)]
            for row in judgements:
                show(row)
            if name == OURS and with_fleet:
                judgements[0] |= forecast(models, judgements[0])
                show({key: value for key, value in judgements[0].items() if key.startswith("fleet")})
            rows += judgements
    return rows


def floors_of(rows: list[dict], effort: Effort, smoke: bool) -> list[dict]:
    ours = [row for row in rows if row["system"] != PEER]
    differences = max(row["max_difference"] for row in rows if row["system"] == PEER)
    floors = [
        exactly("queries that failed", sum(row["failed"] for row in rows), 0),
        exactly("largest difference of a logit from that of the library", max(r["max_difference"] for r in ours), 0),
        at_most("largest difference of a logit of plain torch", differences, 1e-4),
    ]
    if smoke:
        return floors
    valid: dict[str, dict[int, float]] = {OURS: {}, PEER: {}, INSIDE: {}}  # rates by round
    for row in rows:
        if (row["scenario"], row["verdict"]) == ("server", "VALID"):
            valid[row["system"]][row["round"]] = row["target_rate"]
    floors.append(exactly("rounds in which a rate was VALID", len(valid[OURS]), effort.rounds))
    ratios = [rate / valid[PEER][number] for number, rate in valid[OURS].items() if number in valid[PEER]]
    floors.append(at_least("VALID queries/s, over plain torch's, lowest of the rounds", min(ratios, default=0.0), 3))
    return floors


def main() -> None:
    args = parsed(options("loadgen", __doc__))
    if not has_peer("mlcommons-loadgen", args):
        sys.exit("loadgen needs the extra `judges`")
    effort = EFFORTS["smoke" if args.smoke else "quick" if args.quick else "full"]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_all(Path(folder), effort, with_fleet=not args.smoke)
    finish("loadgen", rows, floors_of(rows, effort, args.smoke), args)


if __name__ == "__main__":
    main()

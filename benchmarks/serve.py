"""What does a score over HTTP cost, is it the bits of `rowwise predict`, and do new versions delay it?

    python benchmarks/serve.py [--quick | --smoke] [--save]

A DLRM of 13 numbers and 26 tables of dim 64 behind `rowwise serve`. A request has one row, or a context and 100
candidates, in JSON; all answers are compared with the file of `rowwise predict` for the version that they name. With
one worker: a client that sends the next request when it has an answer, and 16 of them. With a worker for each core:
requests that arrive at random times, at 25 and 75 % of the rate that 16 clients reach, and at 50 % while each second
the next version, an increment, becomes current, and without changes, in turns. Each version that is current for
two loads has to answer. Clients are a process that shares the machine's cores; processor seconds are those of the
server's processes.

Then one worker gets three times the requests that it can answer, and refuses the others; what refusals take is its
processor time without that of its answers. Beside it, if
`make .venv/.serve_peers` has installed them: LitServe and BentoML with plain torch and the same weights, 16 clients,
logits within 1e-4.

Takes: 9 minutes; --quick 4 minutes
Needs: the extra `serve`
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from parts import BENCHMARKS
from parts.process_tree import memory_bytes, processor_s
from parts.report import at_least, at_most, exactly, finish, options, parsed, show
from parts.serve_work import (
    OK,
    Answered,
    Change,
    Served,
    answering,
    changing,
    count_wrong,
    first_answers_s,
    free_port,
    make_requests,
    measure,
    serving,
    write_versions,
    write_weights,
)

from rowwise.serve.load import quantiles_ms, seconds_of

CLIENTS = 16
OPEN = 64  # connections of an open loop
SHARES, CHANGED = (0.25, 0.75), 0.5  # of the rate that clients reach
OVERLOAD, OVERLOADED, TIMEOUT_ms = 3.0, 256, 100  # times the rate that clients reach; connections; time of a request
PEERS, PEER_NAMES = Path(sys.executable).parents[1] / "serve_peers/bin/python", ("litserve", "bentoml")
REFUSED = (503, 504)  # as there is no time for them
SIZES = {  # rows of a table, dim, MLP, requests of a client, versions
    "smoke": (1000, 8, (16,), 20, 3),
    "quick": (20_000, 64, (512, 256), 300, 6),
    "full": (100_000, 64, (512, 256), 2000, 12),
}
# Of an open loop, and of each turn with or without changes.
SECONDS = {"smoke": (0.2, 0.2), "quick": (4.0, 4.0), "full": (15.0, 8.0)}


@contextmanager
def peer_serving(name: str, weights: Path, requests: dict, workers: int) -> Iterator[Served]:
    """The same model behind another server."""
    port = free_port()
    command = [str(PEERS), str(BENCHMARKS / "parts/serve_peers.py"), name, str(weights), str(port), str(workers)]
    if name == "bentoml":  # its bodies name the argument
        requests = {
            kind: ([(b'{"request": ' + body + b"}", rows) for body, rows in bodies], wanted)
            for kind, (bodies, wanted) in requests.items()
        }
    with answering(command, port, requests["one row"][0][0][0]) as pid:
        yield Served(f"http://127.0.0.1:{port}", pid, requests, "/score", 1e-4)


def measure_all(folder: Path, size: tuple, times: tuple[float, float]) -> list[dict]:
    """A row for each measurement, one after the other."""
    seconds, turn_s = times
    models, data = write_versions(folder, size)
    requests, count = make_requests(models, data, folder), size[3]
    rows = []
    with serving(models, requests, "--workers", "1") as server:
        for kind in requests:
            rows += [measure(server, kind, count, clients) | {"workers": 1} for clients in (1, CLIENTS)]
        rows.append(overload(server, rows[-1], seconds))
    with serving(models, requests) as server:
        for kind in requests:
            rows.append(full := measure(server, kind, count, CLIENTS))
            for share in SHARES:
                rate = share * full["requests_s"]
                rows.append(measure(server, kind, int(seconds * rate), OPEN, rate) | {"share": share})
            rows += change_in_turns(server, models, kind, CHANGED * full["requests_s"], turn_s, size[4] // 2)
    for name in PEER_NAMES if PEERS.exists() else ():
        write_weights(models, folder / "weights.pt")
        with peer_serving(name, folder / "weights.pt", requests, os.cpu_count() or 1) as server:
            for kind in requests:
                rows.append(measure(server, kind, max(20, count // 4), CLIENTS) | {"peer": name})
    return rows


def change_in_turns(server: Served, models: Path, kind: str, rate: float, seconds: float, turns: int) -> list[dict]:
    """Without and with changes of the version in turns: the median of each number, and of the ratios of p99."""
    still, changed, made, seen = [], [], list[Change](), list[tuple[float, int]]()
    count, due = max(2, int(seconds * rate)), Answered(0, 0)
    for _ in range(turns):
        still.append(measure(server, kind, count, OPEN, rate))
        answers: list[tuple[float, int]] = []
        with changing(models) as changes:
            changed.append(measure(server, kind, count, OPEN, rate, answers))
        begin_s, end_s = min(answers)[0], max(answers)[0]  # arrivals of requests
        during = [change for change in changes if begin_s <= change.at_s < end_s]
        load_s = median(first_answers_s(during, answers) or [seconds])
        made, seen = made + during, seen + answers
        due = Answered(*map(sum, zip(due, Answered.of(during, end_s, answers, load_s), strict=True)))
    ratios = [after["p99_ms"] / before["p99_ms"] for before, after in zip(still, changed, strict=True)]
    facts = {"share": CHANGED, "turns": turns}
    counted = {"versions": len(made), "due": due.due, "answered": due.answered, "p99_ratio": median(ratios)}
    counted["change_s"] = median(first_answers_s(made, seen) or [seconds])
    return [middle(still) | facts, middle(changed) | facts | counted]


def middle(rows: list[dict]) -> dict:
    """The medians of the numbers of equal measurements; wrong logits are summed."""
    first = rows[0]
    numbers = {name: median(row[name] for row in rows) for name, value in first.items() if isinstance(value, float)}
    return first | numbers | {"wrong_logits": sum(row["wrong_logits"] for row in rows)}


def rows_of(rows: list[dict], kind: str, clients: int) -> dict:
    """The row of a closed loop with a worker for each core."""
    return next(r for r in rows if r["request"] == kind and r["clients"] == clients and "workers" not in r)


def overload(server: Served, full: dict, seconds: float) -> dict:
    """More requests than a worker can answer, none of which waits long: answers a second, and times of refusals."""
    rate = OVERLOAD * full["requests_s"]
    bodies, wanted = server.requests["1 x 100"]
    sent = [body for body, _ in bodies]
    load = server.load(sent, int(seconds * rate), OVERLOADED, rate=rate, timeout_ms=TIMEOUT_ms)
    before_bytes, before_s = memory_bytes(server.pid), processor_s(server.pid)
    answers = server.send(load)
    cpu_s = processor_s(server.pid) - before_s
    growth = memory_bytes(server.pid) / before_bytes - 1
    took_s = seconds_of(answers)
    good = [one for one in answers if one.code == OK]
    refused = [one for one in answers if one.code in REFUSED]
    refusals_s = max(0.0, cpu_s - len(good) * full["server_cpu_ms"] / 1e3)
    return {
        "request": "1 x 100",
        "workers": 1,
        "clients": OVERLOADED,
        "rate": rate,
        "requests": len(answers),
        "requests_s": len(good) / took_s,
        "overload": OVERLOAD,
        "refused": len(refused),
        "refused_p99_ms": quantiles_ms(refused)["p99_ms"] if refused else 0.0,
        "refused_cpu_us": 1e6 * refusals_s / max(1, len(refused)),
        "refused_cpu_share": refusals_s / cpu_s,
        **quantiles_ms(good),
        "memory_growth": growth,
        "wrong_logits": count_wrong([one for one in answers if one.code not in REFUSED], bodies, wanted),
    }


def main() -> None:
    args = parsed(options("serve", __doc__))
    with tempfile.TemporaryDirectory() as folder:
        size = "smoke" if args.smoke else "quick" if args.quick else "full"
        rows = measure_all(Path(folder), SIZES[size], SECONDS[size])
    for row in rows:
        show(row)
    finish("serve", rows, floors_of(rows, args), args)


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
    crowd = next(row for row in rows if "overload" in row)
    answered = OVERLOAD * crowd["requests_s"] / crowd["rate"]
    floors += [
        at_least(f"answers/s at {OVERLOAD:g} times the rate of {CLIENTS} clients, over theirs", answered, 0.9),
        at_most(f"ms until a request is refused at {OVERLOAD:g} times that rate, p99", crowd["refused_p99_ms"], 10.0),
        at_most(f"growth of memory at {OVERLOAD:g} times that rate", crowd["memory_growth"], 0.02),
    ]
    for kind in dict.fromkeys(row["request"] for row in ours):
        changed = next(row for row in ours if row["request"] == kind and "p99_ratio" in row)
        ratio, due = changed["p99_ratio"], changed["due"]
        floors += [
            at_most(f"{kind}: p99 while a version changes each second, over p99 without", ratio, 1.5),
            at_least(f"{kind}: versions that were current for two loads", due, changed["turns"]),
            at_least(f"{kind}: of these, those that answered", changed["answered"], due),
        ]
    return floors


if __name__ == "__main__":
    main()

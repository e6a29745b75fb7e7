"""Does a server keep up with versions that change faster than it loads them, under load and while workers are killed?

    python benchmarks/serve_versions.py [--quick | --smoke] [--save]

The DLRM of `serve.py` behind `rowwise serve`, with a worker for each core. Versions become current every 0.2, 0.5, 1
and 2 s: with a client that asks ten times a second, with clients that always ask, and with these while every few
seconds a worker is killed. Each answer is compared with the logits of `rowwise predict` for the version that it names.
Beside them a client reads `/v1/versions`: how often the version changed, how long others than it were wanted, and how
long the last one took after the changes had ended. A change alone, under the same load, is measured first. Each version
that is current for two such changes has to answer.

Before all that: the processor time of a change without requests, and the memory of all processes while versions change.

Takes: 9 minutes; --quick 3 minutes
Needs: the extra `serve`
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPException
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
from parts.process_tree import children_of, memory_bytes, processor_s
from parts.report import at_least, at_most, exactly, finish, options, parsed, show
from parts.serve_work import OK, Answered, Served, beside, changing, make_requests, serving, write_versions

from rowwise.serve.package import list_versions, write_traffic
from rowwise.serve.start import is_loader
from rowwise.serve.traffic import Traffic

EVERY_s, LOOK_s, PAUSE_s = (0.2, 0.5, 1.0, 2.0), 0.05, 0.1  # between changes, looks, and requests of a slow client
CLIENTS, KILL_s, LIMIT_s = 4, 5.0, 120.0  # that always ask; between two kills; that a change may take at most
KIND = "one row"
CHANGES = 20  # without requests
SIZES = {  # rows of a table, dim, MLP, unused, versions; seconds of changes
    "smoke": ((1000, 8, (16,), 0, 3), 1.0),
    "quick": ((20_000, 64, (512, 256), 0, 4), 10.0),
    "full": ((20_000, 64, (512, 256), 0, 6), 30.0),
}


class Seen(NamedTuple):
    """An answer of `/v1/versions`."""

    at_s: float
    version: int
    behind_s: float


class Found:
    """What clients have seen of a server."""

    def __init__(self) -> None:
        self.answers, self.wrong, self.lost, self.seen = 0, 0, 0, list[Seen]()
        self.guard = threading.Lock()

    def ask(self, server: Served, number: int, connection: HTTPConnection) -> None:
        bodies, wanted = server.requests[KIND]
        body, rows = bodies[number % len(bodies)]
        connection.request("POST", server.path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        right = response.status == OK and np.array_equal(
            np.array(answer["outputs"]["label_logit"], np.float32).view(np.int32),
            wanted(answer["version"], rows).view(np.int32),
        )
        with self.guard:
            self.answers, self.wrong = self.answers + 1, self.wrong + (not right)

    def look(self, server: Served, number: int, connection: HTTPConnection) -> None:
        connection.request("GET", "/v1/versions")
        about = json.loads(connection.getresponse().read())
        self.seen.append(Seen(time.perf_counter(), about["version"], about["behind_s"]))


@contextmanager
def repeating(
    server: Served, found: Found, do: Callable[[Served, int, HTTPConnection], None], pause_s: float
) -> Iterator[None]:
    """A client that connects again where its worker was killed."""

    def go(ending: threading.Event) -> None:
        number = 0
        while not ending.is_set():
            with closing(HTTPConnection(urlsplit(server.url).netloc, timeout=LIMIT_s)) as connection:
                try:
                    while not ending.wait(pause_s):
                        do(server, number, connection)
                        number += 1
                except (OSError, HTTPException):
                    with found.guard:
                        found.lost += 1

    with beside(go):
        yield


@contextmanager
def killing(pid: int, every_s: float) -> Iterator[list[int]]:
    """Kill the oldest worker now and then."""
    killed: list[int] = []

    def go(ending: threading.Event) -> None:
        while not ending.wait(every_s):
            forked = [process for child in children_of(pid) for process in children_of(child)]
            workers = [process for process in forked if not is_loader(process)]
            if workers:  # none while all of them start
                killed.append(min(workers))
                os.kill(killed[-1], signal.SIGKILL)

    with beside(go):
        yield killed


def arrive(models: Path, number: int, found: Found) -> float:
    """Let a version become current; seconds until the server answers by it."""
    write_traffic(models, Traffic(number))
    begin_s, first = time.perf_counter(), len(found.seen)
    while time.perf_counter() < begin_s + LIMIT_s:
        for one in found.seen[first:]:
            if one.version == number and one.behind_s == 0:
                return one.at_s - begin_s
        time.sleep(LOOK_s)
    sys.exit(f"version {number} does not answer after {LIMIT_s:g} s")


def measure(models: Path, server: Served, every_s: float, seconds: float, clients: int, kill_s: float | None) -> dict:
    """Changes of the version, asked for and made."""
    found, newest = Found(), list_versions(models)[-1]
    with ExitStack() as stack:
        for _ in range(max(1, clients)):
            stack.enter_context(repeating(server, found, found.ask, 0.0 if clients else PAUSE_s))
        stack.enter_context(repeating(server, found, found.look, LOOK_s))
        arrive(models, 1, found)
        alone_s = arrive(models, 2, found)
        first = len(found.seen) - 1
        with ExitStack() as changes:
            killed = [] if kill_s is None else changes.enter_context(killing(server.pid, kill_s))
            made = changes.enter_context(changing(models, every_s, list_versions(models)[:-1]))
            time.sleep(seconds)
        last = len(found.seen)
        last_s = arrive(models, newest, found)
    versions = [one.version for one in found.seen[first:last]]
    due = Answered.of(made, made[-1].at_s, [(one.at_s, one.version) for one in found.seen], max(alone_s, LOOK_s))
    return {
        "every_s": every_s,
        "clients": clients,
        "kills": len(killed),
        "asked": len(made),
        "due": due.due,
        "due_answered": due.answered,
        "answered": sum(before != after for before, after in pairwise(versions)),
        "alone_s": alone_s,
        "behind_s": max(one.behind_s for one in found.seen[first:]),
        "last_s": last_s,
        "answers": found.answers,
        "wrong_answers": found.wrong,
        "lost": found.lost,
    }


def measure_alone(models: Path, server: Served, changes: int) -> dict:
    """What a change takes without requests: processor time of all processes, and most memory beside that before it."""
    found, numbers = Found(), list_versions(models)[1:]
    with repeating(server, found, found.look, LOOK_s):
        for number in (*numbers, 1):  # each version once: its files are in memory, and its rows beside the base's
            arrive(models, number, found)
        begin_s, before_s = time.perf_counter(), processor_s(server.pid, ended=True)
        time.sleep(changes / 4)
        idle = (processor_s(server.pid, ended=True) - before_s) / (time.perf_counter() - begin_s)
        begin_s, before_s = time.perf_counter(), processor_s(server.pid, ended=True)
        took_s = [arrive(models, number, found) for number in islice(cycle((*numbers, 1)), changes)]
        time.sleep(PAUSE_s)  # old versions are closed
        cpu_s = processor_s(server.pid, ended=True) - before_s - idle * (time.perf_counter() - begin_s)
        before_bytes, most_bytes = memory_bytes(server.pid), 0
        ending = threading.Event()

        def watch() -> None:
            nonlocal most_bytes
            while not ending.wait(LOOK_s / 5):
                most_bytes = max(most_bytes, memory_bytes(server.pid))

        watching = threading.Thread(target=watch)
        watching.start()
        for number in (*numbers, 1):
            arrive(models, number, found)
        ending.set()
        watching.join()
    return {
        "changes": changes,
        "change_s": median(took_s),
        "change_cpu_ms": 1e3 * cpu_s / changes,
        "memory_bytes": before_bytes,
        "change_bytes": most_bytes - before_bytes,
    }


def main() -> None:
    args: argparse.Namespace = parsed(options("serve_versions", __doc__))
    size, seconds = SIZES["smoke" if args.smoke else "quick" if args.quick else "full"]
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as name:
        models, data = write_versions(Path(name), size)
        requests = make_requests(models, data, Path(name))
        for clients, kill_s in ((0, None), (CLIENTS, None), (CLIENTS, seconds / 4 if args.quick else KILL_s)):
            with serving(models, requests) as server:
                if not rows:
                    rows.append(alone := measure_alone(models, server, 2 if args.smoke else CHANGES))
                    show(alone)
                for every_s in EVERY_s[:: 2 if args.smoke else 1]:
                    rows.append(row := measure(models, server, every_s, seconds, clients, kill_s))
                    show(row)
    many = rows[1:]
    unharmed = [row for row in many if not row["kills"]]
    due = sum(row["due"] for row in unharmed)
    floors = [exactly("answers with other bits than predict's", sum(row["wrong_answers"] for row in many), 0)]
    if not args.smoke:
        floors += [
            at_least("versions that answered while they changed, at least", min(row["answered"] for row in many), 1),
            at_least("versions that were current for two loads, while no worker was killed", due, 1),
            at_least("of these, those that answered", sum(row["due_answered"] for row in unharmed), due),
            at_most("ms of processor for a change, of all processes", alone["change_cpu_ms"], 150.0),
            at_most(
                "seconds from the last change to its answers, over those of a change alone, without load",
                max(row["last_s"] / row["alone_s"] for row in many if not row["clients"]),
                3.0,
            ),
        ]
    finish("serve_versions", rows, floors, args)


if __name__ == "__main__":
    main()

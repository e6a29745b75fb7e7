"""The driver of a job on Ray, `python -m rowwise.cli.ray_job`: reserves nodes, starts ranks, restarts on a lost node.

Ray reserves nodes (a placement group with one bundle per node), starts an actor on each, and detects lost nodes. Ranks
are child processes of the actors: the usual command, with the environment variables of torchrun.
"""

import argparse
import ctypes
import importlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, final

from rowwise.base.errors import SpecError, one_line
from rowwise.base.quantity import pluralise
from rowwise.base.textfile import parse_whole
from rowwise.base.value import MAX_RANKS
from rowwise.cli.environment import LISTENER
from rowwise.parallel.comm.spawn import describe_exit

POLL_S = 1.0  # polling interval of ranks
ANSWER_S = 60.0  # timeout of an actor call, with its start
LINGER_S = 300.0  # timeout for the remaining ranks after one has failed or stopped; the first writes a report
RESTARTS = 5  # maximum in a row without a new checkpoint
STOPPED = 128 + signal.SIGTERM
PR_SET_PDEATHSIG = 1
KEPT_bytes, PIECE_bytes = 4 << 20, 1 << 16  # buffer and read size of the output of ranks
WAITING = 4096  # backlog of connections to rank 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of the driver."""

    nodes: tuple[int, ...]  # node counts on which the recipe can run, in ascending order
    nproc: int
    cpus: int  # per rank
    gpus: int  # per rank
    wait: int
    log: str
    run: str
    command: list[str]

    @property
    def bundle(self) -> dict[str, float]:
        """Resources required on each node."""
        amounts = {"CPU": self.cpus * self.nproc, "GPU": self.gpus * self.nproc}
        return {kind: float(amount) for kind, amount in amounts.items() if amount}


def parse_counts(text: str) -> tuple[int, ...]:
    """Node counts in ascending order, from 1-4 or 1,2,4."""
    first, dash, last = text.partition("-")
    numbers = [parse_whole(number) or 0 for number in ((first, last) if dash else text.split(","))]
    if min(numbers) < 1 or max(numbers) > MAX_RANKS or (dash and numbers[0] > numbers[1]):
        raise ValueError
    return tuple(range(numbers[0], numbers[1] + 1)) if dash else tuple(sorted(set(numbers)))


def choose_count(counts: Sequence[int], available: int) -> int:
    """The largest count that is available, or 0."""
    return max((count for count in counts if count <= available), default=0)


def decide_code(codes: Sequence[int | None], lost: int, *, stopped: bool) -> int | None:
    """The exit code of the job, or None to restart; the code of a rank on a lost node is None."""
    errors = [code for code in codes if code]
    if not lost and not errors:
        return 0
    if stopped:
        return STOPPED
    failures = [code for code in errors if code not in (STOPPED, -signal.SIGTERM)]  # SIGTERM: its node shuts down
    if lost or not failures:
        return None
    return max(128 - code if code < 0 else code for code in failures)


@final
class RankOutput:
    """Buffered output of processes from a pipe: what was not acknowledged yet, up to the last KEPT_bytes."""

    def __init__(self) -> None:
        self._source, self.target = os.pipe()
        os.set_blocking(self._source, False)
        self._begin, self._kept, self._lock = 0, bytearray(), threading.Lock()
        threading.Thread(target=self._follow, daemon=True).start()

    def since(self, begin: int) -> tuple[int, bytes]:
        """The offset of the first kept byte at or after `begin`, and the output from there; drops older output."""
        self._receive()
        with self._lock:
            self._drop(begin - self._begin)
            return self._begin, bytes(self._kept)

    def _follow(self) -> None:
        poller = select.poll()
        poller.register(self._source, select.POLLIN)
        while poller.poll() and self._receive():
            pass

    def _receive(self) -> bool:
        """Drain the pipe; false at end of file."""
        with self._lock:
            try:
                while piece := os.read(self._source, PIECE_bytes):
                    self._kept += piece
                    self._drop(len(self._kept) - KEPT_bytes)
            except BlockingIOError:
                return True
        return False

    def _drop(self, count: int) -> None:
        if count > 0:
            del self._kept[:count]
            self._begin += count


@final
class RanksOfNode:
    """Actor with the ranks of one node, which are killed when it ends."""

    def __init__(self) -> None:
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._output = RankOutput()
        self._listener = socket.create_server(("", 0), backlog=WAITING)

    def meet(self, cwd: str) -> tuple[str, int]:
        """The address of this node, and the port of a listening socket that rank 0 will inherit."""
        address = _ray().util.get_node_ip_address()
        if not os.path.isdir(cwd):
            raise SpecError(
                f"node {address} has no folder {cwd}",
                "the working folder, Python and the runs on storage that all nodes share",
            )
        return address, self._listener.getsockname()[1]

    def start(self, command: Sequence[str], cwd: str, variables: Sequence[dict[str, str]]) -> None:
        with self._listener:
            for environment in variables:
                inherited = {LISTENER: str(self._listener.fileno())} if environment["RANK"] == "0" else {}
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env={**os.environ, **environment, **inherited},  # noqa: TID251 - Ray has set the GPUs of this actor
                    stdin=subprocess.DEVNULL,
                    stdout=self._output.target,
                    stderr=self._output.target,
                    preexec_fn=_die_with_parent(),
                    pass_fds=[*map(int, inherited.values())],
                )
                self._ranks.append(process)
        os.close(self._output.target)

    def poll(self, begin: int) -> tuple[int, bytes, list[int | None]]:
        """Offset and complete lines of the output from `begin` on, and the exit codes of the ranks."""
        codes = [rank.poll() for rank in self._ranks]
        begin, text = self._output.since(begin)
        return begin, text[: text.rfind(b"\n") + 1] if None in codes else text, codes

    def stop(self) -> None:
        """Send SIGTERM: ranks save a checkpoint and exit."""
        for rank in self._ranks:
            rank.terminate()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()


def _die_with_parent() -> Callable[[], None] | None:
    """A preexec function with which Linux kills the child when this process ends."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@final
class Attempt:
    """One attempt: ranks on the reserved nodes."""

    def __init__(self, options: Options, actors: list[Any], report: Callable[[str], None]) -> None:
        self._options, self._actors, self._report = options, actors, report
        self._codes: list[list[int | None]] = [[None] * options.nproc for _ in actors]
        self._addresses = [f"number {place}" for place in range(len(actors))]
        self._read = [0] * len(actors)
        self._lost: set[int] = set()

    @property
    def codes(self) -> list[int | None]:
        """The exit code of each rank, or None if unknown."""
        return [code for codes in self._codes for code in codes]

    @property
    def lost(self) -> list[str]:
        """Addresses of lost nodes."""
        return [self._addresses[place] for place in sorted(self._lost)]

    def start(self) -> None:
        """Start all ranks, unless a node was lost before."""
        nproc, cwd = self._options.nproc, os.getcwd()
        endpoints = self._ask("meet", [(cwd,)] * len(self._actors), must=True)
        self._addresses = [
            endpoint[0] if endpoint else name for endpoint, name in zip(endpoints, self._addresses, strict=True)
        ]
        if self._lost:
            return
        host, port = endpoints[0]
        world = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(self.codes))}
        world["OMP_NUM_THREADS"] = str(self._options.cpus)
        variables = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank % nproc)} for rank in range(len(self.codes))]
        command = [sys.executable, "-m", "rowwise", *self._options.command, "--run", self._options.run]
        variables_by_node = [variables[first : first + nproc] for first in range(0, len(variables), nproc)]
        self._ask("start", [(command, cwd, environments) for environments in variables_by_node], must=True)

    def follow(self, is_stopped: Callable[[], bool]) -> None:
        """Forward the output of ranks until all have ended; after a failure, kill the rest on a timeout."""
        is_stopping, end_s = False, None
        while self._running and (end_s is None or time.monotonic() < end_s):
            if is_stopped() and not is_stopping:
                self._report("SIGTERM: ranks save and end\n")
                self._ask("stop", [()] * len(self._actors))
                is_stopping = True
            time.sleep(POLL_S)
            for index, answer in enumerate(self._ask("poll", [(begin,) for begin in self._read])):
                if answer is not None:
                    begin, text, self._codes[index] = answer
                    if begin > self._read[index]:
                        self._report(f"[{begin - self._read[index]:,} bytes are left out]\n")
                    self._read[index] = begin + len(text)
                    self._report(text.decode(errors="replace"))
            if end_s is None and (self._lost or any(self.codes)):
                end_s = time.monotonic() + LINGER_S
        self._ask("kill", [()] * len(self._actors))
        for rank, code in enumerate(self.codes):
            if code is not None and code < 0:
                self._report(f"rowwise: rank {rank} {describe_exit(code)}\n")

    @property
    def _running(self) -> bool:
        return any(None in codes for place, codes in enumerate(self._codes) if place not in self._lost)

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]], *, must: bool = False) -> list[Any]:
        """The answer of each actor, or None if it is lost or unreachable; with `must`, unreachable actors are lost."""
        alive = [index for index in range(len(self._actors)) if index not in self._lost]
        calls = {index: getattr(self._actors[index], method).remote(*arguments[index]) for index in alive}
        answers: list[Any] = [None] * len(self._actors)
        errors = _ray().exceptions
        for index, answer in calls.items():
            try:
                answers[index] = _ray().get(answer, timeout=ANSWER_S)
            except (errors.ActorUnavailableError, errors.GetTimeoutError):
                self._lost |= {index} if must else set()
            except errors.RayActorError:
                self._lost.add(index)
        return answers


@final
class Driver:
    """Starts ranks, restarts them after lost nodes, and logs both."""

    def __init__(self, options: Options, log: TextIO) -> None:
        self._options, self._log, self._stopped = options, log, False

    def run(self) -> int:
        """The exit code of the job."""
        failures, first = 0, True
        while True:
            saved = self._list_checkpoints()
            group = self._reserve(patient=first)
            if group is None:
                return STOPPED
            try:
                start = self._start(group)
            finally:
                _ray().util.remove_placement_group(group)  # and its actors
            code = decide_code(start.codes, len(start.lost), stopped=self._stopped)
            if code is not None:
                return code
            failures, first = (0 if self._list_checkpoints() - saved else failures + 1), False
            lost = f"lost {pluralise(len(start.lost), 'node')} ({', '.join(start.lost)})"
            reason = lost if start.lost else "stopped by SIGTERM"
            if failures > RESTARTS:
                self._report(f"rowwise: {reason}; {failures} starts have saved no checkpoint in {self._options.run}\n")
                return 1
            self._report(f"{reason}: ranks start again\n")

    def stop(self, *_: object) -> None:
        self._stopped = True

    def _reserve(self, *, patient: bool) -> Any:
        """A placement group, of fewer nodes if the rest is unavailable after `wait` seconds; None if stopped before."""
        options, util = self._options, _ray().util
        end_s = time.monotonic() + options.wait
        group, count, requested_s, max_count = None, -1, 0.0, options.nodes[-1]
        while not self._stopped:
            is_full = patient or time.monotonic() < end_s
            if not is_full and count > 0 and time.monotonic() - requested_s > options.wait:  # other jobs use some nodes
                max_count = choose_count(options.nodes, count - 1) or count
            target = options.nodes[-1] if is_full else choose_count(options.nodes, min(self._count_nodes(), max_count))
            if target != count:
                requested_s = time.monotonic()
                if group is not None:
                    util.remove_placement_group(group)
                group = util.placement_group([options.bundle] * target, strategy="STRICT_SPREAD") if target else None
                count = target
                amounts = ", ".join(f"{amount:g} {kind}" for kind, amount in options.bundle.items())
                self._report(f"waits for {pluralise(count or options.nodes[0], 'node')} with {amounts}\n")
            if group is None:
                time.sleep(POLL_S)
            elif group.wait(POLL_S):
                self._report(f"starts {pluralise(options.nproc * count, 'rank')} on {pluralise(count, 'node')}\n")
                return group
        if group is not None:
            util.remove_placement_group(group)
        self._report("SIGTERM: no rank was running\n")
        return None

    def _count_nodes(self) -> int:
        """Number of live nodes with the required resources, busy or not."""
        resources = [node["Resources"] for node in _ray().nodes() if node["Alive"]]
        return sum(
            all(node_resources.get(kind, 0.0) >= amount for kind, amount in self._options.bundle.items())
            for node_resources in resources
        )

    def _start(self, group: Any) -> Attempt:
        strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        options = self._options
        actor = _ray().remote(RanksOfNode)
        actors = [
            actor.options(
                num_cpus=options.cpus * options.nproc,
                num_gpus=options.gpus * options.nproc,
                scheduling_strategy=strategy(group, placement_group_bundle_index=place),
            ).remote()
            for place in range(len(group.bundle_specs))
        ]
        start = Attempt(options, actors, self._report)
        start.start()
        start.follow(lambda: self._stopped)
        return start

    def _list_checkpoints(self) -> set[str]:
        """Names of complete checkpoints."""
        return {path.parent.name for path in Path(self._options.run).glob("ckpt/step-*/manifest.json")}

    def _report(self, text: str) -> None:
        """Print to the job log of Ray, and to the file that `rowwise ps` follows."""
        print(text, end="", flush=True)
        self._log.write(text)


def _ray() -> Any:
    """Ray, imported on first use: it is an optional dependency."""
    return importlib.import_module("ray")


def _parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m rowwise.cli.ray_job")
    parser.add_argument("--nodes", type=parse_counts, required=True, help="node counts, such as 1-4 or 1,2,4")
    parser.add_argument("--nproc", type=int, default=1, help="ranks per node")
    parser.add_argument("--cpus", type=int, default=1, help="cores per rank")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs per rank")
    parser.add_argument("--wait", type=int, default=60, help="seconds to wait for a replacement of a lost node")
    parser.add_argument("--log", default=os.devnull, help="log file of the job")
    parser.add_argument("--run", required=True, help="run folder")
    parser.add_argument("command", nargs="+", help="-- train RECIPE ...")
    return Options(**vars(parser.parse_args(arguments)))


def main() -> int:
    options = _parse()
    try:
        ray = _ray()
    except ImportError:
        print(f"rowwise: no Ray in {sys.executable}; pip install 'rowwise[cluster]' there", file=sys.stderr)
        return 2
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    with open(options.log, "a", buffering=1) as log:
        driver = Driver(options, log)
        signal.signal(signal.SIGTERM, driver.stop)  # replaces the handler of Ray
        try:
            return driver.run()
        except ray.exceptions.RayTaskError as error:
            line = one_line(error.cause)
            if line is None:
                raise
            print(f"rowwise: {line}", file=sys.stderr)
            log.write(f"rowwise: {line}\n")
            return 2


if __name__ == "__main__":
    from rowwise.cli import ray_job  # actors need a module that nodes can import, not __main__

    sys.exit(ray_job.main())

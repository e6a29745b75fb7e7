"""The driver of a job on Ray, `python -m rowwise.cli.ray_job`: reserves nodes, starts ranks, and outlives lost nodes.

Ray reserves nodes (a placement group with a bundle for each), starts an actor on each, and notices when one is lost.
Ranks are processes of the actors: the same command as everywhere, with the variables of torchrun.
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

POLL_S = 1.0  # between two looks at the ranks
ANSWER_S = 60.0  # of an actor, with its start; later ones are lost
LINGER_S = 300.0  # the longest that ranks take to end after one that failed or was stopped; the first writes a report
RESTARTS = 5  # most in a row that have not saved a checkpoint
STOPPED = 128 + signal.SIGTERM
PR_SET_PDEATHSIG = 1
KEPT_bytes, PIECE_bytes = 4 << 20, 1 << 16  # of what ranks print, until the driver takes it
WAITING = 4096  # connections to rank 0 before it answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of the driver."""

    nodes: tuple[int, ...]  # numbers of nodes on which the recipe can run, the smallest first
    nproc: int
    cpus: int  # a rank
    gpus: int  # a rank
    wait: int
    log: str
    run: str
    command: list[str]

    @property
    def bundle(self) -> dict[str, float]:
        """What a node has to have."""
        amounts = {"CPU": self.cpus * self.nproc, "GPU": self.gpus * self.nproc}
        return {kind: float(amount) for kind, amount in amounts.items() if amount}


def parse_counts(text: str) -> tuple[int, ...]:
    """Numbers of nodes, the smallest first, of 1-4 or 1,2,4."""
    first, dash, last = text.partition("-")
    numbers = [parse_whole(one) or 0 for one in ((first, last) if dash else text.split(","))]
    if min(numbers) < 1 or max(numbers) > MAX_RANKS or (dash and numbers[0] > numbers[1]):
        raise ValueError
    return tuple(range(numbers[0], numbers[1] + 1)) if dash else tuple(sorted(set(numbers)))


def choose_count(counts: Sequence[int], there: int) -> int:
    """The largest of these numbers of nodes that is there; 0: none."""
    return max((count for count in counts if count <= there), default=0)


def decide_code(codes: Sequence[int | None], lost: int, *, stopped: bool) -> int | None:
    """The exit code of the job by those of its ranks, None if on a lost node; None: start again."""
    bad = [code for code in codes if code]
    if not lost and not bad:
        return 0
    if stopped:
        return STOPPED
    guilty = [code for code in bad if code not in (STOPPED, -signal.SIGTERM)]  # SIGTERM of a node that is about to end
    if lost or not guilty:
        return None
    return max(128 - code if code < 0 else code for code in guilty)


@final
class RankOutput:
    """What processes print into a pipe: all that nobody has taken yet, and no more than its last KEPT_bytes."""

    def __init__(self) -> None:
        self._source, self.target = os.pipe()
        os.set_blocking(self._source, False)
        self._begin, self._kept, self._lock = 0, bytearray(), threading.Lock()
        threading.Thread(target=self._follow, daemon=True).start()

    def since(self, begin: int) -> tuple[int, bytes]:
        """The number of the first byte kept from `begin` on, and the output from there; older output is dropped."""
        self._receive()
        with self._lock:
            self._drop(begin - self._begin)
            return self._begin, bytes(self._kept)

    def _follow(self) -> None:
        there = select.poll()
        there.register(self._source, select.POLLIN)
        while there.poll() and self._receive():
            pass

    def _receive(self) -> bool:
        """Read what is in the pipe; false after its end."""
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
    """The ranks of one node, in an actor. They are killed when it ends."""

    def __init__(self) -> None:
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._output = RankOutput()
        self._listener = socket.create_server(("", 0), backlog=WAITING)

    def meet(self, cwd: str) -> tuple[str, int]:
        """The address of this node, and a port at which this actor listens until it hands it to rank 0."""
        address = _ray().util.get_node_ip_address()
        if not os.path.isdir(cwd):
            raise SpecError(
                f"node {address} has no folder {cwd}",
                "the working folder, Python and the runs on storage that all nodes share",
            )
        return address, self._listener.getsockname()[1]

    def start(self, command: Sequence[str], cwd: str, variables: Sequence[dict[str, str]]) -> None:
        with self._listener:
            for given in variables:
                own = {LISTENER: str(self._listener.fileno())} if given["RANK"] == "0" else {}
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env={**os.environ, **given, **own},  # noqa: TID251 - Ray names the GPUs of this actor there
                    stdin=subprocess.DEVNULL,
                    stdout=self._output.target,
                    stderr=self._output.target,
                    preexec_fn=_die_with_parent(),
                    pass_fds=[*map(int, own.values())],
                )
                self._ranks.append(process)
        os.close(self._output.target)

    def poll(self, begin: int) -> tuple[int, bytes, list[int | None]]:
        """Lines of the ranks from a byte on, or from a later one, and their exit codes."""
        codes = [rank.poll() for rank in self._ranks]
        begin, text = self._output.since(begin)
        return begin, text[: text.rfind(b"\n") + 1] if None in codes else text, codes

    def stop(self) -> None:
        """Ask all ranks to save and to end."""
        for rank in self._ranks:
            rank.terminate()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()


def _die_with_parent() -> Callable[[], None] | None:
    """What a new process calls, so that Linux kills it however this one ends."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@final
class Start:
    """A start of the ranks on nodes that are reserved."""

    def __init__(self, options: Options, actors: list[Any], say: Callable[[str], None]) -> None:
        self._options, self._actors, self._say = options, actors, say
        self._codes: list[list[int | None]] = [[None] * options.nproc for _ in actors]
        self._addresses = [f"number {place}" for place in range(len(actors))]
        self._read = [0] * len(actors)
        self._lost: set[int] = set()

    @property
    def codes(self) -> list[int | None]:
        """The exit code of each rank; None: unknown."""
        return [code for codes in self._codes for code in codes]

    @property
    def lost(self) -> list[str]:
        """Addresses of lost nodes."""
        return [self._addresses[place] for place in sorted(self._lost)]

    def start(self) -> None:
        """Start all ranks, unless a node is lost before."""
        nproc, cwd = self._options.nproc, os.getcwd()
        met = self._ask("meet", [(cwd,)] * len(self._actors), must=True)
        self._addresses = [one[0] if one else name for one, name in zip(met, self._addresses, strict=True)]
        if self._lost:
            return
        world = {"MASTER_ADDR": met[0][0], "MASTER_PORT": str(met[0][1]), "WORLD_SIZE": str(len(self.codes))}
        world["OMP_NUM_THREADS"] = str(self._options.cpus)
        variables = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank % nproc)} for rank in range(len(self.codes))]
        command = [sys.executable, "-m", "rowwise", *self._options.command, "--run", self._options.run]
        of_nodes = [variables[first : first + nproc] for first in range(0, len(variables), nproc)]
        self._ask("start", [(command, cwd, given) for given in of_nodes], must=True)

    def follow(self, is_stopped: Callable[[], bool]) -> None:
        """Pass on what ranks say until all have ended; those that do not end after a failure are killed."""
        asked, end_s = False, None
        while self._running and (end_s is None or time.monotonic() < end_s):
            if is_stopped() and not asked:
                self._say("SIGTERM: ranks save and end\n")
                self._ask("stop", [()] * len(self._actors))
                asked = True
            time.sleep(POLL_S)
            for place, found in enumerate(self._ask("poll", [(begin,) for begin in self._read])):
                if found is not None:
                    begin, text, self._codes[place] = found
                    if begin > self._read[place]:
                        self._say(f"[{begin - self._read[place]:,} bytes are left out]\n")
                    self._read[place] = begin + len(text)
                    self._say(text.decode(errors="replace"))
            if end_s is None and (self._lost or any(self.codes)):
                end_s = time.monotonic() + LINGER_S
        self._ask("kill", [()] * len(self._actors))
        for rank, code in enumerate(self.codes):
            if code is not None and code < 0:
                self._say(f"rowwise: rank {rank} {describe_exit(code)}\n")

    @property
    def _running(self) -> bool:
        return any(None in codes for place, codes in enumerate(self._codes) if place not in self._lost)

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]], *, must: bool = False) -> list[Any]:
        """The answer of each actor; None: lost, or not reached this time, which means lost where it `must` answer."""
        there = [place for place in range(len(self._actors)) if place not in self._lost]
        asked = {place: getattr(self._actors[place], method).remote(*arguments[place]) for place in there}
        answers: list[Any] = [None] * len(self._actors)
        errors = _ray().exceptions
        for place, answer in asked.items():
            try:
                answers[place] = _ray().get(answer, timeout=ANSWER_S)
            except (errors.ActorUnavailableError, errors.GetTimeoutError):
                self._lost |= {place} if must else set()
            except errors.RayActorError:
                self._lost.add(place)
        return answers


@final
class Driver:
    """Starts the ranks as often as nodes are lost, and says what happens."""

    def __init__(self, options: Options, log: TextIO) -> None:
        self._options, self._log, self._stopped = options, log, False

    def run(self) -> int:
        """The exit code of the job."""
        idle, first = 0, True
        while True:
            saved = self._saved()
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
            idle, first = (0 if self._saved() - saved else idle + 1), False
            lost = f"lost {pluralise(len(start.lost), 'node')} ({', '.join(start.lost)})"
            why = lost if start.lost else "stopped by SIGTERM"
            if idle > RESTARTS:
                self._say(f"rowwise: {why}; {idle} starts have saved no checkpoint in {self._options.run}\n")
                return 1
            self._say(f"{why}: ranks start again\n")

    def stop(self, *_: object) -> None:
        self._stopped = True

    def _reserve(self, *, patient: bool) -> Any:
        """A placement group, of fewer nodes where no more are there after `wait`; None: stopped before."""
        options, util = self._options, _ray().util
        end_s = time.monotonic() + options.wait
        group, count, made_s, most_free = None, -1, 0.0, options.nodes[-1]
        while not self._stopped:
            most = patient or time.monotonic() < end_s
            if not most and count > 0 and time.monotonic() - made_s > options.wait:  # others have some of them
                most_free = choose_count(options.nodes, count - 1) or count
            wanted = options.nodes[-1] if most else choose_count(options.nodes, min(self._count_nodes(), most_free))
            if wanted != count:
                made_s = time.monotonic()
                if group is not None:
                    util.remove_placement_group(group)
                group = util.placement_group([options.bundle] * wanted, strategy="STRICT_SPREAD") if wanted else None
                count = wanted
                amounts = ", ".join(f"{amount:g} {kind}" for kind, amount in options.bundle.items())
                self._say(f"waits for {pluralise(count or options.nodes[0], 'node')} with {amounts}\n")
            if group is None:
                time.sleep(POLL_S)
            elif group.wait(POLL_S):
                self._say(f"starts {pluralise(options.nproc * count, 'rank')} on {pluralise(count, 'node')}\n")
                return group
        if group is not None:
            util.remove_placement_group(group)
        self._say("SIGTERM: no rank was running\n")
        return None

    def _count_nodes(self) -> int:
        """Nodes that are large enough, busy ones as well."""
        there = [node["Resources"] for node in _ray().nodes() if node["Alive"]]
        return sum(all(has.get(kind, 0.0) >= amount for kind, amount in self._options.bundle.items()) for has in there)

    def _start(self, group: Any) -> Start:
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
        start = Start(options, actors, self._say)
        start.start()
        start.follow(lambda: self._stopped)
        return start

    def _saved(self) -> set[str]:
        """Checkpoints that are complete."""
        return {path.parent.name for path in Path(self._options.run).glob("ckpt/step-*/manifest.json")}

    def _say(self, text: str) -> None:
        """Print to Ray's log of the job, and to the file that `rowwise ps` follows."""
        print(text, end="", flush=True)
        self._log.write(text)


def _ray() -> Any:
    """Ray, imported on first use: it is an optional dependency."""
    return importlib.import_module("ray")


def _parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m rowwise.cli.ray_job")
    parser.add_argument("--nodes", type=parse_counts, required=True, help="numbers of nodes, such as 1-4 or 1,2,4")
    parser.add_argument("--nproc", type=int, default=1, help="ranks on each node")
    parser.add_argument("--cpus", type=int, default=1, help="cores of a rank")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of a rank")
    parser.add_argument("--wait", type=int, default=60, help="seconds for a node in the place of a lost one")
    parser.add_argument("--log", default=os.devnull, help="a file for what the job prints")
    parser.add_argument("--run", required=True, help="the folder of the run")
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
        signal.signal(signal.SIGTERM, driver.stop)  # in the place of Ray's handler
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
    from rowwise.cli import ray_job  # actors are of a module that nodes can import, and not of __main__

    sys.exit(ray_job.main())

"""Measures for some minutes into a folder: sets of tables on each rank, and exchanges between ranks.

Both alternate in blocks of some seconds that ranks begin together, and every measurement is written at once, so that a
calibration that ends early has some of both. Measurements that the folder has count: minutes are the time of all
measurements, without starting processes.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec import structs

from rowwise.parallel.comm.interface import Comm
from rowwise.parallel.comm.spawn import run_processes
from rowwise.planning.calibrate.draw import DrawnSet, Population, draw_set
from rowwise.planning.calibrate.folder import MeasurementFolder, MeasurementSpec, Tally, lock_folder
from rowwise.planning.calibrate.kernels import KernelBench
from rowwise.planning.calibrate.links import measure_exchange
from rowwise.planning.calibrate.samples import SetSample, read_samples, write_sample
from rowwise.planning.calibrate.trust import MAX_WAITED, waited_s
from rowwise.tables.spec import Topology

ReportProgress = Callable[[str, float], None]  # measurements in words, and the fraction done
SETS_FRACTION = 0.8  # of the time; the rest is for exchanges
CYCLE_s, FIRST_s = 25.0, 5.0  # seconds of a block of sets and exchanges; of the first one
# The last of every 13 measurements of a rank repeats a set of 4 groups before (at first, of the first group); no set is
# measured three times.
GROUP, GROUPS_BEFORE = 13, 4
TRIES = 3  # to measure sets while no other process has the processor
POLL_s = 0.5
TIMEOUT_s = 120.0


class MeasurementTurn(NamedTuple):
    """The next set of a rank: its number, and whether it repeats one."""

    number: int
    again: bool


def choose_turn(k: int) -> MeasurementTurn:
    """The k-th measurement of a rank."""
    group, place = divmod(k, GROUP)
    new = GROUP - 1
    if place < new:
        return MeasurementTurn(group * new + place, False)
    if group < GROUPS_BEFORE:
        return MeasurementTurn(group, True)
    return MeasurementTurn((group - GROUPS_BEFORE) * new + GROUPS_BEFORE + group % (new - GROUPS_BEFORE), True)


def measure(spec: MeasurementSpec, folder: MeasurementFolder, minutes: float, report: ReportProgress) -> None:
    """Measures until all measurements in the folder took `minutes`."""
    with lock_folder(folder):
        tally = Tally(folder)
        if tally.update() >= minutes * 60:
            return
        with _report_progress(tally, minutes * 60, report):
            run_processes(
                Topology(devices=spec.world),
                measure_on_rank,
                spec,
                folder,
                minutes * 60,
                timeout_s=TIMEOUT_s,
                shared_memory=spec.transport == "shared",
                threads=spec.threads,
            )


@contextmanager
def _report_progress(tally: Tally, total_s: float, report: ReportProgress) -> Iterator[None]:
    """Reports progress from a thread that polls the folder."""
    done = threading.Event()

    def poll() -> None:
        while True:
            ended = done.wait(POLL_s)
            fraction = min(tally.update() / total_s, 1.0)
            report(f"{tally.sets:,} sets of tables, {tally.links:,} exchanges", fraction)
            if ended:
                return

    thread = threading.Thread(target=poll, name="calibration progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def measure_on_rank(comm: Comm, spec: MeasurementSpec, folder: MeasurementFolder, total_s: float) -> None:
    """Measures blocks of sets and exchanges; all ranks call it."""
    rank = MeasuringRank(comm, spec, folder)
    while (left_s := total_s - rank.done_s()) > 0:
        cycle_s = min(CYCLE_s, left_s, max(FIRST_s, total_s - left_s))
        if spec.world == 1:
            rank.measure_sets(cycle_s)
            continue
        rank.measure_sets(cycle_s * SETS_FRACTION)
        rank.max_over_ranks(0.0)
        rank.measure_links(cycle_s * (1 - SETS_FRACTION))


class MeasuringRank:
    """A rank with its pool of memory, and the number and time of its measurements."""

    def __init__(self, comm: Comm, spec: MeasurementSpec, folder: MeasurementFolder) -> None:
        self._comm, self._spec, self._folder = comm, spec, folder
        self._turns, self._sets_s = _count_samples(folder.sets_of(comm.rank))
        self._links, self._links_s = _count_samples(folder.links)
        self._population = Population(spec.tables, spec.limits.pool_bytes)
        self._bench = KernelBench(spec.limits.pool_bytes, spec.limits.vector_floats, spec.device)
        self.max_over_ranks(0.0)

    def done_s(self) -> float:
        """Seconds of measuring of the slowest rank."""
        return self.max_over_ranks(self._sets_s + self._links_s)

    def max_over_ranks(self, value: float) -> float:
        """The largest value of any rank; also a barrier."""
        world = len(self._comm.ranks)
        sent = torch.tensor([value], dtype=torch.float64)
        return float(self._comm.all_gather(sent, [1] * world, "meeting").wait().max())

    def measure_sets(self, seconds: float) -> None:
        """Measures sets for `seconds`; the last ones may end later."""
        begin = lap = time.perf_counter()
        while lap - begin < seconds:
            lap = self._measure_turns(lap)

    def _measure_turns(self, begin: float) -> float:
        """Measures the next sets, which take turns; returns the time when they ended."""
        sets = self._bench.take(self._draw(choose_turn(k)) for k in count(self._turns))
        for _ in range(TRIES):
            lap, waited_before_s = time.perf_counter(), waited_s()
            measured = self._bench.measure(sets, self._spec.seed)
            ended = time.perf_counter()
            waited = min((waited_s() - waited_before_s) / (ended - lap), 1.0)
            if waited <= MAX_WAITED:
                break
        for drawn, taken in zip(sets, measured, strict=True):
            sample = SetSample(
                number=drawn.number,
                rank=self._comm.rank,
                batch=drawn.batch,
                workloads=drawn.workloads,
                lookup_s=taken.lookup_s,
                update_s=taken.update_s,
                again=choose_turn(self._turns).again,
                took_s=(ended - begin) / len(sets),
                waited=waited,
            )
            write_sample(self._folder.sets_of(self._comm.rank), sample)
            self._turns, self._sets_s = self._turns + 1, self._sets_s + sample.took_s
        return ended

    def _draw(self, turn: MeasurementTurn) -> DrawnSet:
        return draw_set(self._population, self._spec.limits, self._spec.seed, turn.number, self._comm.rank)

    def measure_links(self, seconds: float) -> None:
        """Measures exchanges until the slowest rank has spent `seconds`; rank 0 writes them."""
        spent = 0.0
        while spent < seconds:
            sample = measure_exchange(self._comm, self._spec.seed, self._links)
            took_s = self.max_over_ranks(sample.took_s)
            spent, self._links, self._links_s = spent + took_s, self._links + 1, self._links_s + took_s
            if self._comm.rank == 0:
                write_sample(self._folder.links, structs.replace(sample, took_s=took_s))


def _count_samples(path: Path) -> tuple[int, float]:
    """The samples of a file, and the seconds that they took."""
    taken_s = [sample.took_s for sample in read_samples(path)] if path.exists() else []
    return len(taken_s), sum(taken_s)

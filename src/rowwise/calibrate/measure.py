"""Measures into a folder, for so many minutes in all: sets of tables on each rank, and exchanges between ranks.

Every measurement is written when it is made, in blocks of some seconds that ranks begin together, so that whatever
ends a calibration leaves some of both. What has been measured is counted from the folder: minutes are of measuring,
not of starting.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import torch
from msgspec import structs

from rowwise.calibrate.draw import DrawnSet, Population, draw_set
from rowwise.calibrate.folder import MeasurementFolder, MeasurementSpec, Tally, lock_folder
from rowwise.calibrate.kernels import KernelBench
from rowwise.calibrate.links import measure_exchange
from rowwise.calibrate.samples import SetSample, read_samples, write_sample
from rowwise.calibrate.trust import WAITED, waited_s
from rowwise.comm.seam import Comm
from rowwise.comm.spawn import run_processes
from rowwise.spec import Topology

Tell = Callable[[str, float], None]  # what is done, and the share of it
SETS = 0.8  # of the time, where there are links
CYCLE_s, FIRST_s = 25.0, 5.0  # of sets and exchanges
EVERY = 13  # the last of so many measurements is one of a set that was measured before: never the same one,
TRIES = 3  # to measure sets while no other process has the processor
EARLIER = 4  # and so many times as many before
LOOK_s = 0.5
TIMEOUT_s = 120.0


class MeasurementTurn(NamedTuple):
    """The next set or exchange that a rank measures."""

    number: int
    again: bool


def turn(k: int) -> MeasurementTurn:
    """The k-th measurement of a rank."""
    group, place = divmod(k, EVERY)
    new = EVERY - 1
    if place < new:
        return MeasurementTurn(group * new + place, False)
    if group < EARLIER:
        return MeasurementTurn(group, True)
    return MeasurementTurn((group - EARLIER) * new + EARLIER + group % (new - EARLIER), True)


def measure(order: MeasurementSpec, folder: MeasurementFolder, minutes: float, tell: Tell) -> None:
    """Measure until there are so many minutes in all."""
    with lock_folder(folder):
        tally = Tally(folder)
        if tally.update() >= minutes * 60:
            return
        with _telling(tally, minutes * 60, tell):
            run_processes(
                Topology(devices=order.world),
                measure_on_rank,
                order,
                folder,
                minutes * 60,
                timeout_s=TIMEOUT_s,
                shared_memory=order.transport == "shared",
                threads=order.threads,
            )


@contextmanager
def _telling(tally: Tally, wanted_s: float, tell: Tell) -> Iterator[None]:
    """Tell how far it is, read from the folder now and then."""
    done = threading.Event()

    def look() -> None:
        while True:
            ended = done.wait(LOOK_s)
            share = min(tally.update() / wanted_s, 1.0)
            tell(f"{tally.sets:,} sets of tables, {tally.links:,} exchanges", share)
            if ended:
                return

    thread = threading.Thread(target=look, name="telling how far it is", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def measure_on_rank(comm: Comm, order: MeasurementSpec, folder: MeasurementFolder, wanted_s: float) -> None:
    me = MeasuringRank(comm, order, folder)
    while (left_s := wanted_s - me.done_s()) > 0:
        cycle_s = min(CYCLE_s, left_s, max(FIRST_s, wanted_s - left_s))
        if order.world == 1:
            me.measure_sets(cycle_s)
            continue
        me.measure_sets(cycle_s * SETS)
        me.meet(0.0)
        me.measure_links(cycle_s * (1 - SETS))


class MeasuringRank:
    """A rank, its measurements, and the memory that it measures in."""

    def __init__(self, comm: Comm, order: MeasurementSpec, folder: MeasurementFolder) -> None:
        self._comm, self._order, self._folder = comm, order, folder
        self._sets_s = self._links_s = 0.0
        self._turns = self._links = 0
        mine = folder.sets_of(comm.rank)
        for sample in read_samples(mine) if mine.exists() else ():
            self._turns += 1
            self._sets_s += sample.took_s
        for sample in read_samples(folder.links) if folder.links.exists() else ():
            self._links += 1
            self._links_s += sample.took_s
        self._population = Population(order.tables, order.limits.pool_bytes)
        self._bench = KernelBench(order.limits.pool_bytes, order.limits.vector_floats, order.device)
        self.meet(0.0)

    def done_s(self) -> float:
        return self.meet(self._sets_s + self._links_s)

    def meet(self, mine: float) -> float:
        """All ranks wait for each other; gives the largest of what they have."""
        world = len(self._comm.ranks)
        sent = torch.tensor([mine], dtype=torch.float64)
        return float(self._comm.all_gather(sent, [1] * world, "meeting").wait().max())

    def measure_sets(self, seconds: float) -> None:
        """For so long, and for as long as the last one takes."""
        begin = lap = time.perf_counter()
        while lap - begin < seconds:
            lap = self._measure_some(lap)

    def _measure_some(self, began: float) -> float:
        """The next sets, as many as take turns; gives when they ended."""
        sets = self._bench.take(self._draw(turn(k)) for k in count(self._turns))
        for _ in range(TRIES):
            lap, waited_before_s = time.perf_counter(), waited_s()
            found = self._bench.measure(sets, self._order.seed)
            ended = time.perf_counter()
            waited = min((waited_s() - waited_before_s) / (ended - lap), 1.0)
            if waited <= WAITED:
                break
        for drawn, taken in zip(sets, found, strict=True):
            sample = SetSample(
                number=drawn.number,
                rank=self._comm.rank,
                batch=drawn.batch,
                workloads=drawn.workloads,
                lookup_s=taken.lookup_s,
                update_s=taken.update_s,
                again=turn(self._turns).again,
                took_s=(ended - began) / len(sets),
                waited=waited,
            )
            write_sample(self._folder.sets_of(self._comm.rank), sample)
            self._turns, self._sets_s = self._turns + 1, self._sets_s + sample.took_s
        return ended

    def _draw(self, one: MeasurementTurn) -> DrawnSet:
        return draw_set(self._population, self._order.limits, self._order.seed, one.number, self._comm.rank)

    def measure_links(self, seconds: float) -> None:
        """For so long on the slowest rank; the first rank writes."""
        spent = 0.0
        while spent < seconds:
            sample = measure_exchange(self._comm, self._order.seed, self._links)
            took_s = self.meet(sample.took_s)
            spent, self._links, self._links_s = spent + took_s, self._links + 1, self._links_s + took_s
            if self._comm.rank == 0:
                write_sample(self._folder.links, structs.replace(sample, took_s=took_s))

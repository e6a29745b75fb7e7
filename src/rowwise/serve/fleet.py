"""How long requests take at a rate, and how many workers a rate needs: a queue whose server takes all that wait.

A worker computes the requests that wait in one batch, and those that come meanwhile in the next. A batch takes a time
that is a line over its requests, and pauses. One for which the worker has waited takes longer: its core did other work
meanwhile, or slept. Pauses are those of requests alone, beyond their mean: a batch that takes as long as n of them has
n. Requests come at random times (Poisson), and each worker has its part of them. The queue is simulated request by
request, with the same random numbers for each rate.

Near: answers of a batch come together; a request of more rows than a batch has is first in the next one. Ignored: work
of other processes on the same cores.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rowwise.base.errors import SpecError

REQUESTS = 40_000  # that are simulated
HALVINGS = 12
PASSES = 8  # of the fit of rounds: for the line, and for how fast the machine was in each
ALIKE = 1.05  # numbers of requests whose ratio is less


class MeasuredBatches(NamedTuple):
    """Batches of a worker, on average."""

    requests: float
    seconds: float  # in which it does nothing else
    woken: float = 0.0  # share of the batches that it had waited for


class BatchTimes(NamedTuple):
    """The seconds of batches of requests in one worker."""

    fixed_s: float
    request_s: float
    most: float  # requests of a batch, by its rows; a part of one is computed with the next batch
    idle_s: float = 0.0  # more, for a batch that the worker has waited for
    pauses_s: tuple[float, ...] = (0.0,)  # of requests alone, beyond their mean

    @classmethod
    def fit(cls, measured: Sequence[MeasuredBatches], most: float, alone_s: Sequence[float]) -> "BatchTimes":
        """A line through measured times; `alone_s`: of requests that the worker waited for."""
        requests, seconds = ([one[k] for one in measured] for k in (0, 1))
        if max(requests) < ALIKE * min(requests):  # one point and no line: a request has a batch, or several
            fixed_s, request_s = 0.0, float(np.mean(seconds) / np.mean(requests))
        else:
            fixed_s, request_s = _fit_line(measured)
        mean_s = float(np.mean(alone_s))
        idle_s = max(0.0, mean_s - fixed_s - request_s)
        return cls(fixed_s, request_s, most, idle_s, tuple(one - mean_s for one in alone_s))

    @classmethod
    def fit_rounds(
        cls, rounds: Sequence[tuple[Sequence[MeasuredBatches], Sequence[float]]], most: float
    ) -> "list[BatchTimes]":
        """The times in each of some rounds, of a machine that may be faster in one than in another.

        What a request adds to a batch is the same share of it in all of them: a line through few batches is that of
        chance.
        """
        slower, whole = [1.0] * len(rounds), cls(0.0, 0.0, most)
        for _ in range(PASSES):
            evenly = [
                MeasuredBatches(one.requests, one.seconds / factor, one.woken)
                for (batches, _), factor in zip(rounds, slower, strict=True)
                for one in batches
            ]
            alone_s = [one_s / factor for (_, alone), factor in zip(rounds, slower, strict=True) for one_s in alone]
            whole = cls.fit(evenly, most, alone_s)
            beside = [np.mean([one.seconds / whole.of(one.requests) for one in batches]) for batches, _ in rounds]
            slower = [float(one / np.mean(beside)) for one in beside]  # than on average: waking up is in each round
        return [whole.slower(factor) for factor in slower]

    def slower(self, factor: float) -> "BatchTimes":
        """All seconds so many times as long."""
        pauses_s = tuple(factor * one for one in self.pauses_s)
        return BatchTimes(factor * self.fixed_s, factor * self.request_s, self.most, factor * self.idle_s, pauses_s)

    def of(self, requests: float) -> float:
        """The seconds of a batch of so many requests, without its pauses."""
        return self.fixed_s + self.request_s * requests

    @property
    def max_rate(self) -> float:
        """Requests a second that a worker can answer, however long they wait."""
        return self.most / self.of(self.most)


def _fit_line(measured: Sequence[MeasuredBatches]) -> tuple[float, float]:
    """Seconds of a batch and of each of its requests, near in proportion, neither of them negative.

    A worker that has slept computes slower: a third term, without which a batch of few requests would seem to be slow.
    """
    from scipy.optimize import nnls

    terms_NT = np.array([(1.0, one.requests, one.woken) for one in measured]) / [[one.seconds] for one in measured]
    fixed_s, request_s, _ = nnls(terms_NT, np.ones(len(measured)))[0].tolist()
    return fixed_s, request_s


class LatencyForecast(NamedTuple):
    """Seconds of requests by quantile, at a rate."""

    p50_s: float
    p99_s: float


def forecast(rate: float, times: BatchTimes) -> LatencyForecast:
    """The latencies of requests that come to one worker at a rate; infinite where it cannot answer them."""
    if rate >= times.max_rate:
        return LatencyForecast(np.inf, np.inf)
    arrived_s = np.cumsum(np.random.default_rng(0).exponential(1 / rate, REQUESTS)).tolist()
    p50_s, p99_s = np.quantile(latencies(arrived_s, times), (0.5, 0.99)).tolist()
    return LatencyForecast(p50_s, p99_s)


def latencies(arrived_s: Sequence[float], times: BatchTimes) -> list[float]:
    """The seconds that each request takes; they come at these times, ascending, to one worker."""
    count = len(arrived_s)
    paused_s = np.cumsum(np.random.default_rng(1).choice(times.pauses_s, max(2, count))).tolist()
    latencies_s: list[float] = []
    now_s = done = 0.0  # done: the part of the oldest request that was computed
    at, pause, alone_s = 0, 0, times.of(min(1.0, times.most)) + times.idle_s
    while at < count:
        idle_s = times.idle_s if arrived_s[at] > now_s else 0.0
        now_s = max(now_s, arrived_s[at])
        waiting = bisect_right(arrived_s, now_s, at) - at - done
        taken = min(waiting, times.most)
        seconds = times.of(taken) + idle_s
        pauses = min(max(1, round(seconds / alone_s)), len(paused_s) - 1)
        pause = pause if pause + pauses < len(paused_s) else 0
        now_s += max(0.0, seconds + paused_s[pause + pauses] - paused_s[pause])
        pause += pauses
        whole = int(done + taken + 1e-9)
        done = max(0.0, done + taken - whole)
        latencies_s += [now_s - one_s for one_s in arrived_s[at : at + whole]]
        at += whole
    return latencies_s


def check_p99(p99_s: float, min_s: float) -> None:
    """Raise if requests take longer than that however few there are."""
    if min_s > p99_s:
        raise SpecError(
            f"a p99 of {1000 * p99_s:g} ms is less than that of a worker with hardly any requests",
            f"at least {1000 * min_s:.2g} ms, fewer rows in a request, or a smaller model",
        )


def max_rate(times: BatchTimes, p99_s: float) -> float:
    """The highest rate of one worker whose 99 % quantile is at most so long."""
    check_p99(p99_s, forecast(times.max_rate / 100, times).p99_s)
    low, high = times.max_rate / 100, times.max_rate
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if forecast(middle, times).p99_s <= p99_s else (low, middle)
    return low

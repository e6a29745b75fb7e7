"""Latencies at a rate of requests, and workers needed for a rate: a queue with bulk service of all waiting requests.

A worker computes all waiting requests in one batch, and later arrivals in the next. The time of a batch is linear in
its requests, plus pauses. It is longer after an idle period: the core did other work meanwhile, or slept. Pauses are
the deviations of single requests from their mean: a batch as long as n of them has n pauses. Arrivals are Poisson, and
each worker has an equal part of them. The queue is simulated request by request, with the same random numbers for each
rate.

Approximations: all answers of a batch complete at its end; a request with more rows than a batch continues first in
the next one. Ignored: other work on the same cores.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rowwise.base.errors import SpecError

REQUESTS = 40_000  # simulated requests
HALVINGS = 12
FIT_PASSES = 8  # of the alternating fit of the line and of the speed of each round
MIN_RATIO = 1.05  # between the requests of batches, from which on a line is fitted


class MeasuredBatches(NamedTuple):
    """Averages over batches of a worker."""

    requests: float
    seconds: float  # busy time of a batch
    woken_share: float = 0.0  # share of batches after an idle period


class BatchTimes(NamedTuple):
    """A model of the seconds of a batch in one worker."""

    fixed_s: float
    request_s: float
    max_requests: float  # of a batch, by its rows; a request may be split between batches
    idle_s: float = 0.0  # added to a batch after an idle period
    pauses_s: tuple[float, ...] = (0.0,)  # deviations of single requests from their mean

    @classmethod
    def fit(cls, measured: Sequence[MeasuredBatches], max_requests: float, alone_s: Sequence[float]) -> "BatchTimes":
        """Fit a line to measured times; `alone_s` are latencies of single requests on an idle worker."""
        requests, seconds = ([batches[k] for batches in measured] for k in (0, 1))
        if max(requests) < MIN_RATIO * min(requests):  # one point, no line: each request has one or several batches
            fixed_s, request_s = 0.0, float(np.mean(seconds) / np.mean(requests))
        else:
            fixed_s, request_s = _fit_line(measured)
        mean_s = float(np.mean(alone_s))
        idle_s = max(0.0, mean_s - fixed_s - request_s)
        return cls(fixed_s, request_s, max_requests, idle_s, tuple(batches - mean_s for batches in alone_s))

    @classmethod
    def fit_rounds(
        cls, rounds: Sequence[tuple[Sequence[MeasuredBatches], Sequence[float]]], max_requests: float
    ) -> "list[BatchTimes]":
        """One model per round, for a machine whose speed varies between rounds.

        The models differ by a factor only, as a line through the few batches of a round would be dominated by noise.
        """
        slowdowns, mean_fit = [1.0] * len(rounds), cls(0.0, 0.0, max_requests)
        # Alternate: fit one line to normalized times, then re-estimate the slowdown of each round.
        for _ in range(FIT_PASSES):
            normalized = [
                MeasuredBatches(batch.requests, batch.seconds / factor, batch.woken_share)
                for (batches, _), factor in zip(rounds, slowdowns, strict=True)
                for batch in batches
            ]
            alone_s = [value / factor for (_, alone), factor in zip(rounds, slowdowns, strict=True) for value in alone]
            mean_fit = cls.fit(normalized, max_requests, alone_s)
            ratios = [
                np.mean([batch.seconds / mean_fit.seconds_of(batch.requests) for batch in batches])
                for batches, _ in rounds
            ]
            slowdowns = [float(ratio / np.mean(ratios)) for ratio in ratios]  # relative to the average round
        return [mean_fit.scaled(factor) for factor in slowdowns]

    def scaled(self, factor: float) -> "BatchTimes":
        """Scale all times by `factor`."""
        pauses_s = tuple(factor * pause_s for pause_s in self.pauses_s)
        return BatchTimes(
            factor * self.fixed_s, factor * self.request_s, self.max_requests, factor * self.idle_s, pauses_s
        )

    def seconds_of(self, requests: float) -> float:
        """Seconds of a batch of `requests`, without pauses."""
        return self.fixed_s + self.request_s * requests

    @property
    def max_rate(self) -> float:
        """Saturation throughput of a worker, in requests per second."""
        return self.max_requests / self.seconds_of(self.max_requests)


def _fit_line(measured: Sequence[MeasuredBatches]) -> tuple[float, float]:
    """Seconds per batch and per request, by non-negative least squares of relative errors.

    The third term is the cost of waking up, which else would be attributed to small batches.
    """
    from scipy.optimize import nnls

    terms_NT = np.array([(1.0, batches.requests, batches.woken_share) for batches in measured]) / [
        [batches.seconds] for batches in measured
    ]
    fixed_s, request_s, _ = nnls(terms_NT, np.ones(len(measured)))[0].tolist()
    return fixed_s, request_s


class LatencyForecast(NamedTuple):
    """Quantiles of latency at a rate."""

    p50_s: float
    p99_s: float


def forecast(rate: float, times: BatchTimes) -> LatencyForecast:
    """Latencies of one worker at a rate; infinite beyond its saturation throughput."""
    if rate >= times.max_rate:
        return LatencyForecast(np.inf, np.inf)
    arrived_s = np.cumsum(np.random.default_rng(0).exponential(1 / rate, REQUESTS)).tolist()
    p50_s, p99_s = np.quantile(latencies(arrived_s, times), (0.5, 0.99)).tolist()
    return LatencyForecast(p50_s, p99_s)


def latencies(arrived_s: Sequence[float], times: BatchTimes) -> list[float]:
    """Latency of each request of one worker, by ascending arrival times."""
    count = len(arrived_s)
    paused_s = np.cumsum(np.random.default_rng(1).choice(times.pauses_s, max(2, count))).tolist()
    latencies_s: list[float] = []
    now_s = done = 0.0  # done: computed fraction of the oldest request
    next_request, pause, alone_s = 0, 0, times.seconds_of(min(1.0, times.max_requests)) + times.idle_s
    # One iteration per batch: idle until a request arrives, then serve all waiting ones up to the maximum.
    while next_request < count:
        idle_s = times.idle_s if arrived_s[next_request] > now_s else 0.0
        now_s = max(now_s, arrived_s[next_request])
        waiting = bisect_right(arrived_s, now_s, next_request) - next_request - done
        batch_requests = min(waiting, times.max_requests)
        seconds = times.seconds_of(batch_requests) + idle_s
        pauses = min(max(1, round(seconds / alone_s)), len(paused_s) - 1)
        pause = pause if pause + pauses < len(paused_s) else 0
        now_s += max(0.0, seconds + paused_s[pause + pauses] - paused_s[pause])
        pause += pauses
        completed = int(done + batch_requests + 1e-9)
        done = max(0.0, done + batch_requests - completed)
        latencies_s += [now_s - request_s for request_s in arrived_s[next_request : next_request + completed]]
        next_request += completed
    return latencies_s


def check_p99(p99_s: float, min_s: float) -> None:
    """Raise if the target is below the latency of an idle worker."""
    if min_s > p99_s:
        raise SpecError(
            f"a p99 of {1000 * p99_s:g} ms is below the latency of an almost idle worker",
            f"at least {1000 * min_s:.2g} ms, fewer rows in a request, or a smaller model",
        )


def max_rate(times: BatchTimes, p99_s: float) -> float:
    """The highest rate of one worker that meets the p99 target, by bisection."""
    check_p99(p99_s, forecast(times.max_rate / 100, times).p99_s)
    low, high = times.max_rate / 100, times.max_rate
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if forecast(middle, times).p99_s <= p99_s else (low, middle)
    return low

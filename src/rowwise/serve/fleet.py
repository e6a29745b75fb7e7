"""How long requests take at a rate, and how many workers a rate needs: a queue whose server takes all that wait.

A worker computes the requests that wait in one batch, and those that come meanwhile in the next. A batch of n requests
takes a time that was measured. Arrivals are random (Poisson), and each worker has its part of them. So the sizes of
batches are a Markov chain: of a batch of n, the next one is of as many as came in its time, and of at least one. A
request waits for the rest of the batch that it came in, and takes the time of its own.

Near: arrivals at random times, workers with equal parts. Ignored: a limit of the rows of a batch, pauses of the system,
and work of other processes on the same cores.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowwise.errors import SpecError

MOST_BATCH = 160  # requests; a worker whose batches are larger has more requests than it can answer
PARTS = 32  # of a batch's time, at which requests come
HALVINGS = 12
Floats = NDArray[np.float64]


class BatchTimes(NamedTuple):
    """The seconds of batches of requests in one worker: measured ones, and straight lines between them."""

    sizes: tuple[int, ...]  # ascending, from 1
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> "BatchTimes":
        """Of seconds by size. A larger batch takes no less time, whatever the noise."""
        sizes = sorted(measured)
        return cls(tuple(sizes), tuple(accumulate((measured[size] for size in sizes), max)))

    def of_sizes(self, size_N: Floats) -> Floats:
        """The seconds of batches of these sizes; of larger ones than those measured, in proportion."""
        most = self.sizes[-1]
        return np.interp(size_N, self.sizes, self.seconds) * np.maximum(1.0, size_N / most)

    @property
    def most_rate(self) -> float:
        """Requests a second that a worker can answer, however long they wait."""
        return self.sizes[-1] / self.seconds[-1]


class LatencyForecast(NamedTuple):
    """Seconds of requests by quantile, at a rate."""

    p50_s: float
    p99_s: float


def forecast(rate: float, times: BatchTimes) -> LatencyForecast:
    """The latencies of requests that come to one worker at a rate; infinite where it cannot answer them."""
    if rate >= times.most_rate:
        return LatencyForecast(np.inf, np.inf)
    size_N = np.arange(1.0, MOST_BATCH + 1)
    seconds_N = times.of_sizes(size_N)
    arrivals_NK = _poisson(rate * seconds_N, MOST_BATCH)
    share_N = _stationary(arrivals_NK)
    if share_N[-1] > 1e-3:  # its batches grow and grow
        return LatencyForecast(np.inf, np.inf)
    # With no arrival the worker is idle, and the next request is computed alone, at once.
    alone = float((share_N * arrivals_NK[:, 0]).sum())
    weight_NK = share_N[:, None] * arrivals_NK[:, 1:] * size_N
    rest_P = (np.arange(PARTS) + 0.5) / PARTS
    latency_NKP = rest_P * seconds_N[:, None, None] + seconds_N[None, :, None]
    weight_NKP = np.broadcast_to(weight_NK[:, :, None] / PARTS, latency_NKP.shape)
    latencies = np.concatenate([[seconds_N[0]], latency_NKP.ravel()])
    weights = np.concatenate([[alone], weight_NKP.ravel()])
    order = np.argsort(latencies)
    total = np.cumsum(weights[order])
    p50_s, p99_s = (float(latencies[order][np.searchsorted(total, q * total[-1])]) for q in (0.5, 0.99))
    return LatencyForecast(p50_s, p99_s)


def most_rate(times: BatchTimes, p99_s: float) -> float:
    """The highest rate of one worker whose 99 % quantile is at most so long."""
    least_s = forecast(times.most_rate / 100, times).p99_s
    if least_s > p99_s:
        got = f"a p99 of {1000 * p99_s:g} ms is less than that of a worker with hardly any requests"
        raise SpecError(f"{got}: want at least {1000 * least_s:.2g} ms, fewer rows in a request, or a smaller model")
    low, high = times.most_rate / 100, times.most_rate
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if forecast(middle, times).p99_s <= p99_s else (low, middle)
    return low


def workers_for(rate: float, times: BatchTimes, p99_s: float) -> int:
    """How many workers a rate needs."""
    return int(np.ceil(rate / most_rate(times, p99_s)))


def _poisson(mean_N: Floats, most: int) -> Floats:
    """Probabilities [N, 0 to most] of counts; the last one is of all larger counts, too."""
    count_K = np.arange(most + 1)
    log_factorial_K = np.concatenate([[0.0], np.cumsum(np.log(count_K[1:]))])
    found_NK = np.exp(count_K * np.log(mean_N)[:, None] - mean_N[:, None] - log_factorial_K)
    found_NK[:, -1] += np.maximum(0.0, 1 - found_NK.sum(1))
    return found_NK


def _stationary(arrivals_NK: Floats) -> Floats:
    """The share of batches of each size."""
    steps_NN = arrivals_NK[:, 1:].copy()
    steps_NN[:, 0] += arrivals_NK[:, 0]
    share_N = np.full(len(steps_NN), 1 / len(steps_NN))
    for _ in range(60):  # squares: as many steps as ever matter
        steps_NN = steps_NN @ steps_NN
        found_N = share_N @ steps_NN
        if np.abs(found_N - share_N).max() < 1e-12:
            break
        share_N = found_N / found_N.sum()
    return share_N

"""The forecast of a fleet beside a queue that is simulated request by request, and the command on a real server."""

import json

import numpy as np
import pytest
from launching import rowwise

from rowwise import SpecError
from rowwise.serve.fleet import BatchTimes, forecast, most_rate, workers_for


def simulated(rate, times, requests=60_000):
    """Latencies of requests that come at random times to a worker that takes all that wait."""
    arrived = np.cumsum(np.random.default_rng(0).exponential(1 / rate, requests))
    latencies, now, at = np.empty(requests), 0.0, 0
    while at < requests:
        now = max(now, arrived[at])
        end = max(at + 1, int(np.searchsorted(arrived, now, "right")))
        now += float(times.of_sizes(np.array([end - at], float))[0])
        latencies[at:end] = now - arrived[at:end]
        at = end
    return np.quantile(latencies, [0.5, 0.99])


def line(fixed_s, each_s):
    return BatchTimes.of({size: fixed_s + each_s * size for size in (1, 4, 64)})


@pytest.mark.parametrize(
    "times", [line(1e-3, 4e-4), line(5e-3, 1e-4), line(0.0, 2e-3), BatchTimes.of({1: 2e-3, 4: 3e-3, 16: 9e-3})]
)
@pytest.mark.parametrize("load", [0.05, 0.25, 0.5, 0.75])
def test_latencies_are_those_of_a_simulated_queue(times, load):
    rate = load * times.most_rate
    np.testing.assert_allclose(forecast(rate, times), simulated(rate, times), rtol=0.06)


def test_times_are_those_that_were_measured():
    times = BatchTimes.of({16: 9e-3, 1: 2e-3, 4: 1.9e-3})
    np.testing.assert_allclose(
        times.of_sizes(np.array([1.0, 4.0, 10.0, 16.0, 32.0])), [2e-3, 2e-3, 5.5e-3, 9e-3, 18e-3]
    )
    assert times.most_rate == 16 / 9e-3


def test_rates_and_workers():
    times = line(1e-3, 4e-4)
    rates = [most_rate(times, p99_s) for p99_s in (0.004, 0.01, 0.05)]
    assert rates == sorted(rates)
    for rate, p99_s in zip(rates, (0.004, 0.01, 0.05), strict=True):
        assert forecast(rate, times).p99_s <= p99_s
    assert workers_for(10 * rates[1], times, 0.01) in (10, 11)
    assert forecast(times.most_rate * 2, times).p99_s == np.inf
    with pytest.raises(SpecError, match="a p99 of 1 ms is less than that of a worker with hardly any requests"):
        most_rate(times, 0.001)


@pytest.mark.slow
def test_the_command_measures_a_server(increments, tmp_path):
    options = ("--qps", "1000", "--p99", "1000", "--rows", "3", "--memory", "200kB", "--workers", "2")
    done = rowwise(tmp_path, "fleet", str(increments.models), *options, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["workers"] >= 1
    assert found["replicas"] == -(-found["workers"] // 2)
    assert found["p99_ms"] <= 1000
    assert len(found["checks"]) == 3
    done = rowwise(tmp_path, "fleet", str(increments.models), *options, "--no-check")
    assert "1000 requests a second: " in done.stdout
    done = rowwise(tmp_path, "fleet", str(increments.models), *options, "--p99", "0.01")
    assert (done.returncode, "a p99 of 0.01 ms is less" in done.stderr) == (2, True)

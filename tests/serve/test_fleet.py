"""The forecast of a fleet beside a queue that is simulated request by request, and the command on a real server."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import rowwise, wait_for
from redis_server import one_server

from rowwise import SpecError
from rowwise.serve.fleet import BatchTimes, MeasuredBatches, forecast, latencies, max_rate
from rowwise.serve.start import processes_of

LINES = [(1e-3, 4e-4), (5e-3, 1e-4), (0.0, 2e-3)]


def sizes_of_batches(rate, times):
    """The share of batches of each size, as a Markov chain: of a batch, the next one is of those that came in it."""
    size_N = np.arange(1, 161)
    mean_N = rate * np.array([times.seconds_of(size) for size in size_N])
    logs = np.cumsum(np.log(size_N))
    arrivals_NK = np.exp(size_N * np.log(mean_N)[:, None] - mean_N[:, None] - logs)
    none_N = np.exp(-mean_N)
    steps_NN = arrivals_NK.copy()
    steps_NN[:, 0] += none_N
    share_N = np.linalg.matrix_power(steps_NN / steps_NN.sum(1, keepdims=True), 1 << 12)[0]
    return size_N, share_N, arrivals_NK, none_N


def quantiles(rate, times):
    """Of a request: the rest of the batch that it came in, and its own batch."""
    size_N, share_N, arrivals_NK, none_N = sizes_of_batches(rate, times)
    seconds_N = np.array([times.seconds_of(size) for size in size_N])
    rest_P = (np.arange(32) + 0.5) / 32
    latency_NKP = rest_P * seconds_N[:, None, None] + seconds_N[None, :, None]
    weight_NK = share_N[:, None] * arrivals_NK * size_N
    latencies = np.append(latency_NKP.ravel(), seconds_N[0])
    weights = np.append(np.repeat(weight_NK.ravel() / 32, 32), share_N @ none_N)
    order = np.argsort(latencies)
    total = np.cumsum(weights[order])
    return [latencies[order][np.searchsorted(total, q * total[-1])] for q in (0.5, 0.99)]


@pytest.mark.few(4)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("load", [0.05, 0.25, 0.5, 0.75])
def test_latencies_are_those_of_a_chain_of_batches(line, load):
    times = BatchTimes(*line, max_requests=1e6)
    rate = load * 64 / times.seconds_of(64)
    np.testing.assert_allclose(forecast(rate, times), quantiles(rate, times), rtol=0.06)


def test_batches_of_one_size_have_no_line():
    """Where a request fills a batch, or has several: no warning, and the time of a request."""
    for requests in (1.0, 0.25):
        measured = [MeasuredBatches(requests * near, 0.02 * near) for near in (1.0, 1.001, 0.999, 1.0)]
        times = BatchTimes.fit(measured, requests, [0.02 / requests] * 3)
        assert (times.fixed_s, times.idle_s) == (0.0, 0.0)
        assert times.seconds_of(requests) == pytest.approx(0.02)
        assert times.max_rate == pytest.approx(requests / 0.02)


def test_latencies_are_those_of_the_times_at_which_requests_come():
    times = BatchTimes(1e-3, 1e-3, max_requests=3)
    found = latencies([0.0, 0.5e-3, 0.6e-3, 0.7e-3, 0.8e-3, 0.1], times)
    np.testing.assert_allclose(found, [2e-3, 5.5e-3, 5.4e-3, 5.3e-3, 7.2e-3, 2e-3])


@pytest.mark.parametrize("load", [0.25, 0.5, 0.75])
def test_one_request_at_a_time_is_the_queue_of_textbooks(load):
    """M/M/1: seconds of a request are exponential, and so are latencies."""
    draw = np.random.default_rng(1).exponential(2e-3, 4000)
    times = BatchTimes(2e-3, 0.0, max_requests=1, pauses_s=tuple(draw - draw.mean()))
    rest = 1 / 2e-3 - load / 2e-3
    wanted = [math.log(2) / rest, math.log(100) / rest]
    np.testing.assert_allclose(forecast(load / 2e-3, times), wanted, rtol=0.15)


def test_a_request_of_more_rows_than_a_batch_takes_several():
    times = BatchTimes(1e-3, 2e-3, max_requests=0.4)
    assert times.max_rate == pytest.approx(0.4 / 1.8e-3)
    assert forecast(1.0, times).p50_s == pytest.approx(3 * 1e-3 + 2e-3)


def test_times_are_lines_through_what_was_measured():
    measured = [MeasuredBatches(n, 1e-3 + 4e-4 * n) for n in (1.0, 1.5, 8.0, 20.0)]
    times = BatchTimes.fit(measured, 256, [2.4e-3, 1.8e-3])
    np.testing.assert_allclose(times[:4], [1e-3, 4e-4, 256, 7e-4])
    np.testing.assert_allclose(times.pauses_s, [3e-4, -3e-4])
    falling = [MeasuredBatches(1, 3e-3), MeasuredBatches(8, 2e-3)]
    assert BatchTimes.fit(falling, 256, [2e-3]).request_s == 0
    woken = [MeasuredBatches(n, 1e-3 + 4e-4 * n + 2e-3 * p, p) for n, p in ((1.0, 0.9), (1.5, 0.2), (8, 0), (20, 0))]
    np.testing.assert_allclose(BatchTimes.fit(woken, 256, [5e-3])[:4], [1e-3, 4e-4, 256, 3.6e-3])


@given(st.lists(st.sampled_from((0.5, 1.0, 1.5, 2.0)), min_size=1, max_size=4))
def test_rounds_of_a_machine_that_changes_its_speed_have_one_line(slower):
    """Whatever sizes of batches a round has measured."""
    line, sizes = BatchTimes(1e-3, 4e-4, 256, 7e-4, (-2e-4, 2e-4)), (1.0, 1.5, 8.0, 20.0, 3.0)
    rounds = [
        (
            [MeasuredBatches(n, factor * line.seconds_of(n)) for n in sizes[k:] + sizes[:1]],
            [factor * 1.9e-3, factor * 2.3e-3],
        )
        for k, factor in enumerate(slower)
    ]
    for found, factor in zip(BatchTimes.fit_rounds(rounds, 256), slower, strict=True):
        want = line.scaled(factor)
        np.testing.assert_allclose(found[:4], want[:4], rtol=1e-2)
        np.testing.assert_allclose([min(found.pauses_s), max(found.pauses_s)], want.pauses_s, rtol=1e-2)


@pytest.mark.slow
def test_rates_and_workers():
    times = BatchTimes(1e-3, 4e-4, 256)
    rates = [max_rate(times, p99_s) for p99_s in (0.004, 0.01, 0.05)]
    assert rates == sorted(rates)
    for rate, p99_s in zip(rates, (0.004, 0.01, 0.05), strict=True):
        assert forecast(rate, times).p99_s <= p99_s
    assert forecast(times.max_rate * 2, times).p99_s == np.inf
    with pytest.raises(SpecError, match="p99 of 1 ms"):
        max_rate(times, 0.001)


@pytest.mark.slow
def test_the_command_measures_a_server(increments, tmp_path):
    options = ("--qps", "1000", "--p99", "2000", "--rows", "3", "--memory", "200kB", "--workers", "2")
    done = rowwise(tmp_path, "fleet", str(increments.models), *options, "--json", timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["workers"] >= 1
    assert found["replicas"] == -(-found["workers"] // 2)
    assert found["p99_ms"] <= 2000
    assert [one["rate"] for one in found["checks"][3:]] in ([], [found["rate_planned"]])
    assert all(one["waited_share"] >= 0 for one in found["checks"])
    assert len(found["filled_rates"]) == 3 + (len(found["checks"]) > 3)
    assert found["resident_bytes"] + found["cache_bytes"] <= 200_000
    assert found["memory_bytes"] > 2 * found["worker_bytes"] > 50 << 20
    assert (found["cached_tables"] > 0, found["redis"]) == (True, None)
    with one_server(tmp_path) as redis:
        done = rowwise(tmp_path, "fleet", str(increments.models), *options, "--no-check", "--redis", redis.address)
        assert redis.ask("DBSIZE").strip() != "0"
        assert "rowwise-fleet" not in redis.ask("KEYS", "*")
    assert "1000 requests a second: " in done.stdout, done.stderr
    assert "Redis: 1 node of " in " ".join(done.stdout.split())
    done = rowwise(tmp_path, "fleet", str(increments.models), *options, "--p99", "0.01", "--no-check")
    assert (done.returncode, "a p99 of 0.01 ms is below" in done.stderr) == (2, True)


@pytest.mark.slow
def test_a_server_ends_with_the_command(increments, tmp_path):
    command = [sys.executable, "-m", "rowwise", "fleet", str(increments.models), "--qps", "1000"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as fleet:
        wait_for(lambda: len(list(processes_of(fleet))) > 2)  # a server that has begun to start its own
        server = list(processes_of(fleet))[1]
        fleet.terminate()
        assert fleet.wait(60) == 143
    assert not server.exists()

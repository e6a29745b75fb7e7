"""From probes to a network: latencies and rates of pairs that were alone, groups and uplinks of rounds under load.

A shared uplink does not limit a single pair. It shows in the slowdown of messages when all hosts send at once: hosts
of one group slow each other down less than those of two. Suffixes: H hosts.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.base.quantity import round_digits
from rowwise.base.textfile import read_text
from rowwise.parallel.comm.probe import ProbeSample, ProbeSamples
from rowwise.planning.perf.access import Floats
from rowwise.planning.perf.links import Network, NetworkHost, NetworkProbe

LOW_QUANTILE, HIGH_QUANTILE = 0.1, 0.75  # of pings: above are queues and other processes; of uplinks
MIN_STEP = 1.25  # between the slowdowns inside groups and across them


def make_network(probed: ProbeSamples, hosts: Sequence[NetworkHost], groups: tuple[int, ...] | None = None) -> Network:
    """The network of a probe; `groups` overrides the clusters of the slowdown under load."""
    count = len(hosts)
    kinds: dict[str, list[ProbeSample]] = defaultdict(list)
    for sample in probed.samples:
        kinds[sample.kind].append(sample)
    if not kinds["ping"] or not kinds["alone"]:
        raise SpecError(f"the probe has measured nothing in {probed.seconds:.1f} s", "more --seconds")
    latency_HH = _by_pair(kinds["ping"], count, lambda times: float(np.quantile(times, LOW_QUANTILE)))
    latency_HH = np.where(np.isnan(latency_HH), latency_HH.T, latency_HH)
    small, large = (min(s.size_bytes for s in kinds["alone"]), max(s.size_bytes for s in kinds["alone"]))
    # A message is no faster under load, so those that were fast then count as well.
    full = [s for kind in ("alone", "loaded") for s in kinds[kind] if s.size_bytes == large]
    large_HH = _by_pair(full, count, min)
    small_HH = _by_pair([s for s in kinds["alone"] if s.size_bytes == small], count, min)
    # The slope between two sizes has neither the latency nor the bytes that a shaper lets through at once.
    alone_HH = np.maximum(large_HH - small_HH, 1e-9) * large / (large - small)
    slowdown_HH = _slowdown(kinds["loaded"], alone_HH)
    groups = groups if groups is not None else find_groups(slowdown_HH)
    latency_HH, alone_HH = (_fill_missing(matrix_HH, groups) for matrix_HH in (latency_HH, alone_HH))
    spread = [
        np.ptp(times) / np.median(times) for times in _seconds_by_pair(kinds["alone"], large).values() if len(times) > 1
    ]
    loaded_rounds = len({s.round for s in kinds["loaded"]})
    return Network(
        hosts=tuple(structs.replace(h, address=a) for h, a in zip(hosts, probed.addresses, strict=True)),
        latency_s=_as_matrix(latency_HH),
        rate_Bps=_as_matrix(large / alone_HH),
        groups=groups if max(groups) else (),
        uplink_Bps=_uplink_rates(kinds["loaded"], groups, large / alone_HH) if max(groups) else (),
        probed=NetworkProbe(
            when=datetime.now().astimezone().isoformat(timespec="seconds"),
            seconds=round(probed.seconds, 1),
            sizes=(small, large),
            rounds=loaded_rounds,
            noise=round(float(np.median(spread)), 3) if spread else 0.0,
        ),
    )


def find_groups(slowdown_HH: Floats) -> tuple[int, ...]:
    """Average-linkage clusters of the slowdown under load, cut at its largest step; one group if that is small."""
    clusters = [[host] for host in range(len(slowdown_HH))]
    history, heights = [clusters], [1.0]
    while len(clusters) > 1:  # merge the two clusters with the least mean slowdown
        height, a, b = min(
            (float(slowdown_HH[np.ix_(clusters[a], clusters[b])].mean()), a, b)
            for a, b in combinations(range(len(clusters)), 2)
        )
        clusters = [*(c for k, c in enumerate(clusters) if k not in (a, b)), clusters[a] + clusters[b]]
        history.append(clusters)
        heights.append(max(height, heights[-1]))
    steps = [after / before for before, after in pairwise(heights[1:])]
    cut = int(np.argmax(steps)) + 1 if steps and max(steps) > MIN_STEP else len(history) - 1
    group_of = {host: group for group, members in enumerate(sorted(map(sorted, history[cut]))) for host in members}
    return tuple(group_of[host] for host in range(len(slowdown_HH)))


def read_racks(path: Path) -> dict[str, str]:
    """The rack of each host, from a CSV file with both in each line."""
    rows = [row for row in csv.reader(read_text(path).splitlines()) if row]
    bad = [number for number, row in enumerate(rows, 1) if len(row) != 2]
    if bad:
        raise SpecError(f"{path}: line {bad[0]} has {len(rows[bad[0] - 1])} columns", "a host and its group")
    return {host.strip(): rack.strip() for host, rack in rows}


def number_racks(racks: Mapping[str, str], names: Sequence[str]) -> tuple[int, ...]:
    """The groups of hosts, by their racks."""
    missing = [name for name in names if name not in racks]
    if missing:
        raise SpecError(f"--groups: host {missing[0]!r} is missing", "a line for each host of the job")
    numbers = {rack: number for number, rack in enumerate(dict.fromkeys(racks[name] for name in names))}
    return tuple(numbers[racks[name]] for name in names)


def _seconds_by_pair(
    samples: Sequence[ProbeSample], size_bytes: int | None = None
) -> dict[tuple[int, int], list[float]]:
    by_pair: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in samples:
        if size_bytes in (None, sample.size_bytes):
            by_pair[sample.sender, sample.receiver].append(sample.seconds)
    return by_pair


def _by_pair(samples: Sequence[ProbeSample], hosts: int, reduce: Callable[[list[float]], float]) -> Floats:
    """A number for each pair, [from][to]; NaN for pairs without a message."""
    reduced_HH = np.full((hosts, hosts), np.nan)
    for pair, times in _seconds_by_pair(samples).items():
        reduced_HH[pair] = reduce(times)
    return reduced_HH


def _slowdown(loaded: Sequence[ProbeSample], alone_HH: Floats) -> Floats:
    """Slowdown of messages under load, the geometric mean of both ways; the median for pairs that did not meet."""
    slowdown_HH = _by_pair(loaded, len(alone_HH), lambda times: float(np.median(times))) / alone_HH
    mean_HH = np.sqrt(slowdown_HH * slowdown_HH.T)
    known_HH = np.where(np.isnan(mean_HH), np.nanmedian(mean_HH) if np.isfinite(mean_HH).any() else 1.0, mean_HH)
    return np.maximum(known_HH, _dissimilarity(known_HH))


def _dissimilarity(slowdown_HH: Floats) -> Floats:
    """The ratio of two hosts' slowdowns to a third, the median over these; 1 or more.

    Hosts of one group have the same uplink to all others. Two of different groups may by chance have met only while
    hardly any other pair used it.
    """
    hosts, ratio_HH = len(slowdown_HH), np.ones_like(slowdown_HH)
    for a in range(hosts if hosts > 2 else 0):
        ratios_HH = np.abs(np.log(slowdown_HH[a] / slowdown_HH))
        ratios_HH[:, a] = np.nan
        np.fill_diagonal(ratios_HH, np.nan)
        ratio_HH[a] = np.exp(np.nanmedian(ratios_HH, 1))
    np.fill_diagonal(ratio_HH, 1.0)
    return ratio_HH


def _fill_missing(matrix_HH: Floats, groups: Sequence[int]) -> Floats:
    """Pairs that did not meet get the median of those inside groups, or of those across them."""
    group_H = np.array(groups)
    near_HH, remote_HH = group_H[:, None] == group_H, ~np.eye(len(group_H), dtype=bool)
    filled_HH = matrix_HH.copy()
    for kind_HH in (near_HH & remote_HH, ~near_HH):
        known_HH = kind_HH & np.isfinite(matrix_HH)
        usual = np.median(matrix_HH[known_HH if known_HH.any() else np.isfinite(matrix_HH)])
        filled_HH[kind_HH & ~known_HH] = usual
    return filled_HH


def _uplink_rates(loaded: Sequence[ProbeSample], groups: Sequence[int], rate_HH: Floats) -> tuple[float, ...]:
    """Bytes a second of messages that left or entered a group at once, until the last has arrived."""
    together: dict[tuple[int, int, str], list[ProbeSample]] = defaultdict(list)
    for sample in loaded:
        source, target = groups[sample.sender], groups[sample.receiver]
        if source != target:
            together[source, sample.round, "out"].append(sample)
            together[target, sample.round, "in"].append(sample)
    rates: dict[int, list[float]] = defaultdict(list)
    for (group, _, _), flows in together.items():
        if len(flows) > 1:
            rates[group].append(sum(s.size_bytes for s in flows) / max(s.seconds for s in flows))
    fastest_Bps = float(rate_HH[np.isfinite(rate_HH)].max())
    # A slow host delays some rounds. The uplink of a group that no two messages left at once does not limit its hosts.
    return tuple(
        float(np.quantile(rates[group], HIGH_QUANTILE)) if rates[group] else fastest_Bps * groups.count(group)
        for group in range(max(groups) + 1)
    )


def _as_matrix(matrix_HH: Floats) -> tuple[tuple[float | None, ...], ...]:
    return tuple(
        tuple(None if a == b else round_digits(value) for b, value in enumerate(row_H))
        for a, row_H in enumerate(matrix_HH)
    )

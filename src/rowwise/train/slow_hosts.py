"""Detects slow hosts by the forward and backward times of their ranks, as all ranks do the same work in them."""

from collections.abc import Sequence
from statistics import median_low
from typing import final

from rowwise.tables.spec import Topology
from rowwise.train.breakdown import PhaseSeconds

SLOW = 1.5  # times the median of all hosts
LINES = 3  # consecutive lines of stages.csv
EQUAL_WORK = ("forward", "backward")


@final
class SlowHosts:
    """The number of newest lines in which each host was slow."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._slow_H = [0] * topology.hosts  # consecutive slow lines; counting continues after the report

    def add(self, spent_W: Sequence[PhaseSeconds]) -> list[str]:
        """A message for each host with `LINES` consecutive slow lines, once per slow period."""
        # By the fastest rank of a host: if only some of its ranks are slow, the cause is not the host.
        seconds_H = [
            min(sum(spent_W[rank].exposed[phase] for phase in EQUAL_WORK) for rank in self._topology.ranks_of(host))
            for host in range(self._topology.hosts)
        ]
        median_s, messages = median_low(seconds_H), list[str]()
        for host, seconds in enumerate(seconds_H):
            self._slow_H[host] = self._slow_H[host] + 1 if seconds > SLOW * median_s > 0 else 0
            if self._slow_H[host] == LINES:
                ranks, ratio = self._topology.ranks_of(host), seconds / median_s
                who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
                messages.append(
                    f"host {host} ({who}) takes {ratio:.1f} times as long as the median host for forward and backward, "
                    "and the others wait for it: look for other processes, a lower clock, or fewer cores there"
                )
        return messages
